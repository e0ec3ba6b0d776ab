"""The few words in which kernels are written: TVM's IR builder with names, 64-bit indices, vectors and masks.

Everything is unrolled in Python and vectorised by the native lane count: vectors of another width compile to code
that is many times slower.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from copy import copy

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from .arithmetic import bits

INDEX = "int64"


def const(value: int):
    """A 64-bit index constant."""
    return tirx.const(value, INDEX)


def let(name: str, value):
    """Compute ``value`` once, here, under a name that the printed IR shows."""
    var = T.bind(value)
    IRBuilder.name(name, var)
    return var


#: An identity that LLVM cannot see through and that costs nothing: no instruction, the result is where the argument was.
_KEPT = (
    "define linkonce_odr hidden i64 @tvmgemm_kept(i64 %x) alwaysinline nounwind "
    '{ %r = call i64 asm "", "=r,0"(i64 %x) ret i64 %r } '
)


#: No instruction, but LLVM takes it for one that it does not know, and does not unroll a loop that has such.
_ROLLED = (
    "define linkonce_odr hidden i32 @tvmgemm_rolled() alwaysinline nounwind "
    '{ call void asm sideeffect "", ""() nounwind memory(inaccessiblemem: readwrite) ret i32 0 } '
)

#: ``_KEPT`` that stays where it is.
_PINNED = (
    "define linkonce_odr hidden i64 @tvmgemm_pinned(i64 %x) alwaysinline nounwind "
    '{ %r = call i64 asm sideeffect "", "=r,0"(i64 %x) nounwind memory(inaccessiblemem: readwrite) ret i64 %r } '
)

#: A prefetch of the cache line at an address, for reading, into all caches.
_PREFETCHED = (
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32) "
    "define linkonce_odr hidden i32 @tvmgemm_prefetched(i64 %x) alwaysinline nounwind "
    "{ %p = inttoptr i64 %x to ptr call void @llvm.prefetch.p0(ptr %p, i32 0, i32 3, i32 1) ret i32 0 } "
)


def settled(name: str, index):
    """Compute the index once, here. TVM's analyser puts what ``let`` binds wherever its name occurs, and of bounds made of
    bounds made of bounds that is too much for it: code generation takes minutes. It does not look into memory."""
    buffer = T.alloc_buffer((1,), INDEX, scope="local", annotations=_ON_STACK)
    T.buffer_store(buffer, index, [const(0)])
    return let(name, buffer[const(0)])


def opaque(name: str, index):
    """The index, as a value that LLVM knows nothing about: what depends on it is computed anew, behind this place."""
    return let(name, T.call_extern(INDEX, "tvmgemm_kept", index))


def pinned(name: str, index):
    """The index, as a value that LLVM makes at this place and no earlier: so is what depends on it."""
    return let(name, T.call_extern(INDEX, "tvmgemm_pinned", index))


def variable(name: str, value) -> Register:
    """An index that changes; ``value`` to begin with."""
    buffer = T.alloc_buffer((1,), INDEX, scope="local", annotations=_ON_STACK)
    IRBuilder.name(name, buffer)
    register = Register(buffer, 1)
    register.set(value)
    return register


#: Of an allocation: that it is one of the machine's stack (or registers), not a call of TVM's runtime.
_ON_STACK = {"disable_lower_builtin": True}


@contextmanager
def loop(name: str, extent, start=None):
    """A serial loop ``for name in range(start, start + extent)``; yields its variable."""
    frame = T.serial(extent) if start is None else T.serial(start, start + extent)
    with frame as var:
        IRBuilder.name(name, var)
        yield var


@contextmanager
def parallel(name: str, tasks):
    """A loop whose iterations are shared out to the threads of the pool; yields its variable."""
    with T.parallel(tasks) as var:
        IRBuilder.name(name, var)
        yield var


def branch(condition, then, otherwise=None) -> None:
    """``if condition: then() else: otherwise()``; a Python bool is decided here and leaves no branch."""
    if isinstance(condition, bool):
        if condition:
            then()
        elif otherwise is not None:
            otherwise()
        return
    with T.If(condition):
        with T.Then():
            then()
        if otherwise is not None:
            with T.Else():
                otherwise()


def both(left, right):
    """Logical and of two conditions, each an expression or a Python bool."""
    if isinstance(left, bool):
        return right if left else False
    if isinstance(right, bool):
        return left if right else False
    return tirx.And(left, right)


def minimum(a, b):
    """The smaller of two indices."""
    return T.min(a, b)


def maximum(a, b):
    """The larger of two indices."""
    return T.max(a, b)


def ceil_div(a, b):
    """a / b rounded up, for a >= 0 and b > 0."""
    return tirx.truncdiv(a + b - const(1), b)


def blocks_in(extent, size):
    """extent / size rounded up. One block, the usual case of a small product, takes no division: a division is worth a
    dozen cycles, and a product of 4 x 4 has few hundred."""
    return T.if_then_else(extent <= size, minimum(extent, const(1)), ceil_div(extent, size))


def round_up(a, b):
    """The smallest multiple of b that is at least a."""
    return ceil_div(a, b) * b


def lanes_of(value) -> int:
    """Elements of a vector; 1 for a scalar."""
    _, _, lanes = str(value.ty).partition("x")
    return int(lanes or 1)


class Register:
    """A variable of one vector (or one element). One allocation each: LLVM merges a larger tile into a vector of hundreds of lanes."""

    def __init__(self, buffer, lanes: int):
        self._buffer = buffer
        self._all = T.ramp(const(0), const(1), lanes) if lanes > 1 else const(0)

    def get(self):
        """Its value."""
        return self._buffer[self._all]

    def set(self, value) -> None:
        """Assign ``value``."""
        T.buffer_store(self._buffer, value, [self._all])


class Vectors:
    """Vectors of one type: ``lanes`` elements each.

    Lanes outside the matrix hold quiet NaNs (or copies of real elements): arithmetic on a quiet NaN sets no
    floating-point flag, whatever the other operand is, while 0 would raise *invalid* against a user's infinity.
    """

    def __init__(self, dtype: str, lanes: int):
        self.dtype = dtype
        self.itemsize = bits(dtype) // 8
        self.lanes = lanes
        self.type = f"{dtype}x{lanes}"
        self.floating = dtype.startswith("float")
        self._element = f"{'f' if self.floating else 'i'}{bits(dtype)}"
        self._llvm = f"v{lanes}{self._element}"

    def scalar(self, value: float):
        """A constant of the dtype."""
        return tirx.const(value if self.floating else int(value), self.dtype)

    def splat(self, value):
        """Every lane holds ``value`` (a Python number or a scalar expression)."""
        return T.broadcast(self.scalar(value) if isinstance(value, (int, float)) else value, self.lanes)

    def multiply_add(self, a, b, c):
        """a * b + c of floating-point vectors or scalars, rounded once if the instruction set can do that.

        Asked for, because what LLVM makes of a product and a sum differs: on Arm it fuses them in one place and not in
        another, and of a sum of two products now the one and now the other.
        """
        _, _, lanes = str(c.ty).removeprefix(self.dtype).rpartition("x")  # of another width too, or none
        llvm = f"{f'v{lanes}' if lanes else ''}f{8 * self.itemsize}"
        return T.call_llvm_intrin(str(c.ty), f"llvm.fmuladd.{llvm}", a, b, c)

    def mask(self, name: str, limit):
        """Lanes below ``limit`` (may be negative or beyond the width); 32-bit, so one compare fills it.

        The limit is bound, not the mask: TVM's analyser refuses a bound vector of booleans, and LLVM hoists the compare.
        """
        limit = let(name, tirx.Cast("int32", minimum(maximum(limit, const(0)), const(self.lanes))))
        return T.ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), self.lanes) < T.broadcast(limit, self.lanes)

    def masked_load(self, address, mask, otherwise: float | None = None):
        """Load; memory outside the mask is not touched, those lanes hold ``otherwise``, or a quiet NaN (0 of integers)."""
        if otherwise is None:
            otherwise = float("nan") if self.floating else 0
        return T.call_llvm_intrin(
            self.type, f"llvm.masked.load.{self._llvm}.p0", address, mask, self.splat(otherwise)
        )

    def masked_store(self, value, address, mask) -> None:
        """Store; memory outside the mask is not touched."""
        T.evaluate(T.call_llvm_intrin("void", f"llvm.masked.store.{self._llvm}.p0", value, address, mask))

    def register(self, name: str) -> Register:
        """A vector that lives in one register."""
        buffer = T.alloc_buffer((self.lanes,), self.dtype, scope="local", annotations=_ON_STACK)
        IRBuilder.name(name, buffer)
        return Register(buffer, self.lanes)

    def transpose(self, rows: list, unit: int = 1) -> list:
        """The lanes x lanes block held in ``rows``, transposed in registers; of elements that are ``unit`` lanes wide, as many
        as a vector has.

        In the steps that instruction sets have: interleave within 128-bit groups until each group of each vector holds
        one column of a small block, then gather the groups of a column. (Other factorings of the same permutation
        compile to several times as many instructions.)
        """
        group = 16 // self.itemsize
        width = unit
        while width < group:
            rows = self._exchange(rows, width // unit, lambda a, b: self._interleave(a, b, width, group))
            width *= 2
        # rows[g * group + q] now holds rows g * group... of one column of each group; gather the groups.
        width = group
        while width < self.lanes:
            rows = self._exchange(rows, width // unit, lambda a, b: self._separate(a, b, group))
            width *= 2
        # Interleaving leaves the columns of a group in the order of their reversed binary numbers: 0 2 1 3.
        elements = group // unit
        digits = elements.bit_length() - 1
        order = [int(f"{c:0{digits}b}"[::-1], 2) for c in range(elements)] if digits else [0]
        return [rows[c - c % elements + order[c % elements]] for c in range(self.lanes // unit)]

    def _exchange(self, rows: list, distance: int, step) -> list:
        """Replace each pair of rows ``distance`` apart by the two results of ``step``."""
        result = list(rows)
        for r in range(len(rows)):
            if not r & distance:
                result[r], result[r | distance] = step(rows[r], rows[r | distance])
        return result

    def _shuffle(self, a, b, indices: list[int]):
        """Elements of the concatenation of a and b."""
        return T.bind(tirx.Shuffle([a, b], indices))

    def _interleave(self, a, b, width: int, group: int) -> tuple:
        """Within each group, runs of ``width`` elements of a and b in turn: from the lower and the upper halves."""
        halves = []
        for half in (0, group // 2):
            indices = []
            for start in range(half, self.lanes, group):
                for run in range(start, start + group // 2, width):
                    indices += list(range(run, run + width)) + list(range(self.lanes + run, self.lanes + run + width))
            halves.append(self._shuffle(a, b, indices))
        return tuple(halves)

    def _separate(self, a, b, group: int) -> tuple:
        """The even and the odd groups of a followed by b."""
        both_rows = range(2 * self.lanes)
        return tuple(self._shuffle(a, b, [i for i in both_rows if i // group % 2 == parity]) for parity in (0, 1))


class View:
    """Memory that the caller owns, seen as an array of ``dtype`` with these strides (in elements) and this offset.

    Alignment is that of one element, for NumPy promises no more.

    The last index of a vector access runs over consecutive elements, so the last stride must be 1 there. Indices are
    flattened here and not by TVM, whose flattened vector indices only its slowest passes turn back into one access.
    """

    def __init__(self, name: str, pointer, dtype: str, strides, offset=None):
        self._buffer = T.decl_buffer((const(1 << 40),), dtype, data=pointer, align=bits(dtype) // 8)
        IRBuilder.name(name, self._buffer)
        self.dtype = dtype
        self._strides = strides
        self._offset = offset

    @classmethod
    def on_stack(cls, name: str, dtype: str, shape: tuple[int, int]) -> View:
        """A small array of the function's own, which LLVM knows no pointer to reach."""
        view = cls.__new__(cls)
        view._buffer = T.alloc_buffer((math.prod(shape),), dtype, scope="local", annotations=_ON_STACK)
        IRBuilder.name(name, view._buffer)
        view._strides, view._offset = (const(shape[1]), 1), None
        return view

    def kept(self) -> View:
        """The same memory, its strides in registers from here on.

        LLVM leaves strides that many loops use on the stack and loads them again in the innermost one, with registers to
        spare; what is new to it right before that loop stays in a register there.
        """
        view = copy(self)
        view._strides = tuple(
            stride if isinstance(stride, int) else opaque("stride", stride) for stride in self._strides
        )
        return view

    def sliced(self, position: int, index) -> View:
        """The part of the memory where the index at that position is fixed, without that index."""
        view = copy(self)
        strides = list(self._strides)
        part = strides.pop(position) * index
        view._strides, view._offset = tuple(strides), part if self._offset is None else self._offset + part
        return view

    def moved(self, *indices) -> View:
        """The same memory, where these indices become the origin: one sum, made here and kept in a register."""
        view = self.kept()
        view._offset = opaque("origin", view._flat(indices))
        return view

    def _flat(self, indices):
        terms = [] if self._offset is None else [self._offset]
        for index, stride in zip(indices, self._strides, strict=True):
            terms.append(index if isinstance(stride, int) and stride == 1 else index * stride)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def get(self, *indices):
        """One element."""
        return self._buffer[self._flat(indices)]

    def get_vector(self, lanes: int, *indices):
        """``lanes`` consecutive elements from there."""
        return self._buffer[T.ramp(self._flat(indices), const(1), lanes)]

    def set(self, value, *indices) -> None:
        """Store one element."""
        T.buffer_store(self._buffer, value, [self._flat(indices)])

    def set_vector(self, value, lanes: int, *indices) -> None:
        """Store ``lanes`` consecutive elements there."""
        T.buffer_store(self._buffer, value, [T.ramp(self._flat(indices), const(1), lanes)])

    def address(self, *indices):
        """The address of an element."""
        return T.address_of(self.get(*indices))

    def prefetch(self, *indices) -> None:
        """Ask for the cache line of an element, which need not exist: a prefetch never faults."""
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", self.address(*indices), 0, 3, 1))


@contextmanager
def function(symbol: str):
    """A plain C function named ``symbol`` that returns int32 0; what it writes is aliased by no other pointer."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name(symbol)
            T.func_attr({"global_symbol": symbol, "calling_conv": 2, "tirx.noalias": True})
            T.func_ret(tvm.ir.PrimType("int32"))
            yield builder
            T.Return(tirx.const(0, "int32"))


def body(definitions: str = ""):
    """The context of all that follows the arguments of a function: it brings the definitions that ``opaque`` calls, and
    others in LLVM's language."""
    return T.attr(tirx.const(0, "int32"), "pragma_import_llvm", _KEPT + _PINNED + _ROLLED + _PREFETCHED + definitions)


def address(base, offset):
    """The number of the address ``offset`` bytes behind the pointer ``base``."""
    return T.reinterpret(INDEX, base) + offset


def rolled() -> None:
    """Keep LLVM from unrolling the loop that this is in."""
    T.evaluate(T.call_extern("int32", "tvmgemm_rolled"))


def prefetch(address) -> None:
    """Ask for the cache line at an ``address``, which need not exist: a prefetch never faults."""
    T.evaluate(T.call_extern("int32", "tvmgemm_prefetched", address))


def pointer(name: str, base, dtype: str, offset):
    """The pointer ``offset`` elements behind ``base``."""
    return let(name, View(name + "_base", base, dtype, (1,)).address(offset))


def argument(name: str, dtype: str):
    """A pointer parameter of the function."""
    return T.arg(name, T.handle(dtype))

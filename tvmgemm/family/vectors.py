"""Vectors and registers of kernels: loads and stores under masks, fused products and sums, transposes in registers."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from .arithmetic import bits
from .emit import INDEX, ON_STACK, const, let, maximum, minimum


def lanes_of(value) -> int:
    """Elements of a vector; 1 for a scalar."""
    _, _, lanes = str(value.ty).partition("x")
    return int(lanes or 1)


def typed(name: str, lanes: int) -> str:
    """The type of a vector of ``lanes`` elements; of one element for 1."""
    return name if lanes == 1 else f"{name}x{lanes}"


def cast(value, name: str, lanes: int):
    """Converted to another type: integers by their value modulo 2**n."""
    return tirx.Cast(typed(name, lanes), value)


def reinterpret(value, name: str, lanes: int):
    """The same bits, seen as ``lanes`` elements of another type."""
    return T.reinterpret(typed(name, lanes), value)


def splat(value, lanes: int):
    """A scalar in every lane."""
    return value if lanes == 1 else T.broadcast(value, lanes)


def word(value: int, lanes: int):
    """A number of 32 bits in every lane."""
    return splat(tirx.const(value, "uint32"), lanes)


class Register:
    """A variable of one vector (or one element). One allocation each: LLVM merges a larger tile into a vector of
    hundreds of lanes."""

    def __init__(self, buffer, lanes: int):
        self._buffer = buffer
        self._all = T.ramp(const(0), const(1), lanes) if lanes > 1 else const(0)

    def get(self):
        """Its value."""
        return self._buffer[self._all]

    def set(self, value) -> None:
        """Assign ``value``."""
        T.buffer_store(self._buffer, value, [self._all])


def variable(name: str, value) -> Register:
    """An index that changes; ``value`` to begin with."""
    buffer = T.alloc_buffer((1,), INDEX, scope="local", annotations=ON_STACK)
    IRBuilder.name(name, buffer)
    register = Register(buffer, 1)
    register.set(value)
    return register


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

        The limit is bound, not the mask: TVM's analyser refuses a bound vector of booleans, and LLVM hoists the
        compare.
        """
        limit = let(name, tirx.Cast("int32", minimum(maximum(limit, const(0)), const(self.lanes))))
        return self._numbers < T.broadcast(limit, self.lanes)

    def mask_from(self, name: str, first):
        """Lanes from ``first`` on, likewise."""
        first = let(name, tirx.Cast("int32", minimum(maximum(first, const(0)), const(self.lanes))))
        return self._numbers >= T.broadcast(first, self.lanes)

    @property
    def _numbers(self):
        return T.ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), self.lanes)

    def masked_load(self, address, mask, otherwise: float | None = None):
        """Load; memory outside the mask is not touched, those lanes hold ``otherwise``, or a quiet NaN (0 of
        integers)."""
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
        buffer = T.alloc_buffer((self.lanes,), self.dtype, scope="local", annotations=ON_STACK)
        IRBuilder.name(name, buffer)
        return Register(buffer, self.lanes)

    def transpose(self, rows: list, unit: int = 1) -> list:
        """The lanes x lanes block held in ``rows``, transposed in registers; of elements that are ``unit`` lanes wide,
        as many as a vector has.

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

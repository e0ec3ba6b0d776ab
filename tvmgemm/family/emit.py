"""The few words in which kernels are written: TVM's IR builder with names and 64-bit indices. Memory is in ``views``,
vectors and their masks in ``vectors``.

Everything is unrolled in Python and vectorised by the native lane count: vectors of another width compile to code
that is many times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from .llvm_functions import KEPT, KEPT_POINTER, PINNED, PREFETCHED, ROLLED

INDEX = "int64"

#: Of an allocation: that it is one of the machine's stack (or registers), not a call of TVM's runtime.
ON_STACK = {"disable_lower_builtin": True}


def const(value: int):
    """A 64-bit index constant."""
    return tirx.const(value, INDEX)


def let(name: str, value):
    """Compute ``value`` once, here, under a name that the printed IR shows.

    An index that depends on conditions goes through memory, from which LLVM moves it to a register again. TVM's code generator
    follows each name that is bound to the value, to learn of bounds and alignment. Conditions are made of names that
    are bound to conditions, and it looks into every one of them: for the kernels of small products that took three
    times as long as all that LLVM does, for others minutes. It does not look into memory.
    """
    if _hangs_on_conditions(value):
        buffer = T.alloc_buffer((1,), INDEX, scope="local", annotations=ON_STACK)
        IRBuilder.name(f"{name}_value", buffer)
        T.buffer_store(buffer, value, [const(0)])
        value = buffer[const(0)]
    var = T.bind(value)
    IRBuilder.name(name, var)
    return var


def _hangs_on_conditions(value) -> bool:
    """Whether ``value`` is an index with a condition in it, or with a call, which may be one."""
    if str(value.ty) != INDEX:
        return False
    if isinstance(value, (tirx.Select, tirx.Min, tirx.Max, tvm.ir.Call)):
        return True
    if isinstance(value, tirx.expr.BinaryOpExpr):
        return _hangs_on_conditions(value.a) or _hangs_on_conditions(value.b)
    return isinstance(value, tirx.Cast)


def opaque(name: str, index):
    """The index, as a value that LLVM knows nothing about: what depends on it is computed anew, behind this place."""
    return let(name, T.call_extern(INDEX, "tvmgemm_kept", index))


def pinned(name: str, index):
    """The index, as a value that LLVM makes at this place and no earlier: so is what depends on it."""
    return let(name, T.call_extern(INDEX, "tvmgemm_pinned", index))


@contextmanager
def loop(name: str, extent, start=None):
    """A serial loop ``for name in range(start, start + extent)``; yields its variable."""
    frame = T.serial(extent) if start is None else T.serial(start, start + extent)
    with frame as var:
        IRBuilder.name(name, var)
        yield var


def leave() -> None:
    """End the innermost loop here."""
    T.evaluate(T.break_loop())


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


def by_size(value, low: int, high: int, then: Callable[[int], None]) -> None:
    """``then(value)`` with the value made a constant of the code; it is between ``low`` and ``high``."""
    if low == high:
        then(low)
        return
    middle = (low + high) // 2
    branch(
        value > const(middle),
        lambda: by_size(value, middle + 1, high, then),
        lambda: by_size(value, low, middle, then),
    )


def both(left, right):
    """Logical and of two conditions, each an expression or a Python bool."""
    if isinstance(left, bool):
        return right if left else False
    if isinstance(right, bool):
        return left if right else False
    return tirx.And(left, right)


def either(left, right):
    """Logical or of two conditions."""
    return tirx.Or(left, right)


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
    return T.attr(tirx.const(0, "int32"), "pragma_import_llvm", KEPT + KEPT_POINTER + PINNED + ROLLED + PREFETCHED + definitions)


def address(base, offset):
    """The number of the address ``offset`` bytes behind the pointer ``base``."""
    return T.reinterpret(INDEX, base) + offset


def rolled() -> None:
    """Keep LLVM from unrolling the loop that this is in."""
    T.evaluate(T.call_extern("int32", "tvmgemm_rolled"))


def prefetch(address) -> None:
    """Ask for the cache line at an ``address``, which need not exist: a prefetch never faults."""
    T.evaluate(T.call_extern("int32", "tvmgemm_prefetched", address))


def argument(name: str, dtype: str):
    """A pointer parameter of the function."""
    return T.arg(name, T.handle(dtype))

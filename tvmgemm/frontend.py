"""The front door: ``matmul``, a ufunc made of NumPy's own parts, ``gemm``, and where a miss enters Python.

Nothing here decides how a product is computed. The native loops find a published plan by themselves; only
where none fits do they call ``tg_miss``, which imports the dispatcher the first time that it is needed.
"""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tvmgemm._native import ffi, lib
from tvmgemm.forks import importing
from tvmgemm.problem import DTYPES

#: Decides about a problem that no plan serves and publishes a plan: ``on_miss(tg_problem *) -> bool``, True
#: if the loop should look again. None until the first miss, then ``tvmgemm.dispatch.on_miss``.
on_miss: Callable[[object], bool] | None = None

#: Does what a small shape that many products have had deserves, ``on_hot(tg_problem *) -> bool``: True if a plan for it
#: alone has been published. ``tvmgemm.dispatch.on_hot``, which is loaded by then: a plan of its asks for this.
on_hot: Callable[[object], bool] | None = None

_LOOK_AGAIN, _DECLINE, _INTERRUPTED = 1, 0, -1
_SERVED, _KERNEL_FAILED = 0, -2

_interrupts: list[BaseException] = []


def _handle_escaped(kind, error, traceback) -> int:
    """What the native loop gets when planning raised: decline. What is not about planning is handed on, all else is logged."""
    if issubclass(kind, KeyboardInterrupt) or _comes_from_a_signal(traceback):
        _interrupts.append(error)
        return _INTERRUPTED  # the native part has it raised once no frame of ours is left to swallow it
    try:
        from tvmgemm import log

        if log.enabled():
            log.logger().warning("planning a product failed, NumPy computes it: %s", error,
                                 exc_info=(kind, error, traceback))
    except Exception:  # no way to report: the product still has to be computed
        pass
    return _DECLINE


def _comes_from_a_signal(traceback) -> bool:
    """Whether the program's handler of a signal raised it: a time limit that ended while a kernel was built, say."""
    import signal

    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    while traceback is not None:
        if traceback.tb_frame.f_code in handlers:
            return True
        traceback = traceback.tb_next
    return False


def raise_interrupt() -> None:
    """Raise what ended planning, in the main thread: the native part asks for it (``tg_python_interrupt``)."""
    if _interrupts:
        raise _interrupts.pop()


@ffi.def_extern(onerror=_handle_escaped)
def tg_miss(problem) -> int:
    """Called by a native loop that has no plan for its problem, on any thread, under the GIL."""
    global on_miss
    if on_miss is None:
        if sys.is_finalizing():
            return _DECLINE
        with importing:
            from tvmgemm import dispatch

        on_miss = dispatch.on_miss
    return _LOOK_AGAIN if on_miss(problem) else _DECLINE


@ffi.def_extern(onerror=_handle_escaped)
def tg_hot(problem) -> int:
    """Called by a native loop when a small shape has come to as many products as its plan says, under the GIL."""
    return _LOOK_AGAIN if on_hot is not None and on_hot(problem) else _DECLINE


def _numpys_matmul() -> np.ufunc:
    """np.matmul, or RuntimeError if it is not the ufunc whose parts the native code takes."""
    found = np.matmul
    if (
        not isinstance(found, np.ufunc)
        or found.signature != "(n?,k),(k,m?)->(n?,m?)"
        or not {f"{x}{x}->{x}" for x in "?bBhHiIlLqQefdFD"} <= set(found.types)
    ):
        raise RuntimeError(
            f"np.matmul of NumPy {np.__version__} is {found!r}, not the generalized ufunc with loops for "
            f"numbers of all types that tvmgemm builds on; import tvmgemm before what replaced it"
        )
    return found


def _check_interpreter() -> None:
    """ImportError in a subinterpreter: the native part finds its way back to the main one only."""
    c = ctypes.pythonapi
    c.PyInterpreterState_Get.restype = c.PyInterpreterState_Main.restype = ctypes.c_void_p
    if c.PyInterpreterState_Get() != c.PyInterpreterState_Main():
        raise ImportError("tvmgemm works in Python's main interpreter only; import it there, or use processes")


def _make_matmul(numpys: np.ufunc) -> np.ufunc:
    address = lib.tg_make_ufunc(id(numpys))
    if not address:
        raise RuntimeError(
            f"no ufunc could be made from np.matmul of NumPy {np.__version__} ({numpys.ntypes} loops): this "
            f"tvmgemm does not know it; upgrade tvmgemm, or use an earlier NumPy"
        )
    made = ctypes.cast(address, ctypes.py_object).value  # C's own reference stays: the ufunc lives for ever
    try:
        made.__module__, made.__qualname__ = "tvmgemm", "matmul"  # where pickle looks for it
    except AttributeError:  # NumPy < 2.2: pickle searches all modules
        pass
    return made


_check_interpreter()

#: NumPy's ufunc, which also the ``@`` operator calls: kept, because a program may rebind the name np.matmul.
numpys_matmul = _numpys_matmul()
if TYPE_CHECKING:
    matmul = np.matmul  # the same signature
else:
    matmul = _make_matmul(numpys_matmul)

_Result = TypeVar("_Result", bound=np.ndarray)

#: The native number of a dtype of gemm.
_NATIVE = {
    np.dtype(d.name): d.native_id
    for d in DTYPES.values()
    if d.a == d.b == d.c and d.name not in ("bool", "bfloat16")  # alpha and beta of bool would mean nothing
}


def gemm(
    a: np.ndarray, b: np.ndarray, c: _Result, alpha: complex | np.number = 1, beta: complex | np.number = 1
) -> _Result:
    """Compute ``C = alpha * A @ B + beta * C`` in place and return ``c``.

    Parameters
    ----------
    a, b, c : ndarray
        2-D arrays of shapes (m, k), (k, n) and (m, n), of one dtype: float16, float32, float64, complex64,
        complex128, or any integer dtype. Any strides, also negative; ``a`` and ``b`` may have zero strides and
        may share memory with each other.
    alpha, beta : number
        Real, for complex dtypes also complex, for integer dtypes integers. As in BLAS, ``beta == 0`` means that
        C is not read (NaN in it vanish), and ``alpha == 0`` that A and B are not.

    Integers wrap around, alpha and beta too. float16 computes in float32 and rounds once.

    Raises
    ------
    TypeError
        For an operand that is not an ndarray, is a masked array, or has another dtype, and for a scalar that
        the dtype does not take.
    ValueError
        For a wrong number of dimensions or a shape that does not fit; for a ``c`` that is read-only, has
        elements that share memory, or overlaps ``a`` or ``b``; for unaligned operands.

    Floating-point errors (overflow, invalid) are not reported, whatever ``np.errstate`` says.

    Examples
    --------
    >>> import numpy as np, tvmgemm
    >>> a, b, c = np.ones((2, 3)), np.ones((3, 2)), np.ones((2, 2))
    >>> tvmgemm.gemm(a, b, c, alpha=2, beta=-1)
    array([[5., 5.],
           [5., 5.]])
    """
    _check_operands(a, b, c)
    alpha, beta = _scalar("alpha", alpha, c.dtype), _scalar("beta", beta, c.dtype)
    (m, k), n = a.shape, b.shape[1]
    if m == 0 or n == 0:
        return c
    if alpha == 0:
        with np.errstate(all="ignore"):
            _scale_in_place(c, beta)
        return c
    status = lib.tg_gemm(
        _NATIVE[c.dtype], m, n, k, _pointer(a), *a.strides, _pointer(b), *b.strides, _pointer(c), *c.strides,
        _scale(c.dtype, alpha, beta),
    )
    if status == _KERNEL_FAILED:
        raise RuntimeError(f"the kernel for a {m}x{k} by {k}x{n} product failed; c holds anything now")
    if status != _SERVED:
        with np.errstate(all="ignore"):
            _gemm_by_matmul(a, b, c, alpha, beta)
    return c


def _pointer(array: np.ndarray):
    return ffi.cast("char *", array.__array_interface__["data"][0])


def _scale(dtype: np.dtype, alpha, beta):
    """(alpha, beta) as the kernels take them: in ``DType.scale``."""
    if dtype.kind == "c":
        return ffi.new("float[4]" if dtype.itemsize == 8 else "double[4]", (alpha.real, alpha.imag, beta.real, beta.imag))
    if dtype.kind == "f":
        return ffi.new("double[2]" if dtype.itemsize == 8 else "float[2]", (alpha, beta))
    return ffi.new(f"{dtype.name}_t[2]", (alpha, beta))


def _scale_in_place(c: np.ndarray, beta) -> None:
    if beta == 0:
        c[...] = 0
    elif beta != 1:
        np.multiply(c, _typed(c.dtype, beta), out=c, casting="same_kind")


def _gemm_by_matmul(a: np.ndarray, b: np.ndarray, c: np.ndarray, alpha, beta) -> None:
    product = matmul(a, b, subok=False, dtype=np.promote_types(c.dtype, np.float32) if c.dtype.kind == "f" else c.dtype)
    if alpha != 1:
        product *= _typed(c.dtype, alpha)
    if beta == 0:
        c[...] = product
    elif beta == 1:
        np.add(c, product, out=c, casting="same_kind")
    else:
        np.add(c * _typed(c.dtype, beta), product, out=c, casting="same_kind")


def _typed(dtype: np.dtype, scalar) -> np.generic:
    """alpha or beta for arithmetic with C: in its dtype, for float16 in float32."""
    return np.dtype(DTYPES[dtype.name].scale).type(scalar)


def _scalar(name: str, value, dtype: np.dtype):
    """alpha or beta as a float, a complex, or an integer that is wrapped around to fit; or TypeError."""
    if dtype.kind in "fc":
        try:
            return float(value) if dtype.kind == "f" else complex(value)
        except TypeError:
            raise TypeError(f"{name}={value!r} is not a {'real' if dtype.kind == 'f' else 'complex'} number") from None
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is not an integer, and c is {dtype}") from None
    bits = 8 * dtype.itemsize
    low = -(1 << (bits - 1)) if dtype.kind == "i" else 0
    return (value - low) % (1 << bits) + low


def _check_operands(a, b, c) -> None:
    for name, x in (("a", a), ("b", b), ("c", c)):
        if type(x) is not np.ndarray:
            _check_kind(name, x)
        if x.ndim != 2:
            raise ValueError(f"{name} has {x.ndim} dimensions (shape {x.shape}), 2 are needed; "
                             f"for a stack of matrices call gemm once for each")
        if x.dtype not in _NATIVE:
            order = "" if x.dtype.isnative else " in foreign byte order"
            raise TypeError(f"{name} has dtype {x.dtype!s}{order}, one of {', '.join(map(str, _NATIVE))} is needed; "
                            f"convert it with {name}.astype(...)")
        if not x.flags.aligned:
            raise ValueError(f"{name} is not aligned to its item size of {x.itemsize} bytes; "
                             f"pass {name}.copy()")
    if not a.dtype == b.dtype == c.dtype:
        raise TypeError(f"a is {a.dtype}, b is {b.dtype}, c is {c.dtype}: one dtype is needed for all; "
                        f"convert with .astype(...)")
    if a.shape[1] != b.shape[0] or c.shape != (a.shape[0], b.shape[1]):
        raise ValueError(f"a has shape {a.shape}, b {b.shape}, c {c.shape}: "
                         f"(m, k), (k, n) and (m, n) are needed")
    if not c.flags.writeable:
        raise ValueError("c is read-only, and gemm writes its result there; pass a writeable array")
    if _elements_share_memory(c):
        raise ValueError(f"c has elements that share memory (shape {c.shape}, strides {c.strides}); "
                         f"pass c.copy()")
    for name, x in (("a", a), ("b", b)):
        if np.may_share_memory(c, x) and np.shares_memory(c, x):
            raise ValueError(f"c overlaps {name} in memory, and gemm reads {name} while it writes c; "
                             f"pass {name}.copy()")


def _check_kind(name: str, x) -> None:
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is a {type(x).__name__}, an ndarray is needed; convert it with np.asarray")
    if hasattr(x, "mask") and hasattr(x, "filled"):
        raise TypeError(f"{name} is a masked array, and gemm knows no masks; "
                        f"pass {name}.filled(0) or {name}.data")


def _elements_share_memory(x: np.ndarray) -> bool:
    """Whether two elements of an aligned 2-D array have one address.

    They do if i*s0 + j*s1 = 0 for some (i, j) != (0, 0) inside the array. The smallest such |i| is |s1|/gcd,
    and |j| is then |s0|/gcd.
    """
    (rows, cols), (s0, s1) = x.shape, x.strides
    divisor = math.gcd(s0, s1)
    if divisor == 0:
        return rows * cols > 1
    return rows > abs(s1) // divisor and cols > abs(s0) // divisor

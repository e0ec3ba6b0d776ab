"""Element types of a benchmark: random elements, references and error bounds.

A name is one of ``tvmgemm.problem.DTYPES``: that of a NumPy dtype, or ``inputs-output`` where the result has another.
"""

from __future__ import annotations

import math

import numpy as np

from tvmgemm.problem import DTYPES


def of(name: str) -> tuple[str, str, str]:
    """The NumPy names of the elements of A, B and C."""
    dtype = DTYPES[name]
    return dtype.a, dtype.b, dtype.c


def keywords(name: str) -> dict[str, np.dtype]:
    """What a call of matmul needs to give elements of C: ``dtype=``, or nothing where they are what it gives anyway."""
    a, b, c = of(name)
    return {} if a == b == c != "bfloat16" else {"dtype": np.dtype(c)}  # a product of bfloat16 is float32


def missing(name: str) -> str | None:
    """Why arrays of these elements cannot be made here, or None."""
    if "bfloat16" in of(name):
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            return f"{name} is left out: the package ml_dtypes is not installed"
    return None


def random(generator: np.random.Generator, shape: tuple[int, ...], name: str, density: float = 0.5) -> np.ndarray:
    """A C-contiguous array: standard normal numbers, integers over the whole range, or bools, ``density`` of them True."""
    dtype = np.dtype(name)
    if dtype.kind == "b":
        return generator.random(shape, np.float32) < density
    if np.issubdtype(dtype, np.integer):
        return np.frombuffer(generator.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
    if np.issubdtype(dtype, np.complexfloating):
        part = np.float32 if dtype == np.complex64 else np.float64
        return generator.standard_normal((*shape, 2), part).view(dtype)[..., 0]
    wide = np.float64 if dtype == np.float64 else np.float32
    return generator.standard_normal(shape, wide).astype(dtype, copy=False)


def reference(a: np.ndarray, b: np.ndarray, name: str) -> np.ndarray:
    """The product with the elements of C, by whatever is both right and fast: NumPy takes seconds for some of them.

    Half precision in float32, rounded once; integers of up to 16 bits in float64, which is exact, then modulo 2**n;
    all else in the elements of C.
    """
    c = np.dtype(of(name)[2])
    integers = np.issubdtype(a.dtype, np.integer) and a.dtype.itemsize <= 2 and a.shape[-1] < 2**20
    halves = a.dtype.itemsize == 2 and not np.issubdtype(a.dtype, np.integer)
    wide = np.float64 if integers else np.float32 if halves else c
    product = np.asarray(np.matmul(a.astype(wide, copy=False), b.astype(wide, copy=False)))
    return (product.astype(np.int64) if integers else product).astype(c, copy=False)


def wrong(result: np.ndarray, expected: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where ``result`` and ``expected`` differ by more than two sums of k terms may; integers and bools may not differ."""
    dtype = expected.dtype
    if dtype.kind in "biu":
        return np.asarray(result != expected)
    wide = np.float64 if dtype.name in ("float64", "complex128") else np.float32
    magnitudes = np.matmul(*(np.abs(x).astype(wide, copy=False) for x in (a, b)))
    complex_terms = 4 if np.iscomplexobj(expected) else 1
    terms = 2 * complex_terms * max(a.shape[-1], 1) * np.finfo(wide).eps
    rounding = 0.0 if dtype.itemsize > 2 else 2 * _epsilon(dtype)  # one of each side, to a narrow result
    return np.asarray(~(np.abs(_wide(result) - _wide(expected)) <= (terms + rounding) * magnitudes))


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.itemsize > 2 else x.astype(np.float32)


def _epsilon(dtype: np.dtype) -> float:
    return 2.0**-10 if dtype == np.float16 else 2.0**-7  # bfloat16 has 8 bits of significand, which np.finfo doesn't know

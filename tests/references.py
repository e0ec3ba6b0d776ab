"""Operands of every dtype that NumPy has a loop for, and what their products have to be."""

from __future__ import annotations

import numpy as np
from equivalence import product


def numbers(shape, letter: str, seed: int = 0) -> np.ndarray:
    """Integers over all of their range, its ends often; bool with few true; moderate fractions."""
    rng, dtype = np.random.default_rng(seed), np.dtype(letter)
    if dtype.kind == "b":
        return rng.random(shape) < 0.1
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
        for end in (info.min, info.max):
            values[rng.random(shape) < 0.1] = end
        return values
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.kind == "c" else values).astype(dtype)


def exactly(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A.B in arithmetic that does not lose: of integers modulo 2**64, by NumPy's np.dot, which is not patched."""
    if a.dtype.kind == "b":
        return product(a.astype(np.int64), b.astype(np.int64)) != 0
    if a.dtype.kind in "iu":
        return product(a.astype(np.int64), b.astype(np.int64)).astype(a.dtype)
    return product(precise(a), precise(b))


def precise(x: np.ndarray) -> np.ndarray:
    """In a dtype in which products are exact, or nearly so."""
    wider = {"e": "f8", "f": "f8", "d": np.longdouble, "F": "c16", "D": np.clongdouble}
    return x.astype(wider[x.dtype.char])


def assert_right(result, a: np.ndarray, b: np.ndarray) -> None:
    """NumPy's result dtype; integers to the bit; others within the bound of any order of summation."""
    result, expected = np.asarray(result), exactly(a, b)
    assert result.dtype == a.dtype and result.shape == expected.shape
    if a.dtype.kind in "biu":
        np.testing.assert_array_equal(result, expected)
        return
    k, eps = a.shape[-1], float(np.finfo("f4" if a.dtype == np.float16 else a.dtype).eps)
    bound = 4 * k * eps * product(abs(precise(a)), abs(precise(b))) + float(np.finfo(a.dtype).tiny)
    if a.dtype == np.float16:  # summed in float32, rounded once
        bound = bound + 2**-11 * abs(expected) + 2**-25
    assert (abs(result - expected) <= bound).all()

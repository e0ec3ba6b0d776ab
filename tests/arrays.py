"""Arrays for tests of the native part and of dtypes: exact numbers, in the layouts that NumPy hands over."""

from __future__ import annotations

import numpy as np

LAYOUTS = ("row", "col", "padded", "strided", "negative")


def whole_numbers(shape, dtype="float32", seed=0):
    """Small integers: their products and sums are exact in every order, or wrap around."""
    numbers = np.random.default_rng(seed).integers(-4, 5, shape)
    if np.dtype(dtype).kind == "c":
        numbers = numbers + 1j * numbers[..., ::-1]
    return numbers.astype(dtype)


def stacks(n: int, shape: tuple[int, int, int], dtype="float32") -> tuple[np.ndarray, np.ndarray]:
    """Operands of n products of the shape (m, n, k)."""
    m, columns, k = shape
    rng = np.random.default_rng(n)
    return rng.standard_normal((n, m, k)).astype(dtype), rng.standard_normal((n, k, columns)).astype(dtype)


def arranged(x: np.ndarray, layout: str) -> np.ndarray:
    """The same values in memory of another layout; only the last two axes change."""
    *batch, m, n = x.shape
    if layout == "row":
        return np.ascontiguousarray(x)
    if layout == "col":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if layout == "padded":
        room = np.full((*batch, m, n + 3), 99, x.dtype)[..., :n]
    elif layout == "strided":
        room = np.full((*batch, 2 * m, 3 * n), 99, x.dtype)[..., ::2, ::3]
    elif layout == "negative":
        room = np.full((*batch, m, n), 99, x.dtype)[..., ::-1, ::-1]
    else:
        raise ValueError(layout)
    room[...] = x
    return room

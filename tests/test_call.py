"""The way in for plain operands: it does what NumPy's machinery does, and leaves to it whatever is not plain."""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import threading
import tracemalloc
import warnings

import numpy as np
import pytest
from equivalence import RUNNABLE, served_by_us

import tvmgemm

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

DTYPES = [np.dtype(code) for code in "?bBhHiIlLqQefdFD"]


def way_in(ufunc: np.ufunc) -> int:
    """The function through which a ufunc is called."""
    offset = ctypes.c_ssize_t.from_address(id(np.ufunc) + 7 * ctypes.sizeof(ctypes.c_ssize_t)).value
    assert 0 < offset < np.ufunc.__basicsize__
    return ctypes.c_void_p.from_address(id(ufunc) + offset).value


def test_who_has_it():
    """Our ufunc always, np.matmul while it is patched, other ufuncs never."""
    ours, numpys = way_in(tvmgemm.matmul), way_in(np.add)
    assert ours != numpys == way_in(np.matmul)
    with tvmgemm.patched():
        assert (way_in(np.matmul), way_in(np.add)) == (ours, numpys)
    assert way_in(np.matmul) == numpys


def filled(shape, dtype, layout="row"):
    rng = np.random.default_rng(7)
    values = rng.integers(0, 3, shape) if dtype.kind in "?bBhHiIlLqQbiu" else rng.integers(-8, 9, shape)
    if layout == "col" and len(shape) == 2:
        return values.astype(dtype).T.copy().T
    if layout == "backwards":
        return values.astype(dtype)[(slice(None, None, -1),) * len(shape)]
    if layout == "stepped":
        wide = np.zeros(tuple(3 * size for size in shape), dtype)
        wide[(slice(None, None, 3),) * len(shape)] = values
        return wide[(slice(None, None, 3),) * len(shape)]
    return values.astype(dtype)


SHAPES = [((4, 5), (5, 6)), ((5,), (5, 6)), ((4, 5), (5,)), ((5,), (5,)), ((1, 1), (1, 1)), ((70, 40), (40, 50)), ((3, 5), (5, 0)),
          ((3, 0), (0, 4)), ((0,), (0,)), ((2, 3, 4), (4, 5)), ((4, 5), (2, 5, 3))]  # fmt: skip


def same(ours, numpys) -> None:
    assert type(ours) is type(numpys) and ours.dtype == numpys.dtype and ours.shape == numpys.shape
    np.testing.assert_array_equal(ours, numpys)
    if isinstance(ours, np.ndarray):
        assert ours.strides == numpys.strides and ours.flags.owndata == numpys.flags.owndata


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.char)
def test_results_are_those_of_numpy(dtype):
    for (left, right), (x, y) in itertools.product(SHAPES, itertools.product(("row", "col", "backwards", "stepped"), repeat=2)):
        a, b = filled(left, dtype, x), filled(right, dtype, y)
        expected = np.matmul(a, b)
        same(tvmgemm.matmul(a, b), expected)
        with tvmgemm.patched():
            same(a @ b, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_serve_it(dtype):
    a, b = np.ones((4, 4), dtype), np.ones((4, 4), dtype)
    with served_by_us(dtype):
        assert (tvmgemm.matmul(a, b) == 4).all()


class Sub(np.ndarray):
    """A subclass that takes no part itself."""


class Overriding:
    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        return ufunc, method, len(inputs), sorted(kwargs)


A, B = np.arange(12.0).reshape(3, 4), np.arange(8.0).reshape(4, 2)


@pytest.mark.parametrize(
    "arguments, keywords",
    [
        ((A, B.astype("f4")), {}),
        ((A, B.astype("i4")), {}),
        ((A, B.astype(">f8")), {}),
        ((A.tolist(), B), {}),
        ((A.view(Sub), B), {}),
        ((A, Overriding()), {}),
        ((A, B), {"dtype": "f4", "casting": "unsafe"}),
        ((A, B), {"axes": [(0, 1), (0, 1), (1, 0)]}),
        ((A, B), {"out": (np.zeros((3, 2)),)}),
        ((A, B), {"out": None}),
        ((A, B, None), {}),
        ((A.astype(np.dtype("f8", metadata={"unit": "m"})), B), {}),
        ((np.frombuffer(bytes(1) + A.tobytes(), "u1")[1:].view("f8").reshape(3, 4), B), {}),
        ((A, B.astype("g")), {}),
        ((A, B.astype("O")), {}),
    ],
)
def test_what_is_not_plain_is_numpys(arguments, keywords):
    ours, numpys = (ufunc(*arguments, **keywords) for ufunc in (tvmgemm.matmul, np.matmul))
    if isinstance(numpys, tuple):
        assert (ours[0], *ours[1:]) == (tvmgemm.matmul, *numpys[1:])
    else:
        assert type(ours) is type(numpys) and ours.dtype == numpys.dtype and ours.dtype.metadata == numpys.dtype.metadata
        np.testing.assert_array_equal(ours, numpys)


@pytest.mark.parametrize(
    "arguments, keywords",
    [
        ((A, A), {}),
        ((A, np.float64(3.0)), {}),
        ((A,), {}),
        ((A, B, np.zeros((3, 2)), 1), {}),
        ((A, B, np.zeros((2, 3))), {}),
        ((A, B, np.zeros(2)), {}),
        ((A, B, [1]), {}),
        ((A, B, np.zeros((3, 2), "i4")), {}),
        ((A, B, np.zeros((3, 2))), {"out": np.zeros((3, 2))}),
        ((A, B), {"nonsense": 3}),
        ((A, B), {"out": np.broadcast_to(np.zeros(2), (3, 2))}),
    ],
)
def test_errors_are_numpys(arguments, keywords):
    messages = []
    for ufunc in (tvmgemm.matmul, np.matmul):
        with pytest.raises((TypeError, ValueError)) as caught:
            ufunc(*arguments, **keywords)
        messages.append((caught.type, str(caught.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("position", ["third", "keyword"])
def test_out(position):
    def multiply(a, b, out):
        return tvmgemm.matmul(a, b, out) if position == "third" else tvmgemm.matmul(a, b, out=out)

    whole = np.full((9, 9), np.nan)
    for out in (np.empty((3, 2)), np.empty((2, 3)).T, whole[1:7:2, 2:8:3], whole[8:2:-2, 1::-1]):
        assert multiply(A, B, out) is out
        np.testing.assert_array_equal(out, np.dot(A, B))
    assert np.isnan(whole).sum() == 81 - 6 - 6
    # Outputs in which, or whose operands in which, one place is two elements: NumPy copies first.
    square = np.arange(16.0).reshape(4, 4)
    for x, y, out in [
        (square, square, square),
        (square.T, square, square),
        (square[:2], square[:, :2], square[1:3, 1:3]),
        (square[:, ::2], square[::2], square[::-1]),
    ]:
        buffers = []
        for ufunc in (tvmgemm.matmul, np.matmul):
            kept = square.copy()
            result = ufunc(x, y, out=out) if ufunc is np.matmul else multiply(x, y, out)
            assert result is out
            buffers.append(square.copy())
            square[...] = kept
        np.testing.assert_array_equal(*buffers)
    folded = np.lib.stride_tricks.as_strided(np.zeros(8), (3, 2), (8, 8))
    expected = np.lib.stride_tricks.as_strided(np.zeros(8), (3, 2), (8, 8))
    np.testing.assert_array_equal(multiply(A, B, folded), np.matmul(A, B, expected))
    with pytest.warns(DeprecationWarning, match="broadcast"):
        multiply(A, B, np.broadcast_arrays(np.zeros((3, 2)), np.zeros((3, 1)))[1])


@pytest.mark.parametrize("size", [4, 400])
@pytest.mark.parametrize("kind", ["matrix x vector", "vector x matrix", "dot"])
def test_out_of_vectors(kind, size):
    """One dimension, or none: an array of that shape comes back as it was given, every other is NumPy's to judge."""
    n, vector = size, np.arange(1.0, 1.0 + size)
    matrix = np.add.outer(vector, vector)
    a, b = matrix if kind == "matrix x vector" else vector, matrix if kind == "vector x matrix" else vector
    shape = np.dot(a, b).shape
    whole = np.full(3 * n + 2, np.nan)
    outs = [whole[1 : 1 + n], whole[1 : 1 + 2 * n : 2], whole[n + 1 : 1 : -1]] if shape else [whole[1:2].reshape(())]
    for out in outs:
        whole[...] = np.nan
        assert tvmgemm.matmul(a, b, out) is out and tvmgemm.matmul(a, b, out=out) is out
        np.testing.assert_array_equal(out, np.dot(a, b))
        assert np.isnan(whole).sum() == whole.size - out.size
    overlapping = [vector] if shape else [vector[1:2].reshape(())]
    overlapping += [np.lib.stride_tricks.as_strided(np.zeros(1), shape, (0,) * len(shape))] if shape else []
    for out in overlapping:
        kept, written = vector.copy(), []
        for ufunc in (tvmgemm.matmul, np.matmul):
            assert ufunc(a, b, out=out) is out
            written.append((vector.copy(), np.array(out)))
            vector[...] = kept
        np.testing.assert_array_equal(*[each[0] for each in written])
        np.testing.assert_array_equal(*[each[1] for each in written])
    for out in (np.zeros((1, *shape)), np.zeros(shape, "f4"), np.zeros((*shape, 1)), np.zeros(n + 1)):
        messages = []
        for ufunc in (tvmgemm.matmul, np.matmul):
            try:
                messages.append(ufunc(a, b, out=out).tolist())
            except (TypeError, ValueError) as error:
                messages.append((type(error), str(error)))
        assert messages[0] == messages[1]
    read_only = np.zeros(shape)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        tvmgemm.matmul(a, b, out=read_only)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.char)
@pytest.mark.parametrize("size", [3, 300])
def test_a_dot_product_is_a_scalar(dtype, size):
    x = filled((size,), dtype)
    for ufunc in (tvmgemm.matmul, np.matmul):
        with tvmgemm.patched():
            result = ufunc(x, x)
        assert type(result) is dtype.type and result.dtype == dtype and result == np.dot(x, x)


@pytest.mark.parametrize("dtype", ["e", "f4", "f8", "F", "D"])
def test_floating_point_errors_of_vectors(dtype):
    """Of products that are ours and of products that NumPy's loop computes, with and without an array for the result."""
    for size in (3, 300):
        huge = np.full(size, np.finfo(dtype).max, dtype)
        for a, b in [(huge, huge), (np.full((size, size), np.finfo(dtype).max, dtype), huge)]:
            out = np.empty(np.matmul(np.zeros_like(a), b).shape, dtype)
            for arguments in ((a, b), (a, b, out)):
                with np.errstate(all="ignore", over="raise"), pytest.raises(FloatingPointError, match="encountered in matmul"):
                    tvmgemm.matmul(*arguments)
                with np.errstate(all="ignore"):
                    assert np.isinf(tvmgemm.matmul(*arguments)).all() or dtype in "FD"


@pytest.mark.parametrize("dtype", ["e", "f4", "f8", "F", "D"])
def test_floating_point_errors(dtype):
    huge, infinite = np.full((3, 3), np.finfo(dtype).max, dtype), np.full((3, 3), np.inf, dtype)
    tiny, zero = np.full((3, 3), np.finfo(dtype).tiny, dtype), np.zeros((3, 3), dtype)
    for a, b, kind in [(huge, huge, "over"), (infinite, zero, "invalid"), (tiny, tiny, "under")]:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error")
            # Not np.matmul: OpenBLAS multiplies complex sums by 1+0j, which makes a NaN of an infinity and a zero.
            np.testing.assert_array_equal(tvmgemm.matmul(a, b), (a[:, :, None] * b).sum(axis=1))
        with np.errstate(**{"all": "ignore", kind: "raise"}):
            with pytest.raises(FloatingPointError, match="encountered in matmul"):
                tvmgemm.matmul(a, b)
            assert (tvmgemm.matmul(zero, zero) == 0).all(), "what an earlier call raised"
        with np.errstate(**{"all": "ignore", kind: "warn"}), pytest.warns(RuntimeWarning, match="encountered in matmul"):
            tvmgemm.matmul(a, b)
        seen = []
        with np.errstate(**{"all": "ignore", kind: "call"}, call=lambda *what: seen.append(what)):
            tvmgemm.matmul(a, b)
        assert len(seen) == 1
    with np.errstate(all="raise"):
        with np.errstate(all="ignore"):
            np.divide(np.ones(3), np.zeros(3))
        assert (tvmgemm.matmul(zero, zero) == 0).all()


def test_integers_have_no_floating_point_errors():
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(tvmgemm.matmul(*[np.full((3, 3), 2**31 - 1, "i4")] * 2), np.full((3, 3), 3, "i4"))


def test_nothing_is_lost():
    a, b, out, scalar = np.ones((4, 4)), np.ones((4, 4)), np.ones((4, 4)), np.ones(())
    calls = (
        lambda: tvmgemm.matmul(a, b), lambda: tvmgemm.matmul(a, b, out), lambda: tvmgemm.matmul(a, b, out=out),
        lambda: tvmgemm.matmul(a[0], b[0]), lambda: tvmgemm.matmul(a, b[0], out[0]),
        lambda: tvmgemm.matmul(a[0], b[0], scalar), lambda: pytest.raises(ValueError, tvmgemm.matmul, a, b[:3]),
    )  # fmt: skip
    before = [sys.getrefcount(x) for x in (a, b, out, scalar)]
    dtypes = sys.getrefcount(a.dtype)
    gc.collect()
    tracemalloc.start()
    try:
        held = []
        for _ in range(5):  # a leak grows in every round; what others keep meanwhile, a build that ends say, does not
            for each in calls:
                for _ in range(300):
                    each()
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
        assert min(later - earlier for earlier, later in zip(held, held[1:])) < 300 * 16
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(x) for x in (a, b, out, scalar)] == before
    assert abs(sys.getrefcount(a.dtype) - dtypes) < 100


def test_other_threads_run_meanwhile():
    a = np.ones((700, 700))
    tvmgemm.matmul(a, a)
    counted, going = [0], threading.Event()

    def count():
        going.set()
        while going.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    old = sys.getswitchinterval()
    sys.setswitchinterval(0.3)  # meanwhile nobody hands over but who lets go
    try:
        thread.start()
        going.wait()
        before = counted[0]
        tvmgemm.matmul(a, a)
        after = counted[0]
    finally:
        going.clear()
        sys.setswitchinterval(old)
        thread.join()
    assert after > before

"""Products with a vector: which way round they are computed, and which are left to NumPy's BLAS."""

from __future__ import annotations

import numpy as np
import pytest
from equivalence import FLOATS, FORCED, RUNNABLE, assert_close, assert_same_bits, planned, served_by_us

import tvmgemm
from tvmgemm.family.tiles import ROW_STEPS, UNBLOCKED_TILES

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

every_dtype = pytest.mark.parametrize("dtype", FLOATS)

M, N = 130, 90
WIDE = np.random.default_rng(1).standard_normal((2 * M, 2 * N))


def matrices(dtype: str) -> dict[str, tuple[np.ndarray, bool]]:
    """M x N matrices by name, and whether BLAS takes them as they are."""
    wide = WIDE.astype(dtype)
    return {
        "rows": (wide[:M, :N].copy(), True),
        "columns": (wide[:M, :N].T.copy().T, True),
        "rows apart": (wide[::2, :N], True),
        "elements apart": (wide[:M, ::2], False),
        "reversed rows": (wide[M:0:-1, :N], False),
        "reversed columns": (wide[:M, N - 1 :: -1], False),
        "one row": (np.broadcast_to(wide[0, :N], (M, N)), False),
    }


def vectors(size: int, dtype: str) -> dict[str, tuple[np.ndarray, bool]]:
    x = WIDE.astype(dtype).ravel()
    return {
        "contiguous": (x[:size], True),
        "apart": (x[: 3 * size : 3], True),
        "reversed": (x[:size][::-1], False),
        "repeated": (np.broadcast_to(x[:1], size), False),
    }


def wide_row(problem) -> bool:
    """Whether C is computed as one row so wide that it is ours (tests/test_one_row.py), with rows of B in place."""
    _, widest = UNBLOCKED_TILES[RUNNABLE[-1], problem.dtype]
    return problem.m == 1 and problem.b_layout == "row" and problem.n >= 2 * widest and problem.k >= ROW_STEPS


@every_dtype
def test_blas_keeps_what_it_takes_and_kernels_serve_the_rest(dtype):
    """The products that we compute have the bits of a packed kernel, whichever way round they were computed."""
    for (matrix, blas_matrix), left in ((case, left) for case in matrices(dtype).values() for left in (True, False)):
        for vector, blas_vector in vectors(N if left else M, dtype).values():
            a, b = (matrix, vector) if left else (vector, matrix)
            told = tvmgemm.explain(a, b)
            assert told.problem.gemv == (blas_matrix and blas_vector)
            if told.problem.gemv and not wide_row(told.problem):
                assert not told.served and "BLAS" in told.reason
                continue
            with planned(num_threads=1), served_by_us(dtype):
                result = tvmgemm.matmul(a, b)
            with planned(num_threads=1, variant=FORCED, packing="ab"), served_by_us(dtype):
                assert_same_bits(result, tvmgemm.matmul(a, b))
            assert_close(result, a, b)


@every_dtype
def test_into_outputs_with_gaps(dtype):
    """The output may be computed as a row or as a column, and nothing beside it is written."""
    for matrix, _ in matrices(dtype).values():
        for a, b, shape in [(matrix, WIDE[:1, :N].T.astype(dtype), (M, 1)), (WIDE[:1, :M].astype(dtype), matrix, (1, N))]:
            for step in (1, 3, -2):
                size = max(shape)
                room = np.full(size * abs(step) + 4, 7.0, dtype)
                out = room[2 : 2 + size * abs(step)][::step].reshape(shape, copy=False)
                with planned(num_threads=1):
                    assert tvmgemm.matmul(a, b, out=out) is out
                assert_close(out, a, b)
                out[...] = 7.0
                assert (room == 7.0).all()


@every_dtype
def test_small_ones_are_ours(dtype):
    with planned(num_threads=1):
        for a, b in [((8, 8), (8,)), ((8,), (8, 8)), ((16, 16), (16, 1)), ((1, 40), (40, 40)), ((1, 128), (128, 16))]:
            x, y = np.ones(a, dtype), np.ones(b, dtype)
            with served_by_us(dtype):
                assert (tvmgemm.matmul(x, y) == x.shape[-1]).all()


@every_dtype
def test_blas_keeps_dot_products_and_long_sums(dtype):
    for a, b in [((5,), (5,)), ((1000,), (1000,)), ((2, 100), (100,)), ((20, 20), (20,)), ((500,), (500, 2)), ((2,), (2, 3000))]:
        told = tvmgemm.explain(np.ones(a, dtype), np.ones(b, dtype))
        assert not told.served and "BLAS" in told.reason


@every_dtype
@pytest.mark.parametrize("layout", ["row", "apart", "reversed"])
def test_outer_products_are_ours(dtype, layout):
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((300, 1)).astype(dtype), rng.standard_normal((1, 300)).astype(dtype)
    y = {"row": y, "apart": np.repeat(y, 2, axis=1)[:, ::2], "reversed": y[:, ::-1]}[layout]
    with planned(num_threads=1), served_by_us(dtype):
        np.testing.assert_array_equal(tvmgemm.matmul(x, y), np.multiply(x, y))


def test_what_blas_does_not_know_is_never_left_to_it():
    """NumPy computes products of integers in plain loops: that BLAS takes the strides says nothing."""
    told = tvmgemm.explain(np.ones((300, 300), "i4"), np.ones(300, "i4"))
    assert told.problem.gemv and "BLAS" not in told.reason


@pytest.mark.parametrize(
    "a, b, transposed",
    [
        (np.ones((5, 7)), np.ones((7, 1)), False),  # a column of C: A in place
        (np.ones((7, 5)).T, np.ones((7, 1)), True),  # a row of C^T = B^T.A^T: A^T has contiguous rows
        (np.ones((5, 14))[:, ::2], np.ones((7, 1)), False),
        (np.ones((1, 5)), np.ones((5, 7)), False),
        (np.ones((1, 5)), np.ones((7, 5)).T, True),
        (np.ones((1, 5)), np.ones((5, 14))[:, ::2], True),
        (np.ones((1, 5)), np.ones((5, 1)), False),
    ],
)
def test_which_way_round(a, b, transposed):
    problem = tvmgemm.explain(a, b).problem
    assert problem.transposed == transposed and problem.c_layout == "row"
    assert problem.b_layout == "row", "a B in place"
    assert {problem.m, problem.n} == {a.shape[0], b.shape[1]}

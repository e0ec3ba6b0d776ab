"""What the inner loops tell the planner: the canonical problem that they make of a call."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from arrays import arranged
from plain_kernels import native  # noqa: F401

from tvmgemm import frontend
from tvmgemm.frontend import matmul
from tvmgemm.problem import COL, GEMV, ROW, SMALL_GEMM, STRIDED


def layouts(p):
    return p.a_layout, p.b_layout, p.c_layout


@pytest.mark.parametrize(
    "a_layout, b_layout, expected",
    [("row", "row", (ROW, ROW, ROW)), ("col", "padded", (COL, ROW, ROW)),
     ("strided", "col", (STRIDED, COL, ROW)), ("negative", "row", (STRIDED, ROW, ROW))],
)
def test_probe_reports_layouts(native, a_layout, b_layout, expected):
    a, b = arranged(np.ones((5, 7), "f"), a_layout), arranged(np.ones((7, 6), "f"), b_layout)
    count, p = native.probe(lambda: matmul(a, b))
    assert (count, p.dtype, p.op, p.m, p.n, p.k, p.batch) == (1, 0, 0, 5, 6, 7, 1)
    assert layouts(p) == expected and not p.transposed and not p.symmetric


def test_probe_computes_nothing_and_ends(native):
    out = np.full((2, 2), 5.0)
    one = np.ones((2, 2))
    native.lib.tg_reset_counters()
    count, p = native.probe(lambda: (matmul(one, one, out=out), matmul(one, np.ones((2, 3)))))
    assert count == 2 and p.n == 2 and p.dtype == 1 and (out == 5).all()
    assert native.lib.tg_served(1) == native.lib.tg_declined(1) == 0
    assert native.probe(lambda: None)[0] == 0
    matmul(one, one, out=out)
    assert (out == 2).all()


def test_probe_belongs_to_its_thread(native):
    result = []
    native.lib.tg_probe_begin()
    thread = threading.Thread(target=lambda: result.append(matmul(np.ones((2, 2)), np.ones((2, 2)))))
    thread.start()
    thread.join()
    assert native.lib.tg_probe_end(native.ffi.NULL) == 0
    assert (result[0] == 2).all()


@pytest.mark.parametrize(
    "a_layout, b_layout, m, n, k, expected",
    [("row", "row", 40, 20, 30, SMALL_GEMM), ("col", "padded", 40, 20, 30, SMALL_GEMM), ("padded", "col", 40, 20, 30, SMALL_GEMM),
     ("strided", "row", 40, 20, 30, 0), ("row", "negative", 40, 20, 30, 0), ("row", "row", 20, 20, 20, 0),
     ("row", "row", 100, 100, 100, SMALL_GEMM), ("row", "row", 100, 100, 101, 0), ("row", "row", 1, 200, 200, GEMV)],
)  # fmt: skip
def test_probe_tells_small_products_that_blas_takes(native, a_layout, b_layout, m, n, k, expected):
    a, b = arranged(np.ones((m, k), "f"), a_layout), arranged(np.ones((k, n), "f"), b_layout)
    _, p = native.probe(lambda: matmul(a, b))
    assert p.blas == expected
    _, p = native.probe(lambda: matmul(a[::-1], b))  # rows reversed: not as it is
    assert p.blas == (GEMV if m == 1 else 0)
    _, p = native.probe(lambda: matmul(a.astype("D"), b.astype("D")))
    assert p.blas != SMALL_GEMM
    _, p = native.probe(lambda: matmul(np.stack([a, a]), b))  # many products for NumPy, even if they are one for us
    assert p.blas == (expected if p.batch == 2 else GEMV if m == 1 and p.m == 1 else 0)


def test_column_major_output_is_computed_transposed(native):
    a, b = arranged(np.ones((5, 7), "f"), "row"), arranged(np.ones((7, 6), "f"), "col")
    _, p = native.probe(lambda: matmul(a, b, order="F"))
    assert p.transposed and (p.m, p.n, p.k) == (6, 5, 7)
    assert layouts(p) == (ROW, COL, ROW)  # A' = B^T is row-major, B' = A^T column-major


@pytest.mark.parametrize("m, n, k, transposed", [(2, 64, 128, "fd"), (2, 64, 127, "d"), (2, 64, 64, "d"), (2, 64, 63, ""),
                                                  (16, 100, 300, "fd"), (17, 100, 300, ""), (16, 63, 300, "")])
@pytest.mark.parametrize("dtype", ["f", "d", "F", "i"])
def test_few_rows_of_a_large_column_major_b_are_computed_transposed(native, m, n, k, transposed, dtype):
    a, b = np.ones((m, k), dtype), arranged(np.ones((k, n), dtype), "col")
    _, p = native.probe(lambda: matmul(a, b))
    if dtype in transposed:
        assert p.transposed and (p.m, p.n, p.k) == (n, m, k) and layouts(p) == (ROW, COL, STRIDED)
    else:
        assert not p.transposed and layouts(p) == (ROW, COL, ROW)
    _, p = native.probe(lambda: matmul(a, np.ascontiguousarray(b)))
    assert not p.transposed


@pytest.mark.parametrize("m, n, k", [(1, 6, 7), (5, 1, 7), (5, 6, 1), (1, 1, 7), (1, 1, 1)])
def test_unit_dimensions_count_as_contiguous(native, m, n, k):
    a, b = np.ones((m, k), "f"), np.ones((k, n), "f")
    _, p = native.probe(lambda: matmul(a, b))
    assert layouts(p) == (ROW, ROW, ROW) and not p.transposed


def test_strided_output_row_is_computed_as_a_column(native):
    out = np.zeros((1, 12), "f")[:, ::2]
    _, p = native.probe(lambda: matmul(np.ones((1, 7), "f"), np.ones((7, 6), "f"), out=out))
    assert p.transposed and (p.m, p.n) == (6, 1) and p.c_layout == ROW


@pytest.mark.parametrize("order", "CF")
def test_symmetric(native, order):
    a = np.ones((3, 5, 7), "f")
    cases = {True: [(a[0], a[0].T), (a[0].T, a[0]), (a, a.swapaxes(1, 2))],
             False: [(a[0], a[1].T), (a[0], a[0].T.copy()), (a[0, :, :5], a[0, :, :5]),
                     (a[0], a.swapaxes(1, 2))]}
    for expected, pairs in cases.items():
        for x, y in pairs:
            _, p = native.probe(lambda: matmul(x, y, order=order))
            assert bool(p.symmetric) == expected, (x.shape, x.strides, y.strides)


def test_a_stack_that_meets_one_matrix_is_one_product(native):
    def seen(a, b, **keywords):
        count, p = native.probe(lambda: matmul(a, b, **keywords))
        return count, p.batch, p.m, p.n, p.k, layouts(p)

    a, b = np.ones((4, 5, 7), "f"), np.ones((4, 7, 6), "f")
    assert seen(a, b[0]) == (1, 1, 20, 6, 7, (ROW, ROW, ROW))
    assert seen(a[:, :, ::2], b[0, ::2]) == (1, 1, 20, 6, 4, (STRIDED, ROW, ROW))
    assert seen(a[:, :1], b[0]) == (1, 1, 4, 6, 7, (ROW, ROW, ROW))  # rows far apart, but evenly
    assert seen(a[::2, ::5], b[0]) == (1, 1, 2, 6, 7, (ROW, ROW, ROW))
    assert seen(a[0], np.ones((4, 7, 1), "f")) == (1, 1, 4, 5, 7, (ROW, COL, ROW))  # columns, of C^T = B^T.A^T
    # Uneven steps from the last row of a matrix to the first of the next:
    assert seen(a[:, :4], b[0]) == seen(a[::-1], b[0])[:1] + (4, 4, 6, 7, (ROW, ROW, ROW))
    assert seen(a, b[0], out=np.ones((4, 8, 6), "f")[:, :5])[1] == 4
    assert seen(a, b)[1] == seen(a[0], b)[1] == 4


def test_kernel_sees_the_canonical_problem(native):
    seen = []
    frontend.on_miss = lambda p: seen.append((p.m, p.n, p.k, p.batch, layouts(p), p.transposed)) or 0
    a, b = np.ones((4, 5, 7)), np.ones((4, 7, 6))
    matmul(a, b)
    matmul(a[0], b[0], order="F")
    assert seen == [(5, 6, 7, 4, (ROW, ROW, ROW), 0), (6, 5, 7, 1, (COL, COL, ROW), 1)]

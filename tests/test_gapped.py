"""Operands whose elements lie apart: every other one, or all backwards, which vectors are made for; and others."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import (
    FORCED,
    RUNNABLE,
    Layout,
    assert_same_bits,
    col_major,
    fill,
    lay_out,
    multiply,
    planned,
    row_major,
    served_by_us,
)

import tvmgemm
from tvmgemm.family.isa import ISAS

BLOCKS = (1, 1, 32)

#: By the step from column to column.
COLUMNS = {step: Layout((0, 1), (1, step), (0, 3), start=4) for step in (1, 2, -1, 3, -2)}
COLUMNS["col backwards"] = Layout((1, 0), (-1, 1), (5, 0))

#: Of B and C.
PAIRS = [*((step, 1) for step in COLUMNS), *((1, step) for step in COLUMNS), (2, -1), (-1, 2)]


def operands(m: int, n: int, k: int, dtype: str, a: Layout, b: Layout, c: Layout):
    """A, B and C in those layouts. C's buffer holds noise."""
    rng = np.random.default_rng(n)
    a, b, c = (lay_out(shape, dtype, layout) for shape, layout in (((m, k), a), ((k, n), b), ((m, n), c)))
    for x in (a, b):
        fill(x.view, rng)
        if dtype.startswith("complex"):
            x.view.imag = rng.standard_normal(x.view.shape)
    c.buffer[...] = rng.integers(0, 256, c.buffer.shape, "u1")
    return a, b, c


def assert_multiplied(a, b, c, dtype: str) -> None:
    """C = A.B by a kernel of ours that writes nothing else, with the bits of contiguous operands."""
    multiply(a, b, c, dtype)
    expected = tvmgemm.matmul(np.ascontiguousarray(a.view), np.ascontiguousarray(b.view))
    for part in ("real", "imag"):
        assert_same_bits(getattr(c.view, part), getattr(expected, part))


@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("packing", [None, "ab"])
def test_every_edge(dtype, isa, packing):
    """Whole panels, and the rest of one, of operands that go to panels in every way, by kernels of every kind."""
    lanes = ISAS[isa].lanes(np.dtype(dtype).itemsize)
    sizes = [(5, lanes + 1, 3), (17, 3 * lanes, 40), (33, 2 * lanes, lanes), (40, 6 * lanes + lanes // 2, 70), (3, 1, 9)]
    forced = {} if packing is None else {"variant": FORCED, "packing": packing}
    with planned(BLOCKS, max_isa=isa, num_threads=1, **forced):
        for (m, n, k), (of_b, of_c) in itertools.product(sizes, PAIRS):
            of_a = list(COLUMNS)[(m + n) % len(COLUMNS)]
            assert_multiplied(*operands(m, n, k, dtype, COLUMNS[of_a], COLUMNS[of_b], COLUMNS[of_c]), dtype)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int16", "int32", "int64", "bool"])
def test_other_element_types(dtype):
    rng = np.random.default_rng(0)
    for m, n, k in [(9, 70, 40), (40, 100, 33)]:
        for of_b, of_c in PAIRS:
            a, b, c = (lay_out(s, dtype, x, 0) for s, x in (((m, k), row_major()), ((k, n), COLUMNS[of_b]), ((m, n), COLUMNS[of_c])))
            for x in (a, b):
                x.view[...] = rng.integers(0, 2, x.view.shape) if dtype == "bool" else rng.integers(-8, 8, x.view.shape)
            with planned(BLOCKS, num_threads=1):
                assert_multiplied(a, b, c, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m, n, loop", [(40, 200, "jc"), (200, 40, "ic"), (200, 100, "ic")])
def test_each_task_copies_what_it_reads(dtype, m, n, loop):
    """Its own columns of B, or all of them where tasks share rows."""
    for layout in (col_major(), COLUMNS[2], COLUMNS[3]):
        a, b, c = operands(m, n, 40, dtype, row_major(), layout, COLUMNS[1])
        with planned(BLOCKS, parallel_work=1, num_threads=3):
            kernel = tvmgemm.explain(a.view, b.view).kernel
            assert f"-{loop}-" in kernel and "-b-" in kernel and "-unblocked-" in kernel
            assert_multiplied(a, b, c, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("step", [2, -1])
def test_old_elements_of_c_are_read(dtype, step):
    """gemm, and later blocks of k."""
    for (m, n, k), beta in itertools.product([(5, 40, 70), (33, 17, 20)], (0.0, 1.5)):
        a, b, c = operands(m, n, k, dtype, row_major(), row_major(), COLUMNS[step])
        fill(c.view, np.random.default_rng(1))
        expected, outside = 0.5 * (a.view @ b.view) + beta * c.view, c.outside()
        with planned(BLOCKS, num_threads=1), served_by_us(dtype):
            tvmgemm.gemm(a.view, b.view, c.view, alpha=0.5, beta=beta)
        np.testing.assert_allclose(c.view, expected, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(c.outside(), outside)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_every_rest_of_k(dtype):
    """Steps that do not fill a vector along k, of operands that are turned round while they are packed."""
    lanes = ISAS[RUNNABLE[0]].lanes(np.dtype(dtype).itemsize)
    for k, n in itertools.product(range(1, 2 * lanes + 2), (3, 2 * lanes, 3 * lanes + 5)):
        operand = operands(9, n, k, dtype, row_major(), col_major(), row_major())
        with planned(BLOCKS, num_threads=1, variant=FORCED, packing="ab"):
            assert_multiplied(*operand, dtype)

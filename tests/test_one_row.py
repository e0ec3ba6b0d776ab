"""A wide C of one row, or of few rows of complex numbers: sums in L1, to which several rows of B are added at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import (
    FLOATS,
    FORCED,
    RUNNABLE,
    Layout,
    assert_close,
    assert_same_bits,
    fill,
    lay_out,
    multiply,
    newer_isas,
    planned,
    row_major,
    served_by_us,
)

import tvmgemm
from tvmgemm.family.isa import ISAS
from tvmgemm.family.one_row import AT_ONCE, SUMS, SUMS_FAR
from tvmgemm.family.tiles import ROW_FAR, ROW_STEPS, UNBLOCKED_TILES, WIDE_FAR, WIDE_ROWS
from tvmgemm.problem import DTYPES

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

every_dtype = pytest.mark.parametrize("dtype", FLOATS)

#: Rows of B and of C lie apart.
APART = Layout((0, 1), (1, 1), (0, 3), start=5)

#: A row of A in every layout that one can have.
ROWS_OF_A = [row_major(), Layout((0, 1), (1, 3), (0, 0)), Layout((0, 1), (1, -1), (0, 0)), Layout((0, 1), (1, 0), (0, 0))]


def operands(n: int, k: int, dtype: str, a_layout: Layout):
    """A, B and C of one row; C's buffer holds noise."""
    rng = np.random.default_rng(n + k)
    a, b, c = (lay_out(shape, dtype, x) for shape, x in (((1, k), a_layout), ((k, n), APART), ((1, n), APART)))
    fill(a.view, rng)
    fill(b.view, rng)
    c.buffer[...] = rng.integers(0, 256, c.buffer.shape, "u1")
    return a, b, c


def check(n: int, k: int, dtype: str, a_layout: Layout, blocks: tuple[int, int, int] | None, **options) -> str:
    """That C has the bits of a packed kernel; the name of the kernel that computed it."""
    a, b, c = operands(n, k, dtype, a_layout)
    with planned(blocks, **options):
        told = tvmgemm.explain(a.view, b.view)
        assert told.problem.m == 1 and "-unblocked-" in told.kernel
        multiply(a, b, c, dtype)
    isa = options.get("max_isa")
    with planned(blocks, max_isa=isa, num_threads=1, variant=FORCED, packing="ab"), served_by_us(dtype):
        assert_same_bits(c.view, tvmgemm.matmul(a.view, b.view))
    assert_close(c.view, a.view, b.view)
    return told.kernel


@every_dtype
@newer_isas
def test_every_edge(dtype, isa):
    """Whole vectors and a last one under a mask, one block of k and several, passes of several rows of B and of one."""
    size = DTYPES[dtype].c_size
    lanes, low, room = ISAS[isa].lanes(size), 2 * UNBLOCKED_TILES[isa, dtype][1], SUMS // size
    widths = [*range(low, low + lanes + 2), room - 1, room, room + 1, 2 * room + lanes // 2]
    layouts = itertools.cycle(ROWS_OF_A)
    steps = itertools.cycle([ROW_STEPS, *(2 * ROW_STEPS + q for q in range(1, AT_ONCE + 1))])
    for n in widths:
        check(n, next(steps), dtype, next(layouts), (1, 1, 32), max_isa=isa, parallel_loop="none")  # of BLAS's, too


@every_dtype
@newer_isas
def test_a_b_from_memory(dtype, isa):
    """The rows after those in use are asked for; more sums at once."""
    size = DTYPES[dtype].c_size
    n = SUMS_FAR // size + 100
    check(n, ROW_FAR // size // n + 3, dtype, row_major(), None, max_isa=isa, num_threads=1)


@every_dtype
@pytest.mark.parametrize("n, k", [(301, 100), (2 * SUMS_FAR // 4, 700)])
def test_shared_out(dtype, n, k):
    """Threads share columns, of a B that L2 holds and of one that comes from memory."""
    told = tvmgemm.explain(np.ones(k, dtype), np.ones((k, n), dtype))
    assert told.served and "m = 1" in told.reason
    assert "-jc-" in check(n, k, dtype, row_major(), None, parallel_work=1, num_threads=2)


@every_dtype
def test_blas_keeps_a_b_that_l3_holds(dtype):
    """It reads L3 faster, of anything between L2 and what is read ahead; options that force a choice come first."""
    k, n = 1000, (ROW_FAR // 2) // 1000 // DTYPES[dtype].c_size
    vector, matrix = np.ones(k, dtype), np.ones((k, n), dtype)
    told = tvmgemm.explain(vector, matrix)
    assert not told.served and "BLAS" in told.reason
    with tvmgemm.options(parallel_loop="none"):
        assert tvmgemm.explain(vector, matrix).served


@every_dtype
def test_scaled_and_added(dtype):
    """gemm: alpha and beta, once for each element, also of several blocks of k."""
    for n, k in ((300, 40), (300, 70)):
        a, b, c = operands(n, k, dtype, row_major())
        before = np.random.default_rng(3).standard_normal((1, n)).astype(dtype)
        for alpha, beta in ((2.0, 0.0), (1.0, 1.0), (-0.5, 3.0)):
            results = []
            for options in ({}, {"variant": FORCED, "packing": "ab"}):
                c.view[...] = before
                with planned((1, 1, 32), num_threads=1, **options), served_by_us(dtype):
                    results.append(np.array(tvmgemm.gemm(a.view, b.view, c.view, alpha=alpha, beta=beta)))
            assert_same_bits(*results)


@every_dtype
def test_infinities_and_nans(dtype):
    """Nothing that is not an element of an operand takes part: no NaN and no warning that NumPy has not."""
    a, b, _ = operands(301, 67, dtype, row_major())
    a.view[0, 66] = np.inf
    b.view[66, :] = np.where(b.view[66, :] < 0, -1, 1)
    with planned(num_threads=1), served_by_us(dtype), np.errstate(all="raise", under="ignore"):
        np.testing.assert_array_equal(tvmgemm.matmul(a.view, b.view), np.inf * b.view[66:])


def assert_same_parts(x, y) -> None:
    """Equal complex numbers, to the bit."""
    assert_same_bits(x.real, y.real)
    assert_same_bits(x.imag, y.imag)


@pytest.mark.parametrize("m", [1, 2, 3, 8, WIDE_ROWS])
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@newer_isas
def test_few_rows_of_complex_numbers(dtype, isa, m):
    """Of a B from far: pairs of rows and an odd one, whole vectors and a last one under a mask, several blocks of k, two tasks."""
    rng, n = np.random.default_rng(m), 2 * UNBLOCKED_TILES[isa, dtype][1] + m
    k = WIDE_FAR // DTYPES[dtype].itemsize // n + m
    a, b, c = (lay_out(shape, dtype, APART) for shape in ((m, k), (k, n), (m, n)))
    for x in (a, b):
        x.view[...] = rng.standard_normal(x.view.shape) + 1j * rng.standard_normal(x.view.shape)
    c.buffer[...] = rng.integers(0, 256, c.buffer.shape, "u1")
    loop = {"parallel_loop": "none"} if m == 1 else {}  # of BLAS's, too
    with planned(max_isa=isa, num_threads=1 + m % 2, **loop):
        told = tvmgemm.explain(a.view, b.view)
        assert f"m <= {WIDE_ROWS}" in told.reason and "-unblocked-" in told.kernel
        multiply(a, b, c, dtype)
    with planned(max_isa=isa, num_threads=1, variant=FORCED, packing="ab"), served_by_us(dtype):
        assert_same_parts(c.view, tvmgemm.matmul(a.view, b.view))


def test_few_rows_of_complex_numbers_scaled_and_added():
    """gemm: alpha and beta."""
    rng, m, n = np.random.default_rng(0), 5, 100
    k = WIDE_FAR // 16 // n + 1
    a, b, before = (rng.standard_normal((*s, 2)).view(complex)[..., 0] for s in ((m, k), (k, n), (m, n)))
    for alpha, beta in ((2.0, 0.0), (1j, 1.0), (-0.5, 3.0 - 1j)):
        results = []
        for options in ({}, {"variant": FORCED, "packing": "ab"}):
            c = before.copy()
            with planned(num_threads=1, **options), served_by_us("complex128"):
                results.append(np.array(tvmgemm.gemm(a, b, c, alpha=alpha, beta=beta)))
        assert_same_parts(*results)

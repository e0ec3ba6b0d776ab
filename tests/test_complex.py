"""Complex kernels: two rows of A and two columns of B and C for each, put together on the way to C."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from arrays import LAYOUTS, arranged
from equivalence import FORCED, RUNNABLE, newer_isas, planned, served_by_us
from references import assert_right, numbers

import tvmgemm

DTYPES = {"complex64": "F", "complex128": "D"}
pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

#: Edges of tiles and vectors, and several blocks of k.
SHAPES = [(1, 1, 1), (3, 5, 2), (9, 7, 33), (13, 50, 20), (37, 29, 61)]


@every_dtype
@newer_isas
@pytest.mark.parametrize("threads, packing", [(1, "ab"), (2, "ab"), (1, "b"), (1, None)])
def test_layouts_and_edges(dtype, isa, threads, packing):
    """Small blocks, so that small operands run through every loop."""
    options = {"packing": packing} if packing else {"variant": FORCED}
    with planned((2, 2, 8), 1, max_isa=isa, num_threads=threads, **options), served_by_us(dtype):
        for (m, n, k), (a_layout, b_layout, c_layout) in itertools.product(SHAPES, itertools.product(LAYOUTS[:4], repeat=3)):
            a, b = numbers((m, k), DTYPES[dtype], 1), numbers((k, n), DTYPES[dtype], 2)
            out = arranged(np.full((m, n), 7, dtype), c_layout)
            around = None if out.base is None else out.base.copy()
            tvmgemm.matmul(arranged(a, a_layout), arranged(b, b_layout), out=out)
            assert_right(out, a, b)
            if around is not None and c_layout in ("padded", "strided"):
                out[...] = 7
                np.testing.assert_array_equal(out.base, around)


@every_dtype
@pytest.mark.parametrize("alpha, beta", [(1, 1), (2 - 1j, 0), (0.5, 1j), (1j, -0.5 + 2j)])
def test_gemm(dtype, alpha, beta):
    with planned((2, 2, 8), variant=FORCED, num_threads=1), served_by_us(dtype):
        for (m, n, k), layout in itertools.product([*SHAPES, (4, 5, 0)], LAYOUTS[:4]):
            a, b, c = (numbers(shape, DTYPES[dtype], seed) for seed, shape in enumerate([(m, k), (k, n), (m, n)]))
            expected = alpha * (a.astype("D") @ b.astype("D")) + beta * c.astype("D")
            c = arranged(c if beta else np.full_like(c, np.nan), layout)
            assert tvmgemm.gemm(arranged(a, layout), b, c, alpha, beta) is c
            np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-4 * (k + 1))


@every_dtype
def test_real_scalars_keep_infinities(dtype):
    """(1 + 0i) times infinity is infinity, not NaN."""
    a, b = np.zeros((20, 20), dtype), np.eye(20, dtype=dtype)
    a[3, 4] = np.inf
    with planned(variant=FORCED, num_threads=1), served_by_us(dtype):
        for alpha in (1, 2.0):
            c = tvmgemm.gemm(a, np.ones_like(b), np.zeros_like(b), alpha, 0)
            assert np.isinf(c[3].real).all() and np.isfinite(np.delete(c, 3, axis=0)).all()


@every_dtype
def test_infinities_where_the_formula_has_them(dtype):
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i, part by part: NaN only where it subtracts infinities or multiplies by 0."""
    big = np.array([[np.inf + 1j, 1], [1, -np.inf + 0.5j]], dtype)
    one = np.array([[1 + 0.5j, 2], [3, 0.25 + 1j]], dtype)

    def formula(a, b):
        re, im = np.dot(a.real, b.real) - np.dot(a.imag, b.imag), np.dot(a.real, b.imag) + np.dot(a.imag, b.real)
        return re, im

    with np.errstate(all="ignore"), planned(variant=FORCED), served_by_us(dtype):
        for a, b in ((big, one), (one, big), (big, big)):
            result = tvmgemm.matmul(a, b)
            for part, expected in zip((result.real, result.imag), formula(a.astype("D"), b.astype("D"))):
                np.testing.assert_array_equal(part, expected)


@every_dtype
@pytest.mark.parametrize("threads", [1, 2])
def test_symmetric_products_are_symmetric(dtype, threads):
    x = numbers((97, 70), DTYPES[dtype])
    with planned(num_threads=threads, parallel_work=1), served_by_us(dtype):
        for a in (x, np.asfortranarray(x), x[::-1, ::2]):
            result = tvmgemm.matmul(a, a.T)
            assert_right(result, a, a.T)
            np.testing.assert_array_equal(result, result.T)


@every_dtype
def test_edges_raise_no_flags(dtype):
    """Infinite operands beside masked columns and repeated rows: what lies outside the matrix is multiplied, too."""
    for m, n in itertools.product((1, 3, 5, 9), (1, 5, 9, 13)):
        a, b = np.full((m, 3), np.inf, dtype), np.full((3, n), 1 + 1j, dtype)
        a.imag = 1
        with np.errstate(all="raise"), planned(variant=FORCED), served_by_us(dtype):
            result = tvmgemm.matmul(a, b)
        assert np.isposinf(result.real).all() and np.isposinf(result.imag).all()


@pytest.mark.parametrize("dtype, variant", [("complex64", "B3A2C0"), ("complex128", "A3B2C0")])
def test_blocks_of_k_shared_out_change_no_bit(dtype, variant):
    """In every layout of C, as a product and with alpha and beta."""
    forced = {"variant": variant, "packing": "ab", "num_threads": 2}
    for (m, n, k), layout in itertools.product([(3, 5, 2), (9, 7, 33), (37, 29, 61), (2, 1, 90)], LAYOUTS[:4]):
        a, b, c = (numbers(shape, DTYPES[dtype], seed) for seed, shape in enumerate([(m, k), (k, n), (m, n)]))
        found = []
        for loop in ("none", "pc"):
            with planned((2, 2, 8), 1, parallel_loop=loop, **forced), served_by_us(dtype):
                assert f"-{'serial' if loop == 'none' else 'pc'}-" in tvmgemm.explain(a, b).kernel
                out, scaled = (arranged(c.copy(), layout) for _ in range(2))
                found.append((tvmgemm.matmul(a, b, out=out), tvmgemm.gemm(a, b, scaled, 2 - 1j, 0.5j)))
        assert_right(found[0][0], a, b)
        for serial, shared in zip(*found):
            np.testing.assert_array_equal(serial, shared)


@every_dtype
def test_few_elements_of_many_terms_share_out_blocks_of_k(dtype):
    a, b = numbers((5, 70_000), DTYPES[dtype]), numbers((70_000, 3), DTYPES[dtype], 1)
    with planned(num_threads=2), served_by_us(dtype):
        assert tvmgemm.explain(a, b).parallel_loop == "pc"
        assert_right(tvmgemm.matmul(a, b), a, b)


def test_forced_variants_that_complex_numbers_do_not_have():
    with planned(variant="C3A2B0"), pytest.warns(RuntimeWarning, match="refused"):
        a, b = numbers((40, 40), "F"), numbers((40, 40), "F", 1)
        np.testing.assert_array_equal(tvmgemm.matmul(a, b), np.matmul(a, b))  # NumPy computes it

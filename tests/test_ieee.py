"""IEEE arithmetic: NaN, infinities, subnormals and signs of zeros are NumPy's, and so are the flags that are raised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import (
    FORCED,
    NEEDS_KERNELS,
    Layout,
    assert_same_bits,
    blockings,
    col_major,
    every_dtype,
    every_isa,
    fill,
    lay_out,
    one_and_two_threads,
    planned,
    product,
    row_major,
    seeds,
    served_by_us,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import tvmgemm
from tvmgemm.family.tiles import TILES

pytestmark = NEEDS_KERNELS


@every_dtype
@every_isa
@one_and_two_threads
@given(
    m=st.integers(1, 50), n=st.integers(1, 50), k=st.integers(1, 40), seed=seeds,
    transposes=st.tuples(*[st.booleans()] * 3), blocks=blockings,
)  # fmt: skip
@settings(max_examples=25)
def test_nan_and_infinity_are_where_numpys_are(dtype, isa, threads, m, n, k, seed, transposes, blocks):
    rng = np.random.default_rng(seed)
    a, b = np.zeros((m, k), dtype), np.zeros((k, n), dtype)
    for x in (a, b):
        fill(x, rng)
        for special in (np.nan, np.inf, -np.inf):
            x[rng.random(x.shape) < 0.02] = special
    a, b = (np.asfortranarray(x) if t else x for x, t in zip((a, b), transposes))
    out = np.empty((n, m), dtype).T if transposes[2] else np.empty((m, n), dtype)
    with np.errstate(all="ignore"):
        numpys = product(wide(a), wide(b))
        with planned(blocks, 1, variant=FORCED, max_isa=isa, num_threads=threads), served_by_us(dtype):
            tvmgemm.matmul(a, b, out=out)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(numpys))
    special = ~np.isfinite(numpys)
    np.testing.assert_array_equal(out[special], numpys[special].astype(dtype))
    assert np.isfinite(out[~special]).all()


def edge_operands(dtype, m, n, k, around):
    """a and b of ones to twos, in every pair of layouts, in buffers full of ``around``."""
    strided = Layout((0, 1), (1, 2), (3, 0), start=1)
    for layout_a, layout_b in itertools.product([row_major(), col_major(), strided], repeat=2):
        a, b = lay_out((m, k), dtype, layout_a, around), lay_out((k, n), dtype, layout_b, around)
        a.view[...] = 1 + np.arange(m * k).reshape(m, k) % 7 / 8
        b.view[...] = 1 + np.arange(k * n).reshape(k, n) % 5 / 8
        yield a.view, b.view


def edge_shapes(dtype, isa):
    """Every m and n up to one more than the tile; k below, at and above a vector in turn."""
    mr, nr = TILES[isa, dtype]["C"][0]
    for m, n in itertools.product(range(1, mr + 2), range(1, nr + 2)):
        yield m, n, (1, 3, 16, 17)[(m + n) % 4]


SIGNALLING = {"float32": (np.uint32, 0x7FA00000), "float64": (np.uint64, 0x7FF4000000000000)}


@every_dtype
@every_isa
@pytest.mark.parametrize("blocks", [None, (1, 1, 8)])
def test_no_flags_from_finite_numbers(dtype, isa, blocks):
    """Lanes outside the matrix hold something: whatever it is, no flag of it may reach the user."""
    loud = np.array([SIGNALLING[dtype][1]], SIGNALLING[dtype][0]).view(dtype)[0]
    with (
        planned(blocks, variant=FORCED, max_isa=isa, num_threads=1),
        served_by_us(dtype),
        np.errstate(all="raise"),
    ):
        for m, n, k in edge_shapes(dtype, isa):
            for around in (np.finfo(dtype).max, np.finfo(dtype).smallest_subnormal, np.inf):
                a, b = next(edge_operands(dtype, m, n, k, around))
                tvmgemm.matmul(a, b)
            for a, b in edge_operands(dtype, m, n, k, loud):
                tvmgemm.matmul(a, b)
                tvmgemm.matmul(a, b, out=np.empty((n, m), dtype).T)


@every_dtype
@every_isa
@pytest.mark.parametrize("blocks", [None, (1, 1, 8)])
def test_infinities_are_not_invalid(dtype, isa, blocks):
    """Infinity times positive numbers is infinity: 0 in a padded lane would make it *invalid*."""
    with (
        planned(blocks, variant=FORCED, max_isa=isa, num_threads=1),
        served_by_us(dtype),
        np.errstate(all="raise"),
    ):
        for m, n, k in edge_shapes(dtype, isa):
            for a, b in edge_operands(dtype, m, n, k, np.nan):
                a[-1, -1] = np.inf
                b[0, 0] = np.inf
                c = tvmgemm.matmul(a, b)
                assert np.isinf(c[-1]).all() and np.isinf(c[:, 0]).all() and np.isfinite(c[:-1, 1:]).all()


@every_dtype
@every_isa
@one_and_two_threads
@pytest.mark.parametrize("m, n, k", [(3, 5, 4), (64, 64, 64), (150, 130, 120), (1, 1, 1)])
@pytest.mark.parametrize("where", [0, -1])
def test_genuine_errors_are_raised(dtype, isa, threads, m, n, k, where):
    """Overflow and inf * 0 reach ``np.errstate``, from whichever thread found them."""
    ones, huge = np.ones((m, k), dtype), np.finfo(dtype).max
    with planned(None, 1, variant=FORCED, max_isa=isa, num_threads=threads):
        for value, other, kind in [(huge, huge, "over"), (np.inf, 0, "invalid")]:
            a, b = ones.copy(), np.ones((k, n), dtype)
            a[where], b[where] = value, other
            with served_by_us(dtype), np.errstate(all="ignore"):
                tvmgemm.matmul(a, b)
            with np.errstate(**{**dict.fromkeys(("divide", "under"), "raise"), kind: "raise"}):
                with pytest.raises(FloatingPointError, match="overflow" if kind == "over" else "invalid"):
                    tvmgemm.matmul(a, b)
            with np.errstate(**{kind: "warn"}), pytest.warns(RuntimeWarning, match="encountered in matmul"):
                tvmgemm.matmul(a, b)
        with np.errstate(all="raise"):  # and nothing of it is left for the next call
            tvmgemm.matmul(ones, ones.T)


@every_dtype
@every_isa
@one_and_two_threads
def test_subnormals_are_kept(dtype, isa, threads):
    tiny = np.finfo(dtype).smallest_subnormal
    for m in (1, 9, 120):
        a = (np.arange(m * m).reshape(m, m) * tiny).astype(dtype)
        with planned(None, 1, variant=FORCED, max_isa=isa, num_threads=threads), served_by_us(dtype):
            assert_same_bits(tvmgemm.matmul(a, np.eye(m, dtype=dtype)), a)
            assert_same_bits(tvmgemm.matmul(np.eye(m, dtype=dtype), a), a)


@every_dtype
@every_isa
def test_sums_of_zeros_are_positive(dtype, isa):
    """NumPy starts its sums from +0, so a sum of zeros is +0 whatever their signs."""
    for m, n, k in [(1, 1, 1), (2, 1, 1), (5, 7, 3), (40, 40, 40)]:
        for blocks in (None, (1, 1, 2)):
            zeros, ones = np.full((m, k), -0.0, dtype), np.ones((k, n), dtype)
            with planned(blocks, variant=FORCED, max_isa=isa), served_by_us(dtype):
                assert_same_bits(tvmgemm.matmul(zeros, ones), np.zeros((m, n), dtype))

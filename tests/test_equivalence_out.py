"""What is written: ``out=`` and what lies around it, layouts and types of results, ``gemm``."""

from __future__ import annotations

import numpy as np
import pytest
from equivalence import (
    FORCED,
    NEEDS_KERNELS,
    assert_close,
    assert_same_bits,
    blockings,
    every_dtype,
    every_isa,
    fill,
    lay_out,
    layouts,
    newer_isas,
    one_and_two_threads,
    planned,
    product,
    seeds,
    served_by_us,
    shapes,
    wide,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tvmgemm
from tvmgemm.blocking import KC_STEP

pytestmark = NEEDS_KERNELS


@every_dtype
@every_isa
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), k=st.integers(1, 20), seed=seeds, start=st.integers(0, 400),
    orders=st.tuples(*[st.sampled_from("CF")] * 3), blocks=blockings,
)  # fmt: skip
@settings(max_examples=25)
def test_out_overlaps_inputs(dtype, isa, m, n, k, seed, start, orders, blocks):
    """As if the inputs were copied first, wherever ``out`` lies in the memory of the inputs."""
    room = np.zeros(3000, dtype)
    fill(room, np.random.default_rng(seed))

    def place(first, shape, order):
        return room[first : first + shape[0] * shape[1]].reshape(shape, order=order)

    a, b, out = place(0, (m, k), orders[0]), place(600, (k, n), orders[1]), place(start, (m, n), orders[2])
    copies, before = (a.copy(), b.copy()), room.copy()
    with planned(blocks, variant=FORCED, max_isa=isa), served_by_us(dtype):
        assert tvmgemm.matmul(a, b, out=out) is out
    assert_close(out, *copies)
    outside = np.ones(room.shape, bool)
    outside[start : start + m * n] = False
    assert_same_bits(room[outside], before[outside])


@every_dtype
def test_out_is_an_input(dtype):
    a = np.zeros((3, 33, 33), dtype)
    fill(a, np.random.default_rng(0))
    for variant in ("auto", FORCED):
        with tvmgemm.options(variant=variant), tvmgemm.patched():
            c = a.copy()
            c @= a
            assert_close(c, a, a)
            c = a.copy()
            assert_close(np.matmul(c, c.mT, out=c), a, a.mT)
            c = a.copy()
            assert_close(np.matmul(c, a, out=c[::-1])[...], a, a)


@every_dtype
@every_isa
@one_and_two_threads
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 70),
    k=st.integers(0, 40),
    layout=layouts(2, output=True),
    blocks=blockings,
)
@settings(max_examples=20)
def test_old_contents_of_out_vanish(dtype, isa, threads, m, n, k, layout, blocks):
    """``out`` is written only: NaN and infinity in it leave no trace. With k == 0 it is all +0."""
    a, b = np.ones((m, k), dtype), np.ones((k, n), dtype)
    for old in (np.nan, np.inf):
        out = lay_out((m, n), dtype, layout, around=old)
        before = out.outside()
        with planned(blocks, 1, variant=FORCED, max_isa=isa, num_threads=threads), served_by_us(dtype):
            with np.errstate(all="raise"):
                tvmgemm.matmul(a, b, out=out.view)
        assert_same_bits(out.view, np.full((m, n), k, dtype))
        np.testing.assert_array_equal(out.outside(), before)


@every_dtype
@pytest.mark.parametrize("order", "KCFA")
def test_order_of_the_result(dtype, order):
    """Layouts of results are NumPy's, values are right in each."""
    rng = np.random.default_rng(1)
    for shape_a, shape_b in [((17, 9), (9, 33)), ((3, 17, 9), (9, 33)), ((1, 9), (9, 1))]:
        for arrange in (np.ascontiguousarray, np.asfortranarray):
            a, b = (arrange(rng.standard_normal(shape).astype(dtype)) for shape in (shape_a, shape_b))
            numpys = np.matmul(a, b, order=order)
            with tvmgemm.options(variant=FORCED), served_by_us(dtype):
                ours = tvmgemm.matmul(a, b, order=order)
            assert ours.strides == numpys.strides and ours.flags.f_contiguous == numpys.flags.f_contiguous
            assert_close(ours, a, b)


def test_casts_around_our_loop():
    """Promotion, casting and byte order are NumPy's; the product in between is ours."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(-9, 9, (20, 30)), rng.integers(-9, 9, (30, 40))
    exact = a @ b
    with tvmgemm.options(variant=FORCED):
        for left, right, ran in [
            ("f4", "i2", "float32"),
            ("f8", "f4", "float64"),
            (">f4", "<f4", "float32"),
            ("f4", "i4", "float64"),
        ]:
            with served_by_us(ran):
                ours = tvmgemm.matmul(a.astype(left), b.astype(right))
            assert ours.dtype == ran and (ours == exact).all()
        for kind in (">f8", "f4", "c16"):
            with served_by_us("float64"):
                out = tvmgemm.matmul(
                    a.astype("f8"), b.astype("f8"), out=np.empty(exact.shape, kind), casting="same_kind"
                )
            assert (out == exact).all()
        with served_by_us("float32"):
            assert (tvmgemm.matmul(a, b, dtype="f4", casting="unsafe") == exact).all()
        with served_by_us("float64"):
            axes = tvmgemm.matmul(a.T.astype("f8"), b.astype("f8"), axes=[(1, 0), (0, 1), (1, 0)])
            assert (axes == exact.T).all()


# -- gemm


scalars = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -4.0])


@every_dtype
@newer_isas
@given(
    shape=shapes(200_000), a=layouts(2), b=layouts(2), c=layouts(2, output=True), seed=seeds,
    alpha=scalars, beta=scalars, blocks=blockings, threads=st.sampled_from([1, 2]),
)  # fmt: skip
def test_gemm(dtype, isa, shape, a, b, c, seed, alpha, beta, blocks, threads):
    """C = alpha A.B + beta C in place; beta == 0 does not read C, alpha == 0 neither A nor B; all layouts."""
    m, n, k = shape
    assume(not (a.misaligned or b.misaligned or c.misaligned))
    rng = np.random.default_rng(seed)
    a, b, c = lay_out((m, k), dtype, a), lay_out((k, n), dtype, b), lay_out((m, n), dtype, c, around=np.inf)
    for x in (a, b, c):
        fill(x.view, rng)
    if beta == 0:
        c.view[...] = np.nan
    if alpha == 0:
        a.view[...] = np.nan
    old, before = wide(c.view), c.outside()
    with planned(blocks, 1, variant=FORCED, max_isa=isa, num_threads=threads):
        with served_by_us(dtype, computed=alpha != 0 and m * n > 0), np.errstate(all="raise", under="ignore"):
            assert tvmgemm.gemm(a.view, b.view, c.view, alpha=alpha, beta=beta) is c.view
    np.testing.assert_array_equal(c.outside(), before)
    kept = np.zeros_like(old) if beta == 0 else beta * old
    if alpha == 0:
        assert_same_bits(c.view, kept.astype(dtype))
        return
    # Scaling by powers of two is exact; each block of k is added to C with one rounding.
    additions = k // (blocks[2] if blocks else KC_STEP) + 2
    slack = np.finfo(dtype).eps * (additions * abs(kept) + abs(wide(c.view)))
    assert_close(c.view - kept, a.view, b.view, slack, scale=alpha)


@every_dtype
def test_gemm_is_matmul_where_it_can_be(dtype):
    """alpha = 1 and beta = 0: the same sum in the same order."""
    rng = np.random.default_rng(4)
    for m, n, k in [(1, 1, 1), (33, 65, 700), (120, 90, 80)]:
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        with planned(variant=FORCED), served_by_us(dtype):
            c = tvmgemm.gemm(a, b, np.full((m, n), np.nan, dtype), beta=0.0)
            assert_same_bits(c, tvmgemm.matmul(a, b))


@every_dtype
def test_gemm_in_auto_mode(dtype):
    """gemm has no loop of NumPy's to go back to: the planner serves it whatever the shape."""
    rng = np.random.default_rng(6)
    for m, n, k in [(1, 30, 40), (30, 1, 40), (64, 64, 64), (5, 6, 0)]:
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        c = rng.standard_normal((m, n)).astype(dtype)
        expected = 2 * product(wide(a), wide(b)) + 3 * wide(c)
        with planned(), served_by_us(dtype):
            tvmgemm.gemm(a, b, c, alpha=2.0, beta=3.0)
        np.testing.assert_allclose(wide(c), expected, rtol=0, atol=200 * np.finfo(dtype).eps * 10)

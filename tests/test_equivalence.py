"""Our kernels compute A.B: every shape, layout, stack and instruction set, against exact references.

Tests that force a variant assert from the counters that our kernels did all the work.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import (
    FLOATS,
    EDGE_SIZES,
    FORCED,
    RUNNABLE,
    Layout,
    assert_close,
    assert_same_bits,
    col_major,
    fill,
    forget_plans,
    lay_out,
    layouts,
    planned,
    product,
    row_major,
    served_by_us,
    wide,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tvmgemm
from tvmgemm.blocking import KC_STEP
from tvmgemm.family.tiles import TILES

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

every_dtype = pytest.mark.parametrize("dtype", FLOATS)
every_isa = pytest.mark.parametrize("isa", RUNNABLE)
one_and_two_threads = pytest.mark.parametrize("threads", [1, 2])

sizes = st.one_of(st.sampled_from(EDGE_SIZES), st.integers(0, 20), st.integers(0, 300))
seeds = st.integers(0, 2**32 - 1)
#: None: the block sizes of this machine; else so small that small operands have several blocks in every loop.
blockings = st.sampled_from([None, None, (1, 1, 3), (2, 1, 7), (1, 2, 32)])


@st.composite
def shapes(draw, work: int = 1_500_000):
    """m, n, k with at most ``work`` multiply-adds: exact references of float64 are slow."""
    few = draw(st.sampled_from([None, None, "rows", "columns"]))
    m = draw(st.integers(1, 12) if few == "rows" else sizes)
    n = draw(st.integers(1, 12) if few == "columns" else sizes)
    k = draw(sizes)
    assume(m * n * k <= work and max(1, m) * max(1, n) <= 100_000)
    return m, n, k


@st.composite
def calls(draw, stacks: bool = True):
    """Shapes of a, b and the product, matrices or stacks that broadcast, and a layout for each."""
    m, n, k = draw(shapes())
    stack = ()
    if stacks and draw(st.booleans()):
        stack = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=2)))
        assume(np.prod(stack) * m * n * k <= 1_500_000)
    stack_a, stack_b = (
        tuple(draw(st.sampled_from([size, size, 1])) for size in stack)[
            draw(st.integers(0, len(stack))) if stack else 0 :
        ]
        for _ in "ab"
    )
    shape_a, shape_b = stack_a + (m, k), stack_b + (k, n)
    shape_c = np.broadcast_shapes(stack_a, stack_b) + (m, n)
    return (
        (shape_a, draw(layouts(len(shape_a)))),
        (shape_b, draw(layouts(len(shape_b)))),
        (shape_c, draw(layouts(len(shape_c), output=True))),
    )


def operands(call, dtype, seed):
    """Filled a and b, and an out whose buffer holds noise."""
    rng = np.random.default_rng(seed)
    (shape_a, layout_a), (shape_b, layout_b), (shape_c, layout_c) = call
    a, b, c = (
        lay_out(shape_a, dtype, layout_a),
        lay_out(shape_b, dtype, layout_b),
        lay_out(shape_c, dtype, layout_c),
    )
    fill(a.view, rng)
    fill(b.view, rng)
    c.buffer[...] = rng.integers(0, 256, c.buffer.shape, "u1")
    return a, b, c


def check(multiply, call, dtype, seed, with_out):
    """One product, against the exact one; nothing but ``out`` is written."""
    a, b, c = operands(call, dtype, seed)
    before = a.buffer.copy(), b.buffer.copy(), c.outside()
    if with_out:
        assert multiply(a.view, b.view, out=c.view) is c.view
        result = c.view
    else:
        result = multiply(a.view, b.view)
        assert result.dtype == dtype and result.shape == c.view.shape
    assert_close(result, a.view, b.view)
    np.testing.assert_array_equal(a.buffer, before[0])
    np.testing.assert_array_equal(b.buffer, before[1])
    np.testing.assert_array_equal(c.outside(), before[2])
    return result


# -- any operands


@every_dtype
@every_isa
@one_and_two_threads
@given(call=calls(), seed=seeds, with_out=st.booleans(), blocks=blockings)
def test_forced(dtype, isa, threads, call, seed, with_out, blocks):
    with planned(blocks, parallel_work=1, variant=FORCED, max_isa=isa, num_threads=threads):
        with served_by_us(dtype, computed=0 not in call[2][0]):
            check(tvmgemm.matmul, call, dtype, seed, with_out)


@every_dtype
@one_and_two_threads
@given(call=calls(), seed=seeds, with_out=st.booleans())
def test_auto(dtype, threads, call, seed, with_out):
    with planned(num_threads=threads):
        check(tvmgemm.matmul, call, dtype, seed, with_out)


@every_dtype
@pytest.mark.parametrize("variant", ["auto", FORCED])
@given(call=calls(), seed=seeds)
def test_patched_operator(dtype, variant, call, seed):
    a, b, c = operands(call, dtype, seed)
    with tvmgemm.options(variant=variant, num_threads=2), tvmgemm.patched():
        if variant == "auto":
            ours = a.view @ b.view
        else:
            with served_by_us(dtype, computed=0 not in c.view.shape):
                ours = a.view @ b.view
    assert_close(ours, a.view, b.view)


@every_dtype
@every_isa
@given(m=sizes, k=sizes, n=sizes, seed=seeds, layout=layouts(2), vector=layouts(1))
def test_vectors(dtype, isa, m, k, n, seed, layout, vector):
    """1-D operands: NumPy lends them a dimension of size 1 with any stride."""
    rng = np.random.default_rng(seed)
    x, y = lay_out((k,), dtype, vector), lay_out((m,), dtype, vector)
    matrix = lay_out((m, k), dtype, layout)
    for operand in (x, y, matrix):
        fill(operand.view, rng)
    x, y, a = x.view, y.view, matrix.view
    with planned(variant=FORCED, max_isa=isa, num_threads=1):
        for left, right in [(a, x), (y, a), (x, x), (x[None], x[:, None]), (y[:, None], x[None])]:
            with served_by_us(dtype, computed=np.prod(left.shape[:-1] + right.shape[1:]) > 0):
                assert_close(tvmgemm.matmul(left, right), left, right)


@every_dtype
@every_isa
def test_every_edge_of_a_tile(dtype, isa):
    """All m and n around the tiles, row-major and column-major operands, k of one block and of several."""
    rng = np.random.default_rng(3)
    edges = [size for size in EDGE_SIZES if 0 < size <= 34]
    a, b = (rng.standard_normal((40, 70)).astype(dtype) for _ in "ab")
    for blocks in (None, (1, 1, 8)):
        with planned(blocks, variant=FORCED, max_isa=isa, num_threads=1), served_by_us(dtype):
            for m, n in itertools.product(edges, edges):
                for k in (1, 19):
                    x, y = a[:m, :k], b[:k, :n]
                    assert_close(tvmgemm.matmul(x, y), x, y)
                x, y = a[:19, :m].T, b[:n, :19].T
                assert_close(tvmgemm.matmul(x, y), x, y)


@every_dtype
@one_and_two_threads
@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("m, n, k", [(2, 1000, 300), (7, 64, 1100), (16, 131, 600)])
def test_few_rows_of_a_large_column_major_b(dtype, threads, order, m, n, k):
    """They are computed as C^T = B^T.A^T, with the bits of any other layout."""
    rng = np.random.default_rng(m)
    a, b = rng.standard_normal((m, k)).astype(dtype, order=order), rng.standard_normal((n, k)).astype(dtype).T
    with planned(num_threads=threads), served_by_us(dtype):
        c = tvmgemm.matmul(a, b)
        assert_same_bits(c, tvmgemm.matmul(a, np.ascontiguousarray(b)))
    assert_close(c, a, b)


@every_dtype
@one_and_two_threads
@pytest.mark.parametrize(
    "m, n, k", [(300, 200, 700), (20, 2000, 600), (2000, 20, 600), (7, 30, 2000), (97, 1100, 30)]
)
def test_large(dtype, threads, m, n, k):
    """Blocks and partitions as they are on this machine; rows and columns are checked in samples."""
    rng = np.random.default_rng(k)
    a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((n, k)).astype(dtype).T
    rows, columns = rng.choice(m, min(m, 12), replace=False), rng.choice(n, min(n, 12), replace=False)
    for left, right in [(a, b), (np.asfortranarray(a), np.ascontiguousarray(b))]:
        with planned(variant=FORCED, num_threads=threads), served_by_us(dtype):
            c = tvmgemm.matmul(left, right)
        assert_close(c[rows], left[rows], right)
        assert_close(c[:, columns], left, right[:, columns])


# -- out= and what lies around it


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


# -- IEEE arithmetic


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


# -- one order of summation


@every_dtype
@every_isa
@given(
    m=st.integers(1, 120), n=st.integers(1, 120), k=st.sampled_from([1, 2, 31, 64, 200, 511, 513, 700]),
    seed=seeds, rows=layouts(2), columns=layouts(2), out=layouts(2, output=True),
    threads=st.sampled_from([1, 2, 3]), mc_nc=st.sampled_from([(1, 1), (3, 1), (1, 2), (50, 50)]),
)  # fmt: skip
@settings(max_examples=25)
def test_an_element_does_not_depend_on_what_is_around_it(
    dtype, isa, m, n, k, seed, rows, columns, out, threads, mc_nc
):
    """Its row of A and its column of B decide its bits: not shape, position, layout, packing, batch or
    threads.
    """
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, k)).astype(dtype)
    i, j = int(rng.integers(m)), int(rng.integers(n))
    a, b, c = lay_out((m, k), dtype, rows), lay_out((k, n), dtype, columns), lay_out((m, n), dtype, out)
    assume(0 not in rows.steps and 0 not in columns.steps)
    fill(a.view, rng)
    fill(b.view, rng)
    a.view[i], b.view[:, j] = x, y
    with planned(variant=FORCED, max_isa=isa, num_threads=1), served_by_us(dtype):
        alone = tvmgemm.matmul(x[None], y[:, None])[0, 0]
        stacked = tvmgemm.matmul(np.stack([a.view] * 2), b.view)
        blocks = tvmgemm.explain(x[None], y[:, None])
    with (
        planned((*mc_nc, blocks.kc), 1, variant=FORCED, max_isa=isa, num_threads=threads),
        served_by_us(dtype),
    ):
        tvmgemm.matmul(a.view, b.view, out=c.view)
    for element in (stacked[0, i, j], stacked[1, i, j], c.view[i, j]):
        assert_same_bits(element, alone)
    assert_same_bits(c.view, stacked[0])


@every_dtype
@every_isa
@one_and_two_threads
@pytest.mark.parametrize("m, k", [(1, 1), (31, 7), (100, 33), (130, 600)])
def test_a_times_its_transpose_is_symmetric(dtype, isa, threads, m, k):
    a = np.random.default_rng(m).standard_normal((m, k)).astype(dtype)
    with planned(None, 1, variant=FORCED, max_isa=isa, num_threads=threads), served_by_us(dtype):
        for c in (
            tvmgemm.matmul(a, a.T),
            tvmgemm.matmul(a, a.T.copy()),
            tvmgemm.matmul(np.asfortranarray(a), a.T),
        ):
            assert_same_bits(c, c.T)


@every_dtype
@pytest.mark.parametrize("threads, loop", [(1, None), (2, None), (2, "stack"), (3, "stack")])
def test_a_stack_is_its_matrices(dtype, threads, loop):
    """Broadcasting, zero outer strides and reversed stacks give what each product gives alone, to the bit."""
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((4, 1, 50, 60)).astype(dtype), rng.standard_normal((3, 60, 70)).astype(dtype)
    with planned(None, 1, variant=FORCED, num_threads=threads, parallel_loop=loop), served_by_us(dtype):
        for x, y in [
            (a, b),
            (a[:, 0], b[0]),
            (a[::-1], b[::2]),
            (np.broadcast_to(a, (4, 3, 50, 60)), b),
            (a.transpose(1, 0, 2, 3), b[:, None]),
        ]:
            c = tvmgemm.matmul(x, y)
            for index in np.ndindex(c.shape[:-2]):
                one, other = (np.broadcast_to(z, c.shape[:-2] + z.shape[-2:])[index] for z in (x, y))
                assert_same_bits(c[index], tvmgemm.matmul(one, other))


# -- strides beyond 32 bits


def sparse(tmp_path, dtype, shape, strides):
    """A view with these byte strides into a file of holes: only the pages that are touched exist."""
    bytes_needed = sum(s * (size - 1) for s, size in zip(strides, shape)) + np.dtype(dtype).itemsize
    base = np.memmap(tmp_path / "sparse", np.uint8, "w+", shape=bytes_needed)
    return np.ndarray(shape, dtype, base, 0, strides)


@every_dtype
@pytest.mark.parametrize(
    "which", ["A rows", "A columns", "B rows", "B columns", "C rows", "C columns", "stack"]
)
def test_strides_beyond_32_bits(tmp_path, dtype, which):
    """2**31 elements apart, let alone bytes (numpy/numpy#17243)."""
    itemsize, rng = np.dtype(dtype).itemsize, np.random.default_rng(0)
    far = (2**31 + 24) * itemsize
    a, b = rng.standard_normal((3, 3)).astype(dtype), rng.standard_normal((3, 3)).astype(dtype)
    strides = (far, itemsize) if which.endswith("rows") else (itemsize, far)
    with planned(variant=FORCED), served_by_us(dtype):
        if which == "stack":
            stack = sparse(tmp_path, dtype, (3, 2, 2), (far, 2 * itemsize, itemsize))
            stack[...] = np.arange(12).reshape(3, 2, 2)
            result = tvmgemm.matmul(stack, stack)
            assert_close(result, stack, stack)
            return
        distant = sparse(tmp_path, dtype, (3, 3), strides)
        if which[0] == "C":
            tvmgemm.matmul(a, b, out=distant)
            assert_close(distant, a, b)
            return
        distant[...] = a
        left, right = (distant, b) if which[0] == "A" else (b, distant)
        assert_close(tvmgemm.matmul(left, right), left, right)


# -- gemm


scalars = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -4.0])


@every_dtype
@every_isa
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


# -- the dispatch table


@every_dtype
def test_many_shapes_in_any_order(dtype):
    """The table of plans is small: thousands of problems with different plans come round without wrong
    results.
    """
    rng = np.random.default_rng(8)
    room = rng.standard_normal((90, 90)).astype(dtype)
    forget_plans()
    with tvmgemm.options(variant="auto", num_threads=2):
        for _ in range(1500):
            m, n, k = rng.integers(0, 90, 3)
            a, b = room[:m, :k], room[:k, :n]
            a = a if rng.random() < 0.5 else np.asfortranarray(a)
            b = b if rng.random() < 0.5 else np.asfortranarray(b)
            c = tvmgemm.matmul(a, b)
            np.testing.assert_allclose(c, np.dot(a, b), rtol=0, atol=2e3 * np.finfo(dtype).eps)

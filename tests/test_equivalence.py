"""Our kernels compute A.B: every shape, layout, stack and instruction set, against exact references.

Tests that force a variant assert from the counters that our kernels did all the work.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import (
    EDGE_SIZES,
    FORCED,
    NEEDS_KERNELS,
    assert_close,
    assert_same_bits,
    blockings,
    every_dtype,
    every_isa,
    fill,
    forget_plans,
    lay_out,
    layouts,
    one_and_two_threads,
    planned,
    seeds,
    served_by_us,
    shapes,
    sizes,
)
from hypothesis import assume, given
from hypothesis import strategies as st

import tvmgemm

pytestmark = NEEDS_KERNELS


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
@pytest.mark.parametrize("m, n, k", [(2, 2000, 300), (16, 70, 1100), (16, 131, 600)])  # BLAS has smaller ones
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


# -- the table of plans


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

"""One order of summation: an element's bits depend on its row of A and its column of B alone."""

from __future__ import annotations

import numpy as np
import pytest
from equivalence import (
    FORCED,
    NEEDS_KERNELS,
    assert_same_bits,
    every_dtype,
    every_isa,
    fill,
    lay_out,
    layouts,
    one_and_two_threads,
    planned,
    seeds,
    served_by_us,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tvmgemm

pytestmark = NEEDS_KERNELS


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

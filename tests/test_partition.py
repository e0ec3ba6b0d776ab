"""How tasks share out a product: every element of C exactly once, whatever the number of tasks and the shape."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import planned

import tvmgemm
from tvmgemm import kernels
from tvmgemm.family.variants import VARIANTS

#: Fewer tiles than tasks, one row of tiles, one column of them, a few of each, many; with rests.
SHAPES = [(1, 1, 3), (5, 700, 20), (700, 5, 20), (50, 130, 40), (33, 97, 9), (200, 300, 17), (16, 1000, 5)]

#: Threads to share with, from two to many more than this machine has, primes among them. Blocks of one tile make so many
#: meetings of the tasks that all counts of threads take minutes.
THREADS = [2, 7, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 5, 13, 64))]


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("variant, loop", [(v.name, loop) for v in VARIANTS.values() for loop in v.outer])
def test_every_element_is_computed_once(variant, loop, threads):
    """Whole numbers added to a C: one that is left out or added twice is off by a whole product."""
    rng = np.random.default_rng(0)
    for (m, n, k), blocks in itertools.product(SHAPES, [(1, 1, 16), (4, 2, 512), None]):
        a, b = (rng.integers(-9, 9, size).astype("float32") for size in ((m, k), (k, n)))
        c = rng.integers(-9, 9, (m, n)).astype("float32")
        expected = c + a @ b
        with planned(blocks, 0, variant=variant, parallel_loop=loop, num_threads=threads):
            before = sum(k.calls for spec, k in list(kernels.loaded.items()) if spec.parallel == loop)
            tvmgemm.gemm(a, b, c, alpha=1.0, beta=1.0)
            assert sum(k.calls for spec, k in list(kernels.loaded.items()) if spec.parallel == loop) == before + 1
        np.testing.assert_array_equal(c, expected, err_msg=f"{m}x{k}x{n}, blocks {blocks}")


@pytest.mark.parametrize("threads", [2, 7, 64])
def test_planned_products_are_right(threads):
    """What the planner shares out by itself, from many rows to a long sum."""
    rng = np.random.default_rng(1)
    for m, n, k in [(300, 20, 50), (20, 300, 50), (130, 140, 150), (9, 9, 40000), (1, 7, 9000), (600, 700, 30)]:
        a, b = (rng.integers(-9, 9, size).astype("float64") for size in ((m, k), (k, n)))
        with planned(None, 1, num_threads=threads):
            told = tvmgemm.explain(a, b)
            np.testing.assert_array_equal(tvmgemm.matmul(a, b), a @ b)
        assert m == 1 or (told.served and told.threads > 1)

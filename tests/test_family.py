"""Every member of the family computes the same product: variant x micro-kernel x packing x parallel loop x dtype x
operation x instruction set, on every class of layouts, in one block and in many.

A spread of the members runs by default, all of them with ``-m slow``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from equivalence import FLOATS, RUNNABLE, assert_close, assert_same_bits, planned

import tvmgemm
from tvmgemm import kernels
from tvmgemm.build.parent import build
from tvmgemm.family.members import member
from tvmgemm.family.tiles import TILES
from tvmgemm.family.variants import VARIANTS
from tvmgemm.problem import OPS
from tvmgemm.spec import KernelSpec

MEMBERS = [
    member(v.name, dtype, isa, tile, packing, parallel=parallel, op=op)
    for isa, dtype, v in itertools.product(RUNNABLE, FLOATS, VARIANTS.values())
    for tile, packing in itertools.product(dict.fromkeys(TILES[isa, dtype][v.resident]), v.packings)
    for parallel, op in itertools.product(("", *v.parallel_loops(packing)), OPS)
]


def is_default(spec: KernelSpec) -> bool:
    """The variant's own tile and packing, one task, on the widest instruction set."""
    variant = VARIANTS[spec.variant]
    return (
        spec.isa == RUNNABLE[-1]
        and spec.tile_sizes == TILES[spec.isa, spec.dtype][variant.resident][0]
        and (spec.packing, spec.parallel, spec.op) == (variant.packable, "", "matmul")
    )


#: Twenty-nine is prime to every factor of the product, so the spread meets every value of every factor.
SPREAD = [spec for i, spec in enumerate(MEMBERS) if i % 29 == 0 or is_default(spec)]
REST = [spec for spec in MEMBERS if spec not in SPREAD]


def test_the_spread_meets_every_choice():
    for factor in ("isa", "dtype", "variant", "packing", "parallel", "op", "tile"):
        assert {getattr(s, factor) for s in SPREAD} == {getattr(s, factor) for s in MEMBERS}, factor
    pairs = {(s.variant, s.packing, s.parallel) for s in MEMBERS}
    assert len({(s.variant, s.packing, s.parallel) for s in SPREAD}) > len(pairs) / 2


@pytest.fixture(scope="module")
def built():
    """Build what the store lacks, many kernels to a process."""

    def make(specs: list[KernelSpec]) -> None:
        missing = kernels.missing(specs)
        for result in build(missing, kernels.store(), timeout=3000.0) if missing else ():
            assert result.error is None, result.error

    return make


def lay(rng, rows, columns, dtype, layout):
    if layout == "col":
        return rng.standard_normal((columns, rows)).astype(dtype).T
    if layout == "strided":
        return rng.standard_normal((2 * rows, 3 * columns)).astype(dtype)[::-2, ::3]
    return rng.standard_normal((rows, columns + 3)).astype(dtype)[:, :columns]


def run(spec: KernelSpec) -> None:
    variant = VARIANTS[spec.variant]
    b_layouts = ("row",) if variant.resident == "C" and "b" not in spec.packing else ("row", "col", "strided")
    c_layouts = ("row",) if "c" in variant.packable and "c" not in spec.packing else ("row", "strided")
    rng = np.random.default_rng(len(spec.name))
    tile_m, tile_n = spec.mr or 8, spec.nr or 8
    shapes = [(2 * tile_m + 1, 3 * tile_n - 1, 40), (tile_m - 1 or 1, tile_n + 1, 7), (3 * tile_m, 2 * tile_n, 24), (5, 3, 0)]
    forced = {
        "variant": spec.variant, "microkernel": spec.tile, "packing": spec.packing, "max_isa": spec.isa,
        "parallel_loop": spec.parallel or "none", "num_threads": 2,
    }  # fmt: skip
    for (m, n, k), blocks in itertools.product(shapes, [(1, 1, 16), (2, 3, 512)]):
        with planned(blocks, 1, **forced):
            for a_layout, b_layout, c_layout in itertools.product(("row", "col", "strided"), b_layouts, c_layouts):
                a, b = lay(rng, m, k, spec.dtype, a_layout), lay(rng, k, n, spec.dtype, b_layout)
                # A matrix one wide has unit column stride whatever its other stride.
                c = lay(rng, m, n, spec.dtype, c_layout)
                before = calls(spec)
                if spec.op == "matmul":
                    c[...] = np.nan
                    tvmgemm.matmul(a, b, out=c)
                    assert_close(c, a, b)
                else:
                    old = c.copy()
                    tvmgemm.gemm(a, b, c, alpha=2.0, beta=-0.5)
                    slack = 4 * np.finfo(spec.dtype).eps * (abs(old) + 2 * abs(a.astype("f8")) @ abs(b.astype("f8")))
                    assert_close(c + 0.5 * old.astype("f8"), a, b, slack=slack, scale=2.0)
                assert calls(spec) > before, f"{spec.name} did not run"


def calls(spec: KernelSpec) -> int:
    return kernels.loaded[spec].calls if spec in kernels.loaded else 0


def test_members(built):
    built(SPREAD)
    for spec in SPREAD:
        run(spec)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("isa", RUNNABLE)
def test_all_members(built, isa, dtype, variant):
    specs = [s for s in REST if (s.isa, s.dtype, s.variant) == (isa, dtype, variant)]
    built(specs)
    for spec in specs:
        run(spec)


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_order_of_summation(built, dtype):
    """All variants give the same bits, also where k spans several blocks: what is packed has the sums of one block."""
    members = [s for s in SPREAD if is_default(s) and s.dtype == dtype]
    assert {s.variant for s in members} == set(VARIANTS)
    rng = np.random.default_rng(3)
    for m, n, k in [(30, 70, 16), (33, 65, 100), (64, 31, 47)]:
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        results = []
        for spec in members:
            with planned((1, 1, 16), variant=spec.variant, parallel_loop="none"):
                results.append(tvmgemm.matmul(a, b))
        for result in results[1:]:
            assert_same_bits(result, results[0])


@pytest.mark.parametrize("dtype, op", [("float32", "gemm"), ("float64", "matmul")])
def test_sharing_out_a_loop_changes_no_bit(built, dtype, op):
    """Whatever the tasks share, blocks of k included, and however many blocks wait in memory until they are added."""
    serial = [s for s in MEMBERS if is_default(replace(s, op="matmul")) and (s.dtype, s.op) == (dtype, op)]
    members = {s: [replace(s, parallel=loop) for loop in VARIANTS[s.variant].outer] for s in serial}
    built([*members, *itertools.chain(*members.values())])
    rng = np.random.default_rng(5)
    # The last has more sums of blocks than fit into the memory for them at a time.
    for (m, n, k), tasks in itertools.product([(33, 65, 100), (3, 130, 16), (290, 310, 420)], (2, 3)):
        a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
        old = rng.standard_normal((m, n)).astype(dtype)
        for spec, shared in members.items():
            forced = {"variant": spec.variant, "microkernel": spec.tile, "packing": spec.packing}
            with planned((1, 1, 16), parallel_loop="none", **forced):
                expected = product_of(a, b, old, op)
            for parallel in shared:
                before = calls(parallel)
                with planned((1, 1, 16), parallel_loop=parallel.parallel, num_threads=tasks, **forced):
                    result = product_of(a, b, old, op)
                assert calls(parallel) > before, f"{parallel.name} did not run"
                assert_same_bits(result, expected)


def product_of(a, b, old, op):
    """A.B, or alpha.A.B + beta.C into a C whose columns have gaps."""
    if op == "matmul":
        return tvmgemm.matmul(a, b)
    c = np.repeat(old, 2, axis=1)[:, ::2] if old.shape[0] % 2 else old.copy()
    tvmgemm.gemm(a, b, c, alpha=1.7, beta=-0.3)
    return c


@pytest.mark.parametrize(
    "forced, words",
    [
        ({"variant": "B3C2A0", "packing": "b"}, "B3C2A0 takes bc, c"),
        ({"variant": "A3C2B0", "packing": "ab"}, "A3C2B0 takes ac, a, c, none"),
        ({"microkernel": "30x64"}, "30x64 with resident C needs"),
        ({"microkernel": "4x7"}, "a multiple of"),
    ],
)
def test_a_choice_that_cannot_be_had_is_refused(forced, words):
    """NumPy serves, the reason is told, and it is said once."""
    a, b = np.ones((40, 50)), np.ones((50, 60))
    with tvmgemm.options(**forced):
        with pytest.warns(RuntimeWarning, match=words):
            c = tvmgemm.matmul(a, b)
        told = tvmgemm.explain(a, b)
    assert (c == 50).all() and not told.served and words in told.reason and "refused" in told.reason


def test_layouts_that_a_choice_cannot_take_are_refused():
    a, b = np.ones((40, 50)), np.ones((60, 50)).T
    with tvmgemm.options(packing="none"):
        told = tvmgemm.explain(a, b)
        assert not told.served and "B in place" in told.reason
        assert tvmgemm.explain(a, np.ascontiguousarray(b)).served

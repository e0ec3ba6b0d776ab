"""What the planner says of a problem holds in all of the plan's box, and few boxes are enough for all problems."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from equivalence import FLOATS
from hypothesis import given
from hypothesis import strategies as st
from planning import COL, GAPS, HOSTS, ROW, hosts, options, problems, sizes, with_isa

from tvmgemm.boxes import Box
from tvmgemm.family.isa import ISAS
from tvmgemm.family.tiles import TILES
from tvmgemm.family.validity import check, unsuitable
from tvmgemm.family.variants import VARIANTS
from tvmgemm.planner import Plan, plan
from tvmgemm.problem import LAYOUT_NAMES, Problem
from tvmgemm.settings import Options


def decision(planned: Plan) -> Plan:
    """The plan without the box, which may be cut differently around another problem."""
    return replace(planned, box=Box())


@st.composite
def inside(draw, box: Box, problem: Problem) -> Problem:
    """Another problem of the same layouts inside ``box``: each number from the whole side, from its ends, or
    the same.
    """

    def another(side: str) -> int:
        low, high = (int(bound) for bound in getattr(box, side))
        value = getattr(problem, side)
        near = st.integers(max(low, value - 3), min(high, value + 3))
        ends = st.sampled_from(sorted({low, min(high, low + 1), high, max(low, high - 1), value}))
        return draw(st.one_of(near, ends, st.integers(low, high), st.integers(low, min(high, low + 5000))))

    return replace(problem, **{side: another(side) for side in ("m", "n", "k", "batch")})


@given(problem=problems, host=hosts, options=options, data=st.data())
def test_every_problem_in_the_box_gets_the_same_plan(problem, host, options, data):
    planned = plan(problem, host, options)
    assert planned.box.holds(problem)
    for _ in range(8):
        other = data.draw(inside(planned.box, problem))
        if planned.box.holds(other):  # the product of the numbers may still be outside
            assert decision(plan(other, host, options)) == decision(planned)


@given(problem=problems, host=hosts, options=options)
def test_plan_is_a_function_of_its_arguments(problem, host, options):
    first = plan(problem, host, options)
    assert plan(replace(problem), replace(host), replace(options)) == first
    if first.served:
        spec = first.spec
        assert (
            first.blocks.mc % (spec.mr or 1) == first.blocks.nc % (spec.nr or 1) == 0
            and min(first.blocks.mc, first.blocks.nc, first.blocks.kc) > 0
        )
        assert 1 < first.tasks <= options.num_threads if first.parallel_loop else first.tasks == 1
        assert not first.spec.parallel or first.spec.parallel in VARIANTS[first.spec.variant].parallel_loops(first.spec.packing)
        assert unsuitable(spec, problem) is None
        check(spec)
    else:
        assert options.variant in ("auto", "numpy") or host.isa(options.max_isa) is None


@given(problem=problems, host=hosts, options=options, layout=st.sampled_from(LAYOUT_NAMES), k=sizes)
def test_one_kc_for_all_kernels_of_a_dtype(problem, host, options, layout, k):
    """The order of summation must not depend on the shape, the layouts or the number of threads."""
    one = plan(problem, host, options)
    other = plan(replace(problem, b_layout=layout, k=k, op="gemm"), host, replace(options, num_threads=1))
    if one.served and other.served:
        assert one.blocks.kc == other.blocks.kc


@pytest.mark.parametrize("isa, dtype", [key for key in TILES if key[0] in ISAS])
def test_every_kind_of_problem_has_a_kernel(isa, dtype):
    """Of every dtype on every instruction set, a symmetric product included, whatever tiles there are."""
    host = with_isa(isa, cores=8)
    for threads, b_layout, c_layout in itertools.product((1, 8), LAYOUT_NAMES, (ROW, GAPS)):
        for symmetric in (False, True):
            problem = Problem(dtype, 90, 90, 90, b_layout=b_layout, c_layout=c_layout, symmetric=symmetric)
            assert plan(problem, host, Options(num_threads=threads)).served


def test_numbers_beyond_32_and_53_bits():
    """m n k overflows an int64 and is inexact as a float: still a plan, inside its own box."""
    for m, n, k in [(2**31, 2**31, 2**31), (2**53 + 1, 1, 1), (2**62, 2**62, 2**62), (3, 2**61 + 1, 7)]:
        problem = Problem("float64", m, n, k)
        assert plan(problem, HOSTS["server"], Options(num_threads=4)).box.holds(problem)


@pytest.mark.parametrize("b_layout", LAYOUT_NAMES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_few_boxes_cover_all_shapes(b_layout, symmetric):
    """The native table holds 256 plans per dtype and operation: shapes must not need one each."""
    host, options, seen = HOSTS["desktop"], Options(num_threads=8), []
    edges = [0, 1, 2, 7, 8, 9, 13, 14, 15, 31, 32, 33, 90, 111, 112, 200, 255, 256, 257, 511, 512, 513, 1000, 4000, 10**6]
    for m, n, k in itertools.product(edges, repeat=3):
        problem = Problem("float32", m, n, k, b_layout=b_layout, symmetric=symmetric)
        if not any(box.holds(problem) for box in seen):
            seen.append(plan(problem, host, options).box)
    assert len(seen) <= (64 if b_layout == "row" else 72)  # a B that is copied has a rule more


@pytest.mark.parametrize("b_layout, dtype", list(itertools.product((ROW, COL), FLOATS)))
def test_few_boxes_cover_small_products(b_layout, dtype):
    """Those for which BLAS has kernels of its own are a class by themselves."""
    seen, edges = [], [2, 3, 4, 5, 6, 7, 15, 16, 40, 64, 65, 100, 256, 300, 512, 513, 1000, 4000, 60_000]
    for m, n, k in itertools.product(edges, repeat=3):
        problem = Problem(dtype, m, n, k, b_layout=b_layout, small_gemm=True)
        if 8_000 < problem.work <= 1e6 and not any(box.holds(problem) for box in seen):
            seen.append(plan(problem, HOSTS["desktop"], Options(num_threads=8)).box)
    assert len(seen) <= 64


def test_box():
    box = Box(m=(3, 9))
    assert [box.holds(Problem("float32", m, 5, 5)) for m in (2, 3, 9, 10)] == [False, True, True, False]
    assert Box().beside([box], Problem("float32", 2, 5, 5)).m == (0, 2)
    assert Box().beside([box], Problem("float32", 10, 5, 5)).m == (10, 2**62)
    heavy = Box(work=(0.0, 100.0))
    left = Box().beside([heavy], Problem("float32", 10, 11, 1))
    assert left.work == (math.nextafter(100.0, math.inf), math.inf)
    assert left.holds(Problem("float32", 101, 1, 1)) and not left.holds(Problem("float32", 100, 1, 1))
    with pytest.raises(ValueError, match="inside the box"):
        Box().beside([box], Problem("float32", 5, 5, 5))
    # Of two bounds that part them, the one that leaves more.
    assert Box().beside([Box(m=(900, 1000), k=(0, 2000))], Problem("float32", 9, 9, 2001)) == Box(m=(0, 899))
    assert Box(n=(0, 9)).beside([Box(m=(0, 9), n=(5, 20))], Problem("float32", 10, 2, 9)) == Box(m=(10, 2**62), n=(0, 9))
    assert Box(n=(0, 9)).beside([Box(m=(0, 9), n=(15, 20))], Problem("float32", 2, 2, 9)) == Box(n=(0, 9)), "apart as they are"

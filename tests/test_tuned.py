"""Tuning results: what the planner makes of them, and calls that they decide."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from equivalence import RUNNABLE
from hypothesis import given
from hypothesis import strategies as st
from tuning import an_isa, cache, entry, use  # noqa: F401 (fixtures)

import tvmgemm
from tvmgemm import planner, tuned
from tvmgemm.boxes import Box, meet
from tvmgemm.family.members import member
from tvmgemm.host import host
from tvmgemm.planner import plan
from tvmgemm.product import Product
from tvmgemm.settings import Options
from tvmgemm.tuned import MEMBER, NUMPY, PLANNER

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

ONE = Options(num_threads=1)


# -- what the planner makes of it


def test_an_entry_decides_what_it_measured_and_what_is_near():
    one = entry()
    decided = plan(one.problem, host(), ONE, [one])
    assert decided.tuned and decided.spec == one.spec
    assert (decided.blocks.mc, decided.blocks.nc) == (one.mc, one.nc)
    assert decided.blocks.kc == planner.blocks_of(one.spec, host()).kc, "kc decides the order of summation"
    assert "tuned: 1.20 [1.10..1.30] times as fast as the planner's at 96x80x64, measured 2026-01-02" == decided.reason
    for m, near in ((90, True), (102, True), (89, False), (103, False)):
        assert plan(replace(one.problem, m=m), host(), ONE, [one]).tuned == near


@pytest.mark.parametrize(
    "problem",
    [
        {"dtype": "float64"}, {"op": "gemm"}, {"a_layout": "col"}, {"b_layout": "col"}, {"c_layout": "strided"},
        {"symmetric": True}, {"batch": 2}, {"small_gemm": False}, {"gemv": True},
    ],
    ids=str,
)  # fmt: skip
def test_an_entry_says_nothing_about_other_problems(problem):
    other = replace(entry().problem, **problem)
    told, untold = (plan(other, host(), ONE, entries) for entries in ([entry()], []))
    assert replace(told, box=None) == replace(untold, box=None)


@pytest.mark.parametrize("options", [{"num_threads": 2}, {"variant": "B3A2C0"}, {"packing": "ab"}, {"parallel_loop": "none"}])
def test_other_threads_and_forced_choices_come_first(options):
    options = replace(ONE, **options)
    assert not plan(entry().problem, host(), options, [entry()]).tuned


@pytest.mark.skipif(len(RUNNABLE) < 2, reason="one instruction set only")
def test_an_entry_is_for_its_instruction_set():
    assert not plan(entry().problem, host(), replace(ONE, max_isa=RUNNABLE[0]), [entry()]).tuned


def test_what_was_measured_itself_comes_before_what_is_near():
    near, itself = entry(m=94), replace(entry(m=96, winner=NUMPY), over="something")
    for entries in ([near, itself], [itself, near]):
        assert not plan(itself.problem, host(), ONE, entries).served
        assert plan(near.problem, host(), ONE, entries).served


def test_the_planners_own_choice_is_no_rule():
    kept = entry(winner=PLANNER)
    assert plan(kept.problem, host(), ONE, [kept]) == plan(kept.problem, host(), ONE)


def test_an_entry_says_how_many_tasks_share_the_loop():
    isa, parallel = an_isa(), Options(num_threads=8)
    spec = member("B3A2C0", "float32", isa, parallel="ic")
    one = replace(entry(threads=8), spec=spec, mc=spec.mr, nc=spec.nr, tasks=3)
    assert plan(one.problem, host(), parallel, [one]).tasks == 3


def test_an_entry_of_a_stack_is_for_stacks_of_about_its_length():
    stack = Product("float32", 16, 16, 16, batch=100).problem()
    one = replace(entry(m=16, n=16, k=16, threads=2), problem=stack, tasks=2, shares_stack=True)
    two = Options(num_threads=2)
    for batch, near in ((1, False), (49, False), (50, True), (100, True), (200, True), (201, False)):
        decided = plan(replace(stack, batch=batch), host(), two, [one])
        assert decided.tuned == near
        if near:
            assert (decided.tasks, decided.parallel_loop) == (2, "stack") and "at 100x16x16x16" in decided.reason


def test_an_entry_of_a_product_is_one_of_its_exchanged_form():
    """The planner makes no difference between them, so there must not be two."""
    row, column = Product("float32", 1, 500, 300, layouts="rc").problem(), Product("float32", 500, 1, 300).problem()
    assert row.transposed and not column.transposed
    assert len({tuned.subject_of(problem, 1, an_isa()) for problem in (row, column)}) == 1


def test_numpy_can_win():
    decided = plan(entry().problem, host(), ONE, [entry(winner=NUMPY)])
    assert decided.tuned and not decided.served and "times as fast" in decided.reason


sizes = st.integers(1, 300)
stacks = st.sampled_from([1, 3, 5])


def asked(*sizes):
    return Product("float32", *sizes).problem()


def measured_in(batch, *about):
    return entry(*about, batch=batch)


problems = st.builds(asked, sizes, sizes, sizes, stacks)
measured = st.lists(st.builds(measured_in, stacks, sizes, sizes, sizes, st.sampled_from([MEMBER, NUMPY, PLANNER])), max_size=6)


@given(problems, measured, st.data())
def test_every_problem_in_the_box_gets_the_same_plan(problem, entries, data):
    decided = plan(problem, host(), ONE, entries)
    assert decided.box.holds(problem)
    inside = {
        side: data.draw(st.integers(max(low, 1), min(high, 1000)), side)
        for side in ("m", "n", "k", "batch")
        for low, high in (getattr(decided.box, side),)
    }
    other = replace(problem, **inside)
    if decided.box.holds(other):  # its work may be out of bounds
        assert replace(plan(other, host(), ONE, entries), box=None) == replace(decided, box=None)


def test_boxes_meet():
    limits = Box(m=(10, 20), n=(10, 20)).limits
    for other, met in [(Box(m=(20, 30)), True), (Box(m=(21, 30)), False), (Box(m=(12, 13), n=(1, 9)), False), (Box(k=(1, 2)), True)]:
        assert meet(limits, other.limits) == meet(other.limits, limits) == met


def test_an_entry_far_away_does_not_narrow_a_plan():
    far = entry(m=1000, n=1000, k=1000)
    assert plan(entry().problem, host(), ONE, [entry(), far]).box == plan(entry().problem, host(), ONE, [entry()]).box


# -- in calls


def test_a_tuned_kernel_serves_and_explain_says_so(cache):
    one = entry()
    use(cache, one)
    a, b = np.random.default_rng(0).standard_normal((2, 96, 96)).astype(np.float32)
    a, b = np.ascontiguousarray(a[:, :64]), np.ascontiguousarray(b[:64, :80])
    told = tvmgemm.explain(a, b)
    assert told.tuned and told.kernel == one.spec.name and told.reason == one.reason
    before = tvmgemm.stats().kernels.get(one.spec.name, 0)
    result = tvmgemm.matmul(a, b)
    assert tvmgemm.stats().kernels[one.spec.name] == before + 1
    with tvmgemm.options(tuned="off"):
        told = tvmgemm.explain(a, b)
        assert not told.tuned and told.kernel != one.spec.name
        assert np.array_equal(tvmgemm.matmul(a, b), result), "tuning must not change results"
    assert tvmgemm.explain(a, b).tuned


def test_explain_says_when_numpy_was_measured_to_be_faster(cache):
    use(cache, entry(winner=NUMPY))
    told = tvmgemm.explain(np.ones((96, 64), np.float32), np.ones((64, 80), np.float32))
    assert (told.served, told.tuned) == (False, True) and "tuned: " in str(told)


def test_info_counts_them(cache):
    from tvmgemm.cli import info

    assert info.collect()["cache"]["tuned"] == 0
    use(cache, entry(), entry(m=200))
    facts = info.collect()
    assert facts["cache"]["tuned"] == 2 and "2 tuned products" in info.render(facts)


IMPORTED = """
import sys, os
opened = []
sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
import numpy as np, tvmgemm
assert not any("tuned-" in name for name in opened), "importing read the file"
assert "tvmgemm.tuned" not in sys.modules
a = np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)
for _ in range(3):
    tvmgemm.matmul(*a)
    tvmgemm.matmul(a[0].T.copy(), a[0])
print(sum("tuned-" in name for name in opened), "tvmgemm.tuned" in sys.modules, tvmgemm.explain(*a).tuned)
"""


@pytest.mark.parametrize("there", [True, False])
def test_the_file_is_read_once_at_the_first_miss(there, cache):
    if there:
        use(cache, entry())
    environment = {**os.environ, "TVMGEMM_CACHE_DIR": cache.folder, "TVMGEMM_NUM_THREADS": "1"}
    said = subprocess.run([sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == (["1", "True", "True"] if there else ["0", "False", "False"])

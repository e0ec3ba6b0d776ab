"""Tuning results: the file, what the planner makes of it, and that nothing in it can break a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
from equivalence import RUNNABLE
from hypothesis import given
from hypothesis import strategies as st

import tvmgemm
from tvmgemm import dispatch, kernels, log, planner, tuned
from tvmgemm.boxes import Box, meet
from tvmgemm.family.members import member
from tvmgemm.family.tiles import TILES
from tvmgemm.host import host
from tvmgemm.planner import plan
from tvmgemm.problem import Problem
from tvmgemm.settings import Options
from tvmgemm.store import Store
from tvmgemm.tuned import MEMBER, NUMPY, PLANNER, Tuned

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

ONE = Options(num_threads=1)


def an_isa():
    return host().isa().name


def entry(m=96, n=80, k=64, winner=MEMBER, threads=1, dtype="float32", **problem):
    """A result in favour of the unpacked second tile, which the planner would not choose, with small blocks."""
    isa = an_isa()
    spec = member("A3B2C0", dtype, isa, TILES[isa, dtype]["C"][2], "ab") if winner == MEMBER else None
    blocks = (4 * spec.mr, 4 * spec.nr) if spec else (0, 0)
    return Tuned(
        Problem(dtype, m, n, k, **problem), threads, isa, winner, "the planner's", "2026-01-02", (1.2, 1.1, 1.3), spec, *blocks
    )


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return Store(str(folder))


@pytest.fixture
def cache(tmp_path):
    """A cache folder of its own that the process uses, with the kernels of the checkout's."""
    log._warned.clear()
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for name in os.listdir(kernels.store().folder):
        if name.endswith(".so"):
            os.link(os.path.join(kernels.store().folder, name), folder / name)
    with tvmgemm.options(cache_dir=folder, num_threads=1):
        yield Store(str(folder))
    dispatch.read_tuned_again()


def use(store, *entries):
    tuned.save(store, host(), entries)
    dispatch.read_tuned_again()


def file_of(store):
    return tuned.path(store, host())


# -- the file


def test_what_is_saved_is_loaded(store):
    entries = (entry(), entry(m=10, winner=NUMPY), entry(m=20, winner=PLANNER), entry(threads=2, b_layout="col"))
    tuned.save(store, host(), entries)
    assert set(tuned.load(store, host())) == set(entries)
    assert os.stat(file_of(store)).st_mode & 0o777 == 0o600
    assert os.listdir(store.folder).count(os.path.basename(file_of(store))) == 1


def test_people_can_read_it(store):
    tuned.save(store, host(), [entry()])
    text = open(file_of(store)).read()
    (line,) = [line for line in text.splitlines() if '"winner"' in line]
    for fact in ('"m": 96', '"threads": 1', '"variant": "A3B2C0"', '"ratio": [1.2, 1.1, 1.3]', '"measured": "2026-01-02"'):
        assert fact in line
    data = json.loads(text)
    assert data["format"] == tuned.FORMAT and data["machine"]["cpu"] == (host().model or host().arch)


def test_later_results_replace_earlier_ones_and_keep_the_others(store):
    tuned.save(store, host(), [entry(), entry(m=10)])
    later = replace(entry(), winner=PLANNER, spec=None, mc=0, nc=0)
    tuned.save(store, host(), [later])
    assert set(tuned.load(store, host())) == {later, entry(m=10)}


def test_writers_do_not_lose_each_others_results(store):
    threads = [threading.Thread(target=tuned.save, args=(store, host(), [entry(m=m)])) for m in range(20, 36)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {found.problem.m for found in tuned.load(store, host())} == set(range(20, 36))


def test_each_machine_and_generator_has_its_own_file(store, monkeypatch):
    tuned.save(store, host(), [entry()])
    first = file_of(store)
    for other in (replace(host(), model="Another CPU"), replace(host(), caches=()), replace(host(), features=frozenset())):
        assert tuned.path(store, other) != first and tuned.load(store, other) == ()
    assert tuned.path(store, replace(host(), cores=99)) == first, "threads are a matter of each entry"
    monkeypatch.setattr(tuned, "generator_digest", lambda: "f" * 64)
    assert tuned.load(store, host()) == ()
    tuned.save(store, host(), [])
    assert not os.path.exists(first), "what an earlier generator left is of no use to anybody"


def test_an_interrupted_write_leaves_the_old_file(store, monkeypatch):
    tuned.save(store, host(), [entry()])

    def interrupted(source, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tuned.save(store, host(), [entry(m=10)])
    assert tuned.load(store, host()) == (entry(),)
    assert [name for name in os.listdir(store.folder) if name.startswith(".tmp-")] == []


def test_without_a_folder_nothing_is_kept():
    with pytest.raises(OSError):
        tuned.save(Store(None), host(), [entry()])


# -- what is wrong with a file


def spoil(data, *path):
    """Set the value at ``path``, all but its last element, to the last; returns the text."""
    *parents, key, value = path
    at = data
    for name in parents:
        at = at[name]
    at[key] = value
    return json.dumps(data)


# fmt: off
WRONG = {
    "empty": lambda data: "",
    "not JSON": lambda data: "{",
    "not text": lambda data: b"\xff\xfe\x00",
    "a list": lambda data: "[]",
    "nested without end": lambda data: "[" * 100_000,
    "of a later format": lambda data: spoil(data, "format", 99),
    "of another machine": lambda data: spoil(data, "machine", "cpu", "Another CPU"),
    "of another generator": lambda data: spoil(data, "generator", "1.0"),
    "no entries": lambda data: spoil(data, "entries", None),
    "an entry that is none": lambda data: spoil(data, "entries", 0, 7),
    "a problem of another kind": lambda data: spoil(data, "entries", 0, "problem", {"shape": 3}),
    "a size that is none": lambda data: spoil(data, "entries", 0, "problem", "m", "96"),
    "a negative size": lambda data: spoil(data, "entries", 0, "problem", "m", -1),
    "an unknown dtype": lambda data: spoil(data, "entries", 0, "problem", "dtype", "float8"),
    "a stack": lambda data: spoil(data, "entries", 0, "problem", "batch", 9),
    "an unknown layout": lambda data: spoil(data, "entries", 0, "problem", "b_layout", "diagonal"),
    "no threads": lambda data: spoil(data, "entries", 0, "threads", 0),
    "an unknown winner": lambda data: spoil(data, "entries", 0, "winner", "BLIS"),
    "a winner without a kernel": lambda data: (data["entries"][0].pop("kernel"), json.dumps(data))[1],
    "an unknown variant": lambda data: spoil(data, "entries", 0, "kernel", "variant", "Z9"),
    "an unknown field": lambda data: spoil(data, "entries", 0, "kernel", "colour", "red"),
    "a tile that does not fit": lambda data: spoil(data, "entries", 0, "kernel", "mr", 4000),
    "a kernel of another dtype": lambda data: spoil(data, "entries", 0, "kernel", "dtype", "float64"),
    "a kernel of another CPU": lambda data: spoil(data, "entries", 0, "kernel", "isa", "z80"),
    "blocks without bounds": lambda data: spoil(data, "entries", 0, "mc", data["entries"][0]["mc"] * 10**6),
    "blocks of broken tiles": lambda data: spoil(data, "entries", 0, "mc", data["entries"][0]["mc"] + 1),
    "a kernel for half of C": lambda data: spoil(data, "entries", 0, "kernel", "symmetric", True),
    "a kernel of an early step": lambda data: spoil(data, "entries", 0, "kernel", "step", "basic"),
    "more tasks than threads": lambda data: spoil(data, "entries", 0, "tasks", 2),
    "no ratio": lambda data: spoil(data, "entries", 0, "ratio", []),
}
# fmt: on


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_file_is_set_aside_with_one_warning_and_calls_go_on(wrong, cache):
    use(cache, entry())
    data = json.load(open(file_of(cache)))
    content = WRONG[wrong](data)
    with open(file_of(cache), "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    dispatch.read_tuned_again()
    a, b = np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)
    with pytest.warns(RuntimeWarning, match="tuning results in .* are set aside, and the planner decides") as given_warnings:
        assert np.array_equal(tvmgemm.matmul(a, b), a @ b)
    assert len(given_warnings) == 1
    assert not os.path.exists(file_of(cache))
    assert os.path.exists(os.path.join(cache.folder, ".bad-" + os.path.basename(file_of(cache))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.read_tuned_again()
        assert not tvmgemm.explain(a, b).tuned


def test_a_file_that_others_can_write_is_not_used(cache):
    use(cache, entry())
    os.chmod(file_of(cache), 0o666)
    dispatch.read_tuned_again()
    with pytest.warns(RuntimeWarning, match="others may write it"):
        assert not tvmgemm.explain(np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)).tuned


def test_a_link_is_not_followed(cache, tmp_path):
    use(cache, entry())
    os.replace(file_of(cache), tmp_path / "elsewhere.json")
    os.symlink(tmp_path / "elsewhere.json", file_of(cache))
    dispatch.read_tuned_again()
    with pytest.warns(RuntimeWarning, match="symbolic link"):
        assert not tvmgemm.explain(np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)).tuned
    assert (tmp_path / "elsewhere.json").exists()


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
        {"symmetric": True}, {"batch": 2},
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


def test_numpy_can_win():
    decided = plan(entry().problem, host(), ONE, [entry(winner=NUMPY)])
    assert decided.tuned and not decided.served and "times as fast" in decided.reason


sizes = st.integers(1, 300)
problems = st.builds(Problem, st.just("float32"), sizes, sizes, sizes, st.sampled_from([1, 3]))
measured = st.lists(st.builds(entry, sizes, sizes, sizes, st.sampled_from([MEMBER, NUMPY, PLANNER])), max_size=6)


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

"""The file of tuning results, and that nothing in it can break a call."""

from __future__ import annotations

import json
import os
import threading
import warnings
from dataclasses import replace

import numpy as np
import pytest
from equivalence import RUNNABLE
from tuning import cache, entry, file_of, store, use  # noqa: F401 (fixtures)

import tvmgemm
from tvmgemm import dispatch, tuned
from tvmgemm.host import host
from tvmgemm.store import Store
from tvmgemm.tuned import NUMPY, PLANNER

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")


def test_what_is_saved_is_loaded(store):
    entries = (
        entry(), entry(m=10, winner=NUMPY), entry(m=20, winner=PLANNER), entry(threads=2, b_layout="col"), entry(op="gemm"),
        replace(entry(batch=50, threads=2), tasks=2, shares_stack=True),
    )  # fmt: skip
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
    "of an earlier format": lambda data: spoil(data, "format", 1),
    "an empty stack": lambda data: spoil(data, "entries", 0, "problem", "batch", 0),
    "a stack of gemm": lambda data: spoil(data, "entries", 0, "problem", {**data["entries"][0]["problem"], "op": "gemm", "batch": 9}),
    "an unknown operation": lambda data: spoil(data, "entries", 0, "problem", "op", "trsm"),
    "a class that is none": lambda data: spoil(data, "entries", 0, "problem", "gemv", 1),
    "a stack shared out that is none": lambda data: spoil(data, "entries", 0, "shares_stack", True),
    "a stack shared out by numbers": lambda data: spoil(data, "entries", 0, "shares_stack", 2),
    "a kernel for one shape": lambda data: spoil(data, "entries", 0, "kernel", "shape", [96, 80, 64]),
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
    "a kernel that cannot take its problem": lambda data: (
        data["entries"][0]["kernel"].update(packing="none"), spoil(data, "entries", 0, "problem", "b_layout", "col")
    )[1],
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
    dispatch.look_again()
    a, b = np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)
    with pytest.warns(RuntimeWarning, match="tuning results in .* are set aside, and the planner decides") as given_warnings:
        assert np.array_equal(tvmgemm.matmul(a, b), a @ b)
    assert len(given_warnings) == 1
    assert not os.path.exists(file_of(cache))
    assert os.path.exists(os.path.join(cache.folder, ".bad-" + os.path.basename(file_of(cache))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.look_again()
        assert not tvmgemm.explain(a, b).tuned


def test_a_file_that_others_can_write_is_not_used(cache):
    use(cache, entry())
    os.chmod(file_of(cache), 0o666)
    dispatch.look_again()
    with pytest.warns(RuntimeWarning, match="others may write it"):
        assert not tvmgemm.explain(np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)).tuned


def test_a_link_is_not_followed(cache, tmp_path):
    use(cache, entry())
    os.replace(file_of(cache), tmp_path / "elsewhere.json")
    os.symlink(tmp_path / "elsewhere.json", file_of(cache))
    dispatch.look_again()
    with pytest.warns(RuntimeWarning, match="symbolic link"):
        assert not tvmgemm.explain(np.ones((96, 64), np.float32), np.ones((64, 80), np.float32)).tuned
    assert (tmp_path / "elsewhere.json").exists()

"""``explain``, ``stats``, ``release_scratch``: what they say is what happens."""

from __future__ import annotations

import dataclasses
import os
import threading

import numpy as np
import pytest
from equivalence import FLOATS, FORCED, RUNNABLE, planned

import tvmgemm
from tvmgemm import kernels
from tvmgemm.cli.info import plan_text
from tvmgemm.family.tiles import TILES
from tvmgemm.host import host
from tvmgemm.problem import DTYPES

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

every_dtype = pytest.mark.parametrize("dtype", FLOATS)


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def test_a_kernel_without_loops_over_blocks():
    with planned(num_threads=1):
        told = tvmgemm.explain(ones(20, 20), ones(20, 20))
    assert told.blocked is False and plan_text(told) == f"{told.variant} {told.micro_kernel} unblocked"


@every_dtype
@pytest.mark.parametrize("isa", RUNNABLE)
@pytest.mark.parametrize("threads", [1, 2])
def test_served(dtype, isa, threads):
    a, b = ones(200, 300, dtype=dtype), ones(300, 400, dtype=dtype)
    with planned(variant=FORCED, max_isa=isa, num_threads=threads):
        told = tvmgemm.explain(a, b)
        assert told.served and told.reason and told.dtype == dtype and told.inner_calls == 1
        assert (told.problem.m, told.problem.n, told.problem.k, told.problem.batch) == (200, 400, 300, 1)
        assert (told.variant, told.isa, told.blocked) == (FORCED, isa, True)
        mr, nr = map(int, told.micro_kernel.split("x"))
        assert (mr, nr) in TILES[isa, dtype]["C"] and told.mc > 0 and told.nc > 0 and told.kc > 0
        assert told.threads == threads and (told.parallel_loop is None) == (threads == 1)
        assert told.source in ("memory", "disk", "built") and os.path.isfile(told.path)
        assert told.kernel in os.path.basename(told.path)
        text = str(told)
        for word in (
            FORCED,
            told.kernel,
            told.micro_kernel,
            told.reason,
            f"kc={told.kc}",
            "200x300",
            "300x400",
            dtype,
        ):
            assert word in text

        before = tvmgemm.stats().kernels.get(told.kernel, 0)
        tvmgemm.matmul(a, b)
        assert tvmgemm.stats().kernels[told.kernel] == before + 1
        assert tvmgemm.explain(a, b) == dataclasses.replace(told, source="memory")


def test_computes_and_counts_nothing():
    a = ones(50, 50)
    with planned(variant=FORCED):
        tvmgemm.matmul(a, a)
        before, room = tvmgemm.stats(), tvmgemm.release_scratch()
        tvmgemm.explain(a, a)
        after = tvmgemm.stats()
        assert (after.served, after.declined, after.kernels) == (
            before.served,
            before.declined,
            before.kernels,
        )
        assert tvmgemm.release_scratch() == 0 <= room
        assert (tvmgemm.matmul(a, a) == 50).all()


@pytest.mark.parametrize(
    "a, b, options, words",
    [
        (ones(1, 500), ones(600, 500).T, {}, "matrix-vector"),
        (ones(600, 500), ones(500), {}, "matrix-vector"),
        (ones(9, 9), ones(9, 9), {"variant": "numpy"}, "TVMGEMM_VARIANT=numpy"),
        (ones(9, 9, dtype="g"), ones(9, 9), {}, f"no kernels for {np.dtype('g').name}; served: float32"),
        (ones(0, 4, 4), ones(4, 4), {"variant": FORCED}, "stack is empty"),
    ],
)
def test_not_served(a, b, options, words):
    with planned(**options):
        told = tvmgemm.explain(a, b)
    assert not told.served and words in told.reason
    assert told.variant is told.kernel is told.path is told.isa is told.micro_kernel is None
    assert "NumPy's own loop" in str(told) and words in str(told)


def test_symmetric_product():
    a = np.random.default_rng(0).random((300, 200))
    with planned():
        told = tvmgemm.explain(a, a.T)
        assert told.served and told.problem.symmetric and "half of C" in told.reason and "symmetric" in told.kernel
        assert not tvmgemm.explain(a, a.T.copy()).problem.symmetric


def test_no_kernel_and_none_may_be_built(tmp_path):
    """A kernel that is planned but cannot be had: the reason names the setting. A narrow ISA is not loaded
    yet.
    """
    spec = tvmgemm.explain(ones(9, 9), ones(9, 9))
    loaded = dict(kernels.loaded)
    kernels.loaded.clear()
    try:
        with planned(variant=FORCED, cache_dir=str(tmp_path / "empty"), jit="off"):
            told = tvmgemm.explain(ones(9, 9), ones(9, 9))
            assert not told.served and "TVMGEMM_JIT=off" in told.reason
            before = tvmgemm.stats()
            assert (tvmgemm.matmul(ones(9, 9), ones(9, 9)) == 9).all()
            after = tvmgemm.stats()
            assert after.declined["float32"] == before.declined["float32"] + 1
            assert after.served == before.served and after.builds == before.builds
    finally:
        kernels.loaded.update(loaded)
    assert spec.served


def test_layouts_and_transposition():
    a, b = ones(30, 40), ones(40, 50)
    with planned(variant=FORCED):
        told = tvmgemm.explain(np.asfortranarray(a), b)
        assert (told.problem.a_layout, told.problem.b_layout) == ("col", "row")
        assert tvmgemm.explain(a[:, ::2], b[::2]).problem.a_layout == "strided"
        stack = tvmgemm.explain(ones(3, 30, 40), ones(3, 40, 50)).problem
        joined = tvmgemm.explain(ones(3, 30, 40), b).problem
        assert (stack.batch, stack.m, joined.batch, joined.m) == (3, 30, 1, 90)


def test_threads_share_out_a_stack():
    a = ones(5000, 3, 4)
    with planned(num_threads=2):
        told = tvmgemm.explain(a, ones(5000, 4, 2))
        assert (told.parallel_loop, told.threads) == ("stack", 2) and "stack, 2 tasks" in str(told)
        assert tvmgemm.explain(a[:99], ones(99, 4, 2)).parallel_loop is None


def test_stacks_of_several_inner_loops():
    """Broadcasting of two batch dimensions takes one inner loop per outer index."""
    with planned(variant=FORCED):
        a, b = ones(5, 1, 8, 8), ones(3, 8, 8)
        told = tvmgemm.explain(a, b)
        before = tvmgemm.stats().served["float32"]
        tvmgemm.matmul(a, b)
        assert told.inner_calls == tvmgemm.stats().served["float32"] - before > 1


@pytest.mark.parametrize(
    "a, b",
    [
        (ones(2, 3), ones(2, 3)),
        (ones(3), 2.0),
        (ones(2, 2), np.ones((2, 2), "V4")),
        (ones(2, 1, 3), ones(4, 3, 2)[:, :, None][..., 0, :, :]),
    ],
)
def test_raises_what_matmul_raises(a, b):
    with pytest.raises(Exception) as numpys:
        np.matmul(a, b)
    with pytest.raises(type(numpys.value)):
        tvmgemm.explain(a, b)


def test_lists_and_promotion():
    told = tvmgemm.explain([[1.0, 2.0]] * 4, ones(2, 3))
    assert told.dtype == "float64" and (told.problem.m, told.problem.n, told.problem.k) == (4, 3, 2)


# -- counters


def counted(counts: dict[str, int]) -> dict[str, int]:
    """Those that are not zero."""
    return {dtype: count for dtype, count in counts.items() if count}


def test_stats_count_by_dtype_and_kernel():
    tvmgemm.reset_stats()
    empty = tvmgemm.stats()
    assert set(empty.served) == set(empty.declined) == set(DTYPES) and not any(empty.served.values())
    assert (empty.builds, empty.failed_builds, empty.store_hits, empty.build_seconds) == (0, 0, 0, 0.0)
    with planned(variant=FORCED, num_threads=1):
        for dtype, calls in [("float32", 3), ("float64", 2)]:
            for _ in range(calls):
                tvmgemm.matmul(ones(20, 20, dtype=dtype), ones(20, 20, dtype=dtype))
        now = tvmgemm.stats()
        assert counted(now.served) == {"float32": 3, "float64": 2} and not any(now.declined.values())
        assert sum(now.kernels.values()) == 5
    with planned(variant="numpy"):
        tvmgemm.matmul(ones(20, 20), ones(20, 20))
        np.matmul(ones(20, 20), ones(20, 20))  # not patched: not ours to count
        now = tvmgemm.stats()
        assert counted(now.declined) == {"float32": 1} and now.served["float32"] == 3
    text = str(now)
    assert "float32: 3 calls served, 1 declined" in text and all(name in text for name in now.kernels)
    tvmgemm.reset_stats()
    assert tvmgemm.stats() == empty


def test_counting_from_many_threads():
    """No call is lost."""
    with planned(variant=FORCED, num_threads=1):
        tvmgemm.matmul(ones(8, 8), ones(8, 8))
        before = tvmgemm.stats().served["float32"]

        def work():
            for _ in range(500):
                tvmgemm.matmul(a, a)

        a = ones(8, 8)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tvmgemm.stats().served["float32"] == before + 2000


def test_scratch_belongs_to_the_thread_and_comes_back():
    a = ones(300, 300)
    with planned(variant=FORCED, num_threads=1):
        tvmgemm.matmul(a, np.asfortranarray(a))
        assert tvmgemm.release_scratch() > 0 and tvmgemm.release_scratch() == 0
        assert (tvmgemm.matmul(a, np.asfortranarray(a)) == 300).all()
        sizes = []
        thread = threading.Thread(target=lambda: sizes.append(tvmgemm.release_scratch()))
        thread.start()
        thread.join()
        assert sizes == [0] and tvmgemm.release_scratch() > 0


def test_explain_is_about_this_machine():
    told = tvmgemm.explain(ones(20, 20), ones(20, 20))
    assert told.isa == host().isa().name == RUNNABLE[-1]

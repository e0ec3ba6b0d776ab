"""Paired timing, with a clock that only moves when the functions under test move it."""

import gc
import threading
import time
from types import SimpleNamespace

import pytest

from tvmgemm import timing


class FakeClock:
    """A clock in seconds; ``work(cost)`` returns a function that takes ``cost()`` seconds of it."""

    def __init__(self):
        self.now = 0.0
        self.log = []

    def __call__(self):
        return self.now

    def work(self, name, cost):
        def function():
            self.log.append(name)
            self.now += cost() if callable(cost) else cost

        return function


def test_every_function_gets_one_sample_per_round_and_seconds_are_per_call():
    clock = FakeClock()
    functions = {"a": clock.work("a", 1e-6), "b": clock.work("b", 0.5)}
    samples = timing.paired(functions, rounds=7, clock=clock)
    assert samples["a"] == pytest.approx([1e-6] * 7)
    assert samples["b"] == pytest.approx([0.5] * 7)


def test_the_order_rotates():
    clock = FakeClock()
    functions = {name: clock.work(name, 1.0) for name in "abc"}  # a second each: one call per sample
    timing.paired(functions, rounds=3, clock=clock)
    assert "".join(clock.log[-9:]) == "abcbcacab"


def test_each_function_is_called_once_before_it_is_timed():
    clock = FakeClock()
    costs = iter([100.0])  # the first call builds something
    samples = timing.paired({"a": clock.work("a", lambda: next(costs, 1.0))}, rounds=5, clock=clock)
    assert samples["a"] == [1.0] * 5


@pytest.mark.parametrize("cost", [1e-9, 3e-7, 1e-5, 1.9e-4, 2e-4, 1.0])
def test_a_sample_lasts_long_enough_but_not_much_longer(cost):
    clock = FakeClock()
    calls = timing.calls_per_sample(clock.work("a", cost), timing.MIN_SECONDS, clock)
    assert calls * cost >= timing.MIN_SECONDS * (1 - 1e-6)
    assert calls == 1 or calls * cost <= 10 * timing.MIN_SECONDS


def test_a_coarse_clock_does_not_end_the_calibration():
    ticks = FakeClock()
    function = ticks.work("a", 1e-6)
    calls = timing.calls_per_sample(function, 1e-3, lambda: ticks.now // 1e-3 * 1e-3)
    assert calls >= 1000


def test_the_budget_ends_the_run_but_not_before_the_minimum():
    clock = FakeClock()
    functions = {"a": clock.work("a", 1.0), "b": clock.work("b", 1.0)}
    assert len(timing.paired(functions, rounds=100, budget=30.0, clock=clock)["a"]) == 15
    assert len(timing.paired(functions, rounds=100, budget=0.0, clock=clock)["a"]) == timing.MIN_ROUNDS
    assert len(timing.paired(functions, rounds=2, budget=0.0, clock=clock)["a"]) == 2


def test_before_runs_untimed_before_each_sample():
    clock = FakeClock()
    state = []

    def before(name):
        state[:] = [name]
        clock.now += 50.0

    def function_of(name):
        def function():
            assert state == [name]
            clock.now += 1.0

        return function

    functions = {name: function_of(name) for name in ("patched", "unpatched")}
    assert timing.paired(functions, rounds=4, before=before, clock=clock) == {
        "patched": [1.0] * 4,
        "unpatched": [1.0] * 4,
    }


def test_settling_waits_and_then_wakes_the_function_before_each_sample(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "wait_until_idle", lambda: clock.log.append("idle"))
    timing.paired({"a": clock.work("a", 1.0)}, rounds=2, settle=True, clock=clock)
    assert clock.log[-6:] == ["idle", "a", "a"] * 2


def test_warming_up_takes_a_while_or_one_call():
    clock = FakeClock()
    timing.warm_up(clock.work("a", 1e-3), clock)
    assert len(clock.log) == 20
    timing.warm_up(clock.work("b", 1.0), clock)
    assert clock.log[20:] == ["b"]


def test_waiting_for_builds_waits_for_their_threads():
    ended = []
    builder = threading.Thread(target=lambda: (time.sleep(0.05), ended.append(True)), name="tvmgemm-build")
    builder.start()
    timing.wait_for_builds()
    assert ended


@pytest.mark.parametrize("busy, waited", [(0.0, 0.02), (0.15, 0.18), (60.0, 0.5)])
def test_waiting_for_an_idle_process_ends(monkeypatch, busy, waited):
    """One step after the last thread has come to rest, and after half a second at the latest."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: min(now, busy), sleep=sleep)
    monkeypatch.setattr(timing, "time", clock)
    timing.wait_until_idle()
    assert now == pytest.approx(waited)


def test_the_garbage_collector_is_off_meanwhile_and_as_before_afterwards():
    seen = []
    timing.paired({"a": lambda: seen.append(gc.isenabled())}, rounds=1, min_seconds=0.0)
    assert seen and not any(seen)
    assert gc.isenabled()
    gc.disable()
    try:
        timing.paired({"a": lambda: None}, rounds=1, min_seconds=0.0)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_exception_passes_and_the_collector_is_back():
    def fails():
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        timing.paired({"a": fails})
    assert gc.isenabled()


def test_ratio_is_peer_over_ours_within_each_round():
    # Both halve their speed in every round: the ratio doesn't see it.
    ours = [1.0, 2.0, 4.0, 8.0, 16.0]
    result = timing.ratio([2 * s for s in ours], ours)
    assert result == timing.Ratio(2.0, 2.0, 2.0, 5)


def test_ratio_quartiles():
    result = timing.ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert (result.median, result.low, result.high, result.rounds) == (3.0, 2.0, 4.0, 5)
    assert str(result) == "3.00 [2.00..4.00]"


@pytest.mark.parametrize("peer, ours", [([], []), ([1.0], [1.0, 2.0])])
def test_ratio_of_what_is_not_pairs(peer, ours):
    with pytest.raises(ValueError, match="not pairs"):
        timing.ratio(peer, ours)


@pytest.mark.parametrize("functions, rounds", [({}, 5), ({"a": int}, 0)])
def test_nothing_to_measure(functions, rounds):
    with pytest.raises(ValueError, match="at least one"):
        timing.paired(functions, rounds=rounds)


def test_thread_limit_sets_ours_and_the_peers_and_puts_them_back():
    from threadpoolctl import threadpool_info

    import tvmgemm
    from tvmgemm import settings

    def blas_threads():
        return [entry["num_threads"] for entry in threadpool_info() if entry["user_api"] == "blas"]

    before = settings.current().num_threads, blas_threads()
    with timing.thread_limit(1) as peers_too:
        assert peers_too
        assert settings.current().num_threads == 1
        assert set(blas_threads()) == {1}
    assert (settings.current().num_threads, blas_threads()) == before
    assert callable(tvmgemm.matmul)

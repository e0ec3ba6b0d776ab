"""The thread pool and the launcher, under plain C kernels that call it as TVM's T.parallel does."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import signal
import threading
import time

import numpy as np
import pytest
from plain_kernels import native  # noqa: F401

from tvmgemm import frontend
from tvmgemm.frontend import matmul

#: FE_UPWARD in the C library's header
UPWARD = {"x86_64": 0x800, "aarch64": 0x400000}


def operands(m=64, k=4096, n=17, dtype="float32"):
    """By default such that a sleeping worker is woken for them."""
    rng = np.random.default_rng(m)
    return rng.integers(-4, 5, (m, k)).astype(dtype), rng.integers(-4, 5, (k, n)).astype(dtype)


def check(*sizes, **keywords):
    a, b = operands(*sizes, **keywords)
    with np.errstate(over="ignore"):  # workers of the meeting kernel overflow
        result = matmul(a, b)
    np.testing.assert_array_equal(result, a.astype("float64") @ b.astype("float64"))


@pytest.mark.parametrize("threads", (1, 2, 4))
@pytest.mark.parametrize("tasks", (1, 2, 3, 8, 100))
def test_every_task_runs_once(native, threads, tasks):
    native.publish(native.kernel("parallel_float32"), tasks=tasks)
    native.lib.tg_pool_set_threads(threads)
    assert native.lib.tg_pool_threads() == threads
    for m in (1, 7, 64, 65):
        check(m)
    assert native.counters.tasks_seen.value == tasks  # the plan's number, not the pool's


@pytest.mark.parametrize("threads", (2, 4))
def test_tasks_run_at_the_same_time(native, threads):
    native.publish(native.kernel("meeting_float32"), tasks=threads)
    native.lib.tg_pool_set_threads(threads)
    native.counters.threads_wanted.value = threads
    for _ in range(3):
        native.counters.entered.value = 0
        check()
    assert native.counters.late.value == 0


@pytest.mark.parametrize("threads, tasks", [(1, 3), (2, 2), (4, 3)])
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_tasks_share_a_stack(native, threads, tasks, dtype):
    """Every product once, whatever the length of the stack, with scratch memory for each task."""
    native.publish(native.kernel(f"packing_{dtype}"), dtype=int(dtype == "float64"), stack_tasks=tasks)
    native.lib.tg_pool_set_threads(threads)
    native.lib.tg_reset_counters()
    rng = np.random.default_rng(3)
    for length in (1, 2, 3, 4, 100):
        a, b = rng.integers(-4, 5, (length, 9, 7)).astype(dtype), rng.integers(-4, 5, (length, 7, 5)).astype(dtype)
        np.testing.assert_array_equal(matmul(a[::-1], b), np.matmul(a[::-1], b))
    assert native.lib.tg_served(dtype == "float64") == 5


def test_tasks_of_a_stack_run_at_the_same_time(native):
    native.publish(native.kernel("meeting_float32"), stack_tasks=2)
    native.lib.tg_pool_set_threads(2)
    native.counters.threads_wanted.value = 2
    a = np.ones((5, 100, 100), "f")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(matmul(a, a), 100 * a)
    assert (native.counters.entered.value, native.counters.late.value) == (2, 0)
    assert native.counters.tasks_seen.value == 1  # a kernel's own parallel loop runs alone inside a task


def test_a_task_of_a_stack_that_fails_is_a_failing_kernel(native):
    native.publish(native.kernel("failing_float32"), stack_tasks=2)
    native.lib.tg_pool_set_threads(2)
    native.lib.tg_reset_counters()
    a = np.ones((5, 3, 3), "f")
    np.testing.assert_array_equal(matmul(a, a), 3 * a)
    assert native.lib.tg_declined(0) == 1


def test_sleeping_workers_wake_up(native):
    native.publish(native.kernel("meeting_float32"), tasks=2)
    native.lib.tg_pool_set_threads(2)
    native.counters.threads_wanted.value = 2
    for pause in (0.0, 0.01, 0.00004, 0.0001, 0.02):
        time.sleep(pause)
        native.counters.entered.value = 0
        check()
    assert native.counters.late.value == 0


def test_sleeping_workers_are_not_woken_for_little(native):
    """Unless there is more of it: a worker that wakes costs its caller more than such a product."""
    native.publish(native.kernel("where_float32"), tasks=2)
    native.lib.tg_pool_set_threads(2)

    def someone_came() -> bool:
        native.counters.entered.value = 0
        check(64, 9, 17)
        return bool(native.counters.entered.value)

    check()
    for _ in range(20):
        time.sleep(0.002)
        assert not someone_came()
    end = time.monotonic() + 30
    while not someone_came():
        assert time.monotonic() < end


def test_resizing(native):
    native.publish(native.kernel("parallel_float32"), tasks=8)
    for threads in (4, 1, 2, 3, 0, -5, 2):
        native.lib.tg_pool_set_threads(threads)
        assert native.lib.tg_pool_threads() == max(threads, 1)
        check()


def test_nested_launch_runs_on_its_own_thread(native):
    native.publish(native.kernel("nested_float32"), tasks=4)
    native.lib.tg_pool_set_threads(2)
    check()
    assert (native.counters.tasks_seen.value, native.counters.nested_tasks_seen.value) == (4, 1)


@pytest.mark.parametrize("threads", (1, 2))
def test_failing_task_is_a_failing_kernel(native, threads):
    native.publish(native.kernel("badtask_float32"), tasks=4)
    native.lib.tg_pool_set_threads(threads)
    native.lib.tg_reset_counters()
    check()  # NumPy computed it
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (0, 1)


def test_concurrent_callers(native):
    """One caller has the pool, the others run alone: same results, exact counts, no deadlock."""
    kernel = native.kernel("parallel_float32")
    native.publish(kernel, tasks=4)
    native.lib.tg_pool_set_threads(3)
    native.lib.tg_reset_counters()
    a, b = operands(65, 30, 40)
    expected, wrong = np.matmul(a, b), []

    def work():
        for _ in range(50):
            if not (matmul(a, b) == expected).all():
                wrong.append(1)

    callers = [threading.Thread(target=work, daemon=True) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)
    assert not wrong and native.lib.tg_served(0) == native.lib.tg_kernel_calls(kernel) == 400


def test_concurrent_misses_publishing_and_clearing(native):
    """Readers always find a plan or decline; the result is right either way."""
    kernel, stop, wrong = native.kernel("plain_float64"), threading.Event(), []

    def on_miss(p):
        native.publish(kernel, dtype=1, m_lo=p.m, m_hi=p.m, id=100 + p.m)
        return 1

    frontend.on_miss = on_miss

    def work(seed):
        a = np.random.default_rng(seed).integers(-4, 5, (40, 40)).astype("float64")
        for i in range(150):
            m = 15 + (i * seed) % 20
            if not (matmul(a[:m], a) == np.matmul(a[:m], a)).all():
                wrong.append(1)

    def disturb():
        while not stop.wait(0.0005):
            native.lib.tg_unpublish(120)
            native.lib.tg_clear_plans()

    callers = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7)]
    disturber = threading.Thread(target=disturb)
    for thread in (*callers, disturber):
        thread.start()
    for caller in callers:
        caller.join(60)
    stop.set()
    disturber.join(60)
    assert not wrong


def in_child(work, seconds=30.0) -> int:
    """Exit status of a forked child that runs ``work()``; it is killed after ``seconds``."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_starts_a_pool_of_its_own(native):
    native.publish(native.kernel("meeting_float32"), tasks=2)
    native.lib.tg_pool_set_threads(2)
    native.counters.threads_wanted.value = 2

    def work():
        native.counters.entered.value = 0
        check()
        assert native.counters.late.value == 0

    work()
    for pause in (0.0, 0.01):  # workers awake, workers asleep
        time.sleep(pause)
        assert in_child(work) == 0
    assert in_child(lambda: (native.lib.tg_pool_set_threads(4), work(), in_child(work))) == 0
    work()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_other_threads_multiply(native):
    native.publish(native.kernel("parallel_float32"), tasks=4)
    native.lib.tg_pool_set_threads(2)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            check(120, 40, 40)

    other = threading.Thread(target=work)
    other.start()
    try:
        for _ in range(5):
            assert in_child(lambda: matmul(*operands(120, 40, 40))) == 0
    finally:
        stop.set()
        other.join()


def test_flags_of_workers_reach_errstate(native):
    native.publish(native.kernel("meeting_float32"), tasks=2)
    native.lib.tg_pool_set_threads(2)
    native.counters.threads_wanted.value = 2
    a, b = operands()
    with np.errstate(over="raise"), pytest.raises(FloatingPointError, match="overflow encountered in matmul"):
        matmul(a, b)
    native.lib.tg_clear_plans()
    native.publish(native.kernel("parallel_float32"), tasks=2)
    with np.errstate(all="raise"):
        matmul(a, b)


def test_workers_round_as_the_caller_does(native):
    machine = os.uname().machine
    if machine not in UPWARD:
        pytest.skip("FE_UPWARD of this machine is not known here")
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    native.publish(native.kernel("meeting_float32"), tasks=2)
    native.lib.tg_pool_set_threads(2)
    native.counters.threads_wanted.value = 2
    nearest = libm.fegetround()
    a, b = operands()
    for mode in (UPWARD[machine], nearest, UPWARD[machine]):
        native.counters.entered.value = 0
        libm.fesetround(mode)
        try:
            with np.errstate(over="ignore"):
                matmul(a, b)
            after = libm.fegetround()
        finally:
            libm.fesetround(nearest)
        assert after == mode and native.counters.worker_rounds_up.value == (mode != nearest)


def test_miss_does_not_change_the_rounding(native):
    machine = os.uname().machine
    if machine not in UPWARD:
        pytest.skip("FE_UPWARD of this machine is not known here")
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    nearest = libm.fegetround()
    frontend.on_miss = lambda p: libm.fesetround(UPWARD[machine])
    try:
        matmul(np.ones((2, 2)), np.ones((2, 2)))
        after = libm.fegetround()
    finally:
        libm.fesetround(nearest)
    assert after == nearest

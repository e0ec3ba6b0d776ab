"""Misses: Python is asked once, and nothing that happens there costs a product."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import pytest
from arrays import whole_numbers
from plain_kernels import native  # noqa: F401

from tvmgemm import frontend
from tvmgemm.frontend import matmul


def test_miss_publishes_and_is_looked_up_again(native):
    calls = []

    def on_miss(p):
        calls.append(p.m)
        native.publish(native.kernel("plain_float32"), m_hi=p.m)
        return 1

    frontend.on_miss = on_miss
    native.lib.tg_reset_counters()
    a = whole_numbers((5, 5), "f")
    for _ in range(3):
        np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert calls == [5]
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (3, 0)


def test_miss_that_publishes_nothing_declines(native):
    frontend.on_miss = lambda p: 1
    a = whole_numbers((5, 5), "f")
    np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))


def test_products_inside_a_miss_decline(native):
    depth = []

    def on_miss(p):
        depth.append(p.m)
        a = np.ones((3, 3), "f")
        np.testing.assert_array_equal(matmul(a, a), np.full((3, 3), 3))
        return 0

    frontend.on_miss = on_miss
    matmul(np.ones((2, 2), "f"), np.ones((2, 2), "f"))
    assert depth == [2]


def test_miss_without_the_gil(native):
    frontend.on_miss = lambda p: native.publish(native.kernel("plain_float32")) > 0
    a = whole_numbers((100, 100), "f")  # more than 500 results: NumPy releases the GIL
    np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert native.lib.tg_lookup(native.problem()) != -1


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), SystemExit(3)])
def test_exception_in_a_miss_is_logged(native, caplog, capfd, error):
    def on_miss(p):
        raise error

    frontend.on_miss = on_miss
    a = whole_numbers((5, 5), "f")
    with caplog.at_level("WARNING", "tvmgemm"):
        np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert len(caplog.records) == 1
    assert "NumPy computes it" in caplog.text and type(error).__name__ in caplog.text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ignored", [False, True], ids=["as it is", "SIGINT ignored"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), TimeoutError("too late")], ids=repr)
def test_what_a_signal_raises_in_a_miss_is_not_lost(native, error, ignored):
    """Ctrl-C, a handler of SIGTERM that exits, a time limit of the program's."""

    def handler(number, frame):
        raise error

    def on_miss(p):
        signal.raise_signal(signal.SIGALRM)

    frontend.on_miss = on_miss
    a, result = whole_numbers((5, 5), "f"), None
    before = signal.signal(signal.SIGALRM, handler), signal.getsignal(signal.SIGINT)
    try:
        if ignored:  # as in a shell's background job
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        with pytest.raises(type(error)) as raised:
            result = matmul(a, a)
            for _ in range(1000):
                pass
    finally:
        signal.signal(signal.SIGALRM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert raised.value is error
    assert result is None or (result == np.matmul(a, a)).all()
    np.testing.assert_array_equal(np.matmul(a, a), a @ a)  # nothing is raised again


def test_miss_leaves_no_floating_point_flags(native):
    def on_miss(p):
        with np.errstate(all="ignore"):
            np.float64(1e308) * np.float64(1e308) + np.float64(0) / np.float64(0)
        return 0

    frontend.on_miss = on_miss
    with np.errstate(all="raise"):
        matmul(np.ones((2, 2)), np.ones((2, 2)))
        native.publish(native.kernel("plain_float64"), dtype=1)
        matmul(np.ones((2, 2)), np.ones((2, 2)))


def test_no_callback_while_the_interpreter_ends(native):
    program = """if True:
        import numpy as np
        from tvmgemm import frontend, problem
        frontend.on_miss = lambda p: print("asked") or 0
        class Last:
            def __del__(self, matmul=frontend.matmul, a=np.ones((2, 2))):
                print(matmul(a, a)[0, 0])
        import sys
        sys.last_of_all = Last()
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.split() in (["2.0"], [])

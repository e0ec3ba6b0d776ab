"""Replacing and restoring the loops of np.matmul."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from plain_kernels import native  # noqa: F401

from tvmgemm import problem
from tvmgemm.frontend import lib, numpys_matmul
from tvmgemm.patching import is_patched, patch_numpy, patched, unpatch_numpy

test_multiarray = pytest.importorskip("numpy._core.tests.test_multiarray", reason="needs NumPy's own tests")

#: Those of one element type that NumPy has a loop for, and NumPy's letters for them.
DTYPES = {name: d.native_id for name, d in problem.DTYPES.items() if d.a == d.b == d.c and name != "bfloat16"}
LETTERS = "?bBhHiIlLqQefdFD"


def loop_pointers() -> list[int]:
    """The addresses of np.matmul's inner loops. A PyUFuncObject: object head, four ints, then `functions`."""
    head = object.__basicsize__ + 4 * ctypes.sizeof(ctypes.c_int)
    functions = ctypes.c_void_p.from_address(id(numpys_matmul) + head).value
    return list((ctypes.c_void_p * numpys_matmul.ntypes).from_address(functions))


NUMPYS = loop_pointers()


@pytest.fixture(autouse=True)
def served(native):
    """NumPy unpatched before and after; plain kernels for everything."""
    assert not is_patched() and loop_pointers() == NUMPYS
    for name, dtype in DTYPES.items():
        native.publish(native.kernel(f"plain_{name}"), dtype)
    native.lib.tg_reset_counters()
    yield native
    unpatch_numpy()
    assert not is_patched() and loop_pointers() == NUMPYS


def serves() -> bool:
    """Whether np.matmul runs our loop, and that is_patched says so."""
    before = sum(map(lib.tg_served, DTYPES.values()))
    for letter in LETTERS:
        a = np.ones((3, 3), letter)
        c = a @ a
        assert (c == a.dtype.type(3)).all() and c.dtype == a.dtype
    calls = sum(map(lib.tg_served, DTYPES.values())) - before
    assert calls in (0, len(LETTERS))
    assert is_patched() == (calls > 0)
    return calls > 0


def test_patch_and_restore():
    assert not serves()
    patch_numpy()
    assert serves()
    changed = [i for i, (now, numpys) in enumerate(zip(loop_pointers(), NUMPYS)) if now != numpys]
    assert [numpys_matmul.types[i] for i in changed] == [f"{x}{x}->{x}" for x in LETTERS]
    unpatch_numpy()
    assert not serves() and loop_pointers() == NUMPYS


def test_idempotent():
    unpatch_numpy()
    assert not serves()
    patch_numpy()
    patch_numpy()
    assert serves()
    unpatch_numpy()
    assert not serves()


def test_blocks_nest():
    with patched():
        assert serves()
        with patched():
            assert serves()
        assert serves()
    assert not serves()


def test_block_and_explicit():
    with patched():
        patch_numpy()
    assert serves()
    with patched():
        unpatch_numpy()
        assert serves()  # the block still holds
    assert not serves()


def test_exception_ends_the_block():
    with pytest.raises(KeyError), patched():
        raise KeyError
    assert not serves()


def test_decorator():
    @patched()
    def inside():
        return serves()

    assert inside() and inside() and not serves()


def test_blocks_in_many_threads():
    failed, start = [], threading.Barrier(8)

    def work():
        start.wait(20)
        for _ in range(100):
            with patched():
                if not is_patched():
                    failed.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not serves()


def test_operators_and_functions_that_use_matmul(served):
    a = np.arange(9, dtype="float64").reshape(3, 3)
    expected = np.matmul(a, a)
    with patched():
        served.lib.tg_reset_counters()
        b = a.copy()
        b @= a
        results = [b, a @ a, np.linalg.matmul(a, a), np.linalg.matrix_power(a, 2),
                   np.matmul(a, a, out=np.empty((3, 3)))]
        assert served.lib.tg_served(1) == len(results)
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_another_packages_loops_stay():
    add = ctypes.c_void_p.from_address(id(np.add) + object.__basicsize__ + 16).value
    foreign = ctypes.c_void_p.from_address(add).value
    i = numpys_matmul.types.index("dd->d")
    head = object.__basicsize__ + 4 * ctypes.sizeof(ctypes.c_int)
    slot = ctypes.c_void_p.from_address(ctypes.c_void_p.from_address(id(numpys_matmul) + head).value + 8 * i)
    slot.value = foreign
    try:
        with pytest.raises(RuntimeError, match="another package has replaced them"):
            patch_numpy()
        with pytest.raises(RuntimeError, match="another package"), patched():
            pass
        assert slot.value == foreign and not is_patched()
    finally:
        slot.value = NUMPYS[i]
    patch_numpy()
    ours, slot.value = slot.value, foreign
    try:
        with pytest.raises(RuntimeError, match="before unpatching"):
            unpatch_numpy()
        assert slot.value == foreign
    finally:
        slot.value = ours
    patch_numpy()
    unpatch_numpy()
    assert not serves()


def test_only_matmul_can_be_patched():
    assert lib.tg_patch(id(np.add), 1) == lib.tg_patch(id(object), 1) == -1


def test_rebound_name_does_not_matter(monkeypatch):
    """``@`` calls NumPy's ufunc whatever the name np.matmul stands for."""
    monkeypatch.setattr(np, "matmul", lambda a, b: None)
    with patched():
        assert serves()


def test_import_does_not_patch():
    program = """if True:
        import tvmgemm.patching, tvmgemm.frontend, numpy as np
        tvmgemm.frontend.on_miss = lambda p: print("asked")
        np.ones((2, 2)) @ np.ones((2, 2))
        print(tvmgemm.patching.is_patched())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_can_patch():
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with patched():
                status = 0 if serves() else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestNumPysOperator(test_multiarray.TestMatmulOperator):
    """NumPy's own tests of ``@``, served by plain kernels."""

    @pytest.fixture(autouse=True)
    def patched_numpy(self, served):
        with patched():
            yield


class TestNumPysInplaceOperator(test_multiarray.TestMatmulInplace):
    """NumPy's own tests of ``@=``."""

    @pytest.fixture(autouse=True)
    def patched_numpy(self, served):
        with patched():
            yield

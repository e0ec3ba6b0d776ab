"""The native part's loading of kernels, counters, scratch memory and features of the CPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sysconfig
import threading

import numpy as np
import pytest
import tvmgemm._native
from arrays import whole_numbers
from plain_kernels import (
    compiler,
    native,  # noqa: F401
)

from tvmgemm import frontend
from tvmgemm.frontend import matmul

NATIVE = pathlib.Path(frontend.__file__).parent / "native"


# -- kernels


def load(native, path, symbol):
    error = native.ffi.new("char[400]")
    kernel = native.lib.tg_kernel_load(str(path).encode(), symbol.encode(), b"a name", error, 400)
    return kernel, native.ffi.string(error).decode()


def test_load_errors_say_what_is_wrong(native, tmp_path):
    kernel, error = load(native, tmp_path / "absent.so", "f")
    assert not kernel and "absent.so" in error
    (tmp_path / "text.so").write_text("not a library")
    kernel, error = load(native, tmp_path / "text.so", "f")
    assert not kernel and "text.so" in error
    kernel, error = load(native, tvmgemm._native.__file__, "no_such_kernel")
    assert not kernel and "no_such_kernel" in error
    kernel, error = load(native, tvmgemm._native.__file__, "x" * 600)
    assert not kernel and len(error) < 400


def test_same_function_is_one_kernel_and_has_a_name(native):
    kernel = native.kernel("plain_float32")
    native.kernel.cache_clear()
    assert native.kernel("plain_float32") == kernel
    assert native.ffi.string(native.lib.tg_kernel_name(kernel)) == b"plain_float32"


def test_counters(native):
    kernels = [native.kernel(name) for name in ("plain_float32", "packing_float32", "plain_float64")]
    native.publish(kernels[0], m_hi=4)
    native.publish(kernels[0], m_lo=5, m_hi=6)
    native.publish(kernels[1], m_lo=7)
    native.publish(kernels[2], dtype=1)
    native.lib.tg_reset_counters()
    for m in (3, 5, 5, 8):
        matmul(np.ones((m, 3), "f"), np.ones((3, 2), "f"))
    matmul(np.ones((6, 3, 3)), np.ones((3, 2)))
    count = [native.lib.tg_kernel_calls(kernel) for kernel in kernels]
    assert count == [3, 1, 1]  # a batch is one inner-loop call
    assert [native.lib.tg_served(d) for d in (0, 1)] == [4, 1]
    native.lib.tg_clear_plans()  # counts survive: they tell what happened
    assert [native.lib.tg_kernel_calls(kernel) for kernel in kernels] == count
    native.lib.tg_reset_counters()
    assert [native.lib.tg_served(d) for d in (0, 1)] == [0, 0]


def test_workspace_is_aligned_kept_and_released(native):
    native.publish(native.kernel("packing_float32"))
    native.lib.tg_release_scratch()
    assert native.lib.tg_scratch_bytes() == 0
    for m, k in ((3, 5), (40, 50), (300, 200), (3, 5)):
        a, b = whole_numbers((2, m, k), "f", 1), whole_numbers((2, k, 4), "f", 2)
        np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    assert 300 * 200 * 4 <= native.lib.tg_scratch_bytes() < 2 * 300 * 200 * 4
    native.lib.tg_release_scratch()
    assert native.lib.tg_scratch_bytes() == 0
    np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))


def test_scratch_belongs_to_its_thread_and_very_large_is_not_kept(native):
    native.publish(native.kernel("packing_float32"))
    native.lib.tg_release_scratch()
    sizes = []

    def work():
        matmul(np.ones((100, 100), "f"), np.ones((100, 2), "f"))
        sizes.append(native.lib.tg_scratch_bytes())
        matmul(np.ones((1000, 20000), "f"), np.ones((20000, 1), "f"))
        sizes.append(native.lib.tg_scratch_bytes())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sizes[0] >= 40000 and sizes[1] == 0
    assert native.lib.tg_scratch_bytes() == 0


@pytest.mark.parametrize("kernel, mc", [("failing", 0), ("empty", 1), ("empty", 2)])
def test_failures_fall_back_to_numpy(native, kernel, mc):
    """The kernel fails, there is no memory for its work space, or the work space function fails."""
    native.publish(native.kernel(f"{kernel}_float32"), mc=mc)
    native.lib.tg_reset_counters()
    a = whole_numbers((3, 5, 5), "f")
    np.testing.assert_array_equal(matmul(a, a), np.matmul(a, a))
    assert (native.lib.tg_served(0), native.lib.tg_declined(0)) == (0, 1)


# -- host and build


def test_cpu_features(native):
    out = native.ffi.new("char[4000]")
    length = native.lib.tg_cpu_features(out, 4000)
    names = native.ffi.string(out).decode().split()
    assert len(" ".join(names)) == length and len(set(names)) == len(names)
    assert native.lib.tg_cpu_features(native.ffi.NULL, 0) == length
    short = native.ffi.new("char[5]")
    assert native.lib.tg_cpu_features(short, 5) == length and len(native.ffi.string(short)) == min(4, length)
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith(("flags", "Features")):
            assert names and set(names) <= set(line.split(":")[1].split())


@pytest.mark.parametrize("file", sorted(path.name for path in NATIVE.glob("*.c")))
def test_c_compiles_without_warnings(file):
    include = [sysconfig.get_paths()["include"], np.get_include()]
    if not os.path.exists(os.path.join(include[0], "Python.h")):
        pytest.skip("needs Python's headers")
    subprocess.run(
        [compiler(), "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror",
         "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION", "-DNPY_TARGET_VERSION=NPY_2_0_API_VERSION",
         "-c", "-o", os.devnull, *(f"-isystem{folder}" for folder in include), str(NATIVE / file)],
        check=True, timeout=60,
    )

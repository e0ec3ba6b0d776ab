"""How tvmgemm._native is built: cffi in API mode over the C files of this folder. setup.py names `ffi`.

The declarations that Python sees are those of tvmgemm.h, which the C files include too.
"""
import os

import numpy
from cffi import FFI

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), os.pardir, os.pardir))
FOLDER = os.path.join("tvmgemm", "native")   # setuptools wants paths relative to setup.py
SOURCES = ("call.c", "cpu.c", "kernels.c", "loops.c", "mixed.c", "plans.c", "pool.c", "scratch.c", "sleepers.c", "ufunc.c")
HEADERS = ("tvmgemm.h", "fpstate.h", "native.h", "numpy_api.h", "sleepers.h")


def declarations() -> str:
    """The text of tvmgemm.h as cffi reads it: without preprocessor lines."""
    with open(os.path.join(ROOT, FOLDER, "tvmgemm.h"), encoding="utf-8") as file:
        return "".join(line for line in file if not line.startswith("#"))


ffi = FFI()
ffi.cdef(declarations() + "".join(f'extern "Python+C" int {name}(const tg_problem *problem);' for name in ("tg_miss", "tg_hot")))
ffi.set_source(
    "tvmgemm._native",
    '#include "tvmgemm.h"',
    sources=[os.path.join(FOLDER, name) for name in SOURCES],
    depends=[os.path.join(FOLDER, name) for name in HEADERS],
    include_dirs=[FOLDER, numpy.get_include()],
    # Hidden symbols: calls between our files stay direct, and nothing of ours can be replaced from outside.
    extra_compile_args=["-O2", "-std=gnu11", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
    libraries=["dl", "m"],
    # Built against any NumPy >= 2.0, runs with any NumPy >= 2.0. NumPy's headers refuse the limited C API,
    # which cffi chooses unless py_limited_api is False.
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_2_0_API_VERSION"),
                   ("NPY_TARGET_VERSION", "NPY_2_0_API_VERSION")],
    py_limited_api=False,
)

"""Importing tvmgemm is cheap and changes nothing; a call with a kernel in the store stays cheap."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import tvmgemm

#: What costs time or memory, or would make the package depend on what a user's folder holds.
HEAVY = {
    "tvm", "tvm_ffi", "platformdirs", "hashlib", "_hashlib", "json", "subprocess", "multiprocessing",
    "logging", "inspect", "asyncio", "concurrent", "tempfile", "random", "shutil", "argparse", "rich",
    "threadpoolctl", "scipy", "sklearn", "importlib.metadata", "urllib", "socket", "ssl", "pytest",
}  # fmt: skip

PROGRAM = """
import json, sys, numpy
before = set(sys.modules)
matmul, add = numpy.matmul, numpy.ones((2, 2)) @ numpy.ones((2, 2))
import tvmgemm
imported = set(sys.modules) - before
patched = tvmgemm.is_patched()
same = numpy.matmul is matmul
a = numpy.ones((40, 40), "f")
c = tvmgemm.matmul(a, a)
called = set(sys.modules) - before
stats = tvmgemm.stats()
import json
print(json.dumps(dict(imported=sorted(imported), called=sorted(called), patched=patched, same=same,
                      right=bool((c == 40).all()), served=stats.served["float32"], builds=stats.builds)))
"""


def fresh(program: str = PROGRAM) -> dict:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return json.loads(done.stdout)


def test_import_and_first_call_load_nothing_heavy():
    tvmgemm.matmul(np.ones((40, 40), "f"), np.ones((40, 40), "f"))  # so that the store has the kernel
    seen = fresh()
    assert not HEAVY & set(seen["imported"])
    assert not any(
        name.startswith(("tvm.", "numpy.linalg", "numpy.random", "numpy.fft")) for name in seen["imported"]
    )
    assert "tvmgemm.dispatch" not in seen["imported"] and "tvmgemm.planner" not in seen["imported"]
    assert not HEAVY & set(seen["called"]), "a call that finds its kernel in the store needs none of these"
    assert not any(
        "tvmgemm.family." + name in seen["called"] for name in ("codegen", "generator", "emit", "microkernel")
    )
    assert seen["right"] and seen["builds"] == 0


def test_import_patches_nothing():
    seen = fresh()
    assert not seen["patched"] and seen["same"]


def test_import_starts_no_thread_and_no_process():
    seen = fresh(
        "import json, os, threading, numpy\nbefore = len(os.listdir('/proc/self/task'))\nimport tvmgemm\n"
        "print(json.dumps([threading.active_count(), len(os.listdir('/proc/self/task')) - before]))"
        if sys.platform == "linux"
        else "import json, threading, tvmgemm\nprint(json.dumps([threading.active_count(), 0]))"
    )
    assert seen == [1, 0]


def test_import_makes_no_folder(tmp_path):
    """Nor do calls that are left to NumPy."""
    folder = tmp_path / "kernels"
    program = f"""
import os
os.environ["TVMGEMM_CACHE_DIR"] = {str(folder)!r}
import json, numpy, tvmgemm
tvmgemm.matmul(numpy.ones((3, 3), numpy.longdouble), numpy.ones((3, 3), numpy.longdouble))
tvmgemm.matmul(numpy.ones((90, 90), "f"), numpy.ones(90, "f"))
with tvmgemm.options(variant="numpy"):
    tvmgemm.matmul(numpy.ones((3, 3), "f"), numpy.ones((3, 3), "f"))
assert tvmgemm.stats().declined["float32"] == 2
print(json.dumps(os.path.exists(os.environ["TVMGEMM_CACHE_DIR"])))
"""
    assert fresh(program) is False


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="NumPy itself cannot be imported there")
def test_not_in_a_subinterpreter():
    program = """
import json, sys
import _xxsubinterpreters as interpreters
code = "import sys, warnings; sys.path[:] = %r; warnings.simplefilter('ignore'); import numpy; import tvmgemm" % sys.path
try:
    error = interpreters.run_string(interpreters.create(), code)
except interpreters.RunFailedError as raised:
    error = raised
print(json.dumps(str(error)))
"""
    assert "tvmgemm works in Python's main interpreter only" in fresh(program)


def test_public_names():
    assert set(tvmgemm.__all__) <= set(dir(tvmgemm)) and tvmgemm.__version__
    for name in tvmgemm.__all__:
        assert callable(getattr(tvmgemm, name)) and getattr(tvmgemm, name).__doc__, name

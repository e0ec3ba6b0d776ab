"""Programs in interpreters of their own, as users run them: how one is started, and what it says of itself.

Whatever happens in one, its products are right; where something is wrong, exactly one warning says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from equivalence import FORCED, RUNNABLE

#: The mark of tests that start them.
LINUX_WITH_KERNELS = [
    pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's /proc"),
]

#: What every program starts with. ``product(seed)`` is right or the program fails; its value is its bytes'
#: digest.
BEGINNING = """
import os, sys, threading, time, warnings, zlib
import numpy as np
import tvmgemm

def operands(seed=0, m=120, n=110, k=130, dtype="float32"):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)

def product(seed=0, **shape):
    a, b = operands(seed, **shape)
    c = tvmgemm.matmul(a, b)
    assert np.allclose(c, np.dot(a.astype("f8"), b.astype("f8")), atol=1e-3), "a wrong product"
    return zlib.crc32(c.tobytes())

def seen(**more):
    s = tvmgemm.stats()
    import json
    print(json.dumps(dict(
        served=s.served, declined=s.declined, builds=s.builds, failed=s.failed_builds, hits=s.store_hits,
        kernels=s.kernels, tvm="tvm" in sys.modules, **more)), flush=True)

caught = []
def remember(message, category, *rest):
    caught.append(f"{category.__name__}: {message}")
warnings.simplefilter("always")
warnings.showwarning = remember
"""

#: The companions of the first kernel follow in a thread: wait until it has ended.
WAIT = "[t.join(60) for t in threading.enumerate() if t.name.startswith('tvmgemm')]"

#: A beginning for programs of a machine that has no TVM.
WITHOUT_TVM = """
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tvm", "tvm_ffi"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""

#: Four products, for :func:`assert_numpy_served_with_one_warning`.
SAY = """
values = [product(seed) for seed in (0, 1)] + [product(2, dtype="float64"), product(3, m=9, n=8, k=7)]
seen(warned=caught)
"""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment with a narrow ISA (its kernels compile fastest), a forced variant and
    ``changes``.
    """
    base = {"TVMGEMM_MAX_ISA": RUNNABLE[0], "TVMGEMM_VARIANT": FORCED, "TVMGEMM_NUM_THREADS": "1"}
    merged = {**os.environ, **base, **changes}
    return {name: str(value) for name, value in merged.items() if value is not None}


def start(program: str, *flags: str, **changes: str | None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *flags, "-c", BEGINNING + textwrap.dedent(program)],
        env=environment(**changes), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def result(process: subprocess.Popen, timeout: float = 120) -> dict:
    """What the program printed last; it must have ended well and written nothing to stderr."""
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, error
    assert error == "", error
    return json.loads(out.splitlines()[-1])


def run(program: str, *flags: str, **changes: str | None) -> dict:
    return result(start(program, *flags, **changes))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def script(path: Path, text: str) -> Path:
    """A shell script that stands for the linker."""
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def assert_numpy_served_with_one_warning(said: dict, *words: str) -> None:
    assert not any(said["served"].values()) and sum(said["declined"].values()) == 4
    assert said["builds"] == 0 and len(said["warned"]) == 1
    assert said["warned"][0].startswith("RuntimeWarning")
    for word in words:
        assert word in said["warned"][0], said["warned"][0]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store that one process has filled, and what that process saw."""
    folder = tmp_path_factory.mktemp("built") / "kernels"
    return folder, run(f"first = product(); {WAIT}; seen(value=first)", TVMGEMM_CACHE_DIR=folder)


@pytest.fixture
def store(built, tmp_path):
    """A copy of the filled store."""
    folder = tmp_path / "kernels"
    shutil.copytree(built[0], folder)
    folder.chmod(0o700)
    return folder

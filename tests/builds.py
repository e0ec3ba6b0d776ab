"""Builds whose compiler is a few statements of the test, and whose object file comes from C."""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tvmgemm.build import parent
from tvmgemm.build.parent import build
from tvmgemm.spec import KernelSpec
from tvmgemm.store import kernel_key

ROOT = str(Path(parent.__file__).parents[2])
SPEC = KernelSpec("float32", "x86-64-v2", "B3A2C0", 4, 8)
OTHER, THIRD = replace(SPEC, nr=12), replace(SPEC, nr=16)

#: The mark of tests of such builds.
STARTS_FROM_C = pytest.mark.skipif(shutil.which("cc") is None, reason="these builds start from C")

#: A program that builds SPEC once a line comes in. Its arguments: the folders of the package, of the store and of the
#: compiler, and "locks" or "no locks".
RACER = """
import sys, types
package = types.ModuleType("tvmgemm"); package.__path__ = [sys.argv[1]]; sys.modules["tvmgemm"] = package
sys.path.append(sys.argv[3])
from tvmgemm.build.parent import build
from tvmgemm.spec import KernelSpec
from tvmgemm.store import Store
spec = KernelSpec("float32", "x86-64-v2", "B3A2C0", 4, 8)
if sys.argv[4] == "no locks":
    import fcntl
    def flock(*arguments):
        raise OSError(37, "No locks available")
    fcntl.flock = flock
sys.stdin.readline()
(result,) = build([spec], Store(sys.argv[2]), 30.0, "fake_compiler:compile_object", {})
print(result.path, result.error)
"""


@pytest.fixture(autouse=True)
def no_compiler_chosen(monkeypatch):
    monkeypatch.delenv("CC", raising=False)


@pytest.fixture(scope="module")
def object_file(tmp_path_factory):
    """An object file with one function, ``int answer(void)``."""
    folder = tmp_path_factory.mktemp("object")
    (folder / "answer.c").write_text("int answer(void) { return 42; }\n")
    subprocess.run(["cc", "-c", "-fPIC", "-o", folder / "answer.o", folder / "answer.c"], check=True)
    return folder / "answer.o"


@pytest.fixture
def compiler(tmp_path, object_file, monkeypatch):
    """Makes a compile function out of statements that run before the object is written; returns its name."""
    folder = tmp_path / "compilers"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(statements="pass"):
        (folder / "fake_compiler.py").write_text(
            "import os, shutil, signal, sys, time\n"
            f"HERE = {str(tmp_path)!r}\n"
            "def compile_object(spec, object_path):\n"
            f"    {statements}\n"
            f"    shutil.copy({str(object_file)!r}, object_path)\n"
        )
        return "fake_compiler:compile_object"

    return make


def build_all(specs, store, compile, timeout=30.0, pins=None):
    return list(build(specs, store, timeout, compile, pins or {}))


def only(results):
    (result,) = results
    return result


def leftovers(store):
    return [
        name
        for name in os.listdir(store.folder)
        if not name.endswith(".so") and not name.startswith(".lock-")
    ]


def kernel_lock_is_free(store, spec):
    with store.lock(kernel_key(spec)) as lock:
        return lock.held

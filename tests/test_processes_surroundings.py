"""Odd surroundings: signals, streams and files of the program around a build, products inside its warnings."""

from __future__ import annotations

import json
import subprocess
import sys

from processes import BEGINNING, LINUX_WITH_KERNELS, environment, run, start

pytestmark = LINUX_WITH_KERNELS


def test_signals_of_children_are_ignored(tmp_path):
    """Where SIGCHLD is ignored, nobody learns how a child ended; a build is still a build."""
    program = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); product(); seen(warned=caught)"
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    assert said["served"]["float32"] == 1 and said["builds"] >= 1 and said["warned"] == []


def test_closed_standard_streams(tmp_path):
    """A daemon has none: pipes to the build process must not be taken for them."""
    report = tmp_path / "report"
    program = f"""
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    product()
    sys.stdout = open({str(report)!r}, "w")
    seen(warned=caught)
    sys.stdout.flush()
    """
    process = start(program, TVMGEMM_CACHE_DIR=tmp_path / "k")
    process.communicate(timeout=120)
    said = json.loads(report.read_text())
    assert said["served"]["float32"] == 1 and said["builds"] >= 1 and said["warned"] == []


def test_products_inside_the_warning(tmp_path):
    """A program's own code runs while we warn or log, and may multiply: that must not wait for itself."""
    program = """
    tvmgemm.patch_numpy()
    inner = []
    def show(message, *rest):
        caught.append(str(message))
        x = np.ones((5, 5), "f")
        inner.append(bool(((x @ x) == 5).all()) and bool(((x.astype("f8") @ x.astype("f8")) == 5).all()))
    warnings.showwarning = show
    product()
    product(1, dtype="float64")
    seen(inner=inner, warned=caught)
    """
    said = run(program, TVMGEMM_CACHE_DIR=tmp_path / "k", PATH=str(tmp_path), CC=None)
    assert said["inner"] and all(said["inner"]) and not any(said["served"].values())


def test_the_users_files_are_not_imported(tmp_path):
    """Files beside the program that are called like modules which the compiler imports do not get into a
    build.
    """
    for name in ("typing_extensions", "ml_dtypes", "difflib", "decimal", "psutil", "tvm_ffi"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    (tmp_path / "main.py").write_text(BEGINNING + "product(); seen(warned=caught)")
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=environment(TVMGEMM_CACHE_DIR=tmp_path / "k"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["served"]["float32"] == 1 and said["failed"] == 0 and said["warned"] == []

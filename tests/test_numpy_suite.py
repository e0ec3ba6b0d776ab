"""NumPy's own tests of matmul and of linalg pass with our kernels under them, both ways of putting them
there.

Each run is a process of its own and is compared with a run of unpatched NumPy on the same machine, test by
test: a test that fails there may fail here, no other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from equivalence import FORCED, RUNNABLE

from tvmgemm.family.tiles import KERNEL_DTYPES, TILES
from tvmgemm.problem import DTYPES

HERE = Path(__file__).resolve().parent

#: What is run: NumPy's tests of matmul, of the operators, and of linalg.
MODULE = "numpy._core.tests.test_multiarray"
MATMUL = tuple(f"{MODULE}::{name}" for name in ("TestMatmul", "test_matmul_axes"))
MATMUL += tuple(f"{MODULE}::{name}" for name in ("TestMatmulOperator", "TestMatmulInplace"))
ALL = (*MATMUL, "numpy.linalg")

NARROW = {"TVMGEMM_MAX_ISA": next(iter(RUNNABLE), "")}

#: Name -> how our kernels get there, which tests, settings.
RUNS = {
    "numpy": ("numpy", ALL, {}),
    "patched": ("patched", ALL, {}),
    "patched, forced": ("patched", ALL, {"TVMGEMM_VARIANT": FORCED, "TVMGEMM_NUM_THREADS": "2"}),
    "attribute": ("attribute", MATMUL, {}),
    "attribute, forced": ("attribute", MATMUL, {"TVMGEMM_VARIANT": FORCED}),
    "patched, forced, narrow": ("patched", MATMUL, {"TVMGEMM_VARIANT": FORCED, **NARROW}),
}


def run_suite(folder: Path, how: str, tests: tuple[str, ...], environment: dict[str, str]) -> dict:
    """One run in an empty folder; what the plugin wrote down."""
    report = folder / "report.json"
    (folder / "pytest.ini").write_text("[pytest]\n")  # NumPy's marks, not this project's settings
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "numpy_suite_plugin",
            "--pyargs",
            *tests,
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH")])
            ),
            "TVMGEMM_SUITE": how,
            "TVMGEMM_SUITE_REPORT": str(report),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return {**json.loads(report.read_text()), "printed": done.stdout}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, two at a time; waited for when a test asks."""
    pytest.importorskip(
        "numpy._core.tests.test_multiarray", reason="this NumPy was installed without its tests"
    )
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(run_suite, tmp_path_factory.mktemp("suite"), *run) for name, run in RUNS.items()
        }


def passed(run: dict) -> set[str]:
    return {name for name, outcome in run["outcomes"].items() if outcome == "passed"}


def assert_as_good(ours: dict, numpys: dict, tests: tuple[str, ...]) -> None:
    """Nothing fails that NumPy passes, and no fewer tests ran."""
    expected = {name for name in passed(numpys) if tests == ALL or name.startswith("test_multiarray::")}
    worse = {name: ours["outcomes"].get(name, "not run") for name in expected - passed(ours)}
    assert not worse, f"{worse}\n{ours['printed'][-6000:]}"
    assert len(passed(ours)) >= len(expected) > 200
    failed = {name for name, outcome in ours["outcomes"].items() if outcome == "failed"}
    assert failed <= {name for name, outcome in numpys["outcomes"].items() if outcome == "failed"}


def served_dtypes(environment: dict[str, str]) -> list[str]:
    """Those of one element type that have kernels under these settings: NumPy's tests multiply all of them."""
    levels = RUNNABLE[:1] if "TVMGEMM_MAX_ISA" in environment else RUNNABLE
    return [name for name in KERNEL_DTYPES if name == DTYPES[name].a == DTYPES[name].c and name != "bfloat16"
            and any((isa, name) in TILES for isa in levels)]  # fmt: skip


@pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run[0] != "numpy"])
def test_numpys_tests_pass_with_our_kernels(runs: dict[str, Future], name):
    ours = runs[name].result()
    assert_as_good(ours, runs["numpy"].result(), RUNS[name][1])
    assert ours["failed_builds"] == 0
    forced = "forced" in name
    for dtype in served_dtypes(RUNS[name][2]):
        assert ours["served"][dtype] > 0, "our kernels computed nothing"
        assert not forced or ours["declined"][dtype] == 0
    assert sum(ours["kernels"].values()) > 0
    if name.startswith("attribute"):
        assert "TestMatmul" in ours["replaced"]
    else:
        assert ours["still_patched"], "a test of NumPy's undid the patch"
    if "narrow" in name:
        assert all(kernel.endswith(RUNNABLE[0]) for kernel in ours["kernels"])


def test_the_right_tests_ran(runs: dict[str, Future]):
    """The classes that matter are among them."""
    names = passed(runs["numpy"].result())
    wanted = (
        "TestMatmul::",
        "TestMatmulOperator::",
        "TestMatmulInplace::",
        "test_matmul_axes",
        "TestMatrixPower::",
    )
    for words in (*wanted, "test_linalg::test_matmul", "TestSolve::", "TestPinv::"):
        assert any(words in name for name in names), words

"""The benchmarks: what suites hold, their operands and references, and the command.

No test of the benchmarks depends on how fast anything is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import elements, peers, runner, shapes
from benchmarks.suite import EXTENTS, LAYOUTS, Case, product
from benchmarks.suites import SUITES

ROOT = Path(__file__).resolve().parent.parent


def benchmarks(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


# -- cases and suites


@pytest.mark.parametrize(
    "case, label, flops",
    [
        (product(2, 3, 4), "2x3x4", 48),
        (product(2, 3, 4, "a layer"), "2x3x4 (a layer)", 48),
        (Case((5, 1, 2, 4), (7, 4, 3)), "5*7*2x3x4", 48 * 35),
        (Case((4,), (4, 3)), "1x3x4", 24),
        (Case((2, 4), (4,)), "2x1x4", 16),
        (Case((2, 4), (4, 3), "C", "F"), "2x3x4 B=F", 48),
        (Case((2, 4), (4, 3), "[::2]", out_layout="F"), "2x3x4 A=[::2] out=F", 48),
        (Case((2, 4), (4, 2), mirrored=True), "2x2x4 B=A.T", 32),
    ],
)
def test_cases_say_what_they_are(case, label, flops):
    assert (case.label, case.flops) == (label, flops)
    a, b = case.operands("float32")
    assert (a.shape, b.shape, a.dtype, b.dtype) == (case.a, case.b, np.float32, np.float32)
    assert np.matmul(a, b).size * 2 * a.shape[-1] == flops


def test_operands_repeat_and_lie_as_asked():
    case = Case((3, 4), (4, 5), "F", "C")
    first, second = case.operands("float64"), case.operands("float64")
    assert all(np.array_equal(x, y) for x, y in zip(first, second))
    assert first[0].flags.f_contiguous and first[1].flags.c_contiguous
    assert not np.array_equal(first[0], case.operands("float64", seed=1)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_layouts_keep_the_shape(layout, shape):
    made = LAYOUTS[layout](shape, lambda shape: np.arange(float(np.prod(shape))).reshape(shape))
    assert made.shape == shape
    assert (made.strides == np.empty(shape).strides) == (layout == "C")
    if layout.startswith("[:,"):
        assert LAYOUTS[layout]((5,), np.zeros).shape == (5,)


def test_a_mirrored_operand_is_the_same_memory():
    a, b = Case((3, 4), (4, 3), a_layout="F", mirrored=True).operands("float32")
    assert np.shares_memory(a, b) and np.array_equal(b, a.T) and a.flags.f_contiguous


def test_results_lie_as_asked():
    out = Case((3, 4), (4, 5), out_layout="F").result(np.zeros((3, 5), np.float32))
    assert (out.shape, out.dtype, out.flags.f_contiguous) == ((3, 5), np.float32, True)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_suite_has_cases_and_known_names(suite):
    for dtype in suite.dtypes:
        counts = [len(list(suite.cases(dtype, extent))) for extent in EXTENTS]
        assert 0 < counts[0] <= counts[1] <= counts[2]
        for case in suite.cases(dtype, "full"):
            assert set(case.targets) <= set(suite.targets), "a peer that the suite does not say it needs"
        labels = [case.label for case in suite.cases(dtype, "full")]
        if suite.measure is None and suite.name != "dtypes":
            assert len(labels) == len(set(labels)), "two cases that a report cannot tell apart"
    assert set(suite.entries) <= set(runner.ENTRIES)
    assert set(suite.targets) <= set(peers.PEERS)
    assert suite.unit in ("GFLOP/s", "us", "ms")


def test_the_suites_of_the_project():
    assert list(SUITES) == [
        "squares", "odd", "small", "calls", "stacks", "layers", "transformer", "vectors", "skinny", "strided",
        "symmetric", "stream", "dtypes", "choices", "startup", "family", "ladder",
    ]  # fmt: skip
    assert [case.peak for case in SUITES["squares"].cases("float32", "usual") if case.peak] == [0.92]
    assert [case.targets["numpy"] for case in SUITES["stacks"].cases("float32", "usual")][:5] == [4, 3, 2, 1.3, 1.1]
    assert [case.a[0] for case in SUITES["calls"].cases("float32", "usual")] == [2, 4, 8, 16]
    assert len(list(SUITES["layers"].cases("float32", "full"))) == len(shapes.RESNET50) + len(shapes.VGG16)


# -- elements


@pytest.mark.parametrize(
    "name, types, keywords",
    [
        ("float32", ("float32",) * 3, {}),
        ("int8-int32", ("int8", "int8", "int32"), {"dtype": np.int32}),
        ("uint8-int8-int32", ("uint8", "int8", "int32"), {"dtype": np.int32}),
        ("float16-float32", ("float16", "float16", "float32"), {"dtype": np.float32}),
    ],
)
def test_elements_of_a_name(name, types, keywords):
    assert elements.of(name) == types and elements.keywords(name) == keywords


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "complex128"])
def test_random_elements(name):
    made = elements.random(np.random.default_rng(0), (50, 40), name)
    assert (made.dtype, made.shape, made.flags.c_contiguous, made.flags.writeable) == (np.dtype(name), (50, 40), True, True)
    assert len(np.unique(made)) > (1 if name == "bool" else 50)
    if made.dtype.kind in "iu":
        info = np.iinfo(name)
        assert made.min() < info.min / 2 + info.max / 8 and made.max() > info.max // 2, "not over the whole range"


def test_few_bools_are_true():
    made = elements.random(np.random.default_rng(0), (100, 100), "bool", density=0.01)
    assert 50 < made.sum() < 150


@pytest.mark.parametrize("name", ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64", "float16", "complex64"])
def test_the_reference_is_what_numpy_computes(name):
    a, b = Case((7, 600), (600, 5)).operands(name)
    expected, found = np.matmul(a, b), elements.reference(a, b, name)
    assert found.dtype == expected.dtype and not elements.wrong(found, expected, a, b).any()


@pytest.mark.parametrize("name", ["int8-int32", "uint8-int8-int32", "uint8-uint32", "int16-int32"])
def test_the_reference_of_mixed_elements(name):
    a, b = Case((7, 600), (600, 5)).operands(name)
    assert np.array_equal(elements.reference(a, b, name), np.matmul(a, b, **elements.keywords(name)))


@pytest.mark.parametrize("name, off", [("float16", 0.5), ("complex64", 1e-2j), ("float32", 1e-3), ("float64", 1e-9)])
def test_what_is_too_far_off_is_wrong(name, off):
    a, b = Case((4, 30), (30, 5)).operands(name)
    exact = elements.reference(a, b, name)
    changed = exact.copy()
    changed[2, 3] += off
    assert np.argwhere(elements.wrong(changed, exact, a, b)).tolist() == [[2, 3]]


# -- the command


def test_list():
    result = benchmarks("--list")
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(SUITES)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cubes"], "suite 'cubes' is not one of squares, odd, small, calls"),
        (["--peers", "numpy,blis"], "peer 'blis' is not one of numpy, mkl, torch"),
        (["--dtypes", "float8", "small"], "dtype 'float8' is not one of float32, float64"),
        (["--threads", "0.5"], "invalid"),
        (["--quick", "--full"], "not allowed with"),
    ],
)
def test_what_there_is_not(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("TVMGEMM_CACHE_DIR", str(ROOT / "cache"))
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_thread_counts():
    assert command.thread_counts("1,all") == (1, 0)
    assert command.names(" a, b,") == ("a", "b")


def test_numpy_is_not_handicapped(monkeypatch):
    """OPENBLAS_CORETYPE makes OpenBLAS run another CPU's kernels: the run starts again without it, and says
    so."""
    result = benchmarks("--list", OPENBLAS_CORETYPE="Nehalem", OPENBLAS_L2_SIZE="1024")
    assert result.returncode == 0 and len(result.stdout.splitlines()) == len(SUITES)

    started = []
    monkeypatch.setattr(os, "execv", lambda path, argv: started.append((path, argv)))
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1024")
    monkeypatch.setenv("TVMGEMM_BENCHMARKS_RESTARTED", "")
    monkeypatch.delenv("TVMGEMM_BENCHMARKS_RESTARTED")
    notes = command.restart_undistorted()
    assert started == [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert "OPENBLAS_CORETYPE" not in os.environ and "OPENBLAS_L2_SIZE" not in os.environ
    (note,) = notes
    assert note.startswith("OPENBLAS_CORETYPE=Nehalem and OPENBLAS_L2_SIZE=1024 was set: started again")


def test_a_run_from_the_command_line(tmp_path):
    files = tmp_path / "out" / "run.json", tmp_path / "out" / "run.md"
    result = benchmarks(
        "calls", "--quick", "--peers", "numpy", "--dtypes", "float32", "--threads", "1", "--seconds", "0.01",
        "--json", files[0], "--markdown", files[1],
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    data = json.loads(files[0].read_text())
    assert len(data["rows"]) == 8 and data["peak"]["float32"]["1"] > 0
    assert {row["entry"] for row in data["rows"]} == {"matmul", "patched"}
    assert all(row["served"] for row in data["rows"])
    assert "python -m benchmarks calls --quick" in files[1].read_text()
    assert data["settings"] == {}
    assert "16x16x16" in result.stdout

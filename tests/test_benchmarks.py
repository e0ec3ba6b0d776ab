"""The benchmarks: what suites hold, how rows are judged and reported, and a real run of one small case.

No test here depends on how fast anything is.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tvmgemm
from benchmarks import __main__ as command
from benchmarks import dtypes, elements, machine, page, peak, peers, plot, report, runner, shapes, startup, stream
from benchmarks.runner import Row
from benchmarks.suite import EXTENTS, LAYOUTS, Case, Conditions, Suite, product
from benchmarks.suites import SUITES
from tvmgemm import settings
from tvmgemm.timing import Ratio

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
# -----------------------------------------------------------------------------------------------


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
        "symmetric", "stream", "dtypes", "startup", "family", "ladder",
    ]  # fmt: skip
    assert [case.peak for case in SUITES["squares"].cases("float32", "usual") if case.peak] == [0.92]
    assert [case.targets["numpy"] for case in SUITES["stacks"].cases("float32", "usual")][:5] == [4, 3, 2, 1.3, 1.1]
    assert [case.a[0] for case in SUITES["calls"].cases("float32", "usual")] == [2, 4, 8, 16]
    assert len(list(SUITES["layers"].cases("float32", "full"))) == len(shapes.RESNET50) + len(shapes.VGG16)


# -- elements
# --------------------------------------------------------------------------------------------------------


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


# -- rows and reports
# -----------------------------------------------------------------------------------------------

FASTER = Row(
    "squares", "8x8x8", "float32", 1, "matmul", "numpy",
    seconds=1e-6, peer_seconds=2e-6, flops=1024.0, peak=0.25,
    ratio=Ratio(2.0, 1.9, 2.1, 25), served=True, plan="a-kernel", target=1.0,
)  # fmt: skip
SLOWER = replace(
    FASTER, case="9x9x9", ratio=Ratio(0.5, 0.4, 0.6, 25), peer_seconds=5e-7, served=False, plan="too|big"
)
ALONE = replace(FASTER, peer="mkl", ratio=None, peer_seconds=None, target=None)


def test_rows_are_judged_by_their_target_and_limit():
    assert [row.missed for row in (FASTER, SLOWER, ALONE)] == [False, True, False]
    assert not replace(SLOWER, target=None).missed
    assert replace(ALONE, limit=0.5e-6).missed and not replace(ALONE, limit=2e-6).missed


def test_a_row_may_have_to_reach_a_fraction_of_the_peak():
    row = replace(FASTER, peak=0.914, peak_target=0.92)
    assert row.below_peak and not replace(row, peak=0.916).below_peak and not FASTER.below_peak
    assert report.cells(row, "GFLOP/s")[8] == "! 91%" and not row.missed


def test_rows_derive_their_speed():
    assert FASTER.gflops == pytest.approx(1.024) and FASTER.peer_gflops == pytest.approx(0.512)
    assert ALONE.peer_gflops is None and replace(FASTER, flops=None).gflops is None


@pytest.fixture
def results():
    return report.Results(
        command="python -m benchmarks squares --markdown page.md",
        date="2026-01-02 03:04 UTC",
        tvmgemm="1.2.3",
        settings={"jit": "off"},
        machine={
            "cpu": "A CPU", "isa": "x86-64-v4", "cores": 2, "system": "Linux", "python": "3.11",
            "caches": [{"level": 1, "bytes": 48 << 10}, {"level": 2, "bytes": 2 << 20}],
            "load_average": [0.1, 0.2, 0.3],
        },
        peers=[{"name": "numpy", "version": "2.4, openblas 0.3", "kernels": "SkylakeX", "caveat": "careful"}],
        peak={"float32": {1: 123.45, 2: 234.56}},
        notes=["something to know"],
        rows=[FASTER, SLOWER, ALONE, replace(FASTER, suite="calls", entry="patched")],
    )  # fmt: skip


def test_cells_follow_the_unit_of_the_suite():
    assert report.cells(FASTER, "GFLOP/s") == [
        "8x8x8", "float32", "1", "matmul", "1.02", "numpy", "0.51",
        "2.00 [1.90..2.10]", "25%", "yes", "a-kernel",
    ]  # fmt: skip
    assert report.cells(FASTER, "us")[4:7] == ["1.00", "numpy", "2.00"]
    slow = replace(FASTER, seconds=0.123, peer_seconds=12.3)
    assert report.cells(slow, "ms")[4:7] == ["123", "numpy", "12300"]


def test_a_row_that_misses_its_target_is_marked():
    assert report.cells(SLOWER, "GFLOP/s")[7] == "! 0.50 [0.40..0.60]"
    assert report.cells(replace(ALONE, limit=1e-9), "ms")[7] == "! -"
    assert report.cells(ALONE, "GFLOP/s")[4:8] == ["1.02", "mkl", "-", "-"]


def test_lines_are_aligned():
    lines = [report.heading("us"), report.line(FASTER, "us"), report.line(SLOWER, "us")]
    assert len({line.index(word) for line, word in zip(lines, ("plan", "a-kernel", "too|big"))}) == 1


def test_summary_counts_and_averages():
    rows = [FASTER, SLOWER, ALONE]
    assert report.summary(rows) == [
        "float32, 1 thread, matmul over numpy: 1.00 (geometric mean), 1 of 2 under the target of 1",
        "all over numpy: 1.00 (geometric mean)",
        "1 of 2 calls were served by NumPy itself",
    ]
    assert report.summary([FASTER], target=2.5)[1] == "all over numpy: ! 2.00 (geometric mean, target 2.5)"
    assert report.summary([FASTER], target=2.0)[1] == "all over numpy: 2.00 (geometric mean, target 2)"
    assert report.summary([replace(FASTER, threads=2, target=None)]) == [
        "float32, 2 threads, matmul over numpy: 2.00 (geometric mean)"
    ]
    assert report.summary([ALONE]) == []


def test_the_better_peer_of_each_case_counts():
    mkl = replace(FASTER, peer="mkl", ratio=Ratio(1.5, 1.4, 1.6, 25))
    torch = replace(FASTER, peer="torch", ratio=Ratio(0.1, 0.1, 0.1, 25), target=None)
    assert report.against_the_better([FASTER, mkl, torch, SLOWER, ALONE]) == [mkl, SLOWER]
    assert report.mean([mkl, SLOWER]) == pytest.approx(0.75**0.5)


def test_markdown_says_how_the_numbers_came_about(results):
    text = report.markdown(results, list(SUITES.values()))
    for fact in (
        results.command, results.date, "A CPU, x86-64-v4, 2 cores, L1 48 KiB, L2 2 MiB",
        "load average: 0.10, 0.20, 0.30", "tvmgemm: 1.2.3, jit=off", "float32 123.5 GFLOP/s",
        "numpy: 2.4, openblas 0.3, kernels: SkylakeX (careful)", "note: something to know",
        "## squares: square products", "## calls: ", "! 0.50 [0.40..0.60]", "too\\|big",
    ):  # fmt: skip
        assert fact in text
    assert "## layers" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {12}
    assert "tvmgemm, GFLOP/s" in text and "tvmgemm, us" in text


def test_json_holds_everything_and_what_follows_from_it(results):
    data = json.loads(json.dumps(report.to_json(results)))
    assert data["command"] == results.command and data["peak"] == {"float32": {"1": 123.45, "2": 234.56}}
    row = data["rows"][1]
    assert row["ratio"] == {"median": 0.5, "low": 0.4, "high": 0.6, "rounds": 25}
    assert (row["missed"], row["served"]) == (True, False)
    assert row["gflops"] == pytest.approx(1.024)


def test_a_busy_machine_is_reported(results):
    assert not any("busy" in line for line in report.preamble(results))
    results.machine["load_average"] = [1.5, 1.0, 1.0]
    assert machine.busy(results.machine)
    assert any("the machine was busy" in line for line in report.preamble(results))


def test_results_come_back_from_json(results):
    again = report.from_json(json.loads(json.dumps(report.to_json(results))))
    assert again == results
    other = replace(results, peak={"float64": {1: 60.0}}, rows=[SLOWER])
    both = report.joined(results, other)
    assert both.peak == {**results.peak, "float64": {1: 60.0}} and both.rows == [*results.rows, SLOWER]


# -- docs/performance.md
# --------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "performance.md").read_text()
SQUARES = [SUITES["squares"]]


def block_of(text, name):
    return text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end {name} -->")[0]


def test_the_page_has_a_place_for_every_suite():
    assert set(page.SUITES) == set(SUITES) - {"family", "ladder"}
    for name in ("machine", "overview", *page.SUITES):
        assert PAGE.count(f"<!-- {name} -->") == PAGE.count(f"<!-- end {name} -->") == 1


def test_results_replace_their_suites_and_nothing_else(results):
    text = page.updated(PAGE, results, SQUARES)
    assert "FMA peak: float32 123.5 GFLOP/s on one core, 234.6 GFLOP/s on 2 cores at once" in block_of(text, "machine")
    squares = block_of(text, "squares")
    assert "    python -m benchmarks squares\n" in squares, "a file's name is not for the page"
    assert "2026-01-02 03:04 UTC; numpy 2.4, openblas 0.3, SkylakeX kernels" in squares
    assert "| 8x8x8 | 2.00 [1.90..2.10] 25 % | a-kernel |" in squares
    assert "| 9x9x9 | **! 0.50** [0.40..0.60] N | too\\|big |" in squares
    assert "Under their target, 1 of 2: 9x9x9: float32 1 thread 0.50." in squares
    row = next(line for line in block_of(text, "overview").splitlines() if line.startswith("| squares"))
    assert row == "| squares | 2 | 1 | 0.50 | ! 1.00 | 1.05 | 1 |"
    for name in page.SUITES[1:]:
        assert block_of(text, name) == block_of(PAGE, name)
    assert page.updated(text, results, SQUARES) == text


def test_a_later_suite_keeps_the_rows_of_the_others(results):
    text = page.updated(PAGE, results, SQUARES)
    text = page.updated(text, results, [SUITES["calls"]])
    found = [line.split("|")[1].strip() for line in block_of(text, "overview").splitlines() if line.startswith("| ")]
    assert [name for name in found if name in ("squares", "calls")] == ["squares", "calls"]


def test_a_fraction_of_the_peak_is_marked_by_itself(results):
    results.rows = [replace(FASTER, peak=0.8, peak_target=0.92)]
    squares = block_of(page.updated(PAGE, results, SQUARES), "squares")
    assert "2.00 [1.90..2.10] **! 80 %**" in squares and "8x8x8: float32 1 thread 80 % of the peak" in squares


def test_many_dtypes_get_a_row_each(results):
    results.rows = [replace(FASTER, suite="dtypes", dtype=name) for name in ("int8", "int16", "int32", "int64", "bool")]
    dtypes_block = block_of(page.updated(PAGE, results, [SUITES["dtypes"]]), "dtypes")
    assert "| int64 | 8x8x8 | numpy | 2.00 [1.90..2.10] 25 % | 1 | 1.02 | 0.51 | a-kernel |" in dtypes_block


def test_a_page_without_a_place_is_refused(results):
    with pytest.raises(ValueError, match="no block <!-- squares -->"):
        page.updated(PAGE.replace("<!-- squares -->", ""), results, SQUARES)


def test_speed_is_plotted_against_size(results, tmp_path):
    pytest.importorskip("matplotlib")
    results.rows = [replace(FASTER, case=f"{n}x{n}x{n}", threads=threads) for n in (256, 512) for threads in (1, 2)]
    assert plot.speeds(results.rows[:1]) == {"tvmgemm": {256: FASTER.gflops}, "numpy": {256: FASTER.peer_gflops}}
    plot.speed_against_size(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    results.rows = []
    plot.speed_against_size(results, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_the_command_takes_files_and_suites(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "update_performance.py")]
    wrong = subprocess.run([*command, "cubes"], capture_output=True, text=True, timeout=100)
    assert wrong.returncode == 2 and "cubes: neither a file nor one of squares, odd" in wrong.stderr


# -- the machine and the peers
# --------------------------------------------------------------------------------------


def test_the_machine_is_described():
    description = machine.describe()
    assert json.loads(json.dumps(description)) == description
    assert description["cores"] >= 1 and len(description["load_average"]) == 3


def test_missing_peers_are_told_apart_from_usable_ones(monkeypatch):
    class Absent(peers.Peer):
        def __init__(self):
            raise ImportError("not on this machine")

    Absent.__abstractmethods__ = frozenset()
    monkeypatch.setitem(peers.PEERS, "mkl", Absent)
    usable, missing = peers.available(("numpy", "mkl"))
    assert list(usable) == ["numpy"] and missing == {"mkl": "not on this machine"}


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("layouts", ["CC", "CF", "FC", "FF"])
def test_every_usable_peer_computes_the_product(name, dtype, layouts):
    usable, missing = peers.available((name,))
    if missing:
        assert name != "numpy" and missing[name]  # an optional peer that isn't installed says why
        return
    a, b = Case((3, 5), (5, 4), *layouts).operands(dtype)
    out = np.full((3, 4), np.nan, dtype)
    function = usable[name].function(a, b, out)
    usable[name].set_threads(1)
    function()
    np.testing.assert_allclose(out, np.matmul(a, b), rtol=1e-4)
    assert usable[name].function(a, b, None)() is not None or name == "mkl"
    assert usable[name].version() and usable[name].kernels()


@pytest.mark.parametrize("name", peers.PEERS)
@pytest.mark.parametrize("dtype", ["int8", "int8-int32", "float16", "bfloat16", "bfloat16-float32", "bool"])
def test_peers_compute_other_elements_or_say_that_they_cannot(name, dtype):
    usable, missing = peers.available((name,))
    if missing or elements.missing(dtype):
        pytest.skip(missing.get(name) or elements.missing(dtype))
    a, b = Case((32, 40), (40, 24)).operands(dtype)
    expected = elements.reference(a, b, dtype)
    function = usable[name].function(a, b, None, elements.keywords(dtype).get("dtype"))
    if function is None:
        assert name != "numpy"
        return
    result = np.asarray(function() if name == "numpy" else function().float())
    assert not elements.wrong(result.astype(expected.dtype), expected, a, b).any()


@pytest.mark.parametrize(
    "x, operand",
    [
        (np.zeros((3, 4)), (False, 4)),
        (np.zeros((3, 4), order="F"), (True, 3)),
        (np.zeros((3, 8))[:, :4], (False, 8)),
        (np.zeros((3, 8))[:, ::2], None),
        (np.zeros((3, 4))[::-1], None),
        (np.zeros((2, 3, 4)), None),
    ],
)
def test_what_blas_can_read(x, operand):
    assert peers._blas_operand(x) == operand


def test_the_peak_of_one_core_and_of_two_at_once_is_measured():
    from tvmgemm.host import host

    meter = peak.build(host().isa().name, ("float32", "float64"))
    assert meter.dtypes == ("float32", "float64")
    for dtype in meter.dtypes:
        assert meter.gflops(dtype) > 0 and meter.gflops(dtype, 2) > 0
        assert meter.highest(dtype, 1, samples=3) > 0


def test_a_peak_that_cannot_be_measured_says_why():
    with pytest.raises(RuntimeError, match="the peak could not be measured: KeyError: 'no-such-isa'"):
        peak.build("no-such-isa", ("float32",))


def test_loops_count_that_ran_while_all_threads_did():
    early, late = [(0.0, 0.5), (1.0, 2.0), (2.0, 4.0)], [(1.0, 4.0), (4.0, 6.0)]
    assert peak.fastest([early, late]) == [1.0, 3.0], "the first loop had a machine of its own, the last one too"
    assert peak.fastest([[(0.0, 1.0)], [(2.0, 4.0)]]) == [1.0, 2.0], "none did"


def test_each_sample_is_judged_by_the_peak_of_its_round():
    peaks = iter((1.0, 100.0, 50.0, 50.0))  # the first is that of the calibration
    beside = peak.Beside(lambda: next(peaks))
    for _ in range(4):
        beside.take("ours")
    assert beside.fraction("ours", [1.0, 2.0, 1.0], 50e9) == pytest.approx(0.5)
    assert peak.Beside(None).fraction("ours", [1.0], 1.0) is None


# -- measuring
# ------------------------------------------------------------------------------------------------------


BRIEFLY = Conditions(threads=1, seconds=0.01, peak=lambda: 100.0)


def test_one_case_is_measured_against_numpy():
    suite = Suite("test", "a test", lambda dtype, extent: [], entries=("matmul", "patched"))
    usable, _ = peers.available(("numpy",))
    rows = list(runner.measure(suite, product(24, 24, 24), "float32", BRIEFLY, usable))
    assert [(row.entry, row.peer) for row in rows] == [("matmul", "numpy"), ("patched", "numpy")]
    assert all(row.served for row in rows)
    for row in rows:
        assert row.ratio.rounds >= 5 and row.seconds > 0 and row.plan
        assert row.peak == pytest.approx(row.gflops / 100.0, rel=0.2)
        assert row.target == 1.0


def test_a_case_has_its_own_targets_layouts_and_cap(monkeypatch):
    seen = []

    def watched(a, b, out):
        seen.append((settings.current().max_isa, a.strides[0] < 0, b.flags.f_contiguous, out.flags.f_contiguous))
        return tvmgemm.matmul(a, b, out)

    monkeypatch.setitem(runner.ENTRIES, "matmul", lambda: runner.Entry(watched, patched=False))
    suite = Suite("test", "a test", lambda dtype, extent: [])
    case = Case((40, 50), (50, 60), "[::-1]", "F", "F", targets={"numpy": 3.0}, max_isa="x86-64-v3")
    (row,) = runner.measure(suite, case, "float64", BRIEFLY, peers.available(("numpy",))[0])
    assert row.target == 3.0 and row.served
    assert set(seen) == {("x86-64-v3", True, True, True)} and settings.current().max_isa is None


def test_a_slow_peer_is_sampled_a_few_times(monkeypatch):
    class Slow(peers.NumPy):
        def function(self, a, b, out, dtype=None):
            return lambda: (time.sleep(0.12), np.matmul(a, b, out))

    suite = Suite("test", "a test", lambda dtype, extent: [])
    (row,) = runner.measure(suite, product(24, 24, 24), "float32", BRIEFLY, {"numpy": Slow()})
    assert row.ratio.rounds == runner.SLOW_ROUNDS and row.ratio.median > 100 and row.peer_seconds >= 0.12


def test_elements_that_are_not_taken_are_reported(monkeypatch):
    def refuse(a, b, out):
        raise TypeError("no such loop")

    monkeypatch.setitem(runner.ENTRIES, "matmul", lambda: runner.Entry(refuse, patched=False))
    suite = Suite("test", "a test", lambda dtype, extent: [])
    (row,) = runner.measure(suite, product(4, 4, 4), "float64", BRIEFLY, peers.available(("numpy",))[0])
    assert (row.served, row.ratio, row.plan) == (False, None, "not offered: no such loop")
    assert report.cells(row, "us")[4:8] == ["nan", "numpy", "-", "-"]


def test_a_stream_of_new_shapes_is_measured(monkeypatch):
    monkeypatch.setattr(stream, "PRODUCTS", 30)
    monkeypatch.setattr(stream, "ROUNDS", (2, 2))
    operands = stream.draw(np.random.default_rng(1), "float32")
    assert len({(a.shape, b.shape) for a, b in operands}) == 30
    (row,) = stream.measure(SUITES["stream"], next(stream.cases("float32", "quick")), "float32", BRIEFLY)
    assert row.ratio.rounds == 2 and row.target == 1.0 and row.plan.endswith("% by kernels of ours")


def test_what_the_dtypes_have_to_reach(monkeypatch):
    cases = {case.label: case for case in dtypes.cases("int8", "usual")}
    assert cases["512x512x512"].targets == {"numpy": dtypes.Goal(100, 500).here}
    assert cases["512x512x512 (capped to x86-64-v3)"].targets == {"numpy": 10}
    assert cases["512x512x512 (capped to x86-64-v3)"].max_isa == "x86-64-v3"
    assert [case.density for case in dtypes.cases("bool", "usual")][:2] == [0.01, 0.5]
    for features, wanted in ((frozenset(), 100), (frozenset({"amx_tile"}), 500)):
        monkeypatch.setattr(dtypes, "host", lambda: SimpleNamespace(features=features))
        assert dtypes.Goal(100, 500).here == wanted
    monkeypatch.setattr(dtypes, "host", lambda: SimpleNamespace(features=frozenset()))
    assert dtypes.Goal(None, 500).here == 0.0


def test_measuring_leaves_numpy_as_it_was():
    assert not tvmgemm.is_patched()


def test_a_wrong_result_is_never_reported_as_a_speed(monkeypatch):
    def off_by_one(a, b, out):
        np.matmul(a, b, out)
        out[1, 2] += 1
        return out

    monkeypatch.setitem(runner.ENTRIES, "matmul", lambda: runner.Entry(off_by_one, patched=False))
    suite = Suite("test", "a test", lambda dtype, extent: [])
    with pytest.raises(runner.WrongResult, match=r"1 elements of 16 are wrong, the first at \(1, 2\)"):
        next(runner.measure(suite, product(4, 4, 4), "float64", BRIEFLY, {}))


def test_integers_have_to_be_exact():
    a = np.arange(4, dtype=np.int8).reshape(2, 2)
    runner.check(a @ a, a @ a, a, a, "2x2x2")
    with pytest.raises(runner.WrongResult):
        runner.check(a @ a + np.int8(1), a @ a, a, a, "2x2x2")


def test_not_a_number_is_wrong():
    a = np.ones((2, 2))
    with pytest.raises(runner.WrongResult):
        runner.check(np.full((2, 2), np.nan), a @ a, a, a, "2x2x2")


def test_startup_rows_come_from_processes(monkeypatch):
    started = []

    def fake(library, dtype, m, n, k, environment):
        folder = Path(environment["TVMGEMM_CACHE_DIR"])
        started.append((library, folder, folder.is_dir()))
        ours = library == "tvmgemm"
        return {
            "import_numpy": 0.1, "import": 0.02, "first_call": 0.004 if ours else 0.003, "second_call": 0.001,
            "builds": int(ours and len(started) <= 2), "served": ours, "tvm": False,
        }  # fmt: skip

    monkeypatch.setattr(startup.first_call, "measure", fake)
    conditions = Conditions(extent="quick")
    ever, second, imported = startup.measure(SUITES["startup"], product(8, 8, 8), "float32", conditions)
    assert len({folder for _, folder, _ in started}) == 2 and all(exists for _, _, exists in started)
    pair = ["numpy", "tvmgemm"]
    assert [library for library, _, _ in started[2:]] == [*pair, *pair[::-1], *pair]
    assert ever.case == "first call ever (8x8x8)"
    assert (ever.peer, ever.plan, ever.served) == (None, "1 built", True)
    assert (second.ratio.median, second.plan) == (0.75, "0 built, tvm not imported")
    assert (imported.seconds, imported.missed) == (0.02, False)


# -- the command
# ----------------------------------------------------------------------------------------------------


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

"""How rows of a benchmark are judged and shown: tables, JSON, docs/performance.md."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import machine, page, plot, report
from benchmarks.runner import Row
from benchmarks.suites import SUITES
from tvmgemm.timing import Ratio

ROOT = Path(__file__).resolve().parent.parent

FASTER = Row(
    "squares", "8x8x8", "float32", 1, "matmul", "numpy",
    seconds=1e-6, peer_seconds=2e-6, flops=1024.0, peak=0.25,
    ratio=Ratio(2.0, 1.9, 2.1, 25), served=True, plan="a-kernel", target=1.0,
)  # fmt: skip

SLOWER = replace(
    FASTER, case="9x9x9", ratio=Ratio(0.5, 0.4, 0.6, 25), peer_seconds=5e-7, served=False, plan="too|big"
)

ALONE = replace(FASTER, peer="mkl", ratio=None, peer_seconds=None, target=None)


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


# -- rows and reports


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
    demanding = replace(FASTER, target=3.0)  # missed, though mkl comes nearer
    assert report.against_the_better([mkl, demanding]) == [demanding]


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

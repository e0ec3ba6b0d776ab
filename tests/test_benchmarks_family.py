"""The ``family`` and ``ladder`` suites: kernels by their spec, what is made of their times, and how it is shown.

No test here depends on how fast anything is.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from equivalence import FLOAT_TILES
from tvmgemm._native import lib

import tvmgemm
from benchmarks import __main__ as command
from benchmarks import family, heatmap, ladder, report
from benchmarks.suite import Conditions, product
from benchmarks.suites import SUITES
from tvmgemm import trial
from tvmgemm.family.members import member
from tvmgemm.family.validity import check
from tvmgemm.family.variants import VARIANTS
from tvmgemm.spec import STEPS, SWITCHES
from tvmgemm.trial import NUMPY

ROOT = Path(__file__).resolve().parent.parent
FAMILY, LADDER = SUITES["family"], SUITES["ladder"]

# -- kernels by their spec


@pytest.fixture(scope="module")
def isa():
    return trial.usable_isa()


@pytest.fixture(scope="module")
def loaded(isa):
    """The six variants, all packed and as little as can be, and every rung of the ladder."""
    rungs = ladder.specs(isa, "float32").values()
    both = [member(v.name, "float32", isa, packing=p) for v in VARIANTS.values() for p in {v.packable, v.packings[-1]}]
    return trial.load([*rungs, *both])


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (19, 83, 37), (64, 64, 64), (50, 200, 600), (7, 5, 0)])
def test_every_step_and_every_variant_computes_the_product(loaded, m, n, k):
    random = np.random.default_rng(m)
    a, b = (random.standard_normal(shape).astype("float32") for shape in ((m, k), (k, n)))
    for spec, kernel in loaded.items():
        out = np.full((m, n + 3), np.nan, "float32")
        result = kernel.multiply(a, b, out[:, :n])
        bound = 1e-6 * (np.abs(a).astype("float64") @ np.abs(b).astype("float64")) * (1 + k) ** 0.5
        assert (np.abs(result - a.astype("float64") @ b.astype("float64")) <= bound).all(), spec.name
        assert np.isnan(out[:, n:]).all(), f"{spec.name} wrote behind a row"


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 96, 97])
def test_edges_of_every_width(loaded, columns):
    """At the edge a kernel computes no more vectors of a tile than hold columns: each number of them is other code."""
    a, b = np.ones((9, 20), "float32"), np.arange(20 * columns, dtype="float32").reshape(20, columns) % 7
    for spec, kernel in loaded.items():
        np.testing.assert_array_equal(kernel.multiply(a, b), a @ b, err_msg=spec.name)


def test_the_kernel_that_serves_is_the_one_that_was_asked_for(loaded):
    a = np.ones((20, 20), "float32")
    for kernel in loaded.values():
        before = lib.tg_kernel_calls(kernel.handle)
        kernel.multiply(a, a)
        assert lib.tg_kernel_calls(kernel.handle) == before + 1


def test_afterwards_the_planner_decides_again(loaded):
    a = np.ones((20, 20), "float32")
    planned = tvmgemm.explain(a, a).kernel
    next(iter(loaded.values())).multiply(a, a)
    assert tvmgemm.explain(a, a).kernel == planned
    before = tvmgemm.stats().served["float32"]
    tvmgemm.matmul(a, a)
    assert tvmgemm.stats().served["float32"] == before + 1


def test_kernels_are_built_in_one_process_with_progress(isa, tmp_path):
    specs = [member("B3A2C0", "float64", isa, packing=packing) for packing in ("ab", "none")]
    told = []
    with tvmgemm.options(cache_dir=tmp_path / "kernels"):
        first = trial.load([*specs, specs[0]], tasks=3, progress=told.append)
        assert [text.split(":")[0] for text in told] == ["1 of 2 kernels", "2 of 2 kernels"]
        again = trial.load(specs, progress=told.append)
    assert list(first) == list(again) == specs and len(told) == 2
    assert {kernel.tasks for kernel in first.values()} == {1}, "without a parallel loop there is one task"


def test_a_kernel_that_cannot_be_built_says_why(isa):
    impossible = replace(member("B3A2C0", "float32", isa), mr=100)
    with pytest.raises(trial.BuildFailed, match="vector registers"):
        trial.load([impossible])


# -- what is compared


@pytest.mark.parametrize("isa, dtype", FLOAT_TILES)
@pytest.mark.parametrize("extent", ["quick", "usual"])
def test_members_are_kernels_and_have_names_of_their_own(isa, dtype, extent):
    specs = list(family.specs(isa, dtype, extent, threads=1))
    for spec in specs:
        check(spec)
    assert len({family.label(spec) for spec in specs}) == len(set(specs)) == len(specs)
    assert {spec.variant for spec in specs} == set(VARIANTS)
    packings = {(spec.variant, spec.packing) for spec in specs}
    for variant in VARIANTS.values():
        wanted = variant.packings if extent == "usual" else (variant.packings[0], variant.packings[-1])
        assert packings >= {(variant.name, packing) for packing in wanted}


def test_with_threads_each_loop_that_can_be_shared_out_takes_part():
    specs = list(family.specs("x86-64-v4", "float32", "quick", threads=2))
    assert {spec.parallel for spec in specs} == {"", "ic", "jc", "pc"}
    assert [family.label(spec) for spec in specs if not spec.blocked] == [
        "B3A2C0 6x64 none unblocked", "B3A2C0 6x64 none ic unblocked", "B3A2C0 6x64 none jc unblocked",
    ]  # fmt: skip
    assert family.label(specs[4]).endswith((" ic", " jc", " pc"))


def test_the_ladder_has_every_step_and_switch():
    rungs = ladder.specs("x86-64-v4", "float64")
    assert list(rungs) == [*STEPS, *(f"optimised, no {switch}" for switch in SWITCHES)]
    assert [spec.step for spec in rungs.values()][: len(STEPS)] == list(STEPS)
    for spec in rungs.values():
        check(spec)


def test_the_classes_of_the_suite():
    labels = [case.label for case in family.cases("float32", "usual")]
    assert labels[2:] == [
        "10000x64x64 (tall)", "64x10000x64 (wide)", "64x64x10000 (deep)", "2000x2000x8 (small k)",
        "10000x8x500 (small n)", "8x2000x2000 (small m)",
    ]  # fmt: skip
    assert len(list(family.cases("float32", "quick"))) == len(labels) - 1


# -- what is made of the times

A, B, C = "B3A2C0 8x48 ab", "A3B2C0 8x48 b", "C3A2B0 6x64 ac"
#: Seconds per round; in the second round the machine was three times as slow.
FIRST = {A: [1.0, 3.0, 1.0], B: [0.8, 2.4, 0.8], C: [4.0, 12.0, 4.0], NUMPY: [1.6, 4.8, 1.6]}
LAST = {A: [1.0, 3.0, 1.0], B: [0.9, 2.7, 0.9], NUMPY: [1.8, 5.4, 1.8]}


def judged(chosen, case=product(10, 10, 10, "square"), last=LAST):
    return family.judged(FAMILY, case, "float32", Conditions(peak=lambda: 2e-6), FIRST, last, chosen, {})


def test_ranks_do_not_depend_on_what_the_machine_did_to_a_round():
    assert trial.ranked(FIRST) == [B, A, NUMPY, C]
    unlucky = {A: [1.0, 1.0, 9.0, 9.0, 9.0], B: [1.1, 1.1, 1.1, 9.9, 9.9], NUMPY: [2.0, 2.0, 2.0, 18.0, 18.0]}
    assert trial.ranked(unlucky)[0] == A


def test_finalists_are_the_fast_ones_and_the_planners_choice():
    assert family.choose_finalists(FIRST, B) == [B]
    assert family.choose_finalists(FIRST, C) == [B, C]
    assert family.choose_finalists(FIRST, NUMPY) == [B]
    many = {**{f"B3A2C0 {i}x48 ab": [1.0 + i / 1000] for i in range(20)}, NUMPY: [2.0]}
    assert family.choose_finalists(many, NUMPY) == list(many)[:8]


def test_rows_are_judged_in_the_second_pass():
    rows = {row.entry: row for row in judged(A)}
    assert list(rows) == [B, A, NUMPY, C]
    assert [(row.best, row.chosen, row.final) for row in rows.values()] == [
        (True, False, True), (False, True, True), (False, False, True), (False, False, False),
    ]  # fmt: skip
    assert rows[A].relative.median == pytest.approx(0.9) and rows[A].ratio.median == pytest.approx(1.8)
    assert rows[C].relative.median == pytest.approx(0.2), "of the first pass"
    assert rows[NUMPY].relative.median == pytest.approx(0.5) and rows[NUMPY].ratio is None
    assert rows[A].gflops == pytest.approx(2000 / 1.0 / 1e9) and rows[A].peak == pytest.approx(1.0)
    assert family.behind(rows[A]) == pytest.approx(0.1)
    assert [row.marks for row in rows.values()] == ["best", "planner", "", ""]


def test_the_best_is_not_behind_itself():
    best = judged(B)[0]
    assert best.marks == "best, planner" and family.behind(best) == 0.0
    assert family.behind(replace(best, best=False, relative=replace(best.relative, median=1.01))) == 0.0


def test_a_planner_that_leaves_it_to_numpy_is_judged_too():
    rows = judged(NUMPY)
    (chosen,) = [row for row in rows if row.chosen]
    assert chosen.entry == NUMPY and family.behind(chosen) == pytest.approx(0.5)


# -- how it is shown


@pytest.fixture
def rows():
    return [*judged(A), *judged(B, product(20, 20, 20, "tall")), *judged(NUMPY, product(8, 9, 10))]


def test_the_summary_counts_who_is_near(rows):
    assert family.summary(rows) == [
        "float32, 1 thread: the planner's choice is within 5 % of the best member in 1 of 3 cases, 20.0 % behind it on"
        " average, 50.0 % at most"
    ]
    assert family.summary([]) == []


def test_tables_name_the_winner_and_the_choice(rows):
    lines = family.tables(rows, "GFLOP/s")
    assert "best member, GFLOP/s" in lines[0]
    assert "| 10x10x10 (square) | float32 | 1 | A3B2C0 8x48 b: 0.0000 | B3A2C0 8x48 ab: 0.0000 | ! 10.0 % |" in lines[2]
    assert "| the same | 0.0 % |" in lines[3] and f"| {NUMPY}: 0.0000 | ! 50.0 % |" in lines[4]
    matrix = lines[lines.index("") + 3 :]
    assert matrix[0] == "| member | 10x10x10 (square) | 20x20x20 (tall) | 8x9x10 |"
    assert matrix[2:] == [
        f"| {A} | > 90 | 90 | 90 |",
        f"| {B} | **100** | > **100** | **100** |",
        f"| {C} | 20 | 20 | 20 |",
        f"| {NUMPY} | 50 | 50 | > 50 |",
    ]


def test_only_finalists_are_shown_while_it_runs(rows):
    view = FAMILY.view
    assert [row.entry for row in rows[:4] if view.shown(row)] == [B, A, NUMPY]
    lines = [report.heading("GFLOP/s", view), *(report.line(row, "GFLOP/s", view) for row in rows[:2])]
    assert "of the best [quartiles]" in lines[0] and lines[1].endswith(" best") and lines[2].endswith(" planner")
    assert "90.0% [90..90]" in lines[2]


def test_members_are_ordered_as_in_the_table_of_variants(rows):
    assert family.order_of_members(rows[::-1]) == [A, B, C, NUMPY]


def test_markdown_and_json_take_such_rows(rows):
    results = report.Results("a command", "today", "1", {}, {
        "cpu": "A CPU", "isa": None, "cores": 2, "caches": [], "system": "Linux", "python": "3", "load_average": [0.0] * 3,
    }, [], {}, rows=[*rows, replace(rows[0], suite="ladder")])  # fmt: skip
    text = report.markdown(results, list(SUITES.values()))
    assert "## family: " in text and "## ladder: " in text and "> **100**" in text
    data = json.loads(json.dumps(report.to_json(results)))
    assert data["rows"][1]["chosen"] and data["rows"][1]["relative"]["median"] == pytest.approx(0.9)


def test_the_heat_map_is_written(rows, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "map.png"
    heatmap.draw([*rows, *(replace(row, dtype="float64") for row in rows[:3])], file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert heatmap.missing() is None


def test_without_rows_there_is_no_heat_map(tmp_path):
    pytest.importorskip("matplotlib")
    heatmap.draw([], tmp_path / "map.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_command_says_so_before_it_measures(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(heatmap.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TVMGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    with pytest.raises(SystemExit):
        command.main(["family", "--heat-map", str(tmp_path / "map.png")])
    assert "needs matplotlib, which is not installed: pip install 'tvmgemm[benchmarks]'" in capsys.readouterr().err


# -- the command


@pytest.mark.parametrize(
    "text, sizes", [("512", ((512, 512, 512),)), ("7,10x20x30", ((7, 7, 7), (10, 20, 30)))]
)
def test_sizes(text, sizes):
    assert command.sizes(text) == sizes


@pytest.mark.parametrize("text", ["0", "a", "5x6", "1x2x3x4", "-3", "2x0x2"])
def test_sizes_that_are_none(text):
    with pytest.raises(command.argparse.ArgumentTypeError, match="is not a size such as 512 or 100x200x300"):
        command.sizes(text)


def test_a_run_of_both_suites_from_the_command_line(tmp_path):
    files = tmp_path / "run.json", tmp_path / "run.md"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "family", "ladder", "--quick", "--sizes", "24x40x32", "--dtypes", "float32",
         "--seconds", "0.002", "--peers", "numpy", "--json", str(files[0]), "--markdown", str(files[1])],
        cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    data = json.loads(files[0].read_text())
    by_suite = {name: [row for row in data["rows"] if row["suite"] == name] for name in ("family", "ladder")}
    assert len(by_suite["ladder"]) == len(STEPS) + len(SWITCHES) + 1
    assert [row["entry"] for row in by_suite["ladder"]][-1] == NUMPY
    assert sum(row["best"] for row in by_suite["family"]) == sum(row["chosen"] for row in by_suite["family"]) == 1
    assert {row["case"] for row in data["rows"]} == {"24x40x32"} and data["peak"]["float32"]["1"] > 0
    assert "of optimised [quartiles]" in files[1].read_text()
    assert "within 5 % of the best member in" in result.stdout

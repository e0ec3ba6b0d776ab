"""The tuner: what it proposes, how it judges, and the command; nothing here depends on how fast anything is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from equivalence import RUNNABLE

import tvmgemm
from tvmgemm import trial, tuned, tuner
from tvmgemm.blocking import blocks_of
from tvmgemm.cli import tune as command
from tvmgemm.family.tiles import KERNEL_DTYPES, TILES
from tvmgemm.family.validity import check, unsuitable
from tvmgemm.family.variants import VARIANTS
from tvmgemm.host import host
from tvmgemm.planner import plan
from tvmgemm.problem import OPS, Problem
from tvmgemm.product import Product
from tvmgemm.settings import Options
from tvmgemm.store import Store
from tvmgemm.tuner import TWIN, proposals, tune, verdict

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

SQUARE = Problem("float32", 200, 200, 200)
ROOT = Path(__file__).resolve().parent.parent


def proposed(problem, threads=1, **options):
    options = Options(num_threads=threads, **options)
    planned = plan(problem, host(), options)
    found = proposals(problem, planned, host(), options)
    return planned, [candidate.spec for candidate in found]


# -- what is proposed


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("b_layout", ["row", "col"])
@pytest.mark.parametrize("m, n, k", [(8, 8, 8), (200, 200, 200), (2000, 2000, 2000), (10000, 16, 500), (16, 3000, 3000)])
def test_proposals_are_the_planners_choice_and_neighbours_that_can_serve(m, n, k, b_layout, dtype, threads):
    problem = Problem(dtype, m, n, k, b_layout=b_layout)
    planned, specs = proposed(problem, threads)
    assert specs[0] == planned.spec and 2 <= len(specs) <= tuner.MEMBERS and len(set(specs)) == len(specs)
    for spec in specs:
        check(spec)
        assert unsuitable(spec, problem) is None
        assert VARIANTS[spec.variant].resident == "C" or "c" in spec.packing, "adds up k in another order"
    assert len({spec.tile for spec in specs}) > 1
    assert threads > 1 or not any(spec.parallel for spec in specs)


def test_other_packings_variants_and_loops_are_proposed():
    _, specs = proposed(replace(SQUARE, m=1000, n=1000, k=1000), threads=2)
    for field in ("packing", "variant", "parallel"):
        assert len({getattr(spec, field) for spec in specs}) > 1, field


def test_where_numpy_serves_kernels_are_proposed_all_the_same():
    planned, specs = proposed(replace(SQUARE, symmetric=True, b_layout="col"))
    if planned.spec is None:
        assert specs and all(unsuitable(spec, replace(SQUARE, b_layout="col")) is None for spec in specs)


def test_tiles_that_waste_much_are_not_proposed():
    problem = replace(SQUARE, n=8)
    planned, specs = proposed(problem)
    widest = max(nr for _, nr in TILES[host().isa().name, "float32"]["C"])
    assert widest > 16 and not any(spec.nr == widest for spec in specs if spec != planned.spec and spec.mr)


def test_blocks_are_resized_where_that_makes_a_difference():
    spec = proposed(replace(SQUARE, m=5000, n=5000))[1][0]
    kernel = trial.Kernel(spec, blocks_of(spec, host()), 1, None)
    sizes = {(blocks.mc, blocks.nc) for blocks in tuner.resizings(kernel, replace(SQUARE, m=5000, n=5000))}
    mc, nc = kernel.blocks.mc, kernel.blocks.nc
    assert {mc} < {m for m, _ in sizes} and {nc} < {n for _, n in sizes}
    assert all(m % spec.mr == 0 and n % spec.nr == 0 for m, n in sizes)
    assert tuner.resizings(kernel, replace(SQUARE, m=8, n=8)) == []


def test_ways_to_share_a_stack_are_proposed():
    stack, options = replace(SQUARE, m=40, n=40, k=40, batch=300), Options(num_threads=2)
    planned = plan(stack, host(), options)
    found = proposals(stack, planned, host(), options)
    assert {candidate.shares_stack for candidate in found} == {True, False}
    assert not any(candidate.shares_stack and candidate.spec.parallel for candidate in found)
    alone = Options(num_threads=1)
    assert not any(candidate.shares_stack for candidate in proposals(stack, plan(stack, host(), alone), host(), alone))


def test_dtypes_that_can_be_tuned():
    names = tuner.tunable(host(), None)
    assert {"float32", "float64"} <= set(names) <= set(KERNEL_DTYPES)
    assert names["float32"] == host().isa().name


@pytest.mark.parametrize("op", OPS)
def test_each_of_them_has_proposals(op):
    for dtype, isa in tuner.tunable(host(), None).items():
        if Product(dtype, 200, 200, 200, op=op).objection is None:
            planned, specs = proposed(replace(SQUARE, dtype=dtype, op=op))
            assert {(spec.dtype, spec.isa, spec.op) for spec in specs} == {(dtype, isa, op)} and len(specs) > 1


# -- how it judges


def judged(chosen="planned", **samples):
    spec = proposed(SQUARE)[1][0]
    kernel = trial.Kernel(spec, blocks_of(spec, host()), 1, None)
    samples = {name.replace("_", " "): times for name, times in samples.items()}
    return verdict(SQUARE, 1, spec.isa, chosen, samples, dict.fromkeys(samples, kernel))


def test_a_clear_win_is_kept():
    entry = judged(planned=[2.0] * 9, other=[1.0] * 9, NumPy=[3.0] * 9)
    assert entry.winner == tuned.MEMBER and entry.spec is not None and entry.mc > 0
    assert entry.ratio == (2.0, 2.0, 2.0) and entry.over == "planned"


def test_numpy_may_win():
    entry = judged(planned=[2.0] * 9, other=[1.5] * 9, NumPy=[1.0] * 9)
    assert entry.winner == tuned.NUMPY and entry.spec is None


def test_the_planners_choice_stays_unless_it_is_beaten_by_more_than_the_noise():
    near, noisy = [1.0 / 1.02] * 9, [0.5, 0.5, 0.5, 1.5, 1.5, 0.5, 1.5, 0.5, 0.5]
    for other in (near, noisy, [2.0] * 9):
        entry = judged(planned=[1.0] * 9, other=other, NumPy=[3.0] * 9)
        assert (entry.winner, entry.spec) == (tuned.PLANNER, None)


def test_it_has_to_be_beaten_twice():
    """The planner's choice takes part twice; where its two sets of samples differ, the machine was noisy."""
    samples = {"planned": [1.3] * 9, TWIN.replace(" ", "_"): [1.0] * 9, "other": [0.99] * 9, "NumPy": [3.0] * 9}
    assert judged(**samples).winner == tuned.PLANNER
    assert judged(**(samples | {"other": [0.9] * 9})).ratio[0] == pytest.approx(1.0 / 0.9)


def test_a_real_product_is_tuned():
    told = []
    entry = tune(Product("float32", 40, 50, 60), 1, 0.05, told.append)
    assert entry.winner in (tuned.MEMBER, tuned.NUMPY, tuned.PLANNER)
    assert entry.over.startswith(("B3A2C0", "A3B2C0", "C3A2B0", "NumPy")) and re.fullmatch(r"\d{4}-\d\d-\d\d", entry.measured)
    assert any("members" in text for text in told)


def test_a_member_with_other_results_does_not_take_part():
    class Wrong(trial.Kernel):
        def run(self, call):
            return super().run(call) + 1

    spec = proposed(SQUARE)[1][0]
    (kernel,) = trial.load([spec]).values()
    wrong = Wrong(kernel.spec, kernel.blocks, kernel.tasks, kernel.handle)
    product = Product("float32", 200, 200, 200)
    a, b, c = product.operands()
    assert list(tuner._agreeing(kernel, {"right": kernel, "wrong": wrong}, product.call(a, b, c), c)) == ["right"]


# -- the command


@pytest.fixture
def folder(tmp_path):
    """A cache folder of its own with the kernels of the checkout's."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    own = Path(os.environ["TVMGEMM_CACHE_DIR"])
    for file in own.glob("*.so"):
        os.link(file, cache / file.name)
    return cache


def started(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tvmgemm", "tune", *map(str, arguments)],
        cwd=ROOT, env={**os.environ, "TVMGEMM_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored if these tests run in the background
    )  # fmt: skip


def entries(folder):
    return tuned.load(Store(str(folder)), host())


def test_the_command_measures_keeps_and_goes_on(folder):
    wanted = ("--shapes", "20,30x20x10", "--dtype", "float32", "--threads", "1")
    process = started(folder, *wanted, "--seconds", "0.1")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert "2 measured" in out and "0 were known already" in " ".join(out.split()) and "tuned-" in out
    assert [(e.problem.m, e.problem.n, e.problem.k, e.threads) for e in entries(folder)] == [(20, 20, 20, 1), (30, 20, 10, 1)]

    process = started(folder, *wanted, "--layouts", "rr,rc", "--seconds", "0.1")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0 and "2 measured" in out and "2 were known already" in " ".join(out.split())
    assert {e.problem.b_layout for e in entries(folder)} == {"row", "col"}


def test_an_interrupt_loses_nothing_that_was_measured(folder):
    process = started(folder, "--shapes", "20,21,22,23,24,25,26,27", "--dtype", "float32", "--threads", "1", "--seconds", "40")
    deadline = time.monotonic() + 120
    while not entries(folder) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, (out, err)
    assert 1 <= len(entries(folder)) < 8 and "interrupted" in out and "Traceback" not in err
    assert [name for name in os.listdir(folder) if name.startswith(".tmp-")] == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dtype", "float8"], "dtype float8: pass some of float32"),
        (["--dtype", ","], "names nothing"),
        (["--op", "trsm"], "trsm: pass matmul or gemm, or both as matmul,gemm"),
        (["--op", "gemm", "--dtype", "int8-int32"], "gemm int8-int32 64x64x64 and its like are left out: gemm takes no int8-int32"),
        (["--op", "gemm", "--shapes", "9x4x4x4"], "gemm float32 9x4x4x4 and its like are left out: gemm takes no stacks"),
        (["--shapes", "10x20"], "'10x20' is not a shape"),
        (["--layouts", "rx"], "pass pairs of r and c"),
        (["--shapes", ""], "names nothing"),
        (["--shapes", "2x3x4x5x6"], "'2x3x4x5x6' is not a shape such as 512"),
        (["--shapes", "1000000000x1x1000000000"], "takes 3725290310 GiB, and this machine has"),
        (["--threads", "0"], "is not a list of numbers of threads, 1 to 1024"),
        (["--seconds", "-1"], "is not a positive number"),
    ],
)
def test_what_there_is_not(arguments, message, capsys):
    try:
        status = command.main(arguments)
    except SystemExit as error:
        status = error.code
    assert status == 2 and message in capsys.readouterr().err


def test_a_folder_that_cannot_be_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="not used"), tvmgemm.options(cache_dir=tmp_path / "file" / "cache"):
        assert command.main(["--shapes", "20"]) == 1
    assert "no place for results" in capsys.readouterr().err


def test_nothing_is_tuned_where_a_choice_is_forced(capsys):
    with tvmgemm.options(packing="ab"):
        assert command.main([]) == 2
    assert "the settings force" in capsys.readouterr().err


def test_nothing_is_built_where_that_is_forbidden(tmp_path, capsys):
    with tvmgemm.options(cache_dir=tmp_path, jit="off"):
        assert command.main(["--shapes", "20", "--seconds", "0.1"]) == 1
    assert "TVMGEMM_JIT=off forbids building it" in capsys.readouterr().err


def test_without_its_packages_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert command.main([]) == 2
    assert 'pip install "tvmgemm[cli]"' in capsys.readouterr().err

"""``python -m tvmgemm demo``: build kernels, check them, compare them with NumPy, start a second process."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

import tvmgemm
from tvmgemm import settings, timing
from tvmgemm.cli import first_call, positive_seconds
from tvmgemm.cli.info import numpy_blas, plan_text
from tvmgemm.host import host

# fmt: off
#: (m, n, k): small, square, tall and skinny; the last two are layers of ResNet-50 as products.
SHAPES = (
    (4, 4, 4), (8, 8, 8), (16, 16, 16), (32, 32, 32), (64, 64, 64), (100, 100, 100),
    (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (10000, 16, 64), (3136, 64, 576), (49, 512, 2048),
)
# fmt: on
DTYPES = ("float32", "float64")

#: Seconds of timing for the whole table, unless ``--seconds`` says otherwise.
SECONDS = 24.0

_SAMPLED_ROWS = 16


@dataclass
class Line:
    """One product of the table and what was found out about it."""

    a: np.ndarray
    b: np.ndarray
    kernel: str = ""
    served: bool = False
    error: float = float("nan")
    gflops: float = float("nan")
    ratios: dict[int, timing.Ratio] = field(default_factory=dict)

    @property
    def shape(self) -> str:
        """``m x n x k``."""
        return f"{self.a.shape[0]}x{self.b.shape[1]}x{self.a.shape[1]}"

    @property
    def name(self) -> str:
        return f"{self.shape} {self.a.dtype}"


def main(argv: list[str]) -> int:
    """Run the demo; 1 if a result is wrong or nothing was served by a kernel, 2 if it can't run."""
    parser = argparse.ArgumentParser(
        prog="python -m tvmgemm demo",
        description="Build kernels, check them against NumPy and compare the speed, in under a minute.",
    )
    parser.add_argument("--seconds", type=positive_seconds, default=SECONDS, help="of timing (default %(default)g)")
    arguments = parser.parse_args(argv)
    try:
        import rich  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        print(f'tvmgemm demo needs {error.name}: pip install "tvmgemm[cli]"', file=sys.stderr)
        return 2
    return run(arguments.seconds)


def run(seconds: float) -> int:
    """The demo itself: prints to the terminal, ``seconds`` of it timing; returns the exit status."""
    from rich.console import Console

    console = Console(highlight=False)
    lines = list(make_lines())
    threads = sorted({1, settings.current().threads})
    introduce(console)
    build(console, lines, threads)
    wrong = verify(console, lines)
    compare(console, lines, threads, seconds)
    show(console, lines, threads)
    second_process(console)
    if wrong:
        console.print(f"[bold red]{len(wrong)} results are outside their error bound: {', '.join(wrong)}")
    return 1 if wrong or not any(line.served for line in lines) else 0


def make_lines() -> Iterator[Line]:
    """The products of the table: standard normal operands, the same at every run."""
    random = np.random.default_rng(1)
    for dtype in DTYPES:
        for m, n, k in SHAPES:
            a, b = (random.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
            yield Line(a, b)


def introduce(console) -> None:
    """What is compared, where."""
    machine, blas = host(), numpy_blas()
    isa = machine.isa(settings.current().max_isa)
    isa_text = isa.name if isa else "no instruction set of ours"
    where = f"{machine.model or machine.arch}, {machine.cores} cores, {isa_text}"
    console.print(f"[bold]tvmgemm {tvmgemm.__version__}[/] on {where}")
    kernels = f", {blas['architecture']} kernels" if blas["architecture"] else ""
    console.print(f"against NumPy {np.__version__} with {blas['name']} {blas['version']}{kernels}\n")


def error_over_bound(result: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The largest error of ``result`` = a @ b as a fraction of its bound, k.eps.(|a| @ |b|).

    Measured on up to 16 rows spread over the matrix, against the product in float64 (float64: long double).
    """
    rows = np.unique(np.linspace(0, a.shape[0] - 1, min(_SAMPLED_ROWS, a.shape[0])).astype(int))
    wide = np.float64 if a.dtype == np.float32 else np.longdouble
    left, right = a[rows].astype(wide), b.astype(wide)
    # Where long double is no wider than double, the reference has an error of the same bound.
    epsilon = np.finfo(a.dtype).eps + np.finfo(wide).eps
    bound = a.shape[1] * epsilon * (np.abs(left) @ np.abs(right))
    return float(np.max(np.abs(result[rows].astype(wide) - left @ right) / bound))


def each(console, doing: str, lines: list[Line], threads: list[int]) -> Iterator[tuple[Line, int]]:
    """Every line with every number of threads, which is in force meanwhile, behind a progress bar."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    counts = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    columns = TextColumn(doing), BarColumn(), *counts
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(lines) * len(threads))
        for count in threads:
            with timing.thread_limit(count):
                for line in lines:
                    progress.update(task, description=line.name)
                    yield line, count
                    progress.advance(task)


def build(console, lines: list[Line], threads: list[int]) -> None:
    """Have every kernel of the table in memory: a first call each takes it from the cache or builds it."""
    before, start = tvmgemm.stats(), time.perf_counter()
    for line, _ in each(console, "building kernels", lines, threads):
        tvmgemm.matmul(line.a, line.b)
    timing.wait_for_builds()
    after = tvmgemm.stats()
    builds, found = after.builds - before.builds, after.store_hits - before.store_hits
    seconds = time.perf_counter() - start
    console.print(f"{builds} kernels built, {found} taken from the cache, in {seconds:.1f} s")


def verify(console, lines: list[Line]) -> list[str]:
    """Check every product against the error bound and note which kernel served it; returns the wrong ones."""
    wrong = []
    for line in lines:
        before = tvmgemm.stats()
        line.error = error_over_bound(tvmgemm.matmul(line.a, line.b), line.a, line.b)
        line.served = sum(tvmgemm.stats().served.values()) > sum(before.served.values())
        line.kernel = plan_text(tvmgemm.explain(line.a, line.b))
        if not line.error <= 1.0:
            wrong.append(line.name)
    served, worst = sum(line.served for line in lines), max(line.error for line in lines)
    console.print(
        f"{len(lines) - len(wrong)} of {len(lines)} results are within their error bound k.eps.|A|.|B|"
        f" (the worst uses {worst:.0%} of it); {served} were served by our kernels"
    )
    return wrong


def compare(console, lines: list[Line], threads: list[int], seconds: float) -> None:
    """Time every product against NumPy's, with one thread and with all, in interleaved rounds."""
    tvmgemm.unpatch_numpy()
    budget = seconds / (len(lines) * len(threads))
    for line, count in each(console, "comparing with NumPy", lines, threads):
        time_line(line, count, budget)


def time_line(line: Line, threads: int, budget: float) -> None:
    """Fill in the ratio for this number of threads; with one thread, our GFLOP/s too."""
    functions = {}
    for name, matmul in (("numpy", np.matmul), ("tvmgemm", tvmgemm.matmul)):
        out = np.empty((line.a.shape[0], line.b.shape[1]), line.a.dtype)
        functions[name] = partial(matmul, line.a, line.b, out)
    several = threads > 1
    shortest = timing.MIN_SECONDS_THREADED if several else timing.MIN_SECONDS
    samples = timing.paired(functions, rounds=41, min_seconds=shortest, budget=budget, settle=several)
    line.ratios[threads] = timing.ratio(samples["numpy"], samples["tvmgemm"])
    if not several:
        flops = 2.0 * line.a.shape[0] * line.a.shape[1] * line.b.shape[1]
        line.gflops = flops / timing.median(samples["tvmgemm"]) / 1e9


def show(console, lines: list[Line], threads: list[int]) -> None:
    """The table of ratios; it fits a terminal of 80 columns."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console.print("\nHow many times as fast as NumPy: the median of paired rounds, and the quartiles")
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("m x n x k", no_wrap=True)
    table.add_column("GFLOP/s", justify="right")
    for count in threads:
        table.add_column("1 thread" if count == 1 else f"{count} threads", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for dtype in DTYPES:
        table.add_row(f"[bold]{dtype}")
        for line in lines:
            if line.a.dtype == dtype:
                ratios = [_ratio_text(line.ratios[count]) for count in threads]
                table.add_row(line.shape, f"{line.gflops:.3g}", *ratios, escape(line.kernel))
        table.add_section()
    console.print(table)


def second_process(console) -> None:
    """Start a process that finds the kernels built, and say what its first product cost."""
    m = n = k = 512
    facts = first_call.measure("tvmgemm", "float32", m, n, k)
    plain = first_call.measure("numpy", "float32", m, n, k)
    imported, ours, theirs = (1e3 * s for s in (facts["import"], facts["first_call"], plain["first_call"]))
    console.print(
        f"A second process: importing tvmgemm took {imported:.1f} ms after NumPy, its first {m}x{n}x{k}"
        f" product {ours:.1f} ms (NumPy's: {theirs:.1f} ms)."
        f" TVM was {'imported' if facts['tvm'] else 'not imported'},"
        f" {facts['builds'] or 'no'} kernels were compiled."
    )


def _ratio_text(ratio: timing.Ratio) -> str:
    color = "green" if ratio.median >= 1.05 else "red" if ratio.median < 0.95 else "default"
    return f"[{color}]{ratio.median:5.2f}[/] [dim]{ratio.low:.2f}-{ratio.high:.2f}[/]"

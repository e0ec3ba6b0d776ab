"""``python -m tvmgemm tune``: measure which kernels serve products of given shapes best, and keep the answers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator

from tvmgemm import dispatch, kernels, settings
from tvmgemm.cli import positive_seconds
from tvmgemm.host import host
from tvmgemm.planner import forced
from tvmgemm.problem import DTYPES, Problem

# fmt: off
#: (m, n, k) that are tuned unless --shapes says otherwise.
SHAPES = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024),
    (10000, 64, 64), (64, 10000, 64), (64, 64, 10000), (2000, 2000, 16), (16, 2000, 2000), (10000, 16, 500),
)
# fmt: on

#: Seconds of measuring, unless ``--seconds`` says otherwise.
SECONDS = 120.0

#: Letters of ``--layouts``.
_LAYOUTS = {"r": "row", "c": "col"}


def main(argv: list[str]) -> int:
    """Run the command; 0, 1 if results can't be kept or kernels not be built, 2 if it can't run, 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        import rich  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        return _fail(f'needs {error.name}: pip install "tvmgemm[cli]"', 2)
    from tvmgemm import tuned, tuner
    from tvmgemm.trial import BuildFailed

    tunable = tuner.tunable(host(), settings.current().max_isa)
    if not tunable:
        return _fail(f"no kernels exist for this CPU ({host().arch})", 2)
    if unknown := [name for name in arguments.dtype if name not in tunable]:
        rest = "; bfloat16 and products of several dtypes are left to the rules"
        return _fail(f"dtype {', '.join(unknown)}: pass some of {', '.join(tunable)}{rest}", 2)
    if forced(settings.current()):
        return _fail("the settings force a variant, micro-kernel, packing or parallel loop, so nothing is left to choose", 2)
    store = kernels.store()
    if store.folder is None:
        return _fail("the kernel cache's folder can't be used, so there is no place for results", 1)

    wanted = list(dict.fromkeys(_products(arguments)))
    if huge := next((problem for problem, _ in wanted if _bytes(problem) > _memory()), None):
        return _fail(f"{_text(huge)} takes {_bytes(huge) / 2**30:.0f} GiB, and this machine has {_memory() / 2**30:.0f}", 2)
    known = () if arguments.again else {entry.subject for entry in tuned.load(store, host())}
    todo = [product for product in wanted if (*product, tunable[product[0].dtype]) not in known]
    found: list = []
    status = 0
    try:
        for entry in _measured(todo, arguments.seconds / max(1, len(todo))):
            tuned.save(store, host(), [entry])  # at once: an interrupt loses nothing that was measured
            found.append(entry)
    except KeyboardInterrupt:
        status = 130
    except BuildFailed as error:
        status = _fail(f"a kernel is missing: {error}", 1)
    except OSError as error:
        status = _fail(f"the results can't be kept: {error.strerror}", 1)
    dispatch.read_tuned_again()
    _report(found, len(wanted) - len(todo), len(todo) - len(found), store, status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tvmgemm tune",
        description="Measure which kernels serve products of given shapes best. What beats the planner's choice by more than "
        "the noise is kept in the kernel cache's folder, and the planner uses it from then on, in every process that starts "
        "later (TVMGEMM_TUNED=off: not). Interrupt it at any time; what was measured is kept. Single products of one dtype are tuned: "
        "stacks, gemm, bfloat16 and products of several dtypes are left to the planner's rules.",
    )
    parser.add_argument("--dtype", type=_names, default=("float32", "float64"), metavar="A,B", help="default float32,float64")
    parser.add_argument("--shapes", type=_shapes, default=SHAPES, metavar="N,MxNxK", help="products (m x n x k) to tune")
    parser.add_argument("--layouts", type=_layouts, default=("rr",), metavar="rr,rc",
                        help="of A and B: r for row-major, c for column-major (default rr)")  # fmt: skip
    parser.add_argument("--threads", type=_counts, metavar="N,N", help="default: one, and as many as are set")
    parser.add_argument("--seconds", type=positive_seconds, default=SECONDS, metavar="S",
                        help="of measuring in all, beside what building kernels takes (default %(default)g)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")
    return parser


def _products(arguments: argparse.Namespace) -> Iterator[tuple[Problem, int]]:
    for dtype in arguments.dtype:
        for m, n, k in arguments.shapes:
            for a, b in arguments.layouts:
                for threads in arguments.threads or (1, settings.current().threads):
                    yield Problem(dtype, m, n, k, a_layout=_LAYOUTS[a], b_layout=_LAYOUTS[b]), threads


def _bytes(p: Problem) -> int:
    """Of the operands and of two results, which are compared."""
    return DTYPES[p.dtype].c_size * (p.m * p.k + p.k * p.n + 2 * p.m * p.n)


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measured(products: list[tuple[Problem, int]], seconds: float) -> Iterator:
    """The entry of each product as it is measured, under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tvmgemm import tuner

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tuning", total=len(products))
        for problem, threads in products:
            what = f"{_text(problem)}, {threads} thread{'s' * (threads != 1)}"
            bar.update(task, description=what)
            yield tuner.tune(problem, threads, seconds, lambda said: bar.update(task, description=f"{what}: {said}"))
            bar.advance(task)


def _report(found: list, known: int, left: int, store, status: int) -> None:
    """A table of what was measured now, and where it is kept."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tvmgemm import tuned

    console = Console(highlight=False)
    if found:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for title in ("product", "threads", "planner's choice", "gain", "winner"):
            table.add_column(title, overflow="fold")
        for entry in found:
            median, low, high = entry.ratio
            gain = "-" if entry.winner == tuned.PLANNER else f"{median:.2f} [{low:.2f}..{high:.2f}]".replace("[", r"\[")
            table.add_row(_text(entry.problem), str(entry.threads), entry.over, gain, _winner(entry))
        console.print(table)
    better = sum(entry.winner != tuned.PLANNER for entry in found)
    console.print(f"{len(found)} products measured, {better} of them served better than the planner would; "
                  f"{known} were known already")  # fmt: skip
    if status == 130:
        console.print(f"interrupted: {left} products are left; run it again to go on")
    if found:
        console.print(f"kept in {tuned.path(store, host())}", soft_wrap=True)


def _winner(entry) -> str:
    from tvmgemm import tuned

    if entry.spec is None:
        return {tuned.PLANNER: "the planner's choice", tuned.NUMPY: "NumPy"}[entry.winner]
    from tvmgemm.tuner import Candidate

    return Candidate(entry.spec, entry.blocks(host())).name


def _text(p: Problem) -> str:
    layouts = "" if (p.a_layout, p.b_layout) == ("row", "row") else f" ({p.a_layout}, {p.b_layout})"
    return f"{p.dtype} {p.m}x{p.n}x{p.k}{layouts}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def _shapes(text: str) -> tuple[tuple[int, int, int], ...]:
    found = []
    for name in _names(text):
        numbers = [int(number) if number.isdecimal() else 0 for number in name.split("x")]
        if len(numbers) not in (1, 3) or not all(numbers):
            raise argparse.ArgumentTypeError(f"{name!r} is not a shape such as 512 or 100x200x300 (m x n x k)")
        found.append(tuple(numbers * 3 if len(numbers) == 1 else numbers))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no shape; pass some such as 512 or 100x200x300 (m x n x k)")
    return tuple(found)


def _layouts(text: str) -> tuple[str, ...]:
    found = _names(text)
    if wrong := [name for name in found if len(name) != 2 or not set(name) <= set(_LAYOUTS)]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: pass pairs of r and c, such as rr,rc")
    return found


def _counts(text: str) -> tuple[int, ...]:
    found = [int(name) if name.isdecimal() else 0 for name in _names(text)]
    if not found or not all(1 <= count <= settings.MAX_THREADS for count in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of threads, 1 to {settings.MAX_THREADS}, such as 1,2")
    return tuple(found)


def _fail(message: str, status: int) -> int:
    print(f"tvmgemm tune: {message}", file=sys.stderr)
    return status

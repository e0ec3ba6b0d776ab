"""``python -m tvmgemm tune``: measure which kernels serve products of given shapes best, and keep the answers."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator

from tvmgemm import dispatch, kernels, settings, tuned
from tvmgemm.cli import positive_seconds
from tvmgemm.host import host
from tvmgemm.planner import forced
from tvmgemm.problem import OPS, Problem
from tvmgemm.product import COL, ROW, Product

#: What is tuned unless --shapes says otherwise.
SHAPES = "64,128,256,512,1024,10000x64x64,64x10000x64,64x64x10000,2000x2000x16,16x2000x2000,10000x16x500"

#: Seconds of measuring, unless ``--seconds`` says otherwise.
SECONDS = 120.0

#: What is measured: a product, its problem, and the number of threads.
_Wanted = tuple[Product, Problem, int]


def main(argv: list[str]) -> int:
    """Run the command; 0, 1 if results can't be kept or kernels not be built, 2 if it can't run, 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        import rich  # noqa: F401
        import threadpoolctl  # noqa: F401
    except ImportError as error:
        return _fail(f'needs {error.name}: pip install "tvmgemm[cli]"', 2)
    from tvmgemm import tuner
    from tvmgemm.trial import BuildFailed

    tunable = tuner.tunable(host(), settings.current().max_isa)
    if not tunable:
        return _fail(f"no kernels exist for this CPU ({host().arch})", 2)
    if unknown := [name for name in arguments.dtype if name not in tunable]:
        return _fail(f"dtype {', '.join(unknown)}: pass some of {', '.join(tunable)}", 2)
    if forced(settings.current()):
        return _fail("the settings force a variant, micro-kernel, packing, arithmetic or parallel loop, so nothing is left to choose; "
                     "see python -m tvmgemm info", 2)  # fmt: skip
    store = kernels.store()
    if store.folder is None:
        return _fail("the kernel cache's folder can't be used, so there is no place for results", 1)

    products = list(dict.fromkeys(_products(arguments)))
    if not products:
        return _fail("nothing is left to measure", 2)
    if huge := next((product for product in products if product.bytes > _memory()), None):
        return _fail(f"{huge} takes {huge.bytes / 2**30:.0f} GiB, and this machine has {_memory() / 2**30:.0f}", 2)
    try:
        wanted = list(_wanted(products, arguments.threads or (1, settings.current().threads)))
    except MemoryError:
        return _fail("there is not enough memory for the largest of the products; pass smaller shapes", 1)
    known = () if arguments.again else {entry.subject for entry in tuned.load(store, host())}
    todo = [one for one in wanted if tuned.subject_of(*one[1:], tunable[one[0].dtype]) not in known]
    found: list = []
    status = 0
    try:
        for product, entry in _measured(todo, arguments.seconds / max(1, len(todo))):
            tuned.save(store, host(), [entry])  # at once: an interrupt loses nothing that was measured
            found.append((product, entry))
    except KeyboardInterrupt:
        status = 130
    except BuildFailed as error:
        status = _fail(f"a kernel is missing: {error}", 1)
    except MemoryError:
        status = _fail(f"there is not enough memory for {todo[len(found)][0]}; pass smaller shapes", 1)
    except OSError as error:
        status = _fail(f"the results can't be kept in {store.folder}: {error.strerror}", 1)
    dispatch.look_again()
    _report(found, len(wanted) - len(todo), len(todo) - len(found), store, status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tvmgemm tune",
        description="Measure which kernels serve products of given shapes best. What beats the planner's choice by more than "
        "the noise is kept in the kernel cache's folder, and the planner uses it from then on, in every process that starts "
        "later (TVMGEMM_TUNED=off: not). Interrupt it at any time; what was measured is kept, and the next run goes on.",
    )
    parser.add_argument("--dtype", type=_names, default="float32,float64", metavar="A,B",
                        help="default %(default)s; also those of other results, such as int8-int32, bfloat16-float32")  # fmt: skip
    parser.add_argument("--shapes", type=_shapes, default=SHAPES, metavar="N,MxNxK,BxMxNxK",
                        help="products to tune: N for NxNxN, MxNxK for (m, k) @ (k, n), BxMxNxK for (b, m, k) @ (b, k, n), a "
                        "stack; (b, m, k) @ (k, n) is one product of b times m rows (default %(default)s)")  # fmt: skip
    parser.add_argument("--op", type=_ops, default="matmul", metavar=",".join(OPS), help="default %(default)s")
    parser.add_argument("--layouts", type=_layouts, default="rr", metavar="rr,rc",
                        help="of A and B: r for row-major, c for column-major (default %(default)s)")  # fmt: skip
    parser.add_argument("--threads", type=_counts, metavar="N,N", help="default: one, and as many as are set")
    parser.add_argument("--seconds", type=positive_seconds, default=SECONDS, metavar="S",
                        help="of measuring in all, beside what building kernels takes (default %(default)g)")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")
    return parser


def _products(arguments: argparse.Namespace) -> Iterator[Product]:
    """What the arguments name; what cannot be measured is left out with a message."""
    for op in arguments.op:
        for dtype in arguments.dtype:
            if "bfloat16" in dtype and not _has_ml_dtypes():
                print(f'tvmgemm tune: {dtype} is left out: it needs ml_dtypes, pip install "tvmgemm[ml_dtypes]"', file=sys.stderr)
                continue
            left_out: dict[str, Product] = {}
            for batch, m, n, k in arguments.shapes:
                for layouts in arguments.layouts:
                    product = Product(dtype, m, n, k, batch, op, layouts)
                    if objection := product.objection:
                        left_out.setdefault(objection, product)
                    else:
                        yield product
            for objection, product in left_out.items():
                print(f"tvmgemm tune: {product} and its like are left out: {objection}", file=sys.stderr)


def _has_ml_dtypes() -> bool:
    return importlib.util.find_spec("ml_dtypes") is not None


def _wanted(products: list[Product], threads: tuple[int, ...]) -> Iterator[_Wanted]:
    """Each problem that the products are, once for each number of threads."""
    seen = set()
    for product in products:
        problem = product.problem()
        for count in threads:
            subject = tuned.subject_of(problem, count, "")
            if subject not in seen:
                seen.add(subject)
                yield product, problem, count


def _memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measured(wanted: list[_Wanted], seconds: float) -> Iterator:
    """Each product with its entry, as it is measured, under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from tvmgemm import tuner

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tuning", total=len(wanted))
        for product, _, threads in wanted:
            what = f"{product}, {threads} thread{'s' * (threads != 1)}"
            bar.update(task, description=what)

            def tell(said: str) -> None:  # without the long name of a kernel, which would leave no room for the bar
                bar.update(task, description=f"{what}: {said.partition(':')[0]}")

            yield product, tuner.tune(product, threads, seconds, tell)
            bar.advance(task)


def _report(found: list, known: int, left: int, store, status: int) -> None:
    """A table of what was measured now, and where it is kept."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if found:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for title in ("product", "threads", "planner's choice", "gain", "winner"):
            table.add_column(title, overflow="fold")
        for product, entry in found:
            median, low, high = entry.ratio
            gain = "-" if entry.winner == tuned.PLANNER else f"{median:.2f} [{low:.2f}..{high:.2f}]".replace("[", r"\[")
            table.add_row(str(product), str(entry.threads), entry.over, gain, _winner(entry))
        console.print(table)
    better = sum(entry.winner != tuned.PLANNER for _, entry in found)
    console.print(f"{len(found)} measured, {better} of them served better than the planner would; {known} were known already")
    if left:
        what = "interrupted" if status == 130 else "stopped"
        console.print(f"{what}, {left} are left: run it again to go on")
    if found:
        console.print(f"kept in {tuned.path(store, host())}", soft_wrap=True)
    if better:
        console.print("print(tvmgemm.explain(a, b)) says of a product whether this decides it")


def _winner(entry) -> str:
    from tvmgemm.trial import OF_ONE_SHAPE, name_of

    if entry.over.startswith(OF_ONE_SHAPE):
        return "the same, built now"
    if entry.spec is None:
        return {tuned.PLANNER: "the same", tuned.NUMPY: "NumPy"}[entry.winner]
    return name_of(entry.spec, entry.blocks(host()), entry.shares_stack)


def _names(text: str) -> tuple[str, ...]:
    found = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; pass names with commas between them")
    return found


def _shapes(text: str) -> tuple[tuple[int, int, int, int], ...]:
    """(batch, m, n, k) of each shape."""
    what = "a shape such as 512, 100x200x300 (m x n x k) or, for a stack, 10000x4x4x4"
    found = []
    for name in _names(text):
        numbers = [int(number) if number.isdecimal() else 0 for number in name.split("x")]
        if len(numbers) not in (1, 3, 4) or not all(numbers):
            raise argparse.ArgumentTypeError(f"{name!r} is not {what}")
        batch, m, n, k = {1: [1, *3 * numbers], 3: [1, *numbers]}.get(len(numbers), numbers)
        found.append((batch, m, n, k))
    return tuple(found)


def _layouts(text: str) -> tuple[str, ...]:
    found = _names(text)
    if wrong := [name for name in found if len(name) != 2 or not set(name) <= {ROW, COL}]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: pass pairs of r and c, such as rr,rc")
    return found


def _ops(text: str) -> tuple[str, ...]:
    found = _names(text)
    if wrong := [name for name in found if name not in OPS]:
        raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: pass {' or '.join(OPS)}, or both as {','.join(OPS)}")
    return found


def _counts(text: str) -> tuple[int, ...]:
    found = [int(name) if name.isdecimal() else 0 for name in _names(text)]
    if not all(1 <= count <= settings.MAX_THREADS for count in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of threads, 1 to {settings.MAX_THREADS}, such as 1,2")
    return tuple(found)


def _fail(message: str, status: int) -> int:
    print(f"tvmgemm tune: {message}", file=sys.stderr)
    return status

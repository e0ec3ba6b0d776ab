"""``python -m benchmarks``: run suites from a checkout and report."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: With these set, NumPy's OpenBLAS runs kernels or block sizes that it would not choose here.
_DISTORTING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
_RESTARTED = "TVMGEMM_BENCHMARKS_RESTARTED"


def restart_undistorted() -> list[str]:
    """Start this process again, once, without what would slow NumPy down; returns notes for the report."""
    if os.environ.get("OPENBLAS_CORETYPE") and _RESTARTED not in os.environ:
        removed = {name: os.environ.pop(name) for name in _DISTORTING if name in os.environ}
        os.environ[_RESTARTED] = " and ".join(f"{name}={value}" for name, value in removed.items())
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if removed := os.environ.get(_RESTARTED):
        return [f"{removed} was set: started again without, so that NumPy chooses its kernels itself"]
    return []


def parser(suites: dict, peers: dict) -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time tvmgemm against NumPy and other BLAS libraries, paired, in one process.",
    )
    known = ", ".join(suites)
    result.add_argument("suites", nargs="*", metavar="suite", help=f"any of {known} (default: all)")
    result.add_argument("--list", action="store_true", help="list the suites and end")
    result.add_argument(
        "--peers",
        type=names,
        metavar="A,B",
        help=f"of {', '.join(peers)} (default: those that each suite's targets name, where they are installed)",
    )
    result.add_argument("--threads", type=thread_counts, metavar="N,N", help="such as 1,2 or 1,all")
    result.add_argument("--dtypes", type=names, metavar="A,B", help="default: those of each suite")
    result.add_argument(
        "--seconds", type=float, metavar="S", help="of timing per case (default 0.5, quick 0.2)"
    )
    result.add_argument(
        "--sizes", type=sizes, metavar="N,MxNxK", help="products to run in place of those of the suites"
    )
    extent = result.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="a few cases, little time for each")
    extent.add_argument("--full", action="store_true", help="every case of a suite")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    result.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a Markdown page")
    result.add_argument("--heat-map", type=Path, metavar="FILE", help="draw the results of family as an image, such as map.png")
    return result  # fmt: skip


def names(text: str) -> tuple[str, ...]:
    """``"a,b"`` -> ("a", "b")."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))


def sizes(text: str) -> tuple[tuple[int, int, int], ...]:
    """``"512,100x200x300"`` -> ((512, 512, 512), (100, 200, 300))."""
    found = []
    for name in names(text):
        numbers = [int(number) if number.isdecimal() else 0 for number in name.split("x")]
        if len(numbers) not in (1, 3) or not all(numbers):
            raise argparse.ArgumentTypeError(f"{name!r} is not a size such as 512 or 100x200x300 (m x n x k)")
        found.append(tuple(numbers * 3 if len(numbers) == 1 else numbers))
    return tuple(found)


def thread_counts(text: str) -> tuple[int, ...]:
    """``"1,all"`` -> (1, ALL_CORES)."""
    from .suite import ALL_CORES

    counts = tuple(ALL_CORES if name == "all" else int(name) for name in names(text))
    if not counts or any(count < 0 for count in counts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of threads such as 1,2 or 1,all")
    return counts


def main(argv: list[str] | None = None) -> int:
    """Run the command line ``argv``; 1 if a result was wrong, 2 if it asks for what there isn't."""
    notes = restart_undistorted()
    # Kernels that the benchmarks need stay in the checkout, not in the user's cache.
    os.environ.setdefault("TVMGEMM_CACHE_DIR", str(ROOT / "cache"))
    from tvmgemm.problem import DTYPES

    from . import heatmap
    from .peers import PEERS
    from .suite import EXTENTS
    from .suites import SUITES

    options = parser(SUITES, PEERS)
    arguments = options.parse_args(argv)
    if arguments.list:
        for suite in SUITES.values():
            lists = {extent: [list(suite.cases(dtype, extent)) for dtype in suite.dtypes] for extent in EXTENTS}
            counts = ", ".join(f"{sum(map(len, cases))} {extent}" for extent, cases in lists.items())
            print(f"{suite.name:<11} {suite.title} (cases: {counts})")
        return 0
    choices = {"suite": SUITES, "peer": PEERS, "dtype": DTYPES}
    for what, known in choices.items():
        for name in getattr(arguments, f"{what}s") or ():
            if name not in known:
                options.error(f"{what} {name!r} is not one of {', '.join(known)}")
    # Now, not after an hour of measuring:
    if arguments.heat_map and (missing := heatmap.missing()):
        options.error(missing)
    for file in filter(None, (arguments.json, arguments.markdown, arguments.heat_map)):
        file.parent.mkdir(parents=True, exist_ok=True)
    suites = [SUITES[name] for name in dict.fromkeys(arguments.suites or SUITES)]
    command = shlex.join(["python", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)])
    results, usable, meter = begin(arguments, suites, command, notes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what a time limit sends: no reason to lose the rows
    try:
        wrong = run(arguments, suites, results, usable, meter)
    except KeyboardInterrupt:
        wrong = "interrupted: the report holds what was measured until then"
    write(arguments, suites, results, wrong)
    return 1 if wrong else 0


def begin(arguments: argparse.Namespace, suites: list, command: str, notes: list[str]) -> tuple:
    """The Results of a run without its rows: all that can be said before measuring; the usable peers; and the Meter of
    the peak, where there is one."""
    import tvmgemm
    from tvmgemm.settings import current, sources

    from . import elements, machine, peak, peers, report

    wanted = arguments.peers or tuple(peer for suite in suites for peer in suite.targets)
    usable, missing = peers.available(tuple(dict.fromkeys(("numpy", *wanted))))
    notes = notes + [f"{name} is not compared: {why}" for name, why in missing.items()]
    description = machine.describe()
    # Where the kernels lie doesn't matter to a reader, and is nobody's business.
    changed = [name for name, source in sources().items() if source != "default" and name != "cache_dir"]
    meter, measured = None, {}
    in_process = [suite for suite in suites if suite.unit != "ms"]
    asked = dict.fromkeys(name for suite in in_process for name in arguments.dtypes or suite.dtypes)
    notes += filter(None, map(elements.missing, asked))
    dtypes = tuple(name for name in asked if name in peak.ITEMSIZES)
    if dtypes and description["isa"]:
        print("measuring the peak ...", file=sys.stderr, flush=True)
        try:
            meter = peak.build(description["isa"], dtypes)
            cores = sorted({1, description["cores"]})
            measured = {dtype: {threads: meter.highest(dtype, threads) for threads in cores} for dtype in dtypes}
        except RuntimeError as error:
            notes.append(str(error))
    results = report.Results(
        command=command,
        date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        tvmgemm=tvmgemm.__version__,
        settings={name: getattr(current(), name) for name in changed},
        machine=description,
        peers=[
            {"name": name, "version": peer.version(), "kernels": peer.kernels(), "caveat": peer.caveat}
            for name, peer in usable.items()
        ],
        peak=measured,
        notes=notes,
    )
    print("\n".join(report.preamble(results)), flush=True)
    return results, usable, meter


def run(arguments: argparse.Namespace, suites: list, results, usable: dict, meter) -> str | None:
    """Measure all rows into ``results``, printing each; the reason why it ended early, or None."""
    from tvmgemm.trial import BuildFailed

    from . import report
    from .runner import WrongResult

    for suite in suites:
        view = report.view_of(suite)
        print(f"\n{suite.name}: {suite.title}\n{report.heading(suite.unit, view)}", flush=True)
        first = len(results.rows)
        try:
            for row in rows(arguments, suite, usable, meter):
                results.rows.append(row)
                if view.shown(row):
                    print(report.line(row, suite.unit, view), flush=True)
        except WrongResult as error:
            return f"wrong result: {error}"
        except BuildFailed as error:
            return f"a kernel is missing: {error}"
        for text in view.summary(results.rows[first:]):
            print(f"  {text}")
    return None


def rows(arguments: argparse.Namespace, suite, usable: dict, meter) -> Iterator:
    """The rows of one suite with the dtypes, threads, peers and extent of the command line."""
    from tvmgemm.host import host

    from . import elements, runner
    from .suite import ALL_CORES, Conditions, product

    extent = "quick" if arguments.quick else "full" if arguments.full else "usual"
    seconds = arguments.seconds or (0.2 if arguments.quick else 0.5)
    counts = [host().cores if n == ALL_CORES else n for n in arguments.threads or suite.threads]
    for dtype in arguments.dtypes or suite.dtypes:
        if elements.missing(dtype):
            continue
        cases = suite.cases(dtype, extent)
        if arguments.sizes:
            cases = [product(*size) for size in arguments.sizes]
        for case in cases:
            wanted = arguments.peers or case.targets or suite.targets
            peers = {name: peer for name, peer in usable.items() if name in wanted}
            for threads in dict.fromkeys(counts):
                peak = partial(meter.gflops, dtype, threads) if meter and dtype in meter.dtypes else None
                conditions = Conditions(extent, threads, seconds, peak)
                if suite.measure is not None:
                    yield from suite.measure(suite, case, dtype, conditions)
                else:
                    yield from runner.measure(suite, case, dtype, conditions, peers)


def write(arguments: argparse.Namespace, suites: list, results, problem: str | None) -> None:
    """Write the files that were asked for; say on stderr what went wrong."""
    from . import heatmap, report

    if problem:
        results.notes.append(problem)
        print(problem, file=sys.stderr)
    results.notes.append("load average at the end: " + ", ".join(f"{load:.2f}" for load in os.getloadavg()))
    if arguments.json:
        arguments.json.write_text(json.dumps(report.to_json(results), indent=1) + "\n")
    if arguments.markdown:
        arguments.markdown.write_text(report.markdown(results, suites))
    if arguments.heat_map:
        heatmap.draw([row for row in results.rows if row.suite == "family"], arguments.heat_map)


if __name__ == "__main__":
    sys.exit(main())

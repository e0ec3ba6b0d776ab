"""Reports: a line per row while it runs; at the end JSON and Markdown that say how the numbers came about."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial

from tvmgemm.timing import Ratio

from . import machine
from .runner import Row
from .suite import Suite

#: Set before the ratio of a row that stays under its target or beyond its limit.
MARK = "!"

_SCALES = {"us": 1e6, "ms": 1e3}

#: The columns of a paired suite.
_COLUMNS = {
    "case": -37, "dtype": -9, "threads": 7, "way in": -8, "tvmgemm": 9, "peer": -6, "its": 9,
    "ratio [quartiles]": 21, "peak": 5, "served": -6, "plan": -1,
}  # fmt: skip


@dataclass
class Results:
    """Everything of one run. ``settings`` are those not at their default; ``peak``: dtype -> cores at once -> GFLOP/s;
    ``rows`` as they were measured."""

    command: str
    date: str
    tvmgemm: str
    settings: dict[str, object]
    machine: dict[str, object]
    peers: list[dict[str, str]]
    peak: dict[str, dict[int, float]]
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class View:
    """How the rows of a suite are shown.

    ``columns``: headings of the running output and their widths; negative: aligned to the left. ``cells(row, unit)``:
    the texts of a row. ``shown(row)``: whether the running output shows it. ``summary(rows)``: lines that say what
    came out. ``tables(rows, unit)``: the lines of Markdown tables.
    """

    columns: Mapping[str, int]
    cells: Callable[[Row, str], list[str]]
    summary: Callable[[Sequence[Row]], list[str]]
    tables: Callable[[Sequence[Row], str], list[str]]
    shown: Callable[[Row], bool] = lambda row: True


def cells(row: Row, unit: str) -> list[str]:
    """The texts of a row in the order of the columns; ``unit`` is that of the row's suite."""
    if unit == "GFLOP/s":
        ours, theirs = row.gflops, row.peer_gflops
    else:
        ours, theirs = (s and s * _SCALES[unit] for s in (row.seconds, row.peer_seconds))
    served = {True: "yes", False: "no", None: "-"}[row.served]
    mark = f"{MARK} " if row.missed else ""
    ratio = str(row.ratio) if row.ratio else "-"
    peak = "-" if row.peak is None else f"{100 * row.peak:.0f}%"
    return [row.case, row.dtype, str(row.threads), row.entry, number(ours), row.peer or "-", number(theirs),
            mark + ratio, f"{MARK} {peak}" if row.below_peak else peak, served, row.plan]  # fmt: skip


def heading(unit: str, view: View | None = None) -> str:
    """The first line of the running output of a suite; speeds are in ``unit``."""
    view = view or PAIRED
    return _line([*view.columns], view) + f"   ({unit})"


def line(row: Row, unit: str, view: View | None = None) -> str:
    """One row of the running output."""
    view = view or PAIRED
    return _line(view.cells(row, unit), view)


def groups(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    """Rows by the values of the fields ``names``, in the order in which they appear."""
    result: dict[tuple, list[Row]] = {}
    for row in rows:
        result.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
    return result


def mean(rows: Iterable[Row]) -> float:
    """The geometric mean of the ratios."""
    return math.exp(statistics.fmean(math.log(row.ratio.median) for row in rows))


def against_the_better(rows: Iterable[Row]) -> list[Row]:
    """Of each case the row against the peer that comes nearest to us, of those that a target is stated against; one that misses its
    target before others, for targets may differ by peer."""
    judged = (row for row in rows if None not in (row.ratio, row.target))
    by_case = groups(judged, "case", "dtype", "threads", "entry").values()
    return [min(rows, key=lambda row: (not row.missed, row.ratio.median)) for rows in by_case]


def summary(rows: Sequence[Row], target: float | None = None) -> list[str]:
    """Per dtype, threads, way in and peer: geometric mean of the ratios, and how many missed their target. Then the same
    over the better peer of each case, beside the ``target`` of that mean, and how many calls NumPy served."""
    lines = []
    compared = [row for row in rows if row.ratio is not None]
    for (dtype, threads, entry, peer), members in groups(compared, "dtype", "threads", "entry", "peer").items():
        missed = sum(row.missed for row in members)
        wanted = {row.target for row in members} - {None}
        under = f", {missed} of {len(members)} under the target of {_range(wanted)}" if wanted else ""
        lines.append(f"{dtype}, {threads_text(threads)}, {entry} over {peer}: {mean(members):.2f} (geometric mean){under}")
    if better := against_the_better(rows):
        over = " or ".join(dict.fromkeys(row.peer for row in better))
        under = "" if target is None or round(mean(better), 2) >= target else f"{MARK} "
        wanted = "" if target is None else f", target {target:g}"
        lines.append(f"all over {over}: {under}{mean(better):.2f} (geometric mean{wanted})")
        if declined := sum(row.served is False for row in better):
            lines.append(f"{declined} of {len(better)} calls were served by NumPy itself")
    return lines


def _range(values: set[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def to_json(results: Results) -> dict:
    """The run as JSON values; each row also has its derived GFLOP/s and whether it missed its target."""
    rows = [
        {**asdict(row), "gflops": row.gflops, "peer_gflops": row.peer_gflops, "missed": row.missed}
        for row in results.rows
    ]
    return {**asdict(results), "rows": rows}


def from_json(data: dict) -> Results:
    """The inverse of ``to_json``, for suites whose rows are pairs of ours and a peer."""
    names = {field.name for field in fields(Row)}
    rows = []
    for values in data["rows"]:
        kept = {name: value for name, value in values.items() if name in names}
        rows.append(Row(**{**kept, "ratio": kept["ratio"] and Ratio(**kept["ratio"])}))
    peak = {dtype: {int(cores): gflops for cores, gflops in known.items()} for dtype, known in data["peak"].items()}
    return Results(**{**data, "peak": peak, "rows": rows})


def joined(first: Results, second: Results) -> Results:
    """The rows of two runs on one machine, with the facts of the second and the peaks of both."""
    return replace(second, peak={**first.peak, **second.peak}, rows=[*first.rows, *second.rows])


def markdown(results: Results, suites: Sequence[Suite]) -> str:
    """The run as a Markdown page, a table per suite."""
    text = ["# tvmgemm against its peers", "", *_provenance(results), ""]
    for suite in suites:
        rows = [row for row in results.rows if row.suite == suite.name]
        if not rows:
            continue
        view = view_of(suite)
        text += [f"## {suite.name}: {suite.title}", ""]
        if lines := view.summary(rows):
            text += [f"- {line}" for line in lines] + [""]
        text += [*view.tables(rows, suite.unit), ""]
    return "\n".join(text)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [_table_row(titles), "|" + "---|" * len(titles), *map(_table_row, rows)]


def preamble(results: Results) -> list[str]:
    """The facts of a run as lines of text, for the head of the running output."""
    where = results.machine
    caches = ", ".join(_cache(cache) for cache in where["caches"]) or "caches unknown"
    lines = [
        f"machine: {where['cpu']}, {where['isa'] or 'no ISA of ours'}, {where['cores']} cores, {caches}",
        f"system: {where['system']}, Python {where['python']}",
        "load average: " + ", ".join(f"{load:.2f}" for load in where["load_average"]),
        f"tvmgemm: {results.tvmgemm}"
        + "".join(f", {name}={value}" for name, value in results.settings.items()),
    ]
    for peer in results.peers:
        caveat = f" ({peer['caveat']})" if peer["caveat"] else ""
        lines.append(f"{peer['name']}: {peer['version']}, kernels: {peer['kernels']}{caveat}")
    if results.peak:
        lines.append("measured FMA peak: " + "; ".join(_peak(*item) for item in results.peak.items()))
    if machine.busy(where):
        lines.append("note: the machine was busy when this began; trust the ratios, not the times")
    return lines + [f"note: {note}" for note in results.notes]


_EXPLAINED = f"""\
A ratio is peer time / our time within one round of interleaved timing in one process: above 1, tvmgemm is
faster. Shown are the median over the rounds and the quartiles. Times and GFLOP/s are medians. A percentage is
the part that we reach of the FMA peak of as many cores at once, measured in each round: the median. `{MARK}` marks a row
that misses its target."""


def _provenance(results: Results) -> list[str]:
    facts = [f"- {line}" for line in preamble(results)]
    return [f"Made on {results.date} by", "", f"    {results.command}", "", *facts, "", _EXPLAINED]


def _table_row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _paired_table(rows: Sequence[Row], unit: str) -> list[str]:
    titles = [f"{name}, {unit}" if name in ("tvmgemm", "its") else name for name in _COLUMNS]
    return table(titles, [cells(row, unit) for row in rows])


def _line(texts: Sequence[str], view: View) -> str:
    columns = zip(texts, view.columns.values(), strict=True)
    return " ".join(t.ljust(-width) if width < 0 else t.rjust(width) for t, width in columns).rstrip()


def number(value: float | None) -> str:
    """Three significant digits, without an exponent; ``-`` for None."""
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def threads_text(threads: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{threads} thread" + "s" * (threads != 1)


def _peak(dtype: str, by_cores: Mapping[int, float]) -> str:
    parts = (f"{gflops:.1f} GFLOP/s on {f'{cores} cores at once' if cores > 1 else 'one core'}" for cores, gflops in by_cores.items())
    return f"{dtype} {', '.join(parts)}"


def _cache(cache: dict) -> str:
    size = cache["bytes"] >> 10
    whole_mib = size >= 1024 and size % 1024 == 0
    return f"L{cache['level']} " + (f"{size >> 10} MiB" if whole_mib else f"{size} KiB")


#: Ours and a peer, a row for each way in and peer.
PAIRED = View(_COLUMNS, cells, summary, _paired_table)


def view_of(suite: Suite) -> View:
    """How the rows of ``suite`` are shown."""
    if suite.view is not None:
        return suite.view
    return replace(PAIRED, summary=partial(summary, target=suite.mean))

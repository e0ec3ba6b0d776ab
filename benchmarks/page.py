"""``docs/performance.md``: its tables, made from results, between markers in prose that is written by hand.

A block is everything between ``<!-- NAME -->`` and ``<!-- end NAME -->``. There is one per suite, one named ``machine``,
and ``overview``, a table with a row per suite. Results of some suites replace the blocks and rows of those, and leave the
rest of the page as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from . import report
from .report import MARK, Results, groups, number, table, threads_text
from .runner import Row
from .suite import Suite

#: The suites of the page, in its order: those with targets, and what calls and starting cost.
SUITES = (
    "squares", "odd", "small", "calls", "stacks", "layers", "transformer", "vectors", "skinny", "strided", "symmetric",
    "stream", "dtypes", "choices", "startup",
)  # fmt: skip

#: Behind a ratio: NumPy's own loop served the call, because ours declined it.
DECLINED = "N"

#: Where results went is nobody's business.
_FILES = re.compile(r" --(json|markdown|heat-map)[ =]\S+")

#: How many columns of dtypes and threads fit a table; suites with more get a row for each.
_COLUMNS = 4

def updated(page: str, results: Results, suites: Sequence[Suite]) -> str:
    """``page`` with the blocks of ``suites`` as ``results`` have them; ValueError if it has no place for one."""
    page = _replaced(page, "machine", [f"- {line}" for line in machine_facts(results)])
    for suite in suites:
        rows = [row for row in results.rows if row.suite == suite.name]
        if rows:
            page = _replaced(page, suite.name, block(suite, rows, results))
            page = _replaced(page, "overview", overview(page, suite, rows))
    return page


def machine_facts(results: Results) -> list[str]:
    """The lines of the preamble that hold for all suites."""
    kinds = ("machine:", "system:", "tvmgemm:", "measured FMA peak")
    return [line for line in report.preamble(results) if line.startswith(kinds)]


def block(suite: Suite, rows: Sequence[Row], results: Results) -> list[str]:
    """What stands about a suite: how it was made, the table, what came out, the lines that miss their target."""
    compared = {row.peer for row in rows} - {None}
    peers = [f"{p['name']} {p['version']}, {p['kernels']} kernels" for p in results.peers if p["name"] in compared]
    lines = [f"    {_FILES.sub('', results.command)}", "", f"{results.date}; {'; '.join(peers) or 'no peers'}.", ""]
    columns = list(groups(rows, "dtype", "threads", "entry"))
    if suite.view is not None:
        lines += suite.view.tables(rows, suite.unit)
    elif len(columns) <= _COLUMNS:
        lines += _by_case(rows, columns)
    else:
        lines += _by_row(rows)
    return [*lines, "", *(f"- {line}" for line in report.view_of(suite).summary(rows)), *_missed(rows)]


def overview(page: str, suite: Suite, rows: Sequence[Row]) -> list[str]:
    """The table of all suites, with this one's row in its place."""
    titles = ["suite", "lines", "miss their target", "lowest", "mean", "target of the mean", "served by NumPy"]
    known = {line.split("|")[1].strip(): line for line in _content(page, "overview").splitlines() if line.startswith("| ")}
    better = report.against_the_better(rows)
    if better:
        lowest = min(better, key=lambda row: row.ratio.median)
        mean = report.mean(better)
        under = suite.mean is not None and round(mean, 2) < suite.mean
        cells = [
            suite.name, str(len(better)), str(sum(_misses(row) for row in better)), f"{lowest.ratio.median:.2f}",
            f"{MARK} {mean:.2f}" if under else f"{mean:.2f}", "-" if suite.mean is None else f"{suite.mean:g}",
            str(sum(row.served is False for row in better)),
        ]  # fmt: skip
        known[suite.name] = table(titles, [cells])[-1]
    return [*table(titles, []), *(known[name] for name in SUITES if name in known)]


def _by_case(rows: Sequence[Row], columns: Sequence[tuple]) -> list[str]:
    """A row per case, a column per dtype, threads and way in."""
    entries = {entry for *_, entry in columns}
    titles = [f"{dtype}, {threads_text(threads)}{f', {entry}' * (len(entries) > 1)}" for dtype, threads, entry in columns]
    lines = []
    for (case,), members in groups(rows, "case").items():
        cells = [_cell([r for r in members if (r.dtype, r.threads, r.entry) == column]) for column in columns]
        lines.append([case, *cells, members[0].plan])
    return table(["case", *titles, "kernel"], lines)


def _by_row(rows: Sequence[Row]) -> list[str]:
    """A row per dtype, case and peer."""
    titles = ["dtype", "case", "over", "ratio", "target", "ours, GFLOP/s", "its", "kernel"]
    return table(titles, [
        [row.dtype, row.case, row.peer or "-", _cell([row]), f"{row.target:g}" if row.target else "-",
         number(row.gflops), number(row.peer_gflops), row.plan]
        for row in rows
    ])  # fmt: skip


def _cell(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if row.ratio is not None]
    if not compared:
        return "-"
    row = min(compared, key=lambda row: row.ratio.median)
    parts = [_marked(f"{row.ratio.median:.2f}", row.missed), f"[{row.ratio.low:.2f}..{row.ratio.high:.2f}]"]
    parts += [row.peer] if len(compared) > 1 else []
    parts += [_marked(f"{100 * row.peak:.0f} %", row.below_peak)] if row.peak is not None and row.served else []
    parts += [DECLINED] if row.served is False else []
    return " ".join(parts)


def _marked(text: str, misses: bool) -> str:
    return f"**{MARK} {text}**" if misses else text


def _misses(row: Row) -> bool:
    return row.missed or row.below_peak


def _missed(rows: Sequence[Row]) -> list[str]:
    """A line that lists what misses its target, or nothing."""
    missed = [row for row in report.against_the_better(rows) if _misses(row)]
    if not missed:
        return []
    named = groups(missed, "case").items()
    texts = [f"{case}: {', '.join(map(_short, members))}" for (case,), members in named]
    return ["", f"Under their target, {len(missed)} of {len(report.against_the_better(rows))}: {'; '.join(texts)}."]


def _short(row: Row) -> str:
    found = f"{row.ratio.median:.2f}" if row.missed else f"{100 * row.peak:.0f} % of the peak"
    return f"{row.dtype} {threads_text(row.threads)} {found}"


def _replaced(page: str, name: str, lines: Sequence[str]) -> str:
    start, end = _marks(page, name)
    return page[:start] + "\n".join(["\n", *lines, "\n"]) + page[end:]


def _content(page: str, name: str) -> str:
    start, end = _marks(page, name)
    return page[start:end]


def _marks(page: str, name: str) -> tuple[int, int]:
    """Where the content of a block begins and ends."""
    found = re.search(rf"<!-- {re.escape(name)} -->(?P<content>.*?)<!-- end {re.escape(name)} -->", page, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no block <!-- {name} --> ... <!-- end {name} -->")
    return found.span("content")

"""Kernels timed beside each other and beside NumPy, and how such rows are shown: what ``family`` and ``ladder``
have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tvmgemm import timing
from tvmgemm.timing import Ratio
from tvmgemm.trial import NUMPY, Kernel

from .report import View, number, table
from .runner import Row, check
from .suite import Case, Suite

#: Set beside the fastest of a case, and beside what the planner chooses.
BEST, CHOSEN = "best", "planner"


@dataclass(frozen=True)
class MemberRow(Row):
    """A kernel, or NumPy, on one case; ``entry`` is its name among those that were compared.

    ``relative``: time of the reference (the fastest member, the full kernel) / its own time, per round. ``best``: it
    is the fastest kernel of ours. ``chosen``: the planner takes it. ``final``: its numbers come from the rounds in
    which only the fastest took part; False: from those in which all did.
    """

    relative: Ratio | None = None
    best: bool = False
    chosen: bool = False
    final: bool = True

    @property
    def marks(self) -> str:
        """``best``, ``planner``, both or neither."""
        return ", ".join(mark for mark, is_it in ((BEST, self.best), (CHOSEN, self.chosen)) if is_it)


def check_all(kernels: Iterable[Kernel], case: Case, a: np.ndarray, b: np.ndarray) -> None:
    """Raise WrongResult if a kernel's product is not NumPy's within the error bound of the dtype."""
    reference = np.matmul(a, b)
    for kernel in kernels:
        result = kernel.multiply(a, b, np.full_like(reference, np.nan))
        check(result, reference, a, b, f"{case.label} by {kernel.spec.name}")


def progress_line(text: str) -> None:
    """Show ``text`` on stderr: on a terminal in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def rows(
    suite: Suite,
    case: Case,
    dtype: str,
    threads: int,
    peak: float | None,
    samples: Mapping[str, Sequence[float]],
    reference: str,
    kernels: Mapping[str, Kernel],
    names: Iterable[str] | None = None,
    **marks: Callable[[str], bool],
) -> list[MemberRow]:
    """A row for each of ``names`` (None: all in ``samples``), relative to ``reference``; ``marks`` gives flags of
    MemberRow by name. ``peak``: GFLOP/s of the cores used."""
    result = []
    for name in samples if names is None else names:
        taken = samples[name]
        seconds = timing.median(taken)
        result.append(
            MemberRow(
                suite=suite.name,
                case=case.label,
                dtype=dtype,
                threads=threads,
                entry=name,
                peer=None if name == NUMPY else "numpy",
                seconds=seconds,
                peer_seconds=None if name == NUMPY else timing.median(samples[NUMPY]),
                ratio=None if name == NUMPY else timing.ratio(samples[NUMPY], taken),
                flops=case.flops,
                peak=peak and case.flops / seconds / 1e9 / peak,
                served=name != NUMPY,
                plan=kernels[name].spec.name if name in kernels else "",
                relative=timing.ratio(samples[reference], taken),
                **{mark: is_it(name) for mark, is_it in marks.items()},
            )
        )
    return result


def view(
    reference: str,
    summary: Callable[[Sequence[MemberRow]], list[str]],
    tables: Callable[[Sequence[MemberRow], str], list[str]] | None = None,
) -> View:
    """The view of a suite of members whose ``relative`` is to ``reference``, which heads that column."""
    columns = {
        "case": -30, "dtype": -8, "threads": 7, "member": -28, "speed": 9, reference: 24,
        "over NumPy [quartiles]": 23, "peak": 5, "": -13,
    }  # fmt: skip
    titles = ["speed, " + "{unit}" if name == "speed" else name for name in columns]

    def all_cells(rows: Sequence[MemberRow], unit: str) -> list[str]:
        return table([title.format(unit=unit) for title in titles], [cells(row, unit) for row in rows])

    return View(columns, cells, summary, tables or all_cells, shown=lambda row: row.final)


def cells(row: MemberRow, unit: str) -> list[str]:
    """The texts of a row, in the order of the columns."""
    peak = "-" if row.peak is None else f"{100 * row.peak:.0f}%"
    return [
        row.case, row.dtype, str(row.threads), row.entry, number(row.gflops), _percent(row.relative),
        str(row.ratio) if row.ratio else "-", peak, row.marks,
    ]  # fmt: skip


def _percent(ratio: Ratio) -> str:
    return f"{100 * ratio.median:.1f}% [{100 * ratio.low:.0f}..{100 * ratio.high:.0f}]"

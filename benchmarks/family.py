"""The ``family`` suite: every member of the family on every class of shapes, and how far the planner's choice is
from the best of them.

A member is a variant with a micro-tile, a packing and, with several threads, a parallel loop. All members of a case
take part in a first pass of few rounds. The fastest of those, the planner's choice and NumPy then meet in a second
pass, whose samples are new: the best of sixty medians is lucky, and its luck must not count as a distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tvmgemm import settings, timing, trial
from tvmgemm.family.members import member, unblocked_member
from tvmgemm.family.tiles import TILES, UNBLOCKED_TILES
from tvmgemm.family.variants import VARIANTS
from tvmgemm.host import host
from tvmgemm.planner import plan
from tvmgemm.probe import problem_of
from tvmgemm.spec import KernelSpec
from tvmgemm.trial import NUMPY, Kernel, load, usable_isa

from . import members
from .members import MemberRow, progress_line
from .report import groups, number, table, threads_text
from .suite import Case, Conditions, Suite, product

#: The planner is to be within this fraction of the best member on every class.
TOLERANCE = 0.05

#: What goes on to the second pass: members within this fraction of the fastest, at most so many.
_NEAR, _FINALISTS = 0.12, 8

# fmt: off
#: Class of shapes, m, n, k.
CLASSES = (
    ("square",   512,   512,   512),
    ("square",  1024,  1024,  1024),
    ("tall",   10000,    64,    64),
    ("wide",      64, 10000,    64),
    ("deep",      64,    64, 10000),
    ("small k", 2000,  2000,     8),
    ("small n", 10000,    8,   500),
    ("small m",    8,  2000,  2000),
)
# fmt: on


def cases(dtype: str, extent: str) -> Iterator[Case]:
    """One case per class; the same for every extent, which decides the members."""
    for name, m, n, k in CLASSES:
        if (m, extent) != (1024, "quick"):
            yield product(m, n, k, name)


def specs(isa: str, dtype: str, extent: str, threads: int) -> Iterator[KernelSpec]:
    """The members: every variant with all its tiles and packings, in a quick run only with its default tile, and
    packing all or as little as it can; the one without cache blocks. With several threads also with each loop that they
    can share out."""
    if (isa, dtype) in UNBLOCKED_TILES:
        for loop in ("", "ic", "jc") if threads > 1 else ("",):
            yield unblocked_member(dtype, isa, parallel=loop)
    for variant in VARIANTS.values():
        tiles = tuple(dict.fromkeys(TILES[isa, dtype][variant.resident]))
        packings = variant.packings
        if extent == "quick":
            tiles, packings = tiles[:1], packings[:: len(packings) - 1]
        for tile in tiles:
            for packing in packings:
                for loop in ("", *variant.parallel_loops(packing)) if threads > 1 else ("",):
                    yield member(variant.name, dtype, isa, tile, packing, parallel=loop)


def label(spec: KernelSpec) -> str:
    """What a report calls a member: ``B3A2C0 14x32 ab``, and the parallel loop."""
    return " ".join(filter(None, (spec.variant, spec.tile, spec.packing, spec.parallel, "" if spec.blocked else "unblocked")))


def measure(suite: Suite, case: Case, dtype: str, conditions: Conditions) -> Iterator[MemberRow]:
    """A row for every member and one for NumPy; ``conditions.seconds`` is for each of the finalists."""
    threads, seconds = conditions.threads, conditions.seconds
    with timing.thread_limit(threads):
        options = settings.current()
        a, b = case.operands(dtype)
        calls = trial.calls_of(a, b)
        planned = plan(problem_of(calls[0])[0], host(), options).spec
        wanted = list(dict.fromkeys([*specs(usable_isa(), dtype, conditions.extent, threads), *([planned] if planned else [])]))
        kernels = {label(spec): kernel for spec, kernel in load(wanted, threads, progress_line).items()}
        chosen = label(planned) if planned else NUMPY

        members.check_all(kernels.values(), case, a, b)
        progress_line(f"{case.label} {dtype}: {len(kernels)} members")
        first = trial.interleaved(kernels, *calls, seconds, threads)
        finalists = choose_finalists(first, chosen)
        last = trial.interleaved(
            {name: kernels[name] for name in finalists if name in kernels}, *calls, seconds * len(finalists), threads
        )
        progress_line("")
    yield from judged(suite, case, dtype, conditions, first, last, chosen, kernels)


def choose_finalists(samples: Mapping[str, Sequence[float]], chosen: str) -> list[str]:
    """Those near the fastest, the fastest first, and what the planner chose; NumPy takes part anyway."""
    order = [name for name in trial.ranked(samples) if name != NUMPY]
    best = samples[order[0]]
    near = [name for name in order if timing.ratio(best, samples[name]).median > 1 - _NEAR]
    return list(dict.fromkeys([*near[:_FINALISTS], *([] if chosen == NUMPY else [chosen])]))


def judged(
    suite: Suite,
    case: Case,
    dtype: str,
    conditions: Conditions,
    first: Mapping[str, Sequence[float]],
    last: Mapping[str, Sequence[float]],
    chosen: str,
    kernels: Mapping[str, Kernel],
) -> list[MemberRow]:
    """The rows of both passes: finalists with their numbers of the second, the best first, then the rest in order."""

    peak = conditions.peak and conditions.peak()

    def best_of(samples: Mapping[str, Sequence[float]]) -> str:
        return next(name for name in trial.ranked(samples) if name != NUMPY)

    def rows_of(samples: Mapping[str, Sequence[float]], names: list[str], final: bool) -> list[MemberRow]:
        return members.rows(
            suite, case, dtype, conditions.threads, peak, samples, best_of(samples), kernels, names,
            best=lambda name: final and name == best_of(last), chosen=lambda name: final and name == chosen,
            final=lambda name: final,
        )  # fmt: skip

    rest = [name for name in trial.ranked(first) if name not in last]
    return rows_of(last, trial.ranked(last), True) + rows_of(first, rest, False)


def behind(chosen: MemberRow) -> float:
    """The fraction of its speed that the planner's choice lacks to the best member; 0 where it is the best."""
    return 0.0 if chosen.best else max(0.0, 1.0 - chosen.relative.median)


def _pairs(rows: Sequence[MemberRow]) -> Iterator[tuple[MemberRow, MemberRow]]:
    """(best member, planner's choice) of each case."""
    for group in groups(rows, "dtype", "threads", "case").values():
        yield next(row for row in group if row.best), next(row for row in group if row.chosen)


def summary(rows: Sequence[MemberRow]) -> list[str]:
    """How often the planner's choice is near the best, and how far from it on average."""
    lines = []
    for (dtype, threads), group in groups(rows, "dtype", "threads").items():
        distances = [behind(chosen) for _, chosen in _pairs(group)]
        near = sum(distance <= TOLERANCE for distance in distances)
        lines.append(
            f"{dtype}, {threads_text(threads)}: the planner's choice is within {100 * TOLERANCE:.0f} % of the best member in "
            f"{near} of {len(distances)} cases, {100 * np.mean(distances):.1f} % behind it on average, "
            f"{100 * max(distances):.1f} % at most"
        )
    return lines


def tables(rows: Sequence[MemberRow], unit: str) -> list[str]:
    """The best and the chosen member of each case; then all members by all cases."""
    titles = ["case", "dtype", "threads", f"best member, {unit}", f"planner's choice, {unit}", "behind the best", "best over NumPy",
              "choice over NumPy"]  # fmt: skip
    lines = table(titles, [_pair_cells(*pair) for pair in _pairs(rows)])
    for (dtype, threads), group in groups(rows, "dtype", "threads").items():
        lines += ["", f"All members, {dtype}, {threads_text(threads)}: speed in % of the best of the case, which is in bold;"
                  " `>` is the planner's choice.", ""]  # fmt: skip
        lines += _matrix(group)
    return lines


def _pair_cells(best: MemberRow, chosen: MemberRow) -> list[str]:
    distance = behind(chosen)
    mark = "! " if distance > TOLERANCE else ""
    return [
        best.case, best.dtype, str(best.threads), f"{best.entry}: {number(best.gflops)}",
        "the same" if chosen.best else f"{chosen.entry}: {number(chosen.gflops)}", f"{mark}{100 * distance:.1f} %",
        *(str(row.ratio) if row.ratio else "-" for row in (best, chosen)),
    ]  # fmt: skip


def _matrix(rows: Sequence[MemberRow]) -> list[str]:
    by_case = groups(rows, "case")
    found = {(row.entry, row.case): row for row in rows}
    lines = []
    for name in order_of_members(rows):
        texts = []
        for (case,) in by_case:
            row = found.get((name, case))
            text = "-" if row is None else f"{100 * row.relative.median:.0f}"
            texts.append(text if row is None else f"{'> ' * row.chosen}{f'**{text}**' if row.best else text}")
        lines.append([name, *texts])
    return table(["member", *(case for (case,) in by_case)], lines)


def order_of_members(rows: Sequence[MemberRow]) -> list[str]:
    """Names of members: variants in the order of their table, NumPy last."""
    names = dict.fromkeys(row.entry for row in rows)
    variants = [*VARIANTS, NUMPY]
    return sorted(names, key=lambda name: (variants.index(name.split()[0]), name))


VIEW = members.view("of the best [quartiles]", summary, tables)

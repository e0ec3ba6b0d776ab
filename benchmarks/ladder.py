"""The ``ladder`` suite: what each of the five steps of the generator is worth, and each fine-grain optimisation.

The paper builds its generator in five steps (``spec.STEPS``), each of which adds one idea to the one before. All are
still there, as kernels; so is the last one without each of ``spec.SWITCHES``.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvmgemm import timing, trial
from tvmgemm.family.members import member
from tvmgemm.family.tiles import TILES
from tvmgemm.planner import DEFAULT_VARIANT
from tvmgemm.spec import STEPS, SWITCHES, KernelSpec
from tvmgemm.trial import load, usable_isa

from . import members
from .members import MemberRow, progress_line
from .suite import Case, Conditions, Suite, product

#: What the others are relative to.
FULL = STEPS[-1]


def cases(dtype: str, extent: str) -> Iterator[Case]:
    """Squares. The first steps take seconds for larger ones, which is why those are left to ``--sizes``."""
    for n in (512,) if extent != "full" else (256, 512, 1000):
        yield product(n, n, n)


def specs(isa: str, dtype: str) -> dict[str, KernelSpec]:
    """The rungs: the steps, then the full kernel without each switch."""
    tile = TILES[isa, dtype]["C"][0]

    def rung(**fields) -> KernelSpec:
        return member(DEFAULT_VARIANT, dtype, isa, tile, **fields)

    rungs = {step: rung(step=step) for step in STEPS}
    return rungs | {f"{FULL}, no {switch}": rung(without=(switch,)) for switch in SWITCHES}


def measure(suite: Suite, case: Case, dtype: str, conditions: Conditions) -> Iterator[MemberRow]:
    """A row for every rung and one for NumPy, with one thread: the early steps have no parallel loop."""
    rungs = specs(usable_isa(), dtype)
    loaded = load(list(rungs.values()), progress=progress_line)
    kernels = {name: loaded[spec] for name, spec in rungs.items()}
    a, b = case.operands(dtype)
    with timing.thread_limit(1):
        members.check_all(kernels.values(), case, a, b)
        samples = trial.interleaved(kernels, *trial.calls_of(a, b), conditions.seconds * len(kernels), threads=1)
        peak = conditions.peak and conditions.peak()
    progress_line("")
    yield from members.rows(suite, case, dtype, 1, peak, samples, FULL, kernels)


VIEW = members.view(f"of {FULL} [quartiles]", lambda rows: [])

"""Finding out by measurement what serves a product best: the model proposes, a few members are timed in pairs.

What is proposed is the planner's choice and its neighbours in the family: other micro-tiles, packings, variants and
parallel loops. All of them and NumPy take part in a first pass of interleaved rounds. The best of those, with smaller and
larger blocks, meet the planner's choice again in a second pass, whose samples are new: the best of a dozen medians is
lucky. There the planner's choice takes part twice, which shows the noise: whoever beats both becomes an entry of ``tuned``.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from . import settings, timing, trial, tuned
from .blocking import BlockSizes
from .family.members import member, unblocked_member
from .family.tiles import TILES, UNBLOCKED_TILES
from .family.validity import check, unsuitable
from .family.variants import VARIANTS
from .host import Host, host
from .planner import DEFAULT_VARIANT, Plan, plan
from .problem import DTYPES, Problem
from .settings import Options
from .spec import KernelSpec
from .tuned import Tuned

#: The planner's choice is replaced by what is so many times as fast in the median, and faster in three of four rounds,
#: against each of its two sets of samples.
GAIN = 1.03

#: Name of the planner's choice where it takes part once more.
TWIN = "the same once more"

#: Members of the first pass at most, and those that go on to the second beside the planner's choice.
MEMBERS, FINALISTS = 14, 2

#: A tile is not tried if, with its edges, it computes so many times as much as the best one.
WASTE = 2.0

#: Where NumPy takes so many times as long as the planner's choice, it does not take part.
_HOPELESS = 4.0

#: The part of the time that the first pass takes.
_FIRST = 0.5


@dataclass(frozen=True)
class Candidate:
    """A kernel and the block sizes to call it with."""

    spec: KernelSpec
    blocks: BlockSizes

    @property
    def name(self) -> str:
        """In the words of a report: ``B3A2C0 8x48 ab ic mc=128 nc=2304``."""
        spec = self.spec
        if not spec.blocked:
            return " ".join(filter(None, (spec.variant, "without blocks", spec.parallel)))
        parts = [spec.variant, spec.tile, spec.packing, spec.parallel, f"mc={self.blocks.mc}", f"nc={self.blocks.nc}"]
        return " ".join(filter(None, parts))


def tunable(machine: Host, cap: str | None) -> dict[str, str]:
    """The dtypes whose products can be tuned, and the instruction set of each: those with kernels, of one element type for
    A, B and C."""
    alike = (d.name for d in DTYPES.values() if d.a == d.b == d.c != "bfloat16")
    found = {name: machine.isa(cap, name) for name in alike}
    return {name: isa.name for name, isa in found.items() if isa is not None}


def tune(problem: Problem, threads: int, seconds: float, progress: Callable[[str], None] | None = None) -> Tuned:
    """Measure one product for about ``seconds``, beside what building kernels takes; ``progress`` is told what happens.

    trial.BuildFailed when a kernel cannot be had.
    """
    tell = progress or (lambda text: None)
    with timing.thread_limit(threads), settings.options(tuned="off"):
        options, machine = settings.current(), host()
        planned = plan(problem, machine, options)
        chosen = trial.NUMPY if planned.spec is None else Candidate(planned.spec, planned.blocks).name
        a, b = operands(problem)
        specs = proposals(problem, planned, machine, options)
        tasks = planned.tasks if planned.tasks > 1 else threads
        (base,) = trial.load(specs[:1], tasks, tell).values()
        once, numpys = _seconds(lambda: base.multiply(a, b)), _seconds(lambda: np.matmul(a, b))
        numpy = planned.spec is None or numpys < _HOPELESS * once
        specs = specs[: _affordable(max(once, numpys * numpy), seconds * _FIRST)]
        loaded = trial.load(specs, tasks, tell)
        kernels = {Candidate(spec, kernel.blocks).name: kernel for spec, kernel in loaded.items()}
        kernels = _agreeing(base, kernels, a, b)

        tell(f"{len(kernels)} members")
        first = trial.interleaved(kernels, a, b, seconds * _FIRST, threads, numpy)
        names = [name for name in trial.ranked(first) if name != chosen][:FINALISTS]
        finalists = {name: kernels[name] for name in (*names, chosen) if name in kernels}
        best = next(kernels[name] for name in trial.ranked(first) if name in kernels)
        resized = {Candidate(best.spec, blocks).name: replace(best, blocks=blocks) for blocks in resizings(best, problem)}
        finalists |= _agreeing(base, resized, a, b)
        if chosen in finalists:
            finalists[TWIN] = finalists[chosen]
        tell(f"{len(finalists)} of them again")
        last = trial.interleaved(finalists, a, b, seconds * (1 - _FIRST), threads, numpy)
    return verdict(problem, threads, specs[0].isa, chosen, last, finalists)


def operands(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """A and B with random elements, in memory as the problem says."""
    random = np.random.default_rng(0)
    dtype = np.dtype(problem.dtype)

    def make(rows: int, columns: int, layout: str) -> np.ndarray:
        shape = (columns, rows) if layout == "col" else (rows, columns)
        if dtype.kind == "b":  # few true: sums of many end at once
            numbers = random.random(shape) < 0.01
        else:
            numbers = random.standard_normal(shape) if dtype.kind in "fc" else random.integers(0, 100, shape)
        return numbers.astype(dtype).T if layout == "col" else numbers.astype(dtype)

    return make(problem.m, problem.k, problem.a_layout), make(problem.k, problem.n, problem.b_layout)


def proposals(problem: Problem, planned: Plan, machine: Host, options: Options) -> list[KernelSpec]:
    """The planner's choice (if it is a kernel) and its neighbours, the likelier first; no more than ``MEMBERS``.

    ValueError where the family has no kernel for the problem at all.
    """
    base = planned.spec or plan(problem, machine, replace(options, variant=DEFAULT_VARIANT)).spec
    if base is None:
        raise ValueError(f"{problem.dtype} has no kernels on this machine: {planned.reason}")
    found = [base]
    for spec in _neighbours(base, options):
        if spec not in found and _fits(spec, problem) and _waste(spec, problem) <= WASTE * _least_waste(base, problem):
            found.append(spec)
    return found[:MEMBERS]


def _neighbours(base: KernelSpec, options: Options) -> Iterator[KernelSpec]:
    if (base.isa, base.dtype) in UNBLOCKED_TILES:
        yield unblocked_member(base.dtype, base.isa, parallel=base.parallel)
    if not base.blocked:
        base = member(base.variant, base.dtype, base.isa, None, base.packing, parallel=base.parallel)
        yield base
    variant, tiles = VARIANTS[base.variant], TILES[base.isa, base.dtype]
    for tile in tiles[variant.resident]:
        yield _with_tile(base, tile)
    for packing in variant.packings:
        yield replace(base, packing=packing)
    if options.num_threads and options.num_threads > 1:
        for loop in ("", *variant.outer):
            yield replace(base, parallel=loop)
    for other in VARIANTS.values():
        if other.resident not in tiles:
            continue
        if other.resident == variant.resident:
            yield replace(base, variant=other.name)
        for packing in (other.packable, other.packings[-1]):
            yield member(other.name, base.dtype, base.isa, None, packing, parallel=base.parallel)
    for tile in tiles[variant.resident]:
        for packing in variant.packings:
            yield replace(_with_tile(base, tile), packing=packing)


def _with_tile(spec: KernelSpec, tile: tuple[int, int]) -> KernelSpec:
    sizes = dict(zip(VARIANTS[spec.variant].tile_dimensions, tile))
    return replace(spec, mr=sizes.get("m", 0), nr=sizes.get("n", 0), kr=sizes.get("k", 0))


def _fits(spec: KernelSpec, problem: Problem) -> bool:
    """Whether there is such a kernel, it can take the operands, and adds up k in the one order (docs/design.md)."""
    try:
        check(spec)
    except ValueError:
        return False
    keeps_order = VARIANTS[spec.variant].resident == "C" or "c" in spec.packing
    return keeps_order and unsuitable(spec, problem) is None


def _waste(spec: KernelSpec, problem: Problem) -> float:
    """Computed over needed: tiles reach beyond the edges of C. (Without blocks, there is a tile for every edge.)"""
    if not spec.blocked:
        return 1.0
    mr, nr = spec.mr or 1, spec.nr or 1
    return (-(-problem.m // mr) * mr / problem.m) * (-(-problem.n // nr) * nr / problem.n)


def _least_waste(base: KernelSpec, problem: Problem) -> float:
    tiles = TILES[base.isa, base.dtype][VARIANTS[base.variant].resident]
    return min(_waste(_with_tile(base, tile), problem) for tile in tiles)


def resizings(kernel: trial.Kernel, problem: Problem) -> list[BlockSizes]:
    """Blocks half and twice as high, half and twice as wide, where that makes a difference to the problem."""
    spec, blocks = kernel.spec, kernel.blocks
    found = []
    if not spec.blocked:
        return found
    for side, tile, size in (("mc", spec.mr or 1, problem.m), ("nc", spec.nr or 1, problem.n)):
        now = getattr(blocks, side)
        for factor in (0.5, 2.0):
            other = max(tile, int(now * factor) // tile * tile)
            if min(other, size) != min(now, size):
                found.append(replace(blocks, **{side: other}))
    return found


def verdict(
    problem: Problem, threads: int, isa: str, chosen: str, samples: dict[str, list[float]], kernels: dict[str, trial.Kernel]
) -> Tuned:
    """Who won: whoever is first among ``samples``, if the planner's choice (``chosen``) is slower by more than the noise."""
    best = trial.ranked(samples)[0]
    own = [samples[name] for name in (chosen, TWIN) if name in samples]
    ratio = min((timing.ratio(times, samples[best]) for times in own), key=lambda ratio: ratio.median)
    entry = Tuned(problem, threads, isa, tuned.PLANNER, over=chosen, measured=datetime.date.today().isoformat())
    if best in (chosen, TWIN) or ratio.median < GAIN or ratio.low <= 1.0:
        return entry
    entry = replace(entry, ratio=(ratio.median, ratio.low, ratio.high))
    if best == trial.NUMPY:
        return replace(entry, winner=tuned.NUMPY)
    winner = kernels[best]
    blocks = {"mc": winner.blocks.mc, "nc": winner.blocks.nc}
    return replace(entry, winner=tuned.MEMBER, spec=winner.spec, tasks=winner.tasks, **blocks)


def _agreeing(
    base: trial.Kernel, kernels: dict[str, trial.Kernel], a: np.ndarray, b: np.ndarray
) -> dict[str, trial.Kernel]:
    """Those whose product is that of ``base`` to the bit: results must not depend on what was tuned."""
    expected = base.multiply(a, b).tobytes()
    return {name: kernel for name, kernel in kernels.items() if kernel.multiply(a, b).tobytes() == expected}


def _seconds(call: Callable[[], object]) -> float:
    call()
    return timing.sample(call, 1)


def _affordable(once: float, seconds: float) -> int:
    """How many members that take ``once`` can be compared in ``seconds``, with the fewest rounds; at least two."""
    return max(2, int(seconds / max(once, timing.MIN_SECONDS) / (timing.MIN_ROUNDS + 2)))

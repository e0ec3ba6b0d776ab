"""Finding out by measurement what serves a product best: the model proposes, a few members are timed in pairs.

What is proposed is the planner's choice and its neighbours in the family: other micro-tiles, packings, variants and
parallel loops, for a stack also sharing out its products. All of them and NumPy (where it has BLAS) take part in a first
pass of interleaved rounds. The best of those, with smaller and larger blocks, are measured against the planner's choice in
a second pass with new samples, because the best of a dozen medians is partly luck. There the planner's choice takes part
twice, which shows the noise: whoever beats both becomes an entry of ``tuned``.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from . import settings, timing, trial, tuned
from .blocking import BlockSizes
from .family.members import member, unblocked_member
from .family.tiles import TILES, UNBLOCKED_TILES
from .family.validity import check, unsuitable
from .family.variants import VARIANTS
from .host import Host, host
from .kinds import BLAS
from .planner import DEFAULT_VARIANT, Plan, plan, shape_spec
from .problem import DTYPES, Problem
from .product import Product
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
    """A kernel, and whether tasks share out the products of a stack by it."""

    spec: KernelSpec
    shares_stack: bool = False


def tunable(machine: Host, cap: str | None) -> dict[str, str]:
    """The dtypes whose products can be tuned, and the instruction set of each: those with kernels."""
    found = {name: machine.isa(cap, name) for name in DTYPES}
    return {name: isa.name for name, isa in found.items() if isa is not None}


def tune(product: Product, threads: int, seconds: float, progress: Callable[[str], None] | None = None) -> Tuned:
    """Measure one product for about ``seconds``, beside what building kernels takes; ``progress`` is told what happens.

    trial.BuildFailed when a kernel cannot be had.
    """
    tell = progress or (lambda text: None)
    with timing.thread_limit(threads), settings.options(tuned="off"):
        options, machine, problem = settings.current(), host(), product.problem()
        if (own := shape_spec(problem, machine, options)) is not None:
            return _specialised(own, problem, threads, tell)
        planned = plan(problem, machine, options)
        candidates = proposals(problem, planned, machine, options)
        tasks = planned.tasks if planned.tasks > 1 else threads
        a, b, c = product.operands()
        ours = product.call(a, b, c)
        (base,) = _load(candidates[:1], tasks, tell).values()
        chosen = trial.NUMPY if planned.spec is None else base.name
        once = _seconds(lambda: base.run(ours))
        # The planner leaves nothing to NumPy where NumPy has no BLAS, so it need not be asked there.
        numpys = product.numpys_call(a, b, c) if product.op == "matmul" and product.dtype in BLAS else None
        numpys_once = _seconds(numpys) if numpys else 0.0
        if numpys_once >= _HOPELESS * once and planned.spec is not None:
            numpys, numpys_once = None, 0.0
        candidates = candidates[: _affordable(max(once, numpys_once), seconds * _FIRST)]
        kernels = _agreeing(base, _load(candidates, tasks, tell), ours, c)

        tell(f"{len(kernels)} members")
        first = trial.interleaved(kernels, ours, numpys, seconds * _FIRST, threads)
        names = [name for name in trial.ranked(first) if name != chosen][:FINALISTS]
        finalists = {name: kernels[name] for name in (*names, chosen) if name in kernels}
        best = next(kernels[name] for name in trial.ranked(first) if name in kernels)
        resized = (replace(best, blocks=blocks) for blocks in resizings(best, problem))
        finalists |= _agreeing(base, {kernel.name: kernel for kernel in resized}, ours, c)
        if chosen in finalists:
            finalists[TWIN] = finalists[chosen]
        tell(f"{len(finalists)} of them again")
        last = trial.interleaved(finalists, ours, numpys, seconds * (1 - _FIRST), threads)
    return verdict(problem, threads, base.spec.isa, chosen, last, finalists)


def _specialised(spec: KernelSpec, problem: Problem, threads: int, tell: Callable[[str], None]) -> Tuned:
    """The entry of a small shape that has a kernel for it alone. That serves as soon as it is there, before all
    measurements, so it is built, and nothing else is measured."""
    (kernel,) = trial.load([spec], 1, tell).values()
    return Tuned(problem, threads, spec.isa, tuned.PLANNER, over=kernel.name, measured=_today())


def _load(candidates: Sequence[Candidate], tasks: int, tell: Callable[[str], None]) -> dict[str, trial.Kernel]:
    """The candidates' kernels by name; ``tasks`` for those that share something out."""
    loaded = trial.load([candidate.spec for candidate in candidates], tasks, tell)
    kernels = [loaded[x.spec] if not x.shares_stack else replace(loaded[x.spec], tasks=tasks, shares_stack=True) for x in candidates]
    return {kernel.name: kernel for kernel in kernels}


def proposals(problem: Problem, planned: Plan, machine: Host, options: Options) -> list[Candidate]:
    """The planner's choice (if it is a kernel) and its neighbours, the likelier first; no more than ``MEMBERS``.

    ValueError where the family has no kernel for the problem at all.
    """
    if planned.spec is None:
        planned = plan(problem, machine, replace(options, variant=DEFAULT_VARIANT))
    base = planned.spec
    if base is None:
        raise ValueError(f"{problem.dtype} has no kernels on this machine: {planned.reason}")
    found = [Candidate(base, planned.shares_stack)]
    if problem.batch > 1 and options.num_threads and options.num_threads > 1:
        found.append(Candidate(replace(base, parallel=""), not planned.shares_stack))
    least = WASTE * _least_waste(base, problem)
    for spec in _neighbours(base, options):
        candidate = Candidate(spec, planned.shares_stack and not spec.parallel)
        if candidate not in found and _fits(spec, problem) and _waste(spec, problem) <= least:
            found.append(candidate)
    return found[:MEMBERS]


def _neighbours(base: KernelSpec, options: Options) -> Iterator[KernelSpec]:
    if (base.isa, base.dtype) in UNBLOCKED_TILES:
        yield unblocked_member(base.dtype, base.isa, op=base.op, parallel=base.parallel)
    if not base.blocked:
        base = member(base.variant, base.dtype, base.isa, None, base.packing, op=base.op, parallel=base.parallel)
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
            yield member(other.name, base.dtype, base.isa, None, packing, op=base.op, parallel=base.parallel)
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
    found: list[BlockSizes] = []
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
    entry = Tuned(problem, threads, isa, tuned.PLANNER, over=chosen, measured=_today())
    if best in (chosen, TWIN) or ratio.median < GAIN or ratio.low <= 1.0:
        return entry
    entry = replace(entry, ratio=(ratio.median, ratio.low, ratio.high))
    if best == trial.NUMPY:
        return replace(entry, winner=tuned.NUMPY)
    won = kernels[best]
    return replace(
        entry, winner=tuned.MEMBER, spec=won.spec, mc=won.blocks.mc, nc=won.blocks.nc, tasks=won.tasks, shares_stack=won.shares_stack
    )


def _today() -> str:
    return datetime.date.today().isoformat()


def _agreeing(
    base: trial.Kernel, kernels: dict[str, trial.Kernel], ours: Callable[[], np.ndarray], c: np.ndarray
) -> dict[str, trial.Kernel]:
    """Those whose product, which ``ours`` puts into ``c``, is that of ``base`` to the bit: results must not depend on what
    was tuned."""

    def result(kernel: trial.Kernel) -> bytes:
        c[...] = 0  # which gemm reads
        return kernel.run(ours).tobytes()

    expected = result(base)
    return {name: kernel for name, kernel in kernels.items() if result(kernel) == expected}


def _seconds(call: Callable[[], object]) -> float:
    call()
    return timing.sample(call, 1)


def _affordable(once: float, seconds: float) -> int:
    """How many members that take ``once`` can be compared in ``seconds``, with the fewest rounds; at least two."""
    return max(2, int(seconds / max(once, timing.MIN_SECONDS) / (timing.MIN_ROUNDS + 2)))

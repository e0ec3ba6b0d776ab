"""The planner: which kernel serves a problem, with which block sizes and how many tasks, and why.

``plan`` is pure: the same problem, host and options give the same plan. It works through an ordered list of rules, each
a box (bounds on m, n, k, batch and m.n.k) and a decision; the first box that holds the problem decides. A plan carries
the box in which every problem of the same layouts gets the same plan, so the native dispatch table asks once per box
and not once per shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .blocking import BlockSizes, block_sizes
from .family.isa import Isa
from .family.tiles import TILES
from .family.variants import VARIANTS
from .host import Host
from .problem import DTYPES, Problem
from .settings import Options
from .spec import KernelSpec

#: m.n.k from which a product is worth sharing out: below, waking the workers costs more than they save.
PARALLEL_WORK = 1 << 20

#: m.n.k up to which A.A^T is computed like any other product; above, NumPy's syrk does half the work.
SYMMETRIC_WORK = 32**3

DEFAULT_VARIANT = "B3A2C0"

_UNBOUNDED = (0, 2**62)


@dataclass(frozen=True)
class Box:
    """Inclusive bounds on what a problem's numbers may be; ``work`` is m.n.k as a float."""

    m: tuple[float, float] = _UNBOUNDED
    n: tuple[float, float] = _UNBOUNDED
    k: tuple[float, float] = _UNBOUNDED
    batch: tuple[float, float] = _UNBOUNDED
    work: tuple[float, float] = (0.0, math.inf)

    SIDES = ("m", "n", "k", "batch", "work")

    def holds(self, problem: Problem) -> bool:
        """Whether the problem's numbers are within the bounds."""
        return all(low <= getattr(problem, side) <= high for side in self.SIDES for low, high in (getattr(self, side),))

    def clipped(self, side: str, low: float, high: float) -> Box:
        """This box with one side narrowed to within [low, high]."""
        now_low, now_high = getattr(self, side)
        return replace(self, **{side: (max(low, now_low), min(high, now_high))})

    def without(self, other: Box, problem: Problem) -> Box:
        """The part of this box on the problem's side of a bound of ``other`` that the problem breaks."""
        for side in self.SIDES:
            value, (low, high) = getattr(problem, side), getattr(other, side)
            exact = side != "work"
            if value < low:
                return self.clipped(side, -math.inf, low - 1 if exact else math.nextafter(low, -math.inf))
            if value > high:
                return self.clipped(side, high + 1 if exact else math.nextafter(high, math.inf), math.inf)
        raise ValueError("the problem lies inside the box that is to be cut away")


@dataclass(frozen=True)
class Plan:
    """A decision: ``spec`` with run-time numbers, or ``spec`` None where NumPy's own loop serves; ``reason`` in words."""

    spec: KernelSpec | None
    blocks: BlockSizes | None
    tasks: int
    box: Box
    reason: str

    @property
    def served(self) -> bool:
        """Whether one of our kernels computes."""
        return self.spec is not None


@dataclass(frozen=True)
class _Rule:
    box: Box
    decide: Callable[[], tuple[KernelSpec | None, int, str]]


def plan(problem: Problem, host: Host, options: Options) -> Plan:
    """The Plan for ``problem`` on ``host`` under ``options``."""
    isa = host.isa(options.max_isa)
    if options.variant == "numpy":
        return _declined(Box(), "TVMGEMM_VARIANT=numpy leaves every product to NumPy")
    if isa is None:
        return _declined(Box(), f"no kernels exist for this CPU ({host.arch} with {options.max_isa or 'any level'})")
    blocks = dtype_blocks(problem.dtype, isa, host)
    box = Box()
    for rule in _rules(problem, isa, blocks, options):
        if rule.box.holds(problem):
            spec, tasks, reason = rule.decide()
            for side in Box.SIDES:
                box = box.clipped(side, *getattr(rule.box, side))
            return Plan(spec, blocks if spec else None, tasks, box, reason)
        box = box.without(rule.box, problem)
    raise AssertionError("the last rule holds every problem")


def dtype_blocks(dtype: str, isa: Isa, host: Host) -> BlockSizes:
    """The block sizes of all kernels of a dtype on this host.

    One kc for all of them: then every kernel adds up k in the same order, and an element of C depends on its row of A
    and its column of B, not on the shape around it, the tile or the number of threads.
    """
    mr, nr = TILES[isa.name, dtype][0]
    return block_sizes(mr, nr, DTYPES[dtype].itemsize, host.cache(1), host.cache(2), host.cache(3))


def _declined(box: Box, reason: str) -> Plan:
    return Plan(None, None, 1, box, reason)


def _rules(problem: Problem, isa: Isa, blocks: BlockSizes, options: Options) -> list[_Rule]:
    """The rules for problems of these layouts, first match first; the last one holds everything."""
    forced = options.variant != "auto"
    variant = VARIANTS[options.variant if forced else DEFAULT_VARIANT]
    packed_tile, small_tile = TILES[isa.name, problem.dtype][:2]
    threads = options.threads

    def kernel(packing: str, parallel: str, why: str) -> Callable[[], tuple[KernelSpec | None, int, str]]:
        mr, nr = small_tile if packing == "none" else packed_tile
        spec = KernelSpec(problem.dtype, isa.name, variant.name, mr, nr, problem.op, packing, parallel)
        return lambda: (spec, threads if parallel else 1, why)

    def numpy(why: str) -> Callable[[], tuple[KernelSpec | None, int, str]]:
        return lambda: (None, 1, why)

    rules: list[_Rule] = []
    if not forced and problem.op == "matmul":
        if problem.symmetric:
            why = "A and B are one buffer, B = A^T: NumPy's syrk does half the work"
            rules.append(_Rule(Box(work=(SYMMETRIC_WORK + 1, math.inf)), numpy(why)))
        for side in ("m", "n"):
            why = f"{side} = 1 is a matrix-vector product: NumPy's BLAS runs it at the speed of memory"
            rules.append(_Rule(Box(**{side: (1, 1)}), numpy(why)))

    # B fits in half of L2 next to what streams past it, or is read once only: then packing costs more than it saves.
    in_place: list[tuple[Box, str]] = []
    if problem.b_layout == "row":
        columns = max(packed_tile[1], blocks.mc // 2)
        in_place.append((Box(n=(0, columns), k=(0, blocks.kc)), f"B of up to {blocks.kc} x {columns} stays in L2"))
        in_place.append((Box(m=(0, small_tile[0])), "one row of micro-tiles reads B once"))
    choices = [(box, "none", f"not packed: {why}") for box, why in in_place]
    choices.append((Box(), "ab", "both operands packed"))

    for box, packing, why in choices:
        if threads > 1:
            rows = packed_tile[0] * threads
            large = box.clipped("work", PARALLEL_WORK, math.inf)
            rules.append(_Rule(large.clipped("m", rows, math.inf), kernel(packing, "ic", f"{why}; rows shared out")))
            columns = packed_tile[1] * threads
            by_columns = large.clipped("n", columns, math.inf)
            if by_columns.n[0] <= by_columns.n[1]:
                rules.append(_Rule(by_columns, kernel(packing, "jc", f"{why}; columns shared out")))
        rules.append(_Rule(box, kernel(packing, "", why)))
    return rules


def companions(spec: KernelSpec, options: Options) -> list[KernelSpec]:
    """Kernels that a program which needs ``spec`` will most likely need next: they are built in the same process,
    because loading the compiler takes longer than compiling a kernel."""
    tiles = TILES[spec.isa, spec.dtype]
    wanted = [("none", ""), ("ab", "")]
    if options.threads > 1:
        wanted += [("none", "ic"), ("ab", "ic")]
    found = []
    for packing, parallel in wanted:
        mr, nr = tiles[1] if packing == "none" else tiles[0]
        other = replace(spec, mr=mr, nr=nr, packing=packing, parallel=parallel)
        if other != spec:
            found.append(other)
    return found

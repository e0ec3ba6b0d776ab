"""The planner: which kernel serves a problem, with which block sizes and how many tasks, and why.

``plan`` is pure: the same problem, host and options give the same plan. It works through an ordered list of rules, each
a box (bounds on the sizes and on products of them) and a decision; the first box that holds the problem decides. A plan
carries the box in which every problem of the same layouts gets the same plan, so the native dispatch table asks once
per box and not once per shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from . import sharing
from .blocking import BlockSizes, blocks_of
from .boxes import STACK, Box, Limits, Rule
from .family.arithmetic import WAYS
from .family.isa import Isa
from .family.members import member, shape_member, unblocked_member
from .family.tiles import IN_PLACE, LARGEST_SHAPE, PACKED, SLENDER, TILES, TINY, UNBLOCKED, UNBLOCKED_TILES
from .family.validity import check, unsuitable
from .family.variants import VARIANTS, Variant
from .host import Host
from .kinds import BLAS, DEFAULT_VARIANT
from .problem import Problem
from .rules import forced, rules_for
from .settings import Options
from .spec import KernelSpec

if TYPE_CHECKING:
    from .tuned import Tuned

#: m.n.k up to which a kernel for one shape alone is faster than those for all; beyond, the FMAs are most of the time.
SHAPE_WORK = 12**3

#: The same of integers: 64-bit ones of 16x16x4 are slower so.
SHAPE_WORK_OF_INTEGERS = 8**3

#: Products of a small shape after which a kernel for it alone is built. One saves some 10 ns of each; building takes a
#: second of another core, in the background, once for all processes to come: with 5 ms saved if it had been there, 200
#: such programs pay for it, and one that goes on for a second does so by itself.
HOT_PRODUCTS = 500_000


@dataclass(frozen=True)
class Plan:
    """A decision: ``spec`` with run-time numbers, or ``spec`` None where NumPy's own loop serves; ``reason`` in words.

    ``shares_stack``: the tasks share out the products of a stack, each by the kernel of ``spec`` on its own thread.
    ``refused``: the options force a choice that cannot be honoured, and ``reason`` says why. ``tuned``: a measurement on
    this machine decided, and not the rules.
    """

    spec: KernelSpec | None
    blocks: BlockSizes | None
    tasks: int
    box: Box
    reason: str
    refused: bool = False
    tuned: bool = False
    shares_stack: bool = False

    @property
    def parallel_loop(self) -> str | None:
        """The loop whose iterations are shared out to tasks: ``"stack"``, an outer loop of the kernel, or None."""
        return STACK if self.shares_stack else self.spec and self.spec.parallel or None

    @property
    def served(self) -> bool:
        """Whether one of our kernels computes."""
        return self.spec is not None


def plan(
    problem: Problem,
    host: Host,
    options: Options,
    tuned: Sequence[Tuned] = (),
    shapes: Collection[KernelSpec] = (),
) -> Plan:
    """The Plan for ``problem`` on ``host`` under ``options``.

    ``tuned``: what was measured on this host. Where an entry holds it decides, unless the options force a choice.
    ``shapes``: the kernels for single shapes that can be had without building; they come before everything else. A plan
    for all others does not exclude their shapes from its box: who has several plans looks at the exact ones first.
    """
    isa = host.isa(options.max_isa, problem.dtype)
    if options.variant == "numpy":
        return Plan(None, None, 1, Box(), "TVMGEMM_VARIANT=numpy leaves every product to NumPy")
    if isa is not None and options.arithmetic is not None:
        ways = WAYS[isa.name][problem.dtype]
        if ways == (options.arithmetic,):  # nothing to choose
            options = replace(options, arithmetic=None)
        elif (isa := host.isa(options.max_isa, problem.dtype, options.arithmetic)) is None:
            why = f"refused, NumPy serves: arithmetic {options.arithmetic!r}: {problem.dtype} has {', '.join(ways)} here"
            return Plan(None, None, 1, Box(), why, refused=True)
    if isa is None:
        widest = host.isa(options.max_isa)
        if widest is not None:
            return Plan(None, None, 1, Box(), f"no kernels for {problem.dtype} on {widest.name}")
        return Plan(None, None, 1, Box(), f"no kernels exist for this CPU ({host.arch}, {options.max_isa or 'any level'})")
    threads = options.num_threads or host.cores
    spec = shape_spec(problem, host, options)
    if spec is not None and spec in shapes:
        return _shape_plan(spec, problem, host, threads)
    fitting = [] if forced(options) else [entry for entry in tuned if entry.applies(problem, isa.name, threads)]
    passed: list[Box] = []
    # What was measured itself comes before what is near it.
    for box, entry in (*((entry.point, entry) for entry in fitting), *((entry.box, entry) for entry in fitting)):
        if box.holds(problem):
            box = box.beside(passed, problem)
            return Plan(
                entry.spec, entry.blocks(host), entry.tasks, box, entry.reason, tuned=True, shares_stack=entry.shares_stack
            )
        passed.append(box)
    passed = [entry.box for entry in fitting]  # each holds its point
    for rule in rules_for(problem, isa, host, options):
        if rule.box.holds(problem):
            return _decision(rule, rule.box.beside(passed, problem), problem, isa, host, options)
        passed.append(rule.box)
    raise AssertionError("the last rule holds every problem")


def shape_spec(problem: Problem, host: Host, options: Options) -> KernelSpec | None:
    """The kernel for the problem's shape alone; None if there can be none, if it would gain nothing, or if the options
    force another."""
    most = SHAPE_WORK if problem.dtype in BLAS else SHAPE_WORK_OF_INTEGERS
    if problem.work > most or forced(options) or options.specialise == "off" or problem.op != "matmul":
        return None
    isa = host.isa(options.max_isa, problem.dtype)
    if isa is None:
        return None
    spec = shape_member(problem.dtype, isa.name, (problem.m, problem.n, problem.k))
    try:
        check(spec)
    except ValueError:
        return None
    return spec if unsuitable(spec, problem) is None else None


def _shape_plan(spec: KernelSpec, problem: Problem, host: Host, threads: int) -> Plan:
    """The Plan of a kernel for one shape: for stacks too short to be shared out, or for the others."""
    length = max(math.ceil(sharing.PARALLEL_WORK / max(problem.work, 4.0**3)), 4 * threads)
    shared = threads > 1 and problem.batch >= length
    sides: Limits = {side: (getattr(problem, side),) * 2 for side in ("m", "n", "k")}
    if threads > 1:
        sides["batch"] = (length, math.inf) if shared else (0, length - 1)
    why = f"{problem.m}x{problem.n}x{problem.k} has a kernel for this shape alone"
    why += f"; stacks of at least {length} are shared out" if shared else ""
    box = Box()
    for side, bounds in sides.items():
        box = box.clipped(side, *bounds)
    return Plan(spec, blocks_of(spec, host), threads if shared else 1, box, why, shares_stack=shared)


def hot_at(decided: Plan, problem: Problem, host: Host, options: Options) -> int:
    """The number of products of one small shape, served by this plan for problems of these layouts, at which a kernel for
    the shape alone is worth while; 0 if it never is."""
    m, n, k = (max(1, int(low)) for low, _ in (decided.box.m, decided.box.n, decided.box.k))
    smallest = replace(problem, m=m, n=n, k=k)
    small = all(getattr(smallest, side) <= LARGEST_SHAPE for side in ("m", "n", "k"))
    return HOT_PRODUCTS if small and shape_spec(replace(smallest, m=1, n=1, k=1), host, options) else 0


def _decision(rule: Rule, box: Box, problem: Problem, isa: Isa, host: Host, options: Options) -> Plan:
    """The Plan of a rule: its kernel, or why a forced choice makes none."""
    if rule.variant is None:
        return Plan(None, None, 1, box, rule.reason)
    try:
        spec = _spec(rule, VARIANTS[rule.variant], problem, isa, options)
        check(spec)
        objection = unsuitable(spec, problem)
    except ValueError as error:
        objection = str(error)
    if objection:
        return Plan(None, None, 1, box, f"refused, NumPy serves: {objection}", refused=True)
    return Plan(spec, blocks_of(spec, host), rule.tasks, box, rule.reason, shares_stack=rule.parallel == STACK)


def _spec(rule: Rule, variant: Variant, problem: Problem, isa: Isa, options: Options) -> KernelSpec:
    parallel = "" if rule.parallel == STACK else rule.parallel  # the loop over a stack is not the kernel's to share
    if rule.tile is UNBLOCKED:
        return unblocked_member(problem.dtype, isa.name, rule.packing, op=problem.op, parallel=parallel)
    tiles = TILES[isa.name, problem.dtype]
    if variant.resident not in tiles:
        raise ValueError(f"{variant.name}: {problem.dtype} has the variants with C in registers")
    tile = None if options.arithmetic else tiles[variant.resident][rule.tile]
    if options.microkernel is not None:
        rows, columns = options.microkernel.split("x")
        tile = int(rows), int(columns)
    packing = rule.packing if options.packing is None else options.packing
    if packing != rule.packing and problem.dtype not in BLAS and options.microkernel is None:
        tile = None  # another arithmetic may have other lanes
    return member(
        variant.name, problem.dtype, isa.name, tile, packing, op=problem.op, parallel=parallel, symmetric=rule.symmetric,
        arithmetic=options.arithmetic or "",
    )  # fmt: skip


def companions(spec: KernelSpec, host: Host, options: Options) -> list[KernelSpec]:
    """Kernels that a program which needs ``spec`` will most likely need next: they are built in the same process,
    because loading the compiler takes longer than compiling a kernel."""
    free = options.variant == "auto"
    name = DEFAULT_VARIANT if free else options.variant
    if options.microkernel or options.packing or options.parallel_loop or options.arithmetic or VARIANTS[name].resident != "C":
        return []
    lean = free and (spec.isa, spec.dtype) in UNBLOCKED_TILES
    if spec.dtype in BLAS:
        wanted = [] if lean else [(name, "none", IN_PLACE)]
        wanted += [("A3B2C0", "b", PACKED), ("A3B2C0", "ab", PACKED)] if free else [(name, "ab", PACKED)]
    else:
        wanted = [] if lean else [(name, "none", TINY), (name, "none", SLENDER)]
        wanted += [(name, "ab", PACKED)]
    tiles, found = TILES[spec.isa, spec.dtype]["C"], []
    for parallel in ("", "ic") if (options.num_threads or host.cores) > 1 else ("",):
        rest = {"op": spec.op, "parallel": parallel}
        found += [unblocked_member(spec.dtype, spec.isa, **rest)] if lean else []
        for variant, packing, tile in wanted:
            found.append(member(variant, spec.dtype, spec.isa, tiles[tile], packing, **rest))
    return [other for other in found if other != spec]

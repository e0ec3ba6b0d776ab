"""The planner: which kernel serves a problem, with which block sizes and how many tasks, and why.

``plan`` is pure: the same problem, host and options give the same plan. It works through an ordered list of rules, each
a box (bounds on m, n, k, batch and m.n.k) and a decision; the first box that holds the problem decides. A plan carries
the box in which every problem of the same layouts gets the same plan, so the native dispatch table asks once per box
and not once per shape.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .blocking import BlockSizes, block_sizes, kc_of
from .family.arithmetic import Arithmetic, arithmetic_of, lanes_of, rounds_once
from .family.isa import ISAS, Isa
from .family.members import member, shape_member, unblocked_member
from .family.tiles import LARGEST_SHAPE, TILES, UNBLOCKED_TILES
from .family.validity import check, unsuitable
from .family.variants import VARIANTS
from .host import Host
from .problem import DTYPES, Problem
from .settings import Options
from .spec import KernelSpec

if TYPE_CHECKING:
    from .tuned import Tuned

#: m.n.k from which a product is worth sharing out to two tasks, half of it for each further one: with less to do, waking
#: a worker costs more than it saves.
PARALLEL_WORK = 1 << 20

#: The loop over a stack, as one that tasks share.
STACK = "stack"

#: m.n.k of one product -> length of the stack from which sharing it out pays. A product of less than the first bound takes
#: as long as one of the bound; from the last on, what matters is that the shares come out even.
STACK_LENGTHS = ((0.0, 2048), (16.0**3, 256), (4 * 16.0**3, 64), (16 * 16.0**3, 16), (64 * 16.0**3, 8))

#: m.n.k up to which a kernel for one shape alone is faster than those for all; beyond, the FMAs are most of the time.
SHAPE_WORK = 12**3

#: Products of a small shape after which a kernel for it alone is built. One saves some 10 ns of each; building takes a second
#: of another core, once for all processes to come: worth it once 20 ms would have been saved.
HOT_PRODUCTS = 2_000_000

#: m up to which A.A^T is computed like any other product: there is hardly a tile that lies above the diagonal.
SYMMETRIC_ROWS = 32

#: Bytes of a row of A.A^T up to which the narrowest tile is best for it.
SYMMETRIC_NARROW = 2048

#: k up to which reading and writing a C that no cache holds costs more than the products: rows of C in turn.
SHALLOW = 128

#: m up to which a B that no cache holds is read for too few products: each element of it once, into registers.
FLAT = 64

#: m up to which packing a B that L2 holds costs more than it saves.
FEW_ROWS = 512

#: m up to which a packed B is used so little that it pays only while L2 still holds it from its packing.
SHORT = 256

#: n up to which reading rows of A in place costs less than packing them.
FEW_COLUMNS = 768

#: Micro-tiles of rows per task from which A3B2C0 shares out rows: each task then packs blocks of its own.
TALL = 16

#: m up to which the rows that a tall tile leaves over count.
TINY = 32

#: Elements of a matrix up to which its rows are multiplied by a vector faster, with k in order, than BLAS is called.
SMALL_GEMV = 1 << 10

#: The same of a dot product.
TINY_DOT = 16

#: m.n.k up to which reading operands in place beats packing them for an arithmetic that multiplies groups.
GROUPED_WORK = 32.0**3

#: m up to which packing B costs more than all multiplications with it, in dtypes that NumPy has no BLAS for.
FEW = 8

DEFAULT_VARIANT = "B3A2C0"

#: The dtypes that NumPy hands to its BLAS; for all others it has a scalar loop.
BLAS = ("float32", "float64", "complex64", "complex128")

_UNBOUNDED = (0, 2**62)


@dataclass(frozen=True)
class Box:
    """Inclusive bounds on what a problem's numbers may be; ``mn``, ``kn`` and ``work`` are m.n, k.n and m.n.k as floats."""

    m: tuple[float, float] = _UNBOUNDED
    n: tuple[float, float] = _UNBOUNDED
    k: tuple[float, float] = _UNBOUNDED
    batch: tuple[float, float] = _UNBOUNDED
    mn: tuple[float, float] = (0.0, math.inf)
    kn: tuple[float, float] = (0.0, math.inf)
    work: tuple[float, float] = (0.0, math.inf)

    PRODUCTS = ("mn", "kn", "work")
    SIDES = ("m", "n", "k", "batch", *PRODUCTS)

    def holds(self, problem: Problem) -> bool:
        """Whether the problem's numbers are within the bounds."""
        return all(low <= getattr(problem, side) <= high for side in self.SIDES for low, high in (getattr(self, side),))

    def clipped(self, side: str, low: float, high: float) -> Box:
        """This box with one side narrowed to within [low, high]."""
        now_low, now_high = getattr(self, side)
        return replace(self, **{side: (max(low, now_low), min(high, now_high))})

    def beside(self, others: Iterable[Box], problem: Problem) -> Box:
        """A part of this box, with the problem in it, that meets none of ``others``, none of which holds the problem."""
        box = Box()  # whose bounds are whole numbers
        for side in self.SIDES:
            box = box.clipped(side, *getattr(self, side))
        for other in others:
            if box.meets(other):
                box = box.without(other, problem)
        return box

    def meets(self, other: Box) -> bool:
        """Whether the bounds of both can be kept at once."""
        return all(
            max(ours[0], theirs[0]) <= min(ours[1], theirs[1])
            for ours, theirs in ((getattr(self, side), getattr(other, side)) for side in self.SIDES)
        )

    def without(self, other: Box, problem: Problem) -> Box:
        """The part of this box on the problem's side of a bound of ``other`` that the problem breaks."""
        for side in self.SIDES:
            value, (low, high) = getattr(problem, side), getattr(other, side)
            exact = side not in self.PRODUCTS
            if value < low:
                return self.clipped(side, -math.inf, low - 1 if exact else math.nextafter(low, -math.inf))
            if value > high:
                return self.clipped(side, high + 1 if exact else math.nextafter(high, math.inf), math.inf)
        raise ValueError("the problem lies inside the box that is to be cut away")


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


@dataclass(frozen=True)
class _Rule:
    """What serves the problems of a box. ``variant`` None: NumPy. ``tile`` is an index into ``TILES``, or None for a kernel
    without loops over cache blocks, which chooses its tiles itself. ``parallel``: the loop that tasks share, ``"stack"``
    among them."""

    box: Box
    variant: str | None
    packing: str
    tile: int | None
    reason: str
    parallel: str = ""
    tasks: int = 1
    symmetric: bool = False


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
    if isa is None:
        widest = host.isa(options.max_isa)
        if widest is not None:
            return Plan(None, None, 1, Box(), f"no kernels for {problem.dtype} on {widest.name}")
        return Plan(None, None, 1, Box(), f"no kernels exist for this CPU ({host.arch}, {options.max_isa or 'any level'})")
    options = replace(options, num_threads=options.num_threads or host.cores)
    spec = shape_spec(problem, host, options)
    if spec in shapes:
        return _shape_plan(spec, problem, host, options)
    passed: list[Box] = []
    for box, entry in [] if forced(options) else _measured(tuned, problem, isa, options):
        if box.holds(problem):
            return Plan(entry.spec, entry.blocks(host), entry.tasks, box.beside(passed, problem), entry.reason, tuned=True)
        passed.append(box)
    for rule in _rules(problem, isa, host, options):
        if rule.box.holds(problem):
            return _decision(rule, rule.box.beside(passed, problem), problem, isa, host, options)
        passed.append(rule.box)
    raise AssertionError("the last rule holds every problem")


def shape_spec(problem: Problem, host: Host, options: Options) -> KernelSpec | None:
    """The kernel for the problem's shape alone; None if there can be none, if it would gain nothing, or if the options
    force another."""
    isa = host.isa(options.max_isa, problem.dtype)
    if isa is None or forced(options) or options.specialise == "off" or problem.op != "matmul":
        return None
    spec = shape_member(problem.dtype, isa.name, (problem.m, problem.n, problem.k))
    try:
        check(spec)
    except ValueError:
        return None
    return spec if problem.work <= SHAPE_WORK and unsuitable(spec, problem) is None else None


def _shape_plan(spec: KernelSpec, problem: Problem, host: Host, options: Options) -> Plan:
    """The Plan of a kernel for one shape: for stacks too short to be shared out, or for the others."""
    length = max(math.ceil(PARALLEL_WORK / max(problem.work, 4.0**3)), 4 * options.num_threads)
    shared = options.num_threads > 1 and problem.batch >= length
    sides = {side: (getattr(problem, side),) * 2 for side in ("m", "n", "k")}
    if options.num_threads > 1:
        sides["batch"] = (length, math.inf) if shared else (0, length - 1)
    why = f"{problem.m}x{problem.n}x{problem.k} has a kernel for this shape alone"
    why += f"; a stack of at least {length} shared out" if shared else ""
    box = Box()
    for side, bounds in sides.items():
        box = box.clipped(side, *bounds)
    tasks = options.num_threads if shared else 1
    return Plan(spec, blocks_of(spec, host), tasks, box, why, shares_stack=shared)


def hot_at(decided: Plan, problem: Problem, host: Host, options: Options) -> int:
    """The number of products of one small shape, served by this plan for problems of these layouts, at which a kernel for
    the shape alone is worth while; 0 if it never is."""
    smallest = replace(problem, m=decided.box.m[0] or 1, n=decided.box.n[0] or 1, k=decided.box.k[0] or 1)
    small = all(getattr(smallest, side) <= LARGEST_SHAPE for side in ("m", "n", "k"))
    return HOT_PRODUCTS if small and shape_spec(replace(smallest, m=1, n=1, k=1), host, options) else 0


def _measured(tuned: Sequence[Tuned], problem: Problem, isa: Isa, options: Options) -> list[tuple[Box, Tuned]]:
    """The boxes that measurements decide, first match first: what was measured itself, then what is near it."""
    fitting = [entry for entry in tuned if entry.applies(problem, isa.name, options.num_threads)]
    return [*((entry.point, entry) for entry in fitting), *((entry.box, entry) for entry in fitting)]


def forced(options: Options) -> bool:
    """Whether the options name something that the planner would choose otherwise."""
    return options.variant != "auto" or bool(options.microkernel or options.packing or options.parallel_loop)


def _decision(rule: _Rule, box: Box, problem: Problem, isa: Isa, host: Host, options: Options) -> Plan:
    """The Plan of a rule: its kernel, or why a forced choice makes none."""
    if rule.variant is None:
        return Plan(None, None, 1, box, rule.reason)
    try:
        spec = _spec(rule, problem, isa, options)
        check(spec)
        objection = unsuitable(spec, problem)
    except ValueError as error:
        objection = str(error)
    if objection:
        return Plan(None, None, 1, box, f"refused, NumPy serves: {objection}", refused=True)
    return Plan(spec, blocks_of(spec, host), rule.tasks, box, rule.reason, shares_stack=rule.parallel == STACK)


def _spec(rule: _Rule, problem: Problem, isa: Isa, options: Options) -> KernelSpec:
    variant = VARIANTS[rule.variant]
    parallel = "" if rule.parallel == STACK else rule.parallel  # the loop over a stack is not the kernel's to share
    if rule.tile is None:
        return unblocked_member(problem.dtype, isa.name, op=problem.op, parallel=parallel)
    tiles = TILES[isa.name, problem.dtype]
    if variant.resident not in tiles:
        raise ValueError(f"{variant.name}: {problem.dtype} has the variants with C in registers")
    tile = tiles[variant.resident][rule.tile]
    if options.microkernel is not None:
        tile = tuple(map(int, options.microkernel.split("x")))
    packing = rule.packing if options.packing is None else options.packing
    if packing != rule.packing and problem.dtype not in BLAS and options.microkernel is None:
        tile = None  # another arithmetic may have other lanes
    return member(
        variant.name, problem.dtype, isa.name, tile, packing, op=problem.op, parallel=parallel, symmetric=rule.symmetric
    )


def blocks_of(spec: KernelSpec, host: Host) -> BlockSizes:
    """The block sizes of a kernel on this host."""
    l1, l2, l3 = (host.cache(level) for level in (1, 2, 3))
    tile = {"m": spec.mr or 1, "n": spec.nr or 1, "k": spec.kr or 1}
    how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
    steps = _steps(spec.isa, spec.dtype, how, host)
    sizes = block_sizes(VARIANTS[spec.variant], tile, how.size * how.parts, steps, l1, l2, l3)
    return replace(sizes, kc=steps * how.group)


def _steps(isa: str, dtype: str, how: Arithmetic, host: Host) -> int:
    """Elements of a panel along a block of k: kc, in groups. One number for all kernels of an arithmetic on a host."""
    rows, vectors = TILES[isa, dtype]["C"][0][0], TILES[isa, dtype]["C"][0][1] // lanes_of(isa, dtype, "ab")
    return kc_of(rows, vectors * how.columns(ISAS[isa]), how.size * how.parts, host.cache(1), host.cache(2))


def _rules(problem: Problem, isa: Isa, host: Host, options: Options) -> list[_Rule]:
    """The rules for problems of these layouts, first match first; the last one holds everything."""
    rules: list[_Rule] = []
    if not forced(options) and problem.op == "matmul" and problem.dtype in BLAS:
        if problem.gemv:
            rules += _vectors(problem, host)
        if problem.symmetric:
            rules += _symmetric(problem, isa, options)
    choices = _choices if problem.dtype in BLAS else _choices_without_peer
    for choice in choices(problem, isa, host, options):
        rules += _shared_out(choice, isa, problem, host, options)
    return rules


def _vectors(problem: Problem, host: Host) -> list[_Rule]:
    """What BLAS computes faster: it adds up k in as many sums as help, where we keep to one order."""
    in_l1 = host.cache(1).bytes // DTYPES[problem.dtype].itemsize
    why = "a matrix-vector product: NumPy's BLAS runs it at the speed of the caches"
    return [
        _Rule(Box(m=(1, 1), n=(1, 1), k=(TINY_DOT + 1, math.inf)), None, "", 0, "a dot product: BLAS adds it up in many sums"),
        _Rule(Box(n=(1, 1), work=(SMALL_GEMV + 1, math.inf)), None, "", 0, f"n = 1 is {why}"),
        _Rule(Box(m=(1, 1), work=(in_l1 + 1, math.inf)), None, "", 0, f"m = 1 is {why}"),
    ]


def _symmetric(problem: Problem, isa: Isa, options: Options) -> list[_Rule]:
    """The rules for A.A^T: half of it is computed, by tiles whose width is a multiple of their height."""
    tiles = TILES[isa.name, problem.dtype]["C"]
    fitting = sorted((nr, i) for i, (mr, nr) in enumerate(tiles) if nr % mr == 0)
    why = "A and B are one buffer, B = A^T: half of C is computed and copied to the other half"
    # A narrow tile computes least above the diagonal, a wide one reads A less often.
    low, high = SYMMETRIC_ROWS + 1, math.inf
    in_place = "none" if problem.b_layout == "row" else "b"
    small = _Rule(Box(m=(low, SYMMETRIC_NARROW // DTYPES[problem.dtype].itemsize)), DEFAULT_VARIANT, in_place, fitting[0][1], why, symmetric=True)
    large = _Rule(Box(m=(low, high)), DEFAULT_VARIANT, "ab" if in_place == "none" else "b", fitting[-1][1], why, symmetric=True)
    found = []
    for rule in (small, large):
        found += _stack_shared_out(rule, options)
        for tasks in _task_counts(options.num_threads):
            box = rule.box.clipped("work", tasks * PARALLEL_WORK, math.inf)
            box = box.clipped("m", 4 * tasks * tiles[rule.tile][0], math.inf)
            if _possible(box):
                found.append(replace(rule, box=box, parallel="ic", tasks=tasks, reason=f"{why}; its rows shared out"))
        found.append(rule)
    return found


def _choices(problem: Problem, isa: Isa, host: Host, options: Options) -> list[_Rule]:
    """Variant, packing and tile by shape, before anything is shared out."""
    name = options.variant if options.variant != "auto" else DEFAULT_VARIANT
    variant, tiles, itemsize = VARIANTS[name], TILES[isa.name, problem.dtype]["C"], DTYPES[problem.dtype].c_size
    free = options.variant == "auto" and not (options.microkernel or options.packing)
    if variant.resident != "C":
        return [_Rule(Box(), name, variant.packable, 0, f"{name} is forced")]

    in_place = "none" if problem.b_layout == "row" else "b"
    packed_b = "b" if problem.a_layout == "row" else "ab"
    lanes = isa.lanes(itemsize)
    kc = kc_of(*tiles[0], itemsize, host.cache(1), host.cache(2))
    columns = host.cache(2).bytes // (kc * itemsize)  # of a block of B that is as large as L2
    held = columns * tiles[1][0] // 16  # one that L2 delivers fast enough: once for as many rows as a tile has
    # A B and a C whose rows are contiguous, few of them or narrow ones: tiles need nothing around them.
    widest = UNBLOCKED_TILES.get((isa.name, problem.dtype), (0, 0))[1]
    plain = free and widest > 0 and problem.b_layout == problem.c_layout == "row" and options.parallel_loop != "pc"
    column = _Rule(Box(n=(0, widest)), name, "none", None, f"C is at most {widest} wide: one column of tiles")
    narrow = _Rule(
        Box(n=(0, lanes)), name, in_place, 2, f"C is at most {lanes} wide: one vector of it, many rows"
    )
    tiny = _Rule(
        Box(m=(0, TINY), n=(0, lanes)), name, in_place, 3,
        f"C is at most {TINY} x {lanes}: tiles that leave few rows over",
    )  # fmt: skip
    slender = _Rule(
        Box(n=(0, 2 * lanes)), name, in_place, 4, f"C is at most {2 * lanes} wide: a row of B is two vectors"
    )
    # As many times L2 as L3 delivers to few rows without delay.
    near = Box(m=(0, FLAT), kn=(0.0, 5.0 * kc * columns))
    why = f"m <= {FLAT} and a B of at most {5 * kc * columns} elements, which is packed for too few rows"
    few = _Rule(near.clipped("n", 0, 2 * columns), name, in_place, None if plain else 1, why)
    wide = [replace(few, box=near.clipped("k", SHALLOW + 1, math.inf))] if in_place == "none" else []
    small = _Rule(
        Box(m=(0, FEW_ROWS), n=(0, held)), name, in_place, None if plain else 1,
        f"m <= {FEW_ROWS} and blocks of B of at most {kc} x {held}, which stay in L2 as they are",
    )  # fmt: skip
    # With several threads a shared A costs a meeting, and A is small.
    low = _Rule(
        Box(m=(0, FLAT), k=(0, SHALLOW)), *(("A3B2C0", "a") if options.num_threads == 1 else (name, "none")), 1,
        f"m <= {FLAT} and k <= {SHALLOW}: A stays in L1, B goes by once, in place",
    )  # fmt: skip
    if problem.b_layout != "row":
        low = replace(low, variant="A3B2C0", packing="ab")
    shallow = _Rule(
        Box(m=(SHORT + 1, math.inf), k=(0, SHALLOW), n=(columns + 1, math.inf)), "A3B2C0", "ab", 2,
        f"k <= {SHALLOW}: C is most of the traffic, so its rows are written in turn",
    )  # fmt: skip
    flat = _Rule(
        Box(m=(0, FLAT), k=(SHALLOW + 1, math.inf)), "C3A2B0", "ac", 0,
        f"m <= {FLAT}: each element of B goes to registers once, and only once",
    )  # fmt: skip
    short = _Rule(
        Box(m=(0, SHORT)), _packs_b(options), packed_b, 0, f"m <= {SHORT}: B is packed right before it is used"
    )
    lean = _Rule(
        Box(m=(FEW_ROWS + 1, math.inf), n=(0, columns), k=(SHALLOW // 4, SHALLOW)), _packs_b(options), packed_b, 2,
        f"n <= {columns} and k <= {SHALLOW}: tiles one vector wide have the shortest start and end",
    )  # fmt: skip
    slim = _Rule(
        Box(n=(0, FEW_COLUMNS)), _packs_b(options), packed_b, 0,
        f"n <= {FEW_COLUMNS}: packing A costs more than reading its rows",
    )  # fmt: skip
    large = _Rule(Box(), name, "ab", 0, "both operands packed")
    if not free:
        return [tiny, narrow, slender, small, large]
    # Measured: a tenth for float64 and A3B2C0, nothing or less for the others.
    thin = [lean, slim] if problem.dtype == "float64" and options.num_threads == 1 else [slim]
    first = [column] if plain else [tiny, narrow, slender]
    once = [flat] if "B" in TILES[isa.name, problem.dtype] else []
    return [*first, few, *wide, small, low, shallow, *once, short, *thin, large]


def _choices_without_peer(problem: Problem, isa: Isa, host: Host, options: Options) -> list[_Rule]:
    """The same for the dtypes that NumPy has a scalar loop for: everything is served, and what decides is how soon the packing
    of both operands pays, for a packed kernel multiplies groups of elements and converts each element once."""
    name = options.variant if options.variant != "auto" else DEFAULT_VARIANT
    packed = _Rule(Box(), name, "ab", 0, "both operands packed")
    if problem.b_layout != "row":
        return [packed]
    lanes = lanes_of(isa.name, problem.dtype, "none")
    free = options.variant == "auto" and not (options.microkernel or options.packing)
    widest = UNBLOCKED_TILES.get((isa.name, problem.dtype), (0, 0))[1]
    if free and widest and problem.c_layout == "row" and options.parallel_loop != "pc":
        how = arithmetic_of(isa.name, problem.dtype, "ab")
        kc = _steps(isa.name, problem.dtype, how, host)
        if how.group > 1:  # packed kernels multiply several times as fast
            boxes = {f"m.n.k <= {GROUPED_WORK}": Box(n=(0, widest), k=(0, kc), work=(0, GROUPED_WORK))}
        else:
            boxes = {
                f"at most {SHALLOW} x {widest}": Box(m=(0, SHALLOW), n=(0, widest), k=(0, kc)),
                f"m <= {FEW}, each element of B is used so often": Box(m=(0, FEW), k=(0, kc if rounds_once(problem.dtype) else math.inf)),
            }
        return [*(_Rule(box, name, "none", None, f"{why}: read in place") for why, box in boxes.items()), packed]
    in_place = [
        _Rule(Box(m=(0, TINY), n=(0, lanes), k=(0, SHALLOW)), name, "none", 3, f"at most {TINY} x {lanes}, read in place"),
        _Rule(Box(m=(0, TINY), n=(0, 2 * lanes), k=(0, SHALLOW)), name, "none", 4, f"at most {TINY} x {2 * lanes}, read in place"),
    ]
    return [*in_place, packed]


def _packs_b(options: Options) -> str:
    """The variant that packs B and reads A in place. A3B2C0 packs a block of B for L2, where it still is when it is used;
    with several threads each would pack its own, while B3A2C0 packs one for all of them."""
    return "A3B2C0" if options.num_threads == 1 else "B3A2C0"


def _shared_out(rule: _Rule, isa: Isa, problem: Problem, host: Host, options: Options) -> list[_Rule]:
    """The rule as it is, and before it the rules for problems that are worth sharing out."""
    if options.parallel_loop is not None:
        parallel = "" if options.parallel_loop == "none" else options.parallel_loop
        tasks = options.num_threads if parallel else 1
        return [replace(rule, parallel=parallel, tasks=tasks, reason=f"{rule.reason}; parallel loop {options.parallel_loop} is forced")]
    found = _stack_shared_out(rule, options)
    for tasks in _task_counts(options.num_threads):
        heavy = replace(rule, box=rule.box.clipped("work", tasks * PARALLEL_WORK / 2, math.inf), tasks=tasks)
        found += [each for each in _shares(heavy, isa, problem, host) if _possible(each.box)]
    return [*found, rule]


def _stack_shared_out(rule: _Rule, options: Options) -> list[_Rule]:
    """The rule for stacks of which each task has enough products."""
    if options.num_threads == 1:
        return []
    found = []
    for (low, length), (above, _) in zip(STACK_LENGTHS, (*STACK_LENGTHS[1:], (math.inf, 0))):
        length = max(length, 4 * options.num_threads)
        box = rule.box.clipped("work", low, math.nextafter(above, 0.0)).clipped("batch", length, math.inf)
        why = f"{rule.reason}; a stack of at least {length} shared out"
        found.append(replace(rule, box=box, parallel=STACK, tasks=options.num_threads, reason=why))
    return found


def _task_counts(threads: int) -> list[int]:
    """How many tasks a product may have: one per thread, or a fourth, ... of that if there is not enough for all to do."""
    counts = []
    while threads > 1:
        counts.append(threads)
        threads //= 4
    return counts


def _possible(box: Box) -> bool:
    return all(low <= high for low, high in (getattr(box, side) for side in Box.SIDES))


def _shares(rule: _Rule, isa: Isa, problem: Problem, host: Host) -> list[_Rule]:
    """The rule with a loop whose iterations the tasks can share, first choice first: each box has a share for everybody."""
    variant, tiles, tasks = VARIANTS[rule.variant], TILES[isa.name, problem.dtype]["C"], rule.tasks
    mr, nr = tiles[0]

    def at_least(of: _Rule, side: str, low: float, loop: str, what: str) -> _Rule:
        box = of.box.clipped(side, low, math.inf)
        return replace(of, box=box, parallel=loop, reason=f"{of.reason}; {what} shared out")

    rows = at_least(rule, "m", tasks * mr, "ic", "rows")
    columns = at_least(rule, "n", tasks * nr, "jc", "columns")
    if variant.resident != "C":
        return [columns, rows]
    if rule.tile is None:
        low = replace(rule, box=rule.box.clipped("m", 0, FLAT))  # B is most of what is read, and should be read once
        found = [at_least(low, "n", tasks * nr, "jc", "columns"), rows, columns]
    else:
        found = [at_least(rule, "m", TALL * tasks * mr, "ic", "rows")] if variant.outer[0] == "ic" else []
        found.append(at_least(rule, "mn", float(tasks * mr * nr), variant.outer[-1], "tiles"))
    # Few elements of C, each a long sum: blocks of k, by a kernel that has loops over blocks.
    # Sums that are not complete have nowhere to be added up, and those of complex numbers are not yet such.
    if rounds_once(problem.dtype) or problem.dtype.startswith("complex"):
        return found
    how, lanes = arithmetic_of(isa.name, problem.dtype, "ab"), lanes_of(isa.name, problem.dtype, "none")
    kc = _steps(isa.name, problem.dtype, how, host) * how.group
    for tile, widest in ((3, lanes), (1, math.inf)) if rule.tile is None else ((rule.tile, math.inf),):
        deep = replace(rule, tile=tile, box=rule.box.clipped("n", 0, widest))
        found.append(at_least(deep, "k", tasks * kc, "pc", "blocks of k"))
    return found


def companions(spec: KernelSpec, host: Host, options: Options) -> list[KernelSpec]:
    """Kernels that a program which needs ``spec`` will most likely need next: they are built in the same process,
    because loading the compiler takes longer than compiling a kernel."""
    free = options.variant == "auto"
    name = DEFAULT_VARIANT if free else options.variant
    if options.microkernel or options.packing or options.parallel_loop or VARIANTS[name].resident != "C":
        return []
    options = replace(options, num_threads=options.num_threads or host.cores)
    lean = free and (spec.isa, spec.dtype) in UNBLOCKED_TILES
    if spec.dtype in BLAS:
        wanted = [] if lean else [(name, "none", 1)]
        wanted += [(_packs_b(options), "b", 0)] if free else []
    else:
        wanted = [] if lean else [(name, "none", 3), (name, "none", 4)]
    tiles, found = TILES[spec.isa, spec.dtype]["C"], []
    for parallel in ("", "ic") if options.num_threads > 1 else ("",):
        rest = {"op": spec.op, "parallel": parallel}
        found += [unblocked_member(spec.dtype, spec.isa, **rest)] if lean else []
        for variant, packing, tile in (*wanted, (name, "ab", 0)):
            found.append(member(variant, spec.dtype, spec.isa, tiles[tile], packing, **rest))
    return [other for other in found if other != spec]

"""The planner's rules: which variant, packing and tile serve problems of these layouts, by shape, first match first."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from . import sharing
from .blocking import kc_of, steps_of
from .boxes import Box, Rule, possible
from .family.arithmetic import arithmetic_of, lanes_of, rounds_once
from .family.isa import Isa
from .family.tiles import TILES, UNBLOCKED_TILES
from .family.validity import STUDIED
from .family.variants import VARIANTS
from .host import Host
from .problem import DTYPES, Problem
from .settings import Options
from .sharing import FLAT, shared_out, stack_shared_out, task_counts

#: m up to which A.A^T is computed like any other product: there is hardly a tile that lies above the diagonal.
SYMMETRIC_ROWS = 32

#: Bytes of a row of A.A^T up to which the narrowest tile is best for it.
SYMMETRIC_NARROW = 2048

#: k up to which reading and writing a C that no cache holds costs more than the products: rows of C in turn.
SHALLOW = 128

#: k up to which a product is little more than writing C: nothing is packed, and rows of tiles are written in turn.
FILM = 16

#: m up to which packing a B that L2 holds costs more than it saves.
FEW_ROWS = 512

#: m up to which a packed B is used so little that it pays only while L2 still holds it from its packing.
SHORT = 256

#: n up to which reading rows of A in place costs less than packing them.
FEW_COLUMNS = 768

#: k from which rows of A can be so far apart that all their lines belong to one set of L1.
LONG_ROWS = 512

#: m up to which the rows that a tall tile leaves over count.
TINY = 32

#: Elements of a matrix up to which its rows are multiplied by a vector faster, with k in order, than BLAS is called, and k
#: up to which the FMAs of one sum, each of which waits for the one before, take less time than that call.
SMALL_GEMV, SHORT_GEMV = 1 << 8, 32

#: The same k where whole vectors of sums are added up side by side.
SHORT_SUMS = 128

#: m.n.k up to which reading operands in place beats packing them for an arithmetic that multiplies groups.
GROUPED_WORK = 32.0**3

#: k up to which packing rows of A takes as long as multiplying them by a narrow B.
BRIEF = 16

#: m up to which packing B costs more than all multiplications with it, in dtypes that NumPy has no BLAS for.
FEW = 8

#: The same where packed kernels multiply groups; for each plane that they pack.
FEW_GROUPED = 4

#: And the same where a kernel that reads them in place has to widen elements to 32 bits.
FEW_WIDENED = 3

DEFAULT_VARIANT = "B3A2C0"

#: The dtypes that NumPy hands to its BLAS; for all others it has a scalar loop.
BLAS = ("float32", "float64", "complex64", "complex128")


def forced(options: Options) -> bool:
    """Whether the options name something that the planner would choose otherwise."""
    named = options.microkernel or options.packing or options.parallel_loop or options.arithmetic
    return options.variant != "auto" or bool(named)


def rules_for(problem: Problem, isa: Isa, host: Host, options: Options) -> tuple[Rule, ...]:
    """The rules for problems of these layouts, first match first; the last one holds everything."""
    return rules_of_kind(replace(problem, m=1, n=1, k=1, batch=1, transposed=False), isa, host, options)


# A few hundred rules take a millisecond. A stream of new shapes asks for those of the same few kinds again and again.
@lru_cache(maxsize=64)
def rules_of_kind(problem: Problem, isa: Isa, host: Host, options: Options) -> tuple[Rule, ...]:
    """The rules for problems of the dtype and layouts of ``problem``, whose sizes count for nothing."""
    rules: list[Rule] = []
    if not forced(options) and problem.op == "matmul" and problem.dtype in BLAS:
        if problem.gemv:
            rules += _vectors(problem, host)
        if problem.symmetric:
            rules += _symmetric(problem, isa, options)
    choices = _choices if problem.dtype in BLAS else _choices_without_peer
    for choice in choices(problem, isa, host, options):
        rules += shared_out(choice, isa, problem, host, options)
    return tuple(rules)


def _vectors(problem: Problem, host: Host) -> list[Rule]:
    """What BLAS computes faster: it adds up k in as many sums as help, where we keep to one order."""
    in_l1 = host.cache(1).bytes // DTYPES[problem.dtype].itemsize

    def left(one: str, **low: float) -> Rule:
        box = Box(**{one: (1, 1)}, **{side: (bound, math.inf) for side, bound in low.items()})
        why = "a matrix-vector product: NumPy's BLAS runs it at the speed of the caches"
        return Rule(box, None, "", 0, f"{one} = 1 is {why}")

    return [
        Rule(Box(m=(1, 1), n=(1, 1)), None, "", 0, "a dot product: BLAS adds it up in many sums"),
        left("n", k=SHORT_GEMV + 1),
        left("n", work=SMALL_GEMV + 1.0),
        left("m", k=SHORT_SUMS + 1),
        left("m", work=in_l1 + 1.0),
        left("m", n=in_l1 // 8 + 1),
    ]


def _symmetric(problem: Problem, isa: Isa, options: Options) -> list[Rule]:
    """The rules for A.A^T: half of it is computed, by tiles whose width is a multiple of their height."""
    tiles = TILES[isa.name, problem.dtype]["C"]
    fitting = sorted((nr, i) for i, (mr, nr) in enumerate(tiles) if nr % mr == 0)
    if not fitting:  # complex128 on NEON: like any other product
        return []
    why = "A and B are one buffer, B = A^T: half of C is computed and copied to the other half"
    # A narrow tile computes least above the diagonal, a wide one reads A less often.
    low, high = SYMMETRIC_ROWS + 1, math.inf
    in_place = "none" if problem.b_layout == "row" else "b"
    small = Rule(Box(m=(low, SYMMETRIC_NARROW // DTYPES[problem.dtype].itemsize)), DEFAULT_VARIANT, in_place, fitting[0][1], why, symmetric=True)
    large = Rule(Box(m=(low, high)), DEFAULT_VARIANT, "ab" if in_place == "none" else "b", fitting[-1][1], why, symmetric=True)
    found = []
    for rule in (small, large):
        found += stack_shared_out(rule, options)
        for tasks in task_counts(options.num_threads):
            box = rule.box.clipped("work", tasks * sharing.PARALLEL_WORK, math.inf)
            box = box.clipped("m", 4 * tasks * tiles[rule.tile][0], math.inf)
            if possible(box):
                found.append(replace(rule, box=box, parallel="ic", tasks=tasks, reason=f"{why}; its rows shared out"))
        found.append(rule)
    return found


def _choices(problem: Problem, isa: Isa, host: Host, options: Options) -> list[Rule]:
    """Variant, packing and tile by shape, before anything is shared out."""
    name = options.variant if options.variant != "auto" else DEFAULT_VARIANT
    variant, tiles, itemsize = VARIANTS[name], TILES[isa.name, problem.dtype]["C"], DTYPES[problem.dtype].c_size
    free = options.variant == "auto" and not (options.microkernel or options.packing)
    if variant.resident != "C":
        return [Rule(Box(), name, variant.packable, 0, f"{name} is forced")]

    in_place = "none" if problem.b_layout == "row" else "b"
    packed_b = "b" if problem.a_layout == "row" else "ab"
    lanes = isa.lanes(itemsize)
    kc = kc_of(*tiles[0], itemsize, host.cache(1), host.cache(2))
    columns = host.cache(2).bytes // (kc * itemsize)  # of a block of B that is as large as L2
    held = columns * tiles[1][0] // 16  # one that L2 delivers fast enough: once for as many rows as a tile has
    # A B and a C whose rows are contiguous, few of them or narrow ones: tiles need nothing around them.
    widest = UNBLOCKED_TILES.get((isa.name, problem.dtype), (0, 0))[1]
    bare = free and widest > 0 and problem.c_layout == "row" and options.parallel_loop != "pc"
    plain = bare and problem.b_layout == "row"
    # A B in another layout. Larger ones gain nothing (measured: twice as large), and with many rows lose.
    scratch = Rule(
        Box(kn=(0.0, host.cache(2).bytes / 16 / itemsize)), name, "b", None,
        "a B of at most a sixteenth of L2, copied to contiguous rows for tiles with no loops around them",
    )  # fmt: skip
    # With several threads a copy for each spares them a meeting.
    several = replace(
        scratch, box=Box(m=(0, FEW_ROWS), kn=(0.0, host.cache(2).bytes / 8 / itemsize)),
        reason=f"m <= {FEW_ROWS} and a B of at most an eighth of L2, of which each thread makes its own copy",
    )  # fmt: skip
    column = Rule(Box(n=(0, widest)), name, "none", None, f"C is at most {widest} wide: one column of tiles")
    narrow = Rule(
        Box(n=(0, lanes)), name, in_place, 2, f"C is at most {lanes} wide: one vector of it, many rows"
    )
    long = replace(
        narrow, box=narrow.box.clipped("k", LONG_ROWS, math.inf), tile=3,
        reason=f"C is at most {lanes} wide, k >= {LONG_ROWS}: no more rows of A side by side than a set of L1 has ways",
    )  # fmt: skip
    tiny = Rule(
        Box(m=(0, TINY), n=(0, lanes)), name, in_place, 3,
        f"C is at most {TINY} x {lanes}: tiles that leave few rows over",
    )  # fmt: skip
    slender = Rule(
        Box(n=(0, 2 * lanes)), name, in_place, 4, f"C is at most {2 * lanes} wide: a row of B is two vectors"
    )
    # As many times L2 as L3 delivers to few rows without delay.
    near = Box(m=(0, FLAT), kn=(0.0, 5.0 * kc * columns))
    why = f"m <= {FLAT} and a B of at most {5 * kc * columns} elements, which is packed for too few rows"
    few = Rule(near.clipped("n", 0, 2 * columns), name, in_place, None if plain else 1, why)
    wide = [replace(few, box=near.clipped("k", SHALLOW + 1, math.inf))] if in_place == "none" else []
    small = Rule(
        Box(m=(0, FEW_ROWS), n=(0, held)), name, in_place, None if plain else 1,
        f"m <= {FEW_ROWS} and blocks of B of at most {kc} x {held}, which stay in L2 as they are",
    )  # fmt: skip
    # Elements of B that L3 delivers in time by itself: each thread reads columns of its own, as long as L3 holds them all.
    reach = 4.0 * kc * columns
    if options.num_threads > 1:
        reach = max(reach, min(options.num_threads * reach, host.cache(3).bytes / 4 / itemsize))
    # With several threads a shared A costs a meeting, and A is small.
    low = Rule(
        Box(m=(0, FLAT), k=(0, SHALLOW)),
        *(("A3B2C0", "a", 1) if options.num_threads == 1 else (name, "none", None if plain else 1)),
        f"m <= {FLAT} and k <= {SHALLOW}: A stays in L1, B goes by once, in place",
    )  # fmt: skip
    close = Rule(low.box.clipped("kn", 0.0, reach), name, "none", None, f"{low.reason}, from no further than L3")
    if problem.b_layout != "row":
        low = replace(low, variant="A3B2C0", packing="ab")
    # So little to do for each element of C that packing, and prefetching between so few steps, cost as much.
    mr = tiles[0][0]
    film = Box(n=(held + 1, math.inf), k=(0, FILM))
    bare_c = f"k <= {FILM}: C is nearly all of the traffic; nothing is packed, rows of tiles are written in turn"
    near_c = int(2.5 * kc * columns)  # L2 holds so much of it that the order in which it is written does not matter
    films = [
        Rule(
            film.clipped("m", FLAT + 1, math.inf).clipped("mn", 0.0, near_c), name, "none", None,
            f"k <= {FILM} and a C of at most {near_c} elements: tiles with no loops around them",
        ),
        Rule(film.clipped("m", SHORT + 1, math.inf), "A3B2C0", "none", 2, bare_c),
        Rule(film.clipped("m", FLAT + 1, SHORT), "A3B2C0", "none", 1, f"m <= {SHORT} and {bare_c}"),
        Rule(
            film.clipped("m", mr + 1, FLAT).clipped("mn", 8.0 * kc * columns, math.inf), "A3B2C0", "none", 1,
            f"a C of more than {8 * kc * columns} elements, m <= {FLAT} and {bare_c}",
        ),
    ]  # fmt: skip
    # Rows of tiles enough to pay for packing a B that comes from afar, its rows pages apart: packed, it is asked for in time.
    afar = low.box.clipped("kn", reach, math.inf)
    why = f"a B of more than {int(reach)} elements: packed once for all rows of tiles"
    far = []
    if problem.dtype in STUDIED:
        both = "ab" if options.num_threads == 1 else packed_b
        far.append(Rule(afar.clipped("m", mr + 1, FLAT).clipped("k", 0, FILM), "A3B2C0", both, 0, f"k <= {FILM} and {why}"))
        far += films if plain else []
    if options.num_threads == 1:
        far.append(Rule(afar.clipped("m", FLAT // 2 + 1, FLAT), "A3B2C0", "ab", 1, f"k <= {SHALLOW} and {why}"))
    shallow = Rule(
        Box(m=(SHORT + 1, math.inf), k=(0, SHALLOW), n=(columns + 1, math.inf)), "A3B2C0", "ab", 2,
        f"k <= {SHALLOW}: C is most of the traffic, so its rows are written in turn",
    )  # fmt: skip
    flat = Rule(
        Box(m=(0, FLAT), k=(SHALLOW + 1, math.inf)), "C3A2B0", "ac", 0,
        f"m <= {FLAT}: each element of B goes to registers once, and only once",
    )  # fmt: skip
    short = Rule(
        Box(m=(0, SHORT)), "A3B2C0", packed_b, 0, f"m <= {SHORT}: B is packed right before it is used"
    )
    lean = Rule(
        Box(m=(FEW_ROWS + 1, math.inf), n=(0, columns), k=(SHALLOW // 4, SHALLOW)), "A3B2C0", packed_b, 2,
        f"n <= {columns} and k <= {SHALLOW}: tiles one vector wide have the shortest start and end",
    )  # fmt: skip
    slim = Rule(
        Box(n=(0, FEW_COLUMNS)), "A3B2C0", packed_b, 0,
        f"n <= {FEW_COLUMNS}: packing A costs more than reading its rows",
    )  # fmt: skip
    large = Rule(Box(), name, "ab", 0, "both operands packed")
    if not free:
        return [tiny, narrow, slender, small, large]
    large = replace(large, variant="A3B2C0", reason="both operands packed, B right before it is used")
    # Measured: a tenth for float64 and A3B2C0, nothing or less for the others.
    thin = [lean, slim] if problem.dtype == "float64" and options.num_threads == 1 else [slim]
    if bare and not plain and problem.dtype in STUDIED:
        first = [scratch, *([several] if options.num_threads > 1 else []), tiny, long, narrow, slender]
    else:
        first = [column] if plain else [tiny, long, narrow, slender]
    # Rows of B in registers: of a B in another layout they would be collected from as many lines of cache as they have elements.
    once = [flat] if "B" in TILES[isa.name, problem.dtype] and problem.b_layout == "row" else []
    return [*first, few, *wide, small, *far, *([close] if plain else []), low, shallow, *once, short, *thin, large]


def _choices_without_peer(problem: Problem, isa: Isa, host: Host, options: Options) -> list[Rule]:
    """The same for the dtypes that NumPy has a scalar loop for: everything is served, and what decides is how soon the packing
    of both operands pays, for a packed kernel multiplies groups of elements and converts each element once."""
    name = options.variant if options.variant != "auto" else DEFAULT_VARIANT
    packed = Rule(Box(), name, "ab", 0, "both operands packed")
    if problem.b_layout != "row":
        return [packed]
    if options.arithmetic:
        return [replace(packed, reason=f"both operands packed, arithmetic {options.arithmetic} is forced")]
    lanes = lanes_of(isa.name, problem.dtype, "none")
    free = options.variant == "auto" and not (options.microkernel or options.packing)
    widest = UNBLOCKED_TILES.get((isa.name, problem.dtype), (0, 0))[1]
    if free and widest and problem.c_layout == "row" and options.parallel_loop != "pc":
        how = arithmetic_of(isa.name, problem.dtype, "ab")
        kc = steps_of(isa.name, problem.dtype, how, host)
        if how.group > 1:  # packed kernels multiply several times as fast
            row = DTYPES[problem.dtype]
            few = (FEW_WIDENED if row.c.startswith(("int", "uint")) and row.a_size < row.c_size else FEW_GROUPED) * how.planes
            boxes = {f"m.n.k <= {GROUPED_WORK}": Box(n=(0, widest), k=(0, kc), work=(0, GROUPED_WORK))}
        else:
            few, boxes = FEW, {f"at most {SHALLOW} x {widest}": Box(m=(0, SHALLOW), n=(0, widest), k=(0, kc))}
            boxes[f"n <= {widest} and k <= {BRIEF}"] = Box(n=(0, widest), k=(0, BRIEF))
        used = f"m <= {few}, each element of B is used so often"
        boxes[used] = Box(m=(0, few), k=(0, kc if rounds_once(problem.dtype) else math.inf))
        bare = [Rule(box, name, "none", None, f"{why}: read in place") for why, box in boxes.items()]
        if not rounds_once(problem.dtype):
            return [*bare, packed]
        why = f"m <= {few} and k > {kc}: blocks of k, read in place"  # sums of several have to wait somewhere
        tiles = [(5, 1, math.inf), (3, few, lanes), (4, few, 2 * lanes), (1, few, math.inf)]
        long = [Rule(Box(m=(0, high), n=(0, wide), k=(kc + 1, math.inf)), name, "none", tile, why) for tile, high, wide in tiles]
        return [*bare, *long, packed]
    in_place = [
        Rule(Box(m=(0, TINY), n=(0, lanes), k=(0, SHALLOW)), name, "none", 3, f"at most {TINY} x {lanes}, read in place"),
        Rule(Box(m=(0, TINY), n=(0, 2 * lanes), k=(0, SHALLOW)), name, "none", 4, f"at most {TINY} x {2 * lanes}, read in place"),
    ]
    return [*in_place, packed]


"""The planner's rules: which variant, packing and tile serve problems of these layouts, by shape, first match first."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from . import sharing
from .blocking import steps_of
from .boxes import STACK, Box, Rule, possible
from .choices import FEW_ROWS_OF_TILES, SHALLOW, choices, one_row
from .family.arithmetic import arithmetic_of, lanes_of, rounds_once
from .family.isa import Isa
from .family.tiles import IN_PLACE, ONE_ROW, PACKED, ROW_FAR, SLENDER, TINY, UNBLOCKED
from .host import Host
from .kinds import BLAS, DEFAULT_VARIANT, TALL_TILE, Kind
from .problem import DTYPES, Problem
from .settings import Options
from .sharing import STACK_LENGTHS, shared_out, stack_shared_out, task_counts

#: m up to which A.A^T is computed like any other product: there is hardly a tile that lies above the diagonal.
SYMMETRIC_ROWS = 32

#: Bytes of a row of A.A^T up to which the narrowest tile is best for it.
SYMMETRIC_NARROW = 2048

#: Matrix times vector, where calling BLAS takes longer than our product with k in order: up to so many elements of the
#: matrix, and up to that k. (The FMAs of one sum wait for each other.)
SMALL_GEMV, SHORT_GEMV = 1 << 8, 32

#: The same k where whole vectors of sums are added up side by side.
SHORT_SUMS = 128

#: Where operands are contiguous along k, OpenBLAS's kernels for small products on AVX-512 add it up in vectors; up to so many
#: elements of C.
SMALL_SUMS = 1200

#: Where those kernels are ahead of ours, by layout of B: (most columns of C, from which k on, from which m.n.k on).
FEW_SUMS = {
    ("float32", "row"): ((2, 48, 24_000), (2, 32, 48_000), (4, 48, 100_000), (4, 256, 50_000), (6, 64, 500_000), (6, 256, 150_000)),
    ("float32", "col"): ((2, 64, 20_000), (4, 128, 40_000), (6, 512, 16_000)),
    ("float64", "row"): ((2, 48, 48_000), (2, 32, 100_000), (4, 64, 300_000), (4, 1024, 50_000)),
    ("float64", "col"): ((2, 96, 30_000), (4, 512, 30_000), (6, 1024, 16_000)),
}

#: m.n.k up to which reading operands in place beats packing them for an arithmetic that multiplies groups.
GROUPED_WORK = 32.0**3

#: k up to which packing rows of A takes as long as multiplying them by a narrow B.
BRIEF = 16

#: m.n.k up to which a kernel without loops over cache blocks is best, because it has the least to do before it multiplies.
MOST_TINY = 64

#: m up to which packing B costs more than all multiplications with it, in dtypes that NumPy has no BLAS for.
FEW = 8

#: The same where packed kernels multiply groups, which makes them faster: so many rows for each plane that they pack.
FEW_GROUPED = 4

#: The same where, besides, kernels that read in place have to widen elements to 32 bits, which makes those slower.
FEW_WIDENED = 3


def forced(options: Options) -> bool:
    """Whether the options name something that the planner would choose otherwise."""
    named = options.microkernel or options.packing or options.parallel_loop or options.arithmetic
    return options.variant != "auto" or bool(named)


def rules_for(problem: Problem, isa: Isa, host: Host, options: Options) -> tuple[Rule, ...]:
    """The rules for problems of these layouts, first match first; the last one holds everything."""
    return rules_of_kind(Kind(replace(problem, m=1, n=1, k=1, batch=1, transposed=False), isa, host, options))


# A few hundred rules take a millisecond. A stream of new shapes asks for those of the same few kinds again and again.
@lru_cache(maxsize=64)
def rules_of_kind(kind: Kind) -> tuple[Rule, ...]:
    """The rules for problems of a kind."""
    problem, options, rules = kind.problem, kind.options, []
    peer = problem.dtype in BLAS
    free = peer and not forced(options) and problem.op == "matmul"
    if free and problem.gemv:
        rules += _rows_in_l3(problem, kind.host)
    for choice in one_row(kind):
        rules += [_worth_sharing(rule, options) for rule in shared_out(choice, kind)]
    if free and problem.gemv:
        rules += _vectors(problem, kind.host)
    if free and problem.small_gemm and not problem.symmetric:
        rules += _small(kind)
    if free and problem.symmetric:
        rules += _symmetric(kind)
    for choice in choices(kind) if peer else _choices_without_peer(kind):
        rules += shared_out(choice, kind)
    return tuple(rules)


def _worth_sharing(rule: Rule, options: Options) -> Rule:
    """The rule for a vector times a matrix, of which tasks get twice as much as of others: memory decides, and not the FMAs."""
    if rule.tasks == 1 or rule.parallel == STACK or options.parallel_loop is not None:
        return rule
    return replace(rule, box=rule.box.clipped("work", rule.tasks * sharing.PARALLEL_WORK, math.inf))


def _left_to_blas(one: str, **bounds: tuple[float, float]) -> Rule:
    """The rule for products where ``one``, m or n, is 1, within bounds where BLAS is faster."""
    why = "a matrix-vector product, which NumPy's BLAS computes at the speed of the caches"
    return Rule(Box(**{one: (1, 1)}, **bounds), None, "", 0, f"{one} = 1: {why}")


def _rows_in_l3(problem: Problem, host: Host) -> list[Rule]:
    """A B that L2 does not hold and that does not come from memory either: BLAS reads L3 faster than our kernel of one row."""
    itemsize = DTYPES[problem.dtype].itemsize
    rule = _left_to_blas("m", kn=(host.cache(2).bytes / itemsize + 1, ROW_FAR / itemsize - 1))
    return [rule] if possible(rule.box) else []


def _vectors(problem: Problem, host: Host) -> list[Rule]:
    """What BLAS computes faster: it adds up k in as many sums as help, where we keep to one order."""
    in_l1 = host.cache(1).bytes // DTYPES[problem.dtype].itemsize
    return [
        Rule(Box(m=(1, 1), n=(1, 1)), None, "", 0, "a dot product, which NumPy's BLAS adds up in several sums at once"),
        _left_to_blas("n", k=(SHORT_GEMV + 1, math.inf)),
        _left_to_blas("n", work=(SMALL_GEMV + 1.0, math.inf)),
        _left_to_blas("m", k=(SHORT_SUMS + 1, math.inf)),
        _left_to_blas("m", work=(in_l1 + 1.0, math.inf)),
        _left_to_blas("m", n=(in_l1 // 8 + 1, math.inf)),
    ]


def _small(kind: Kind) -> list[Rule]:
    """Small products with a long k that BLAS computes faster, where it has kernels for them: it reads operands along k, where we
    would first have to transpose them, because our sums add up k in order."""
    a, b, c, dtype = kind.problem.a_layout, kind.problem.b_layout, kind.problem.c_layout, kind.problem.dtype
    if kind.isa.vector_bytes < 64:
        return []
    sums = (a, b) == ("row", "col")
    small = Box(mn=(0.0, SMALL_SUMS)) if sums else Box()

    def left(box: Box, why: str) -> Rule:
        return Rule(box, None, "", 0, f"{why}: NumPy's BLAS is faster, because it need not add up k in order")

    if c == "strided":  # few rows of a large B, exchanged
        few = small.clipped("n", 0, FEW_ROWS_OF_TILES // 2)
        return [left(few, "a small product of few rows and a column-major B")]
    found = [
        left(
            small.clipped("n", 0, columns).clipped("k", steps, math.inf).clipped("work", float(least), math.inf),
            f"a small product of n <= {columns}, k >= {steps} and m.n.k >= {least}",
        )
        for columns, steps, least in FEW_SUMS[dtype, b]
    ]
    if b == "col":
        in_l1 = 1.25 * kind.host.cache(1).bytes / kind.itemsize
        large = small.clipped("kn", in_l1 + 1.0, math.inf)
        if not sums:
            large = large.clipped("m", *_rows_for_blas(kind))
        if not kind.one_thread:  # a stack is shared out
            large = large.clipped("batch", 0, STACK_LENGTHS[-1][1] - 1)
        found.append(left(large, f"a column-major B of more than {in_l1:.0f} elements would have to be transposed"))
    return found


def _rows_for_blas(kind: Kind) -> tuple[float, float]:
    """Rows of a small product of two column-major operands that BLAS computes faster than our tiles, B's copy included. Of float32
    it has tiles of 16 rows, so just that many are cheap."""
    if kind.problem.dtype == "float32":
        return (TALL_TILE - 1, TALL_TILE) if kind.one_thread else (TALL_TILE, math.inf)
    return (4, math.inf) if kind.one_thread else (0, math.inf)


def _symmetric(kind: Kind) -> list[Rule]:
    """The rules for A.A^T: half of it is computed, by tiles whose width is a multiple of their height."""
    tiles = kind.tiles
    fitting = sorted((nr, i) for i, (mr, nr) in enumerate(tiles) if nr % mr == 0)
    if not fitting:  # complex128 on NEON: like any other product
        return []
    why = "A and B are one buffer, B = A^T: half of C is computed and copied to the other half"
    # A narrow tile computes least above the diagonal, a wide one reads A less often.
    low, high = SYMMETRIC_ROWS + 1, math.inf
    in_place = kind.least_packing
    narrow, (_, narrowest), (_, widest) = SYMMETRIC_NARROW // kind.itemsize, fitting[0], fitting[-1]
    small = Rule(Box(m=(low, narrow)), DEFAULT_VARIANT, in_place, narrowest, why, symmetric=True)
    large = Rule(Box(m=(low, high)), DEFAULT_VARIANT, "ab" if in_place == "none" else "b", widest, why, symmetric=True)
    found = []
    for rule, tile in ((small, narrowest), (large, widest)):
        found += stack_shared_out(rule, kind.threads)
        for tasks in task_counts(kind.threads):
            box = rule.box.clipped("work", tasks * sharing.PARALLEL_WORK, math.inf)
            box = box.clipped("m", 4 * tasks * tiles[tile][0], math.inf)
            if possible(box):
                found.append(replace(rule, box=box, parallel="ic", tasks=tasks, reason=f"{why}; its rows are shared out"))
        found.append(rule)
    return found


def _choices_without_peer(kind: Kind) -> list[Rule]:
    """The choices for the dtypes that NumPy has a scalar loop for: everything is served, and what decides is how soon
    the packing of both operands pays, for a packed kernel multiplies groups of elements and converts each element
    once."""
    seldom = arithmetic_of(kind.isa.name, kind.problem.dtype, "ab").any_order  # family/along_k.py
    why = "both operands packed" + (", unless C has so few columns that packed elements would be used too seldom" if seldom else "")
    packed = Rule(Box(), kind.variant.name, "ab", PACKED, why)
    if not kind.b_row_major:
        return [packed]
    if forced := kind.options.arithmetic:
        return [replace(packed, reason=f"both operands packed, arithmetic {forced} is forced")]
    if not kind.unblocked:
        return [*_few_columns(kind), packed]
    return [*_dot_products(kind, packed), *_little_use(kind), packed]


def _dot_products(kind: Kind, packed: Rule) -> list[Rule]:
    """One column of C, where the kernels that pack have dot products for it and pack nothing."""
    how = arithmetic_of(kind.isa.name, kind.problem.dtype, "ab")
    box = Box(n=(0, 1), k=(BRIEF + 1, math.inf)) if how.floating else Box(n=(0, 1), work=(MOST_TINY + 1.0, math.inf))
    return [replace(packed, box=box, reason="C is one column: dot products of rows of A")] if how.any_order else []


def _little_use(kind: Kind) -> list[Rule]:
    """Operands whose elements are used so seldom that reading them in place takes less time than packing them."""
    dtype, name, widest = DTYPES[kind.problem.dtype], kind.variant.name, kind.widest
    how = arithmetic_of(kind.isa.name, dtype.name, "ab")
    kc = steps_of(kind.isa.name, dtype.name, how, kind.host)
    if how.group > 1:  # packed kernels multiply several times as fast
        widens = dtype.c.startswith(("int", "uint")) and dtype.a_size < dtype.c_size
        few = (FEW_WIDENED if widens else FEW_GROUPED) * how.planes
        boxes = {f"m.n.k <= {GROUPED_WORK:.0f}": Box(n=(0, widest), k=(0, kc), work=(0, GROUPED_WORK))}
    else:
        few, boxes = FEW, {f"C is at most {SHALLOW} x {widest}": Box(m=(0, SHALLOW), n=(0, widest), k=(0, kc))}
    if how.group == 1:
        boxes[f"n <= {widest} and k <= {BRIEF}"] = Box(n=(0, widest), k=(0, BRIEF))
    elif how.floating:  # NumPy's is BLAS's speed and a conversion
        boxes[f"k <= {BRIEF}"] = Box(k=(0, BRIEF))
    used = f"m <= {few}, so elements of B are used too seldom to be packed"
    boxes[used] = Box(m=(0, few), k=(0, kc if rounds_once(dtype.name) else math.inf))
    in_place = [Rule(box, name, "none", UNBLOCKED, f"{why}: read in place") for why, box in boxes.items()]
    if not rounds_once(dtype.name):
        return in_place
    lanes, why = lanes_of(kind.isa.name, dtype.name, "none"), f"m <= {few} and k > {kc}: blocks of k, read in place"
    tiles = [(ONE_ROW, 1, math.inf), (TINY, few, lanes), (SLENDER, few, 2 * lanes), (IN_PLACE, few, math.inf)]
    # The sums of several blocks have to wait somewhere until they are rounded, which takes a kernel with loops over blocks.
    for tile, rows, width in tiles:
        in_place.append(Rule(Box(m=(0, rows), n=(0, width), k=(kc + 1, math.inf)), name, "none", tile, why))
    return in_place


def _few_columns(kind: Kind) -> list[Rule]:
    """A small C of one or two vectors in width."""
    lanes, found = lanes_of(kind.isa.name, kind.problem.dtype, "none"), []
    for tile, width in ((TINY, lanes), (SLENDER, 2 * lanes)):
        box = Box(m=(0, FEW_ROWS_OF_TILES), n=(0, width), k=(0, SHALLOW))
        why = f"C is at most {FEW_ROWS_OF_TILES} x {width} and k <= {SHALLOW}: read in place"
        found.append(Rule(box, kind.variant.name, "none", tile, why))
    return found

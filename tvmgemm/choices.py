"""The choices of variant, packing and tile by shape, for the dtypes that NumPy hands to its BLAS.

They are lists of rules, and the first rule whose box holds a problem decides. ``choices`` puts them in order, from what is
special to what is general; each function of this module is about one subject and says why its rules are so. Bounds that
follow from the caches are properties of ``Kind``, all others constants. How they were measured: docs/design.md, section 4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .boxes import Box, Rule
from .family.tiles import IN_PLACE, NARROW, PACKED, ROW_STEPS, SLENDER, TILES, TINY, UNBLOCKED, WIDE_FAR, WIDE_ROWS, WIDE_STEPS
from .family.validity import STUDIED
from .kinds import Kind
from .sharing import FLAT

#: The variant that packs B right before it is used and brings C to memory row of tiles after row of tiles.
ROWS_OF_C = "A3B2C0"

#: m up to which the rows that a tall tile leaves over count.
FEW_ROWS_OF_TILES = 32

#: k from which rows of A can be so far apart that all their lines belong to one set of L1.
LONG_ROWS = 512

#: m up to which packing a B that L2 holds costs more than it saves.
FEW_ROWS = 512

#: k up to which reading and writing a C that no cache holds costs more than the products: rows of C in turn.
SHALLOW = 128

#: k up to which a product is little more than writing C: nothing is packed, and rows of tiles are written in turn.
FILM = 16

#: m up to which a packed B is used so little that it pays only while L2 still holds it from its packing.
SHORT = 256

#: n up to which reading rows of A in place costs less than packing them.
FEW_COLUMNS = 768

#: n up to which rows of a B with gaps are copied vector by vector.
GAPPED_COLUMNS = 80


def choices(kind: Kind) -> list[Rule]:
    """What serves problems of the kind by their shape, first match first; the last rule holds everything."""
    variant = kind.variant
    if variant.resident != "C":
        return [Rule(Box(), variant.name, variant.packable, PACKED, f"{variant.name} is forced")]
    if not kind.free:  # no tiles but those of the variant
        return [*_narrow_c(kind), *_b_within_l2(kind), Rule(Box(), variant.name, "ab", PACKED, "both operands packed")]
    return [
        *_narrow_c(kind),
        *_few_rows_of_pairs(kind),
        *_b_within_reach(kind),
        *_b_within_l2(kind),
        *(_film(kind) if kind.problem.dtype in STUDIED else []),
        *_shallow(kind),
        *_few_rows(kind),
        *_packed(kind),
    ]


def one_row(kind: Kind) -> list[Rule]:
    """A wide row of C by rows of B, which kernels without loops over cache blocks read at the speed of memory. It is ahead of
    what is left to BLAS. (Where BLAS does not take the strides, one row is like few: more rules would be more boxes.)"""
    if not (kind.problem.gemv and kind.unblocked_in_place and kind.problem.dtype in STUDIED):
        return []
    low = 2 * kind.widest
    why = f"m = 1, n >= {low} and k >= {ROW_STEPS}: sums in L1, to which rows of B are added several at once"
    return [Rule(Box(m=(1, 1), n=(low, math.inf), k=(ROW_STEPS, math.inf)), kind.variant.name, "none", UNBLOCKED, why)]


def _narrow_c(kind: Kind) -> list[Rule]:
    """A C so narrow that it is one column of tiles, or a B so small that a copy with contiguous rows is cheap: tiles that fit
    the width decide, not the caches."""
    name, lanes = kind.variant.name, kind.lanes
    if kind.unblocked_in_place:
        why = f"C is at most {kind.widest} wide: one column of tiles"
        return [Rule(Box(n=(0, kind.widest)), name, "none", UNBLOCKED, why)]
    vector = Rule(
        Box(n=(0, lanes)), name, kind.least_packing, NARROW, f"C is at most {lanes} wide: tiles one vector wide, of many rows"
    )
    tiny = replace(
        vector, box=vector.box.clipped("m", 0, FEW_ROWS_OF_TILES), tile=TINY,
        reason=f"C is at most {FEW_ROWS_OF_TILES} x {lanes}: tiles that leave few rows over",
    )  # fmt: skip
    long = replace(
        vector, box=vector.box.clipped("k", LONG_ROWS, math.inf), tile=TINY,
        reason=f"C is at most {lanes} wide, k >= {LONG_ROWS}: tiles of no more rows of A than a set of L1 has ways",
    )  # fmt: skip
    two_vectors = replace(
        vector, box=Box(n=(0, 2 * lanes)), tile=SLENDER, reason=f"C is at most {2 * lanes} wide: tiles two vectors wide"
    )
    copied = _copied_b(kind) if kind.unblocked and kind.problem.dtype in STUDIED else []
    return [*copied, tiny, *([long] if kind.free else []), vector, two_vectors]


def _copied_b(kind: Kind) -> list[Rule]:
    """A B without contiguous rows that is small or, of few rows of A, comes from no further than L3: turned round once, and then
    read by tiles of which none computes rows in vain."""
    l2, how = kind.host.cache(2).bytes / kind.itemsize, "copied to contiguous rows for tiles with no loops around them"
    copied = Rule(Box(kn=(0.0, l2 / 16)), kind.variant.name, "b", UNBLOCKED, f"a B of at most a sixteenth of L2, {how}")
    if kind.one_thread:
        # Of a narrower C, most of the copy would be what fills its vectors. Of rows with gaps a vector of each is copied at a time,
        # which is slow where they are longer, and so in a page each.
        low, high = kind.lanes + 1, GAPPED_COLUMNS if kind.problem.b_layout == "strided" else math.inf
        box = Box(m=(0, FLAT), n=(low, high), kn=(0.0, 1.5 * l2))
        return [copied, replace(copied, box=box, reason=f"m <= {FLAT}, n >= {low} and a B of at most 1.5 times L2, {how}")]
    # A copy for each thread spares them a meeting.
    own = replace(
        copied, box=Box(m=(0, FEW_ROWS), kn=(0.0, l2 / 8)),
        reason=f"m <= {FEW_ROWS} and a B of at most an eighth of L2, of which each thread makes its own copy",
    )  # fmt: skip
    return [copied, own]


def _few_rows_of_pairs(kind: Kind) -> list[Rule]:
    """Few rows of complex numbers and a B that is too far away for tiles to walk down: it is read row by row, from end to end."""
    if not kind.unblocked_in_place or kind.problem.dtype in STUDIED:
        return []
    far = WIDE_FAR / kind.itemsize
    box = Box(m=(0, WIDE_ROWS), n=(kind.widest + 1, math.inf), k=(WIDE_STEPS, math.inf), kn=(far, math.inf))
    why = f"m <= {WIDE_ROWS} and a B of at least {WIDE_FAR >> 20} MiB: sums in L1, to which rows of B are added several at once"
    return [Rule(box, kind.variant.name, "none", UNBLOCKED, why)]


def _b_within_reach(kind: Kind) -> list[Rule]:
    """Few rows and a B of as many times L2 as L3 delivers to them without delay: packing it is work for too few rows."""
    reach = 5 * kind.l2_block
    box = Box(m=(0, FLAT), kn=(0.0, float(reach)))
    why = f"m <= {FLAT} and a B of at most {reach} elements: packing more than its layout demands would not pay for so few rows"
    few = Rule(box.clipped("n", 0, 2 * kind.l2_columns), kind.variant.name, kind.least_packing, kind.tile_in_place, why)
    deep = replace(few, box=box.clipped("k", SHALLOW + 1, math.inf))  # of a short k a wide C is most of the traffic
    return [few, deep] if kind.b_row_major else [few]


def _b_within_l2(kind: Kind) -> list[Rule]:
    """Blocks of B that L2 holds, unpacked too: for few rows, and for one block of k by tiles with no loops around them."""
    block = f"blocks of B of at most {kind.kc} x {kind.held_columns}, which stay in L2"
    near = Box(n=(0, kind.held_columns))
    few = Rule(near.clipped("m", 0, FEW_ROWS), kind.variant.name, kind.least_packing, kind.tile_in_place, f"m <= {FEW_ROWS} and {block}")
    if not (kind.unblocked_in_place and kind.problem.dtype in STUDIED):
        return [few]
    # A step along k of a column-major A is a line, and may be a page, of its own.
    steps = kind.kc if kind.problem.a_layout == "row" else SHALLOW
    one = replace(few, box=near.clipped("k", 0, steps), reason=f"k <= {steps} and {block}")
    # A wider B as small as that, if L2 holds so much of C that the order in which it is written does not matter (few rows
    # have rules of their own).
    held, near_c = float(kind.kc * kind.held_columns), 2.5 * kind.l2_block
    small = replace(
        few, box=Box(m=(FLAT + 1, math.inf), k=(0, steps), kn=(0.0, held), mn=(0.0, near_c)),
        reason=f"m > {FLAT}, k <= {steps}, a B of at most {held:.0f} elements, which stays in L2, and a C of at most {near_c:.0f}",
    )  # fmt: skip
    return [one, small, few]


def _film(kind: Kind) -> list[Rule]:
    """So little to do for each element of C that packing, and prefetching between so few steps, cost as much as all of it."""
    mr, l2 = kind.tiles[PACKED][0], kind.l2_block
    few = Box(m=(mr + 1, FLAT), k=(0, FILM))  # enough rows of tiles to pay for packing a B that comes from afar
    packing = "ab" if kind.one_thread else kind.packed_b
    why = f"k <= {FILM} and {_from_afar(kind)}"
    found = [Rule(few.clipped("kn", kind.far_b, math.inf), ROWS_OF_C, packing, PACKED, why)]
    if not kind.unblocked_in_place:
        return found
    wide, above = Box(n=(kind.held_columns + 1, math.inf), k=(0, FILM)), math.inf
    why = f"k <= {FILM}: C is nearly all of the traffic; nothing is packed, rows of tiles are written in turn"
    return [
        *found,
        Rule(wide.clipped("m", SHORT + 1, above), ROWS_OF_C, "none", NARROW, why),
        Rule(wide.clipped("m", FLAT + 1, SHORT), ROWS_OF_C, "none", IN_PLACE, f"m <= {SHORT} and {why}"),
        Rule(
            wide.clipped("m", mr + 1, FLAT).clipped("mn", 8.0 * l2, above), ROWS_OF_C, "none", IN_PLACE,
            f"a C of more than {8 * l2} elements, m <= {FLAT} and {why}",
        ),
    ]  # fmt: skip


def _shallow(kind: Kind) -> list[Rule]:
    """A k so short that the way of B and C through the caches decides."""
    few, name = Box(m=(0, FLAT), k=(0, SHALLOW)), kind.variant.name
    short = f"m <= {FLAT} and k <= {SHALLOW}"
    in_place = f"{short}: A stays in L1, and B is read once, in place"
    found = []
    if kind.one_thread:
        afar = few.clipped("kn", kind.far_b, math.inf).clipped("m", FLAT // 2 + 1, FLAT)
        found.append(Rule(afar, ROWS_OF_C, "ab", IN_PLACE, f"k <= {SHALLOW} and {_from_afar(kind)}"))
    if kind.unblocked_in_place:
        near = few.clipped("kn", 0.0, kind.far_b)
        found.append(Rule(near, name, "none", UNBLOCKED, f"{in_place}, from L3 or nearer"))
    if not kind.b_row_major:
        found.append(Rule(few, ROWS_OF_C, "ab", IN_PLACE, f"{short}: A stays in L1, and B is packed right before it is used"))
    elif kind.one_thread:
        found.append(Rule(few, ROWS_OF_C, "a", IN_PLACE, in_place))
    else:  # for a packed A, which is small, tasks would have to wait for each other
        found.append(Rule(few, name, "none", kind.tile_in_place, in_place))
    many = Box(m=(SHORT + 1, math.inf), n=(kind.l2_columns + 1, math.inf), k=(0, SHALLOW))
    why = f"k <= {SHALLOW}: C is most of the traffic, so its rows are written in turn"
    return [*found, Rule(many, ROWS_OF_C, "ab", NARROW, why)]


def _from_afar(kind: Kind) -> str:
    """Why a B that L3 does not deliver in time is packed for few rows: its rows are pages apart; packed, it is asked
    for in time."""
    return f"a B of more than {int(kind.far_b)} elements: packed once for all rows of tiles"


def _few_rows(kind: Kind) -> list[Rule]:
    """Few rows of a large B: what packing it costs is shared by few products."""
    flat = Rule(
        Box(m=(0, FLAT), k=(SHALLOW + 1, math.inf)), "C3A2B0", "ac", PACKED,
        f"m <= {FLAT}: each element of B is loaded into registers only once",
    )  # fmt: skip
    short = Rule(Box(m=(0, SHORT)), ROWS_OF_C, kind.packed_b, PACKED, f"m <= {SHORT}: B is packed right before it is used")
    # Of a B in another layout, rows in registers would be collected from as many lines of cache as they have elements.
    once = "B" in TILES[kind.isa.name, kind.problem.dtype] and kind.b_row_major
    return [flat, short] if once else [short]


def _packed(kind: Kind) -> list[Rule]:
    """All others: B is packed right before it is used, and A too, unless C is narrow."""
    lean = Rule(
        Box(m=(FEW_ROWS + 1, math.inf), n=(0, kind.l2_columns), k=(SHALLOW // 4, SHALLOW)), ROWS_OF_C, kind.packed_b, NARROW,
        f"n <= {kind.l2_columns} and k <= {SHALLOW}: tiles one vector wide take the least time before and after their loop over k",
    )  # fmt: skip
    slim = Rule(
        Box(n=(0, FEW_COLUMNS)), ROWS_OF_C, kind.packed_b, PACKED,
        f"n <= {FEW_COLUMNS}: packing A costs more than reading its rows",
    )  # fmt: skip
    large = Rule(Box(), ROWS_OF_C, "ab", PACKED, "both operands packed, B right before it is used")
    # Measured: a tenth for float64 and this variant, nothing or less for the others.
    gains = kind.problem.dtype == "float64" and kind.one_thread
    return [lean, slim, large] if gains else [slim, large]

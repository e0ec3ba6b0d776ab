"""Block sizes mc, nc, kc from the host's caches and the micro-tile: the analytical model of Low et al., for the family.

Low, Igual, Smith, Quintana-Orti, "Analytical Modeling Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016,
fills each level of the cache with the block that is reused from it and leaves ways for what streams past. With W ways,
N sets and lines of L bytes in a cache and S bytes per element, for B3A2C0:

    L1   C_Br = floor((W1 - 1) / (1 + mr/nr)) ways hold the micro-panel Br (kc x nr)   kc = C_Br N1 L1 / (nr S)
    L2   W2 - 1 - ceil(kc nr S / (N2 L2)) ways hold Ac (mc x kc)                        mc = ways N2 L2 / (kc S)
    L3   W3 - 1 - ceil(kc mc S / (N3 L3)) ways hold Bc (kc x nc)                        nc = ways N3 L3 / (kc S)

For the other variants the same holds with the dimensions exchanged. The micro-kernel of a variant loops over one
dimension (k for resident C, n for resident A, m for resident B): L1 decides that one, from the micro-panel that is
reused there. The block packed for L2 has that dimension and a second one, which L2 decides; L3 decides the third.

Three deviations, all measured (docs/design.md, "Block sizes"). A wide tile gets a kc of 128 from the first line, and then
reading and writing C once per kc costs more than a Br that streams from L2: kc is at least what keeps both micro-panels
within an eighth of L2. And kc is one number per dtype and host, for all variants and tiles: it decides the order in
which k is added up, so an element of C does not depend on which member of the family computed it. With resident C, while the
block in L2 is used, the next one is fetched there to be packed (``family.ahead``): so it has half of the ways.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from .family.arithmetic import Arithmetic, arithmetic_of, lanes_of
from .family.isa import ISAS
from .family.tiles import TILES
from .family.variants import LOOP_DIMENSION, OPERAND_DIMENSIONS, VARIANTS, Variant
from .host import Cache, Host
from .spec import KernelSpec

#: kc is a multiple of this, so that the unrolled and the vectorised loops over k have no remainder inside a block.
KC_STEP = 32

#: Longer blocks of k gain nothing measurable and cost accuracy: each is one chain of additions.
KC_LIMIT = 512

#: kc of bools that are packed: where every sum is true after one block of k, the others are not even packed.
KC_BOOLS = 512

_ENDLESS = 1 << 40

#: Bytes of the block packed for L3, at most, by its operand: the bulk of a call's scratch memory. A block of A passes by once for
#: every few columns of C, so it has to stay in the part of L3 that other cores leave to this one.
L3_BLOCK_LIMITS = {"A": 2 << 20, "B": 8 << 20, "C": 8 << 20}


@dataclass(frozen=True)
class BlockSizes:
    """mc x kc is the block of A, kc x nc the block of B, mc x nc the block of C; in elements."""

    mc: int
    nc: int
    kc: int


def _way(cache: Cache) -> int:
    """Bytes of one way of a cache."""
    return cache.sets * cache.line


def _reused_panel(width: int, streaming: int, itemsize: int, l1: Cache) -> int:
    """Steps of a micro-panel of ``width`` that stays in L1 while one of ``streaming`` passes by."""
    ways = max(1, int((l1.ways - 1) / (1 + streaming / width)))
    return max(1, ways * _way(l1) // (width * itemsize))


def kc_of(mr: int, nr: int, itemsize: int, l1: Cache, l2: Cache) -> int:
    """The kc of a dtype on a host, from the tile of its packed resident-C kernel; a positive multiple of ``KC_STEP``."""
    within_l2 = l2.bytes // 8 // ((mr + nr) * itemsize)
    kc = min(max(_reused_panel(nr, mr, itemsize, l1), within_l2), KC_LIMIT)
    return max(KC_STEP, kc // KC_STEP * KC_STEP)


def block_sizes(
    variant: Variant, tile: dict[str, int], itemsize: int, kc: int, l1: Cache, l2: Cache, l3: Cache, fetches_next: bool = True
) -> BlockSizes:
    """Block sizes of a variant, before they are clipped to a problem.

    ``tile``: micro-tile sizes by dimension (``"m"``, ``"n"``, ``"k"``), 1 for the one that the micro-kernel loops over.
    ``fetches_next``: whether kernels with resident C fetch the next block, as all but those of matrix units do.
    mc and nc are multiples of the tile, all are positive, whatever the caches claim.
    """
    (l3_operand, _), (l2_operand, _) = variant.packed
    first = variant.stream
    second = _other_dimension(l2_operand, first)
    third = next(d for d in "mnk" if d not in (first, second))
    # The micro-panel of the outer of the two inner loops is reused with each that the inner one streams.
    reused, passing = (tile[LOOP_DIMENSION[loop]] for loop in variant.inner)

    sizes = {"k": kc}
    if first != "k":
        sizes[first] = _reused_panel(reused, passing, itemsize, l1)
    row = sizes[first] * itemsize
    rows = _rows(l2, reserved=row * reused, row=row, blocks=2 if fetches_next and variant.resident == "C" else 1)
    if second == "k":  # kc is given: the other side of the block in L2 gives way
        sizes[first] = max(1, min(sizes[first], rows * sizes[first] // kc))
    else:
        sizes[second] = rows
    if third != "k":
        row = sizes[_other_dimension(l3_operand, third)] * itemsize
        rows = _rows(l3, reserved=sizes[first] * sizes[second] * itemsize, row=row)
        sizes[third] = min(rows, max(1, L3_BLOCK_LIMITS[l3_operand] // row))

    def whole_tiles(d: str) -> int:
        return max(tile[d], sizes[d] // tile[d] * tile[d])

    return BlockSizes(whole_tiles("m"), whole_tiles("n"), kc)


def _other_dimension(operand: str, dimension: str) -> str:
    return next(d for d in OPERAND_DIMENSIONS[operand] if d != dimension)


def _rows(cache: Cache, reserved: int, row: int, blocks: int = 1) -> int:
    """Rows of ``row`` bytes in each of so many blocks in the ways that are left of a cache: one streams, some hold ``reserved``
    bytes."""
    ways = max(1, (cache.ways - 1 - -(-reserved // _way(cache))) // blocks)
    return max(1, ways * _way(cache) // row)


@lru_cache(maxsize=256)
def blocks_of(spec: KernelSpec, host: Host) -> BlockSizes:
    """The block sizes of a kernel on this host."""
    l1, l2, l3 = (host.cache(level) for level in (1, 2, 3))
    tile = {"m": spec.mr or 1, "n": spec.nr or 1, "k": spec.kr or 1}
    how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
    steps = steps_of(spec.isa, spec.dtype, how, host)
    sizes = block_sizes(VARIANTS[spec.variant], tile, how.panel_size, steps, l1, l2, l3, not how.matrix)
    if how.saturates:  # blocks in place need no end
        return replace(sizes, kc=KC_BOOLS if spec.packing == "ab" else _ENDLESS)
    return replace(sizes, kc=steps * how.group)


def steps_of(isa: str, dtype: str, how: Arithmetic, host: Host) -> int:
    """Elements of a panel along a block of k: kc, in groups. One number for all kernels of an arithmetic on a host."""
    rows, vectors = TILES[isa, dtype]["C"][0][0], TILES[isa, dtype]["C"][0][1] // lanes_of(isa, dtype, "ab")
    columns, size, l1 = vectors * how.columns(ISAS[isa]), how.panel_size, host.cache(1)
    steps = kc_of(rows, columns, size, l1, host.cache(2))
    if how.matrix:  # L2 delivers half of what the unit takes: the panel of B has to stay in L1
        steps = max(KC_STEP, min(steps, 2 * l1.bytes // 3 // (columns * size) // KC_STEP * KC_STEP))
    return steps

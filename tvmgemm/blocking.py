"""Block sizes mc, nc, kc from the host's caches and the micro-tile: the analytical model of Low et al.

Low, Igual, Smith, Quintana-Orti, "Analytical Modeling Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016,
fills each level of the cache with the block that is reused from it and leaves ways for what streams past:

    L1   C_Br = floor((W1 - 1) / (1 + mr/nr)) ways hold the micro-panel Br (kc x nr)   kc = C_Br N1 L1 / (nr S)
    L2   W2 - 1 - ceil(kc nr S / (N2 L2)) ways hold Ac (mc x kc)                        mc = ways N2 L2 / (kc S)
    L3   W3 - 1 - ceil(kc mc S / (N3 L3)) ways hold Bc (kc x nc)                        nc = ways N3 L3 / (kc S)

with W ways, N sets and lines of L bytes in a cache, S bytes per element. One deviation, measured (docs/design.md, "Block
sizes"): a wide tile gets a kc of 128 from the first line, and then reading and writing C once per kc costs more than
a Br that streams from L2. kc is therefore at least what keeps both micro-panels within an eighth of L2.
"""

from __future__ import annotations

from dataclasses import dataclass

from .host import Cache

#: kc is a multiple of this, so that the unrolled and the vectorised loops over k have no rest inside a block.
KC_STEP = 32

#: Longer blocks of k gain nothing measurable and cost accuracy: each is one chain of additions.
KC_LIMIT = 512

#: Bytes of Bc, the largest part of a call's scratch memory, whatever the size of L3.
BC_LIMIT = 8 << 20


@dataclass(frozen=True)
class BlockSizes:
    """mc x kc is the block of A, kc x nc the block of B, mc x nc the block of C; in elements."""

    mc: int
    nc: int
    kc: int


def _way(cache: Cache) -> int:
    """Bytes of one way of a cache."""
    return cache.sets * cache.line


def kc_from_l1(mr: int, nr: int, itemsize: int, l1: Cache) -> int:
    """The kc of Low et al.: the micro-panel Br stays in L1 while micro-panels of A stream past it."""
    ways = max(1, int((l1.ways - 1) / (1 + mr / nr)))
    return ways * _way(l1) // (nr * itemsize)


def block_sizes(mr: int, nr: int, itemsize: int, l1: Cache, l2: Cache, l3: Cache) -> BlockSizes:
    """Block sizes of a resident-C variant with an mr x nr tile, before they are clipped to a problem.

    mc is a multiple of mr, nc of nr, kc of ``KC_STEP``; all are positive, whatever the caches claim.
    """
    from_l2 = l2.bytes // 8 // ((mr + nr) * itemsize)
    kc = min(max(kc_from_l1(mr, nr, itemsize, l1), from_l2), KC_LIMIT)
    kc = max(KC_STEP, kc // KC_STEP * KC_STEP)
    mc = _fill(l2, reserved=kc * nr * itemsize, row=kc * itemsize)
    nc = min(_fill(l3, reserved=kc * mc * itemsize, row=kc * itemsize), BC_LIMIT // (kc * itemsize))
    return BlockSizes(max(mr, mc // mr * mr), max(nr, nc // nr * nr), kc)


def _fill(cache: Cache, reserved: int, row: int) -> int:
    """Rows of ``row`` bytes in the ways that are left of a cache: one streams, some hold ``reserved`` bytes."""
    ways = max(1, cache.ways - 1 - -(-reserved // _way(cache)))
    return ways * _way(cache) // row

"""Block sizes: the model's numbers for caches of known CPUs, and sane ones for any."""

from __future__ import annotations

import pytest
from equivalence import FLOAT_TILES
from hypothesis import given
from hypothesis import strategies as st

from tvmgemm.blocking import KC_LIMIT, KC_STEP, L3_BLOCK_LIMITS, BlockSizes, block_sizes, kc_of
from tvmgemm.family.isa import ISAS
from tvmgemm.family.variants import LOOP_DIMENSION, VARIANTS
from tvmgemm.host import DEFAULT_CACHES, Cache
from tvmgemm.problem import DTYPES

KIB, MIB = 1 << 10, 1 << 20

#: CPU -> (bytes, ways) of L1, L2 and L3, lines of 64 bytes.
CPUS = {
    "Nehalem": ((32 * KIB, 8), (256 * KIB, 8), (8 * MIB, 16)),
    "Haswell": ((32 * KIB, 8), (256 * KIB, 8), (8 * MIB, 16)),
    "Zen 2": ((32 * KIB, 8), (512 * KIB, 8), (16 * MIB, 16)),
    "Skylake-SP": ((32 * KIB, 8), (1 * MIB, 16), (11 * MIB, 11)),
    "Emerald Rapids": ((48 * KIB, 12), (2 * MIB, 16), (105 * MIB, 15)),
    "Neoverse N1": ((64 * KIB, 4), (1 * MIB, 8), (32 * MIB, 16)),
    "Cortex-A53": ((32 * KIB, 4), (512 * KIB, 16), (8 * MIB, 16)),
}


def caches(cpu: str) -> tuple[Cache, ...]:
    return tuple(Cache(level, *size) for level, size in enumerate(CPUS[cpu], 1))


def blocks(variant, rows, columns, itemsize, kc, *levels) -> BlockSizes:
    """Block sizes of a variant with a resident tile of rows x columns."""
    variant = VARIANTS[variant]
    tile = {"m": 1, "n": 1, "k": 1, **dict(zip(variant.tile_dimensions, (rows, columns)))}
    return block_sizes(variant, tile, itemsize, kc, *levels)


def goto(mr, nr, itemsize, l1, l2, l3) -> BlockSizes:
    """Those of B3A2C0, with the kc that its own tile gives."""
    return blocks("B3A2C0", mr, nr, itemsize, kc_of(mr, nr, itemsize, l1, l2), l1, l2, l3)


@pytest.mark.parametrize(
    "cpu, mr, nr, itemsize, kc",
    [
        # floor((W1 - 1) / (1 + mr/nr)) ways of Br. 256 for 6x8 float64 is what BLIS uses on Haswell.
        ("Haswell", 6, 8, 8, 4 * 4096 // (8 * 8)),
        ("Haswell", 6, 16, 4, 5 * 4096 // (16 * 4)),
        ("Haswell", 8, 6, 8, 3 * 4096 // (6 * 8)),
        ("Nehalem", 6, 4, 8, 2 * 4096 // (4 * 8)),
        ("Skylake-SP", 14, 32, 4, 4 * 4096 // (32 * 4)),
        ("Emerald Rapids", 14, 16, 8, 5 * 4096 // (16 * 8)),
        ("Neoverse N1", 8, 12, 4, 1 * 16384 // (12 * 4)),
        ("Cortex-A53", 8, 6, 8, 1 * 8192 // (6 * 8)),
    ],
)
def test_kc_of_the_model(cpu, mr, nr, itemsize, kc):
    """With an L2 too small to raise it."""
    assert kc_of(mr, nr, itemsize, caches(cpu)[0], Cache(2, 1024, 8)) == max(KC_STEP, kc // KC_STEP * KC_STEP)


@pytest.mark.parametrize(
    "cpu, mr, nr, itemsize, expected",
    [
        # Haswell, float32: kc = L2/8 / (22 * 4) = 372 -> 352 (above 320 from L1); Br takes 1 way of L2, so Ac
        # gets 3 of 6: mc = 3 * 32768 / 1408 = 69 -> 66; Ac takes 1 way of L3, so Bc gets 14: nc = 14 * 524288 /
        # 1408 = 5213 -> 5200.
        ("Haswell", 6, 16, 4, BlockSizes(mc=66, nc=5200, kc=352)),
        ("Haswell", 6, 8, 8, BlockSizes(mc=42, nc=3184, kc=288)),
        ("Nehalem", 6, 4, 8, BlockSizes(mc=30, nc=2388, kc=384)),
        ("Zen 2", 6, 16, 4, BlockSizes(mc=96, nc=4096, kc=512)),
        ("Skylake-SP", 14, 32, 4, BlockSizes(mc=224, nc=4096, kc=512)),
        ("Emerald Rapids", 14, 16, 8, BlockSizes(mc=224, nc=2048, kc=512)),
        ("Neoverse N1", 8, 12, 4, BlockSizes(mc=192, nc=4092, kc=512)),
        ("Cortex-A53", 8, 6, 8, BlockSizes(mc=56, nc=1788, kc=512)),
    ],
)
def test_block_sizes_of_known_cpus(cpu, mr, nr, itemsize, expected):
    assert goto(mr, nr, itemsize, *caches(cpu)) == expected


@pytest.mark.parametrize(
    "variant, rows, columns, expected",
    [
        # An EPYC of the Zen 4 generation, float32. kc is given; L1 decides what the micro-kernel loops over.
        ("B3A2C0", 14, 32, BlockSizes(mc=182, nc=4096, kc=512)),
        ("A3B2C0", 14, 32, BlockSizes(mc=1022, nc=192, kc=512)),
        # L1: floor(7 / (1 + 32/14)) = 2 ways of 4096 bytes hold a 14-wide panel of 146 columns; L2: 6 ways of
        # 128 KiB hold rows of 146 floats.
        ("B3C2A0", 32, 14, BlockSizes(mc=1344, nc=146, kc=512)),
        ("A3C2B0", 6, 64, BlockSizes(mc=170, nc=1152, kc=512)),
        ("C3B2A0", 32, 14, BlockSizes(mc=14336, nc=146, kc=512)),
        ("C3A2B0", 6, 64, BlockSizes(mc=170, nc=12288, kc=512)),
    ],
)
def test_block_sizes_of_every_variant(variant, rows, columns, expected):
    levels = Cache(1, 32 * KIB, 8), Cache(2, 1 * MIB, 8), Cache(3, 32 * MIB, 16)
    assert blocks(variant, rows, columns, 4, 512, *levels) == expected


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("isa, dtype", FLOAT_TILES)
def test_blocks_fit_their_caches(cpu, isa, dtype):
    """Every packed block leaves a way of its cache free; none is so small that packing it cannot pay."""
    itemsize, levels = DTYPES[dtype].itemsize, caches(cpu)
    kc = kc_of(*FLOAT_TILES[isa, dtype]["C"][0], itemsize, *levels[:2])
    assert 96 <= kc <= KC_LIMIT
    for variant in VARIANTS.values():
        for rows, columns in FLOAT_TILES[isa, dtype][variant.resident]:
            b = blocks(variant.name, rows, columns, itemsize, kc, *levels)
            size = {"m": b.mc, "n": b.nc, "k": b.kc}
            third, second = (bytes_of(operand, size, itemsize) for operand, _ in variant.packed)
            assert second <= levels[1].bytes * (levels[1].ways - 1) / levels[1].ways
            given = variant.packed[0][0] != "C" and variant.stream != "k"  # L3 would decide kc, which is given
            assert third <= min(L3_BLOCK_LIMITS[variant.packed[0][0]], levels[2].bytes) or given
            assert all(size[d] >= 2 * t for d, t in zip(variant.tile_dimensions, (rows, columns)))


def bytes_of(operand: str, size: dict[str, int], itemsize: int) -> int:
    rows, columns = {"A": "mk", "B": "kn", "C": "mn"}[operand]
    return size[rows] * size[columns] * itemsize


absurd_cache = st.builds(
    Cache,
    level=st.just(1),
    bytes=st.one_of(st.integers(0, 200), st.integers(0, 1 << 20), st.integers(0, 1 << 50)),
    ways=st.one_of(st.integers(1, 32), st.integers(1, 1 << 20)),
    line=st.sampled_from([1, 16, 64, 128, 4096]),
)


@given(
    l1=absurd_cache,
    l2=absurd_cache,
    l3=absurd_cache,
    mr=st.integers(1, 64),
    nr=st.integers(1, 128),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
)
def test_absurd_caches_give_usable_blocks(l1, l2, l3, mr, nr, itemsize):
    b = goto(mr, nr, itemsize, l1, l2, l3)
    assert b.mc >= mr and b.mc % mr == 0
    assert b.nc >= nr and b.nc % nr == 0
    assert KC_STEP <= b.kc <= KC_LIMIT and b.kc % KC_STEP == 0
    # Bc is the largest part of the scratch memory of a call; the least there can be is one micro-panel.
    assert b.kc * b.nc * itemsize <= max(L3_BLOCK_LIMITS["B"], b.kc * nr * itemsize)
    assert b == goto(mr, nr, itemsize, l1, l2, l3)
    for variant in VARIANTS:
        b = blocks(variant, mr, nr, itemsize, 256, l1, l2, l3)
        assert b.mc > 0 and b.nc > 0 and b.kc == 256


@pytest.mark.parametrize("isa, dtype", FLOAT_TILES)
def test_defaults_for_hidden_caches(isa, dtype):
    itemsize = DTYPES[dtype].itemsize
    for mr, nr in FLOAT_TILES[isa, dtype]["C"]:
        b = goto(mr, nr, itemsize, *(DEFAULT_CACHES[level] for level in (1, 2, 3)))
        assert b.mc * b.kc * itemsize <= DEFAULT_CACHES[2].bytes and b.kc >= 96


def test_larger_caches_never_give_smaller_footprints():
    """Twice the L2, everything else equal: Ac does not shrink."""
    for (isa, dtype), tiles in FLOAT_TILES.items():
        assert isa in ISAS
        for mr, nr in tiles["C"]:
            sizes = []
            for size in (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB):
                levels = Cache(1, 32 * KIB, 8), Cache(2, size, 8), Cache(3, 32 * MIB, 16)
                b = goto(mr, nr, DTYPES[dtype].itemsize, *levels)
                sizes.append(b.mc * b.kc)
            assert sizes == sorted(sizes), (isa, dtype, mr, nr)


def test_the_panel_held_is_that_of_the_outer_inner_loop():
    """What the model calls reused: the micro-panel that stays while the inner loop brings the others."""
    assert [LOOP_DIMENSION[v.inner[0]] for v in VARIANTS.values()] == ["n", "m", "k", "k", "k", "k"]

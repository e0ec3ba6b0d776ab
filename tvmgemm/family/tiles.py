"""Micro-tiles mr x nr per instruction set and dtype, as data, and the count of registers that one needs.

The rule (Low et al., "Analytical Modeling Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016): the mr.nr
accumulators must hide the latency of the FMA and leave room for one row of B and a broadcast element of A;
near-square tiles need the fewest loads per FMA.
"""

from __future__ import annotations

from .isa import ISAS, Isa

# fmt: off
#: (ISA, dtype) -> tiles; the first is the default of packed kernels, the second that of unpacked ones.
TILES: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    #                             packed    unpacked
    ("x86-64-v2",  "float32"): ((6, 8),   (6, 8)),
    ("x86-64-v2",  "float64"): ((6, 4),   (6, 4)),
    ("x86-64-v3",  "float32"): ((6, 16),  (6, 16)),
    ("x86-64-v3",  "float64"): ((6, 8),   (6, 8)),
    ("x86-64-v4",  "float32"): ((14, 32), (8, 32)),
    ("x86-64-v4",  "float64"): ((14, 16), (8, 16)),
    ("armv8-neon", "float32"): ((8, 12),  (8, 12)),
    ("armv8-neon", "float64"): ((8, 6),   (8, 6)),
}
# fmt: on


def registers_needed(mr: int, nr: int, isa: Isa, itemsize: int) -> int:
    """Vector registers that a resident-C micro-kernel of mr x nr keeps busy in its inner loop.

    mr.nr/lanes accumulators, nr/lanes vectors of B, one broadcast of A, and without FMA one product.
    """
    vectors = -(-nr // isa.lanes(itemsize))
    return mr * vectors + vectors + 1 + (not isa.fma)


def check_tile(mr: int, nr: int, isa_name: str, itemsize: int) -> None:
    """Raise ValueError, with the count of registers, for a tile that this instruction set cannot hold."""
    isa = ISAS[isa_name]
    lanes = isa.lanes(itemsize)
    if mr < 1 or nr < 1 or nr % lanes:
        raise ValueError(
            f"micro-kernel {mr}x{nr}: mr must be positive and nr a multiple of {lanes}, the lanes of {isa.name}"
        )
    needed = registers_needed(mr, nr, isa, itemsize)
    if needed > isa.vector_registers:
        raise ValueError(
            f"micro-kernel {mr}x{nr} needs {needed} vector registers, {isa.name} has {isa.vector_registers}; "
            f"choose a smaller tile"
        )

"""Micro-tiles per instruction set, dtype and resident operand, as data, and the count of registers that one needs.

The rule (Low et al., "Analytical Modeling Is Enough for High-Performance BLIS", ACM TOMS 43(2), 2016): the FMAs in
flight must hide their latency and the tile must leave room for what streams past it; near-square tiles need the fewest
loads per FMA. A tile is rows x columns of the resident operand: mr x nr of C, mr x kr of A, kr x nr of B.
"""

from __future__ import annotations

from .arithmetic import MATRIX_REGISTERS, MATRIX_ROWS, WAYS, Arithmetic, arithmetic_of, lanes_of
from .isa import Isa, isa_of

#: The tiles of C by their place in the tables: that of packed kernels, of kernels that read B in place (often the
#: same), of a C no wider than a vector, of such a C with few rows, of one up to two vectors wide, and (not of every
#: dtype) of a single row.
PACKED, IN_PLACE, NARROW, TINY, SLENDER, ONE_ROW = range(6)

#: In the place of such a number: no tile of the tables, but a kernel without loops over cache blocks, which has many.
UNBLOCKED = None

# fmt: off
#: (ISA, dtype) -> resident operand -> tiles; any of them can be forced. The first is the default.
TILES: dict[tuple[str, str], dict[str, tuple[tuple[int, int], ...]]] = {
    #                              C: packed, in place, narrow, tiny, slender, others  A               B
    ("x86-64-v2",  "float32"): {"C": ((6, 8),   (4, 8),  (12, 4), (8, 4), (4, 8)), "A": ((8, 5),),   "B": ((5, 8),)},
    ("x86-64-v2",  "float64"): {"C": ((6, 4),   (4, 4),  (12, 2), (8, 2), (4, 4)), "A": ((4, 5),),   "B": ((5, 4),)},
    ("x86-64-v3",  "float32"): {"C": ((6, 16),  (4, 24), (12, 8), (8, 8), (4, 16)), "A": ((16, 6),),  "B": ((6, 16), (4, 24))},
    ("x86-64-v3",  "float64"): {"C": ((6, 8),   (4, 12), (12, 4), (8, 4), (4, 8)), "A": ((8, 6),),   "B": ((6, 8), (4, 12))},
    ("x86-64-v4",  "float32"): {"C": ((8, 48),  (8, 48), (14, 16), (8, 16), (8, 32), (6, 64), (14, 32)),
                                "A": ((32, 14), (64, 6)),                       "B": ((6, 64), (14, 32))},
    ("x86-64-v4",  "float64"): {"C": ((8, 24),  (8, 24), (14, 8),  (8, 8),  (8, 16), (6, 32), (14, 16)),
                                "A": ((16, 14), (32, 6)),                       "B": ((6, 32), (14, 16))},
    # Complex tiles have twice as many rows and columns of real numbers.
    ("x86-64-v2",  "complex64"):  {"C": ((3, 4),   (2, 4),  (6, 2),  (4, 2), (2, 4))},
    ("x86-64-v2",  "complex128"): {"C": ((3, 2),   (2, 2),  (6, 1),  (4, 1), (2, 2))},
    ("x86-64-v3",  "complex64"):  {"C": ((3, 8),   (2, 12), (6, 4),  (4, 4), (2, 8))},
    ("x86-64-v3",  "complex128"): {"C": ((3, 4),   (2, 6),  (6, 2),  (4, 2), (2, 4))},
    ("x86-64-v4",  "complex64"):  {"C": ((4, 24),  (4, 24), (7, 8),  (4, 8), (4, 16))},
    ("x86-64-v4",  "complex128"): {"C": ((4, 12),  (4, 12), (7, 4),  (4, 4), (4, 8))},
    ("armv8-neon", "float32"): {"C": ((8, 12),  (8, 8),  (16, 4), (8, 4), (8, 8), (6, 16)), "A": ((8, 12),), "B": ((12, 8),)},
    ("armv8-neon", "float64"): {"C": ((8, 6),   (8, 4),  (16, 2), (8, 2), (8, 4), (6, 8), (4, 8)), "A": ((4, 12),),  "B": ((12, 4),)},
    ("armv8-neon", "complex64"):  {"C": ((4, 6),   (4, 4),  (8, 2),  (4, 2), (4, 4))},
    ("armv8-neon", "complex128"): {"C": ((4, 3),   (4, 2),  (8, 1),  (4, 1), (4, 2))},
}

# fmt: on

# fmt: off
#: For the other dtypes, in rows and vectors of accumulators: as many columns as those have lanes, and a sixth for one
#: row. An integer multiply-add of two instructions takes a register more than an FMA.
_SHAPES: dict[str, tuple[tuple[int, int], ...]] = {
    #                  packed, in place, narrow, tiny,  slender, one row
    "x86-64-v2":      ((5, 2), (5, 2), (12, 1), (8, 1), (5, 2), (1, 2)),
    "x86-64-v3":      ((6, 2), (4, 2), (11, 1), (8, 1), (4, 2), (1, 3)),   # in place, bytes take more addresses than there are for 5 and 12
    "x86-64-v3-vnni": ((6, 2), (4, 2), (11, 1), (8, 1), (4, 2), (1, 3)),
    "x86-64-v4":      ((8, 3), (8, 3), (14, 1), (8, 1), (8, 2), (1, 3)),
    "x86-64-v4-vnni": ((8, 3), (8, 3), (14, 1), (8, 1), (8, 2), (1, 3)),
    "x86-64-v4-bf16": ((8, 3), (8, 3), (14, 1), (8, 1), (8, 2), (1, 3)),
    "x86-64-v4-amx":  ((8, 3), (8, 3), (14, 1), (8, 1), (8, 2), (1, 3)),   # but packed: 2 x 2 registers of a matrix unit
    "armv8-neon":     ((8, 3), (8, 2), (16, 1), (8, 1), (8, 2), (1, 3)),
    "armv8-dotprod":  ((8, 3), (8, 2), (16, 1), (8, 1), (8, 2), (1, 3)),
}
# fmt: on


def _tiles(isa: str, dtype: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """The tiles of ``_SHAPES`` in elements."""
    packings = ("ab", *("none",) * (len(_SHAPES[isa]) - 1))
    lanes = [lanes_of(isa, dtype, packing) for packing in packings]
    tiles = [(rows, vectors * each) for (rows, vectors), each in zip(_SHAPES[isa], lanes)]
    if arithmetic_of(isa, dtype, "ab").matrix:
        tiles[0] = (2 * MATRIX_ROWS, 2 * MATRIX_ROWS)
    return {"C": tuple(tiles)}


TILES |= {(isa, dtype): _tiles(isa, dtype) for isa in _SHAPES for dtype in WAYS[isa] if (isa, dtype) not in TILES}

# fmt: off
#: The same for the instruction sets of ``isa.EMITTED_ISAS``.
EMITTED_TILES: dict[tuple[str, str], dict[str, tuple[tuple[int, int], ...]]] = {
    ("riscv64-v",  "float32"): {"C": ((8, 12),  (8, 8),  (16, 4)),              "A": ((8, 12),),  "B": ((12, 8),)},
    ("riscv64-v",  "float64"): {"C": ((8, 6),   (8, 4),  (16, 2)),              "A": ((4, 12),),  "B": ((12, 4),)},
    ("power9",     "float32"): {"C": ((8, 16),  (8, 8),  (16, 4)),              "A": ((16, 8),),  "B": ((8, 16),)},
    ("power9",     "float64"): {"C": ((8, 8),   (8, 4),  (16, 2)),              "A": ((8, 8),),   "B": ((8, 8),)},
}
# fmt: on

#: The dtypes that have kernels on some instruction set, in the order of the table.
KERNEL_DTYPES: tuple[str, ...] = tuple(dict.fromkeys(dtype for _, dtype in TILES))

# fmt: off
#: The widest tile of kernels without loops over cache blocks; its registers also hold the narrower and taller ones
#: (``heights``). dtypes without a row have no such kernels.
UNBLOCKED_TILES: dict[tuple[str, str], tuple[int, int]] = {
    ("x86-64-v2",  "float32"): (3, 12), ("x86-64-v2",  "float64"): (3, 6),
    ("x86-64-v3",  "float32"): (4, 24), ("x86-64-v3",  "float64"): (4, 12),
    ("x86-64-v4",  "float32"): (6, 64), ("x86-64-v4",  "float64"): (6, 32),
    ("armv8-neon", "float32"): (6, 16), ("armv8-neon", "float64"): (6, 8),
    ("x86-64-v2",  "complex64"): (2, 4),  ("x86-64-v2",  "complex128"): (2, 2),
    ("x86-64-v3",  "complex64"): (2, 12), ("x86-64-v3",  "complex128"): (2, 6),
    ("x86-64-v4",  "complex64"): (3, 32), ("x86-64-v4",  "complex128"): (3, 16),
    ("armv8-neon", "complex64"): (3, 8),  ("armv8-neon", "complex128"): (3, 4),
}
# fmt: on


#: The same for the other dtypes: rows, and vectors of accumulators. Multiplying 64-bit integers in parts takes registers.
_UNBLOCKED_SHAPES = {
    "x86-64-v2": (3, 3), "x86-64-v3": (3, 3), "x86-64-v3-vnni": (3, 3), "x86-64-v4": (6, 4), "x86-64-v4-vnni": (6, 4),
    "x86-64-v4-bf16": (6, 4), "x86-64-v4-amx": (6, 4), "armv8-neon": (5, 4), "armv8-dotprod": (5, 4),
}  # fmt: skip
UNBLOCKED_TILES |= {
    (isa, dtype): (rows, vectors * lanes_of(isa, dtype, "none"))
    for isa, (rows, vectors) in _UNBLOCKED_SHAPES.items()
    for dtype in WAYS[isa]
    if (isa, dtype) not in UNBLOCKED_TILES
}

#: k from which rows of B go by for a C of one row wider than a tile (``one_row``): clearing its sums in L1 and bringing them to C
#: is then little beside adding to them.
ROW_STEPS = 32

#: Most rows of a C of complex numbers by rows of B, and k and the bytes of B from which they are: tiles, which walk down B, or packing
#: it would wait for its lines.
WIDE_ROWS, WIDE_STEPS, WIDE_FAR = 16, 20, 4 << 20

#: Bytes of B from which it comes from memory: then the rows after those in use are asked for. From nearer caches the hardware's
#: own prefetches are soon enough, and ours take as long as the loads.
ROW_FAR = 14 << 20

#: More rows need more addresses than there are registers for, and save nothing any more.
MOST_ROWS = 16


def heights(mr: int, vectors: int) -> dict[int, int]:
    """Vectors in a row of a tile -> most rows of it, for the tiles that as many registers hold as mr x ``vectors``."""
    return {width: min(mr * vectors // width, MOST_ROWS) for width in range(1, vectors + 1)}


def tiles_of(isa_name: str, dtype: str) -> dict[str, tuple[tuple[int, int], ...]]:
    """Resident operand -> tiles, from either table."""
    return (TILES if (isa_name, dtype) in TILES else EMITTED_TILES)[isa_name, dtype]


def registers_needed(rows: int, columns: int, isa: Isa, how: Arithmetic, resident: str = "C") -> int:
    """Vector registers that a micro-kernel with this resident tile keeps busy in its inner loop.

    C: mr.nr/lanes accumulators, nr/lanes vectors of B and one broadcast of A. A (and B): the tile, mr/lanes (nr/lanes)
    vectors of C and one broadcast. Where a multiply-add is more than one instruction, one product more; of pairs of
    parts the vectors of B with the parts exchanged. Of a matrix unit the tile registers: those of C, and one row and one column of
    them for A and B.
    """
    if how.matrix:
        high, wide = rows // MATRIX_ROWS, columns // MATRIX_ROWS
        return high * wide + high + wide
    along, across = (rows, columns) if resident == "A" else (columns, rows)
    vectors = -(-along // how.columns(isa))
    return how.parts * across * vectors + vectors + 1 + (vectors if how.halves else not how.is_fused(isa))


def check_tile(rows: int, columns: int, isa_name: str, how: Arithmetic, resident: str = "C") -> None:
    """Raise ValueError, with the count of registers, for a tile that this instruction set cannot hold."""
    isa = isa_of(isa_name)
    if how.matrix and (rows < 1 or columns < 1 or rows % MATRIX_ROWS or columns % MATRIX_ROWS):
        raise ValueError(
            f"micro-kernel {rows}x{columns}: with {how.name} both must be multiples of {MATRIX_ROWS}, the rows and columns of a register"
        )
    lanes = how.columns(isa)
    along, side = (rows, "rows") if resident == "A" else (columns, "columns")
    if rows < 1 or columns < 1 or along % lanes:
        raise ValueError(
            f"micro-kernel {rows}x{columns} with resident {resident}: both must be positive and the {side} a multiple "
            f"of {lanes}, the {'lanes' if how.parts == 1 else 'complex numbers in a vector'} of {isa.name}"
        )
    needed = registers_needed(rows, columns, isa, how, resident)
    kind, has = ("tile", MATRIX_REGISTERS) if how.matrix else ("vector", isa.vector_registers)
    if needed > has:
        raise ValueError(
            f"micro-kernel {rows}x{columns} with resident {resident} needs {needed} {kind} registers, {isa.name} has "
            f"{has}; choose a smaller tile"
        )


#: The dtypes that have kernels for one small shape (``specialised``).
SHAPED_DTYPES = ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

#: The largest m, n and k of such a kernel: beyond, what a kernel for all shapes does besides multiplying no longer counts.
LARGEST_SHAPE = 16

#: The most elements of A in one for matrix-vector products, whose sums take one element at a time.
MOST_SCALARS = 64


def check_shape(shape: tuple[int, int, int], dtype: str) -> None:
    """Raise ValueError for a shape (m, n, k) that no specialised kernel is for."""
    m, n, k = shape
    if dtype not in SHAPED_DTYPES:
        raise ValueError(f"specialised kernels are for {', '.join(SHAPED_DTYPES)}, not {dtype}")
    if not all(1 <= size <= LARGEST_SHAPE for size in shape):
        raise ValueError(f"shape {m}x{n}x{k}: specialised kernels are for m, n and k from 1 to {LARGEST_SHAPE}")
    if n == 1 and m * k > MOST_SCALARS:
        raise ValueError(f"shape {m}x{n}x{k}: with n = 1 specialised kernels are for m.k <= {MOST_SCALARS}")

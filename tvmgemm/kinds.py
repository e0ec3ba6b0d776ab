"""Kinds of problems: what the planner's rules go by, derived from dtype, layouts, tiles and caches in one place."""

from __future__ import annotations

from dataclasses import dataclass

from .blocking import kc_of
from .family.isa import Isa
from .family.tiles import IN_PLACE, TILES, UNBLOCKED, UNBLOCKED_TILES
from .family.variants import VARIANTS, Variant
from .forks import once
from .host import Host
from .problem import DTYPES, Problem
from .settings import Options

DEFAULT_VARIANT = "B3A2C0"

#: The dtypes that NumPy hands to its BLAS; for all others it has a scalar loop.
BLAS = ("float32", "float64", "complex64", "complex128")

#: Rows of a tile that uses each vector of B so often that L2 delivers B fast enough even if a block of it is as large as L2.
TALL_TILE = 16


@dataclass(frozen=True)
class Kind:
    """Problems of one dtype and one class of layouts, on a host under options: what the rules for them go by.

    Bounds are in elements. ``problem``: one of the kind; its sizes count for nothing.
    """

    problem: Problem
    isa: Isa
    host: Host
    options: Options

    # ---- what is asked for ---------------------------------------------------------------------------------------------

    @property
    def variant(self) -> Variant:
        """The variant that is forced, or the default one."""
        return VARIANTS[DEFAULT_VARIANT if self.options.variant == "auto" else self.options.variant]

    @property
    def free(self) -> bool:
        """Whether variant, tile and packing are the planner's to choose."""
        return self.options.variant == "auto" and not (self.options.microkernel or self.options.packing)

    @property
    def one_thread(self) -> bool:
        """Whether nothing is shared out."""
        return self.threads == 1

    @property
    def threads(self) -> int:
        """The number of threads that products may use."""
        return self.options.num_threads or self.host.cores

    # ---- what the layouts allow ----------------------------------------------------------------------------------------

    @property
    def b_row_major(self) -> bool:
        """Whether rows of B are contiguous, so that kernels can read it in place."""
        return self.problem.b_layout == "row"

    @property
    def least_packing(self) -> str:
        """The packing of kernels that read in place what they can: A, and B if it is row-major."""
        return "none" if self.b_row_major else "b"

    @property
    def packed_b(self) -> str:
        """The packing of B, and of A unless its rows are contiguous."""
        return "b" if self.problem.a_layout == "row" else "ab"

    @property
    def unblocked(self) -> bool:
        """Whether kernels without loops over cache blocks can serve."""
        return self.free and self.widest > 0 and self.problem.c_layout == "row" and self.options.parallel_loop != "pc"

    @property
    def unblocked_in_place(self) -> bool:
        """Whether they can without a copy of B."""
        return self.unblocked and self.b_row_major

    @property
    def tile_in_place(self) -> int | None:
        """The tile of kernels that read a B of several vectors in place: that of kernels without loops over cache blocks, if
        they can serve."""
        return UNBLOCKED if self.unblocked_in_place else IN_PLACE

    # ---- tiles and caches ----------------------------------------------------------------------------------------------

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """The tiles of C, which rules number."""
        return TILES[self.isa.name, self.problem.dtype]["C"]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.problem.dtype].c_size

    @property
    def lanes(self) -> int:
        """Elements of a vector."""
        return self.isa.lanes(self.itemsize)

    @property
    def widest(self) -> int:
        """Columns of the widest tile without loops around it; 0 if there is none."""
        return UNBLOCKED_TILES.get((self.isa.name, self.problem.dtype), (0, 0))[1]

    @once
    def kc(self) -> int:
        """Steps of a block of k."""
        return kc_of(*self.tiles[0], self.itemsize, self.host.cache(1), self.host.cache(2))

    @once
    def l2_columns(self) -> int:
        """Columns of a block of B that is as large as L2."""
        return self.host.cache(2).bytes // (self.kc * self.itemsize)

    @property
    def l2_block(self) -> int:
        """Elements of that block."""
        return self.kc * self.l2_columns

    @property
    def held_columns(self) -> int:
        """Columns of a block of B that L2 delivers fast enough: once for as many rows as a tile has."""
        return self.l2_columns * self.tiles[IN_PLACE][0] // TALL_TILE

    @property
    def far_b(self) -> float:
        """A B beyond what L3 delivers in time by itself: each thread reads columns of its own, as long as L3 holds them
        all."""
        reach = 4.0 * self.l2_block
        if self.one_thread:
            return reach
        return max(reach, min(self.threads * reach, self.host.cache(3).bytes / 4 / self.itemsize))

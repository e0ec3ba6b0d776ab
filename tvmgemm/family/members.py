"""Members of the family by name: a variant, a dtype and an instruction set are enough, the rest has
defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..spec import KernelSpec
from .arithmetic import WAYS, arithmetic_of
from .tiles import UNBLOCKED_TILES, check_tile, tiles_of
from .variants import VARIANTS


def member(
    variant: str,
    dtype: str,
    isa: str,
    tile: tuple[int, int] | None = None,
    packing: str | None = None,
    **rest: Any,
) -> KernelSpec:
    """The spec of a kernel; ``rest`` are other fields of ``KernelSpec``.

    ``packing`` None: what the variant packs. ``tile`` None: the default of kernels that read B in place for such a
    kernel with resident C, and for one that packs B but has their arithmetic; otherwise the first of the table. A
    kernel with ``blocked=False`` has its own, one with another ``arithmetic`` the first that it can hold.
    """
    row = VARIANTS[variant]
    packing = row.packable if packing is None else packing
    if tile is None and not rest.get("blocked", True):
        tile = UNBLOCKED_TILES.get((isa, dtype))
    if tile is None:
        in_place = row.resident == "C" and (
            "b" not in packing or arithmetic_of(isa, dtype, packing) != arithmetic_of(isa, dtype, "ab")
        )
        tiles = tiles_of(isa, dtype)[row.resident]
        tile = tiles[in_place]
        if rest.get("arithmetic") in WAYS[isa].get(dtype, ()):
            tile = next((each for each in (tile, *tiles) if _holds(each, isa, dtype, packing, rest["arithmetic"])), tile)
    sizes = dict(zip(row.tile_dimensions, tile))
    mr, nr, kr = (sizes.get(d, 0) for d in "mnk")
    return KernelSpec(dtype, isa, variant, mr, nr, kr, packing=packing, **rest)


def _holds(tile: tuple[int, int], isa: str, dtype: str, packing: str, arithmetic: str) -> bool:
    """Whether the registers hold that tile of C."""
    try:
        check_tile(*tile, isa, arithmetic_of(isa, dtype, packing, arithmetic))
    except ValueError:
        return False
    return True


def unblocked_member(dtype: str, isa: str, packing: str = "none", **rest: Any) -> KernelSpec:
    """The kernel without loops over cache blocks (``unblocked``), which has its variant's name from the order of its
    loops over tiles."""
    return member("B3A2C0", dtype, isa, packing=packing, blocked=False, **rest)


def shape_member(dtype: str, isa: str, shape: tuple[int, int, int]) -> KernelSpec:
    """The kernel for products of the shape (m, n, k) only (``specialised``): all of C is its tile."""
    m, n, _ = shape
    return member("B3A2C0", dtype, isa, (m, n), "none", blocked=False, shape=shape)


def default_members(dtype: str, isa: str) -> Iterator[KernelSpec]:
    """The kernels of every variant that the dtype has, with the default tiles: all packed; with resident C also those
    that read both operands in place, for a wide C and for one no wider than a vector."""
    for variant in VARIANTS.values():
        if variant.resident not in tiles_of(isa, dtype):
            continue
        yield member(variant.name, dtype, isa)
        if variant.resident == "C":
            _, in_place, narrow, *_ = tiles_of(isa, dtype)["C"]
            yield member(variant.name, dtype, isa, in_place, "none")
            yield member(variant.name, dtype, isa, narrow, "none")

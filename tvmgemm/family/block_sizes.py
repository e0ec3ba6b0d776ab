"""The cache-block sizes that a product uses, in the kernel's own code: evened out, within the product, shared out to
tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm import tirx

from . import emit, matrix_unit, partition
from .emit import const, let
from .variants import LOOP_DIMENSION
from .workspace import SUMS_LIMIT

if TYPE_CHECKING:
    from .generator import Generator

#: The part of its bytes that a packed block keeps where k is short: one in so many.
PACKED_PART = 4


def settle(g: Generator) -> None:
    """Replace the arguments mc, nc and kc among ``g.values`` by the sizes to use, and add ``piece`` where sums wait."""
    v = g.values
    _lengthen(g)
    # The dimension whose loop is shared out last: how it is cut depends on the other.
    for loop_name, dimension in sorted((("ic", "m"), ("jc", "n")), key=lambda row: row[0] == g.spec.parallel):
        v[dimension + "c"] = let(f"{dimension}c_even", _even_block(g, loop_name, dimension))
    # Never evened out: the order of summation must not depend on the shape.
    longest = matrix_unit.longest_block(g.elements)
    limit = v["k"] if longest is None else emit.minimum(v["k"], const(longest))
    v["kc"] = let("kc_used", emit.maximum(emit.minimum(v["kc"], limit), const(1)))
    if g.elements.rounds_once:
        v["piece"] = let("piece", _piece(g))


def _lengthen(g: Generator) -> None:
    """Lengthen the block of the innermost loop over blocks where k is shorter than kc, so that the block has as many
    bytes as with a full kc, or a quarter of that if it is packed. Rows of B are then read, and rows of C written, in
    longer pieces, and the core fetches ahead better by itself, up to a few KB (measured for packed blocks; longer ones
    take room in L2 for nothing)."""
    v, inside = g.values, LOOP_DIMENSION[g.variant.outer[-1]] + "c"
    if g.variant.resident == "C" and not g.elements.arithmetic.matrix:
        steps = emit.maximum(g.steps(v["k"]), const(1)) * const(PACKED_PART if g.packed else 1)
        v[inside] = let("longer", v[inside] * emit.maximum(tirx.truncdiv(g.steps(v["kc"]), steps), const(1)))


def _even_block(g: Generator, loop_name: str, dimension: str):
    """Blocks of equal size instead of full ones and a rest; as many as the tasks can share out evenly."""
    extent, tile, block = g.values[dimension], const(g.tile[dimension]), g.values[dimension + "c"]
    if g.spec.parallel == loop_name:
        multiple = partition.blocks_to_share(g, extent, tile) if partition.applies(g) else g.values["tasks"]
        blocks = emit.round_up(emit.maximum(emit.ceil_div(extent, block), const(1)), multiple)
        even = emit.ceil_div(extent, blocks)
    else:
        even = emit.T.if_then_else(extent <= block, extent, emit.ceil_div(extent, emit.ceil_div(extent, block)))
    return emit.maximum(emit.round_up(even, tile), tile)


def _piece(g: Generator):
    """How much of ``g.piece_dimension`` goes through all blocks of k before the rest begins, so that the sums that wait
    stay within ``SUMS_LIMIT``: whole blocks, one for each task; all of it if there is one block of k."""
    v, inside = g.values, g.piece_dimension
    other = v["nc" if inside == "m" else "mc"]
    share = v[inside + "c"] * (v["tasks"] if LOOP_DIMENSION.get(g.spec.parallel) == inside else const(1))
    fitting = tirx.truncdiv(const(SUMS_LIMIT // g.elements.sums.itemsize), other * share)
    limited = share * emit.maximum(fitting, const(1))
    return emit.T.if_then_else(v["k"] <= v["kc"], emit.maximum(v[inside], const(1)), limited)

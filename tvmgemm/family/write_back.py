"""A finished micro-tile on its way to C.

Where C has unit column stride, vectors go straight to it: whole ones from a tile inside the matrix, masked ones from a
tile at its edge. A C with gaps between its columns gets the tile by way of memory: one element (complex: one pair)
after the other, or vectors that leave out the gaps, for the strides and instruction sets that have those (``gapped``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import emit, gapped
from .emit import const, let, loop
from .views import View

if TYPE_CHECKING:
    from .microkernel import Tile


@dataclass(frozen=True)
class Destination:
    """C as tiles are written to it.

    ``any``: for any strides, with indices (row, column), or of complex numbers (row, column, part). ``rows``: for unit
    column stride, with indices (row, column), where each part of a complex number is a column. ``unit_columns``: the
    condition that C has unit column stride. ``column_stride``: in elements; ``vector_strides`` are those for which
    there are vectors. ``scratch``: memory for one tile of sums.
    """

    any: View
    rows: View
    unit_columns: Any
    column_stride: Any
    vector_strides: tuple[int, ...]
    scratch: View


def write_back(tile: Tile, c: Destination, update: Callable) -> None:
    """Bring what lies inside the matrix of the tile to C.

    ``update(accumulated, load, splat)`` is the new value of C from the accumulated one; it calls ``load()`` only
    where it needs the old one.
    """
    with_gaps = _by_elements if tile.elements.parts == 1 else _by_pairs

    def by_rows() -> None:
        emit.branch(tile.full, lambda: _by_vectors(tile, c, update), lambda: _by_masked_vectors(tile, c, update))

    emit.branch(c.unit_columns, by_rows, lambda: with_gaps(tile, c, update))


def _height(tile: Tile) -> int:
    """Rows of C in a tile."""
    return tile.mr // tile.elements.parts


def _each_row(tile: Tile, then: Callable[[int], None]) -> None:
    """``then(i)`` for each row of C that lies inside the matrix."""
    for i in range(_height(tile)):
        emit.branch(tile.rows > const(i * tile.elements.parts), lambda: then(i))


def _by_vectors(tile: Tile, c: Destination, update: Callable) -> None:
    """A tile that lies inside the matrix."""
    lanes = tile.vectors.lanes
    for i in range(_height(tile)):
        for column in tile.chunks():
            at = (lanes, tile.row(i), tile.j0 + const(column))
            value = update(tile.sum(i, column), lambda: c.rows.get_vector(*at), tile.vectors.splat)
            c.rows.set_vector(value, *at)


def _by_masked_vectors(tile: Tile, c: Destination, update: Callable) -> None:
    """A tile at the edge of the matrix."""
    masks = tile.masks()

    def row(i: int) -> None:
        memory, outside = tile.elements.c, tile.elements.outside("C")
        for column, mask in zip(tile.chunks(), masks):
            at = c.rows.address(tile.row(i), tile.j0 + const(column))
            old = functools.partial(memory.masked_load, at, mask, outside)
            memory.masked_store(update(tile.sum(i, column), old, tile.vectors.splat), at, mask)

    _each_row(tile, row)


def _by_elements(tile: Tile, c: Destination, update: Callable) -> None:
    """A tile of real numbers, to a C with gaps."""
    lanes = tile.vectors.lanes
    for i in range(tile.mr):
        for column in tile.chunks():
            c.scratch.set_vector(tile.registers[i, column].get(), lanes, const(i), const(column))
    wide = let("wide", emit.minimum(tile.columns, const(tile.nr)))
    done = const(0)
    if c.vector_strides:
        whole = emit.tirx.truncdiv(wide, const(lanes))
        fits = functools.reduce(emit.either, [c.column_stride == const(step) for step in c.vector_strides])
        count = let("vectors", emit.T.if_then_else(fits, whole, const(0)))
        done = let("done", count * const(lanes))
    with loop("i", emit.minimum(tile.rows, const(tile.mr))) as i:
        for step in c.vector_strides:
            emit.branch(c.column_stride == const(step), lambda: _spread(tile, c, update, i, count, step))
        with loop("j", wide - done, done) as j:
            at = (tile.i0 + i, tile.j0 + j)
            c.any.set(update(c.scratch.get(i, j), lambda: c.any.get(*at), lambda scalar: scalar), *at)


def _spread(tile: Tile, c: Destination, update: Callable, i, count, step: int) -> None:
    """The first ``count`` vectors of row i of the tile, to columns of C that lie ``step`` elements apart."""
    lanes = tile.vectors.lanes
    with loop("v", count) as v:
        j = let("j", v * const(lanes))
        value = c.scratch.get_vector(lanes, i, j)
        gapped.update(
            tile.elements.c, c.any.in_line(), (tile.i0 + i, tile.j0 + j), step,
            lambda old: update(value, old, tile.vectors.splat), tile.elements.outside("C"),
        )  # fmt: skip


def _by_pairs(tile: Tile, c: Destination, update: Callable) -> None:
    """A tile of complex numbers, to a C with gaps between them."""
    lanes = tile.vectors.lanes

    def to_scratch(i: int) -> None:
        for column in tile.chunks():
            c.scratch.set_vector(tile.sum(i, column), lanes, const(i), const(column))

    _each_row(tile, to_scratch)
    count, wide = (emit.tirx.truncdiv(x, const(2)) for x in (tile.rows, tile.columns))
    first, j0 = tile.row(0), emit.tirx.truncdiv(tile.j0, const(2))
    with (
        loop("i", emit.minimum(count, const(_height(tile)))) as i,
        loop("j", emit.minimum(wide, const(tile.nr // 2))) as j,
    ):
        at = (2, first + i, j0 + j, const(0))
        pair = c.scratch.get_vector(2, i, j * const(2))
        c.any.set_vector(update(pair, lambda: c.any.get_vector(*at), lambda x: emit.T.broadcast(x, 2)), *at)

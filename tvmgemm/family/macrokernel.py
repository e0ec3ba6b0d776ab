"""The macro-kernel with a tile of C in registers: the loops over micro-tiles of the current blocks, and in them over
k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import ahead, emit, gapped, halves, matrix_unit, microkernel, triangle
from .arithmetic import MATRIX_ROWS
from .emit import const, let, loop
from .update import update_c
from .workspace import CACHE_LINE
from .write_back import Destination, write_back

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block


def resident_c(g: Generator, blocks: dict[str, Block], task) -> None:
    """Every micro-tile of the current block of C: clear, multiply and add over the block of k, bring back."""
    mr, nr = g.tile["m"], g.tile["n"]
    outer, inner = g.variant.inner
    matrix = g.elements.arithmetic.matrix
    sums = g.memory.panels("T", task) if matrix else None
    if matrix:
        matrix_unit.configure()

    def product(at: dict[str, Any], turn: ahead.Turn) -> None:
        i, j = at["ir"] * const(mr), at["jr"] * const(nr)
        tile = microkernel.Tile(
            elements=g.elements,
            mr=mr,
            nr=nr,
            i0=let("i0", blocks["m"].start + i),
            j0=let("j0", blocks["n"].start + j),
            rows=let("rows", blocks["m"].size - i),
            columns=let("columns", blocks["n"].size - j),
            registers=microkernel.registers(g.vectors, mr, nr) if sums is None else matrix_unit.stored_sums(g.vectors, sums, mr, nr),
        )
        _by_width(tile, lambda tile: _tile_product(g, tile, at, blocks["k"], task, turn))

    if g.spec.symmetric:
        with loop("jr", triangle.panels(g, blocks)) as jr:
            first = triangle.first_tile(g, blocks, jr)
            with loop("ir", g.count_tiles("ir", blocks) - first, first) as ir:
                product({"ir": ir, "jr": jr}, ahead.Turn(g))
            triangle.mirror(g, blocks, jr)
        return
    first, number = g.panels_here or (const(0), g.count_tiles(outer, blocks))
    with loop(outer, number, first) as x:
        across = g.count_tiles(inner, blocks)
        with loop(inner, across) as y:
            turn = ahead.Turn(g, let("turn", (x - first) * across + y), let("turns", number * across))
            product({outer: x, inner: y}, turn)
    if matrix:
        matrix_unit.release()


def _by_width(tile: microkernel.Tile, product: Callable[[microkernel.Tile], None]) -> None:
    """``product`` of the tile; at the edge, of no more of its vectors than hold columns of the matrix."""
    narrower = tile.nr - (MATRIX_ROWS if tile.elements.arithmetic.matrix else tile.vectors.lanes)
    if narrower == 0:
        product(tile)
        return
    emit.branch(
        tile.columns > const(narrower),
        lambda: product(tile),
        lambda: _by_width(replace(tile, nr=narrower), product),
    )


def _tile_product(g: Generator, tile: microkernel.Tile, at: dict[str, Any], along: Block, task, turn: ahead.Turn) -> None:
    """One micro-tile over the block of k, from clearing it to bringing it back."""
    steps = g.steps(along.size)
    if g.elements.arithmetic.matrix:
        if ahead.prefetches(g):
            for row in range(turn.stretches(tile)):
                turn.begin(tile, const(row))
        _tile_of_matrix_unit(g, tile, at, along, steps, task)
        return
    shift = None
    if g.elements.shifted:
        shift = lambda c: g.panels["B"].get_vector(g.vectors.lanes, at["jr"], steps, const(c))  # noqa: E731
    microkernel.clear(tile, shift)
    _multiply_tile(g, tile, at, along, steps, turn)
    if g.elements.arithmetic.halves:
        halves.compute_again(g, tile, along, task)
    _bring_back(g, tile, along, task)


def _tile_of_matrix_unit(g: Generator, tile: microkernel.Tile, at: dict[str, Any], along: Block, steps, task) -> None:
    """The unit's registers are brought to memory: of a whole tile that is C already, to C itself."""
    how = g.elements.arithmetic
    split = how.planes > 1
    sums, row = g.memory.panels("T", task), const(g.tile["n"] * g.elements.sums.itemsize)

    def by_way_of_memory() -> None:
        if split and not how.floating:
            matrix_unit.multiply_planes(g, tile, at, steps, sums, g.memory.panels("U", task))
            _bring_back(g, tile, along, task)
            return
        matrix_unit.multiply(g, tile, at, steps, lambda i, j: sums.address(const(i), const(j)), row)
        if how.halves:
            halves.compute_again(g, tile, along, task)
        _bring_back(g, tile, along, task)

    def to_c() -> None:
        place = lambda i, j: g.c_rows.address(tile.row(i), tile.j0 + const(j))  # noqa: E731
        matrix_unit.multiply(g, tile, at, steps, place, g.values["rsc"] * const(g.elements.c.itemsize))

    as_it_is = g.spec.op == "matmul" and g.slot is None and not split and g.elements.c.itemsize == g.elements.sums.itemsize
    complete = emit.both(emit.both(as_it_is, along.start == const(0)), emit.both(g.unit_columns, tile.full))
    emit.branch(complete, to_c, by_way_of_memory)


def _bring_back(g: Generator, tile: microkernel.Tile, along: Block, task) -> None:
    """The sums of a tile over the block of k to C, or to those of other blocks."""
    c = Destination(
        any=g.c_any,
        rows=g.c_rows,
        unit_columns=g.unit_columns,
        column_stride=g.values["csc"],
        vector_strides=gapped.stored_steps(g.isa),
        scratch=g.memory.panels("Cs", task),
    )

    def bring(update) -> None:
        write_back(tile, c, update)

    if g.elements.rounds_once:
        _sum_blocks(g, tile, along, task, lambda: update_c(g, True, bring))
    else:
        update_c(g, along.start == const(0), bring)


def _sum_blocks(g: Generator, tile: microkernel.Tile, along: Block, task, finish: Callable[[], None]) -> None:
    """Add the sums of earlier blocks of k to the tile; ``finish`` what is complete, and keep what is not."""
    sums, (m0, n0) = g.memory.panels("W", task), g.sums_origin
    panel = let("sums_panel", emit.tirx.truncdiv(tile.j0 - n0, const(g.tile["n"])))

    def row(i: int):
        return panel, tile.i0 - m0 + const(i)

    emit.branch(along.start > const(0), lambda: microkernel.add_sums(tile, sums, row))
    complete = along.start + along.size >= g.values["k"]
    emit.branch(complete, finish, lambda: microkernel.keep_sums(tile, sums, row))


@dataclass(frozen=True)
class _Operands:
    """Where the micro-kernel gets elements of A and vectors of B from: packed panels, or the operands in place.

    ``at``: index of the current panel by the name of the loop over panels. ``along``: the block of k. Of an operand in
    place, rows and columns outside the matrix are not there to be read: unless a tile is ``full``, row indices stop at
    the last row of A, and vectors of B are masked.
    """

    g: Generator
    tile: microkernel.Tile
    at: dict[str, Any]
    along: Block

    def a(self, full: bool, unit: bool) -> Callable[[int, Any], Any]:
        """``(i, p)`` -> the element of A in row i of the tile and step p; ``unit``: A in place has unit stride along
        k."""
        g, tile = self.g, self.tile
        if "A" in g.packed:
            return lambda i, p: g.panels["A"].get(self.at["ir"], p, const(i))
        source = g.sources["A"].unit_k if unit else g.sources["A"].any
        source = source.kept() if full else source
        parts = g.elements.parts
        last = None if full else emit.tirx.truncdiv(tile.rows - const(1), const(parts))
        rows = [
            let(f"row{i}", tile.row(0) + (const(i) if full else emit.minimum(const(i), last)))
            for i in range(tile.mr // parts)
        ]
        part = [() if parts == 1 else (const(q),) for q in range(parts)]
        return lambda i, p: g.elements.repeated("A", source.get(rows[i // parts], self.along.start + p, *part[i % parts]))

    def b(self, full: bool) -> Callable[[int, Any], Any]:
        """``(c, p)`` -> the vector of B from column c of the tile on, in step p."""
        g, tile, lanes = self.g, self.tile, self.g.vectors.lanes
        if "B" in g.packed:
            return lambda c, p: g.panels["B"].get_vector(lanes, self.at["jr"], p, const(c))
        b = g.sources["B"].unit_e
        if full:
            b = b.kept()
            return lambda c, p: self._converted(b.get_vector(lanes, self.along.start + p, tile.j0 + const(c)))
        masks, memory, outside = dict(zip(tile.chunks(), tile.masks())), g.elements.memory("B"), g.elements.outside("B")
        return lambda c, p: self._converted(
            memory.masked_load(b.address(self.along.start + p, tile.j0 + const(c)), masks[c], outside)
        )

    def _converted(self, b):
        """A vector of B in place as what is multiplied."""
        return self.g.elements.element("B", b, self.g.vectors.lanes)

    def prefetch_b(self, p) -> None:
        """Ask for a later row of the packed panel of B in step p."""
        for c in range(0, self.tile.nr, CACHE_LINE // self.g.elements.panels.itemsize):
            self.g.panels["B"].prefetch(self.at["jr"], p + const(microkernel.PREFETCH_ROWS), const(c))


def _multiply_tile(g: Generator, tile: microkernel.Tile, at: dict[str, Any], along: Block, steps, turn: ahead.Turn) -> None:
    """Tile += A . B over the block of k: one loop for packed operands, one for each case of those in place."""
    operands, asks = _Operands(g, tile, at, along), ahead.prefetches(g)

    def run(full: bool, unit: bool = False) -> None:
        microkernel.multiply_add(
            tile, steps, operands.a(full, unit), operands.b(full), operands.prefetch_b if asks and "B" in g.packed else None,
            register_loads="register-loads" not in g.spec.without,
            stretches=turn.stretches(tile), begin=(lambda stretch: turn.begin(tile, stretch)) if asks else None,
        )  # fmt: skip

    if {"A", "B"} <= set(g.packed):
        run(True)
    elif "A" in g.packed:
        emit.branch(tile.full, lambda: run(True), lambda: run(False))
    else:
        # Rows of A with unit stride share one index; with any other, each row needs a register of its own.
        unit = g.sources["A"].stride_k == const(1)
        full = lambda: emit.branch(unit, lambda: run(True, True), lambda: run(True))  # noqa: E731
        emit.branch(tile.full, full, lambda: run(False))

"""The macro-kernels: the loops over micro-tiles of the current blocks, and the micro-kernel inside them.

``resident_c`` keeps a tile of C in registers and loops over k (``microkernel``); ``resident_operand`` keeps a tile of A
or B and loops over columns or rows of C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import ahead, emit, halves, matrix_unit, microkernel, triangle
from .arithmetic import MATRIX_ROWS
from .emit import const, let, loop
from .packing import pack_panels
from .update import update_c
from .variants import LOOP_DIMENSION, PANELS
from .workspace import CACHE_LINE

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block



def resident_c(g: Generator, blocks: dict[str, Block], task) -> None:
    """Every micro-tile of the current block of C: clear, multiply and add over the block of k, bring back."""
    mr, nr = g.tile["m"], g.tile["n"]
    outer, inner = g.variant.inner
    matrix = g.elements.arithmetic.matrix
    registers = microkernel.registers
    if matrix:
        sums = g.memory.panels("T", task)
        registers = lambda vectors, mr, nr: matrix_unit.stored_sums(vectors, sums, mr, nr)  # noqa: E731
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
            registers=registers(g.vectors, mr, nr),
        )
        _by_width(tile, lambda tile: _tile_product(g, tile, at, blocks["k"], task, turn))

    if g.spec.symmetric:
        with loop("jr", triangle.panels(g, blocks)) as jr:
            first = triangle.first_tile(g, blocks, jr)
            with loop("ir", _tiles(g, "ir", blocks) - first, first) as ir:
                product({"ir": ir, "jr": jr}, ahead.Turn(g))
            triangle.mirror(g, blocks, jr)
        return
    first, number = g.panels_here or (const(0), _tiles(g, outer, blocks))
    with loop(outer, number, first) as x:
        across = _tiles(g, inner, blocks)
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
    scratch = g.memory.panels("Cs", task)

    def bring(update) -> None:
        microkernel.write_back(tile, g.c_any, g.c_rows, g.unit_columns, scratch, update)

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


def _tiles(g: Generator, name: str, blocks: dict[str, Block]):
    """Number of iterations of an inner loop."""
    dimension = LOOP_DIMENSION[name]
    return let(f"{name}_tiles", emit.ceil_div(blocks[dimension].size, const(g.tile[dimension])))


def _multiply_tile(g: Generator, tile: microkernel.Tile, at: dict[str, Any], along: Block, steps, turn: ahead.Turn) -> None:
    """The micro-kernel; an operand that is not packed is read in place, clamped or masked at the edge."""
    lanes = g.vectors.lanes

    def a_at(full: bool, unit: bool):
        if "A" in g.packed:
            return lambda i, p: g.panels["A"].get(at["ir"], p, const(i))
        source = g.sources["A"].unit_k if unit else g.sources["A"].any
        source = source.kept() if full else source
        parts = g.elements.parts
        last = None if full else emit.tirx.truncdiv(tile.rows - const(1), const(parts))
        rows = [
            let(f"row{i}", tile.row(0) + (const(i) if full else emit.minimum(const(i), last)))
            for i in range(tile.mr // parts)
        ]
        part = [() if parts == 1 else (const(q),) for q in range(parts)]
        return lambda i, p: g.elements.repeated("A", source.get(rows[i // parts], along.start + p, *part[i % parts]))

    def b_at(full: bool):
        if "B" in g.packed:
            return lambda c, p: g.panels["B"].get_vector(lanes, at["jr"], p, const(c))
        b = g.sources["B"].unit_e
        if full:
            b = b.kept()
            return lambda c, p: converted(b.get_vector(lanes, along.start + p, tile.j0 + const(c)))
        masks, memory, outside = dict(zip(tile.chunks(), tile.masks())), g.elements.memory("B"), g.elements.outside("B")
        return lambda c, p: converted(
            memory.masked_load(b.address(along.start + p, tile.j0 + const(c)), masks[c], outside)
        )

    def converted(vector):
        return g.elements.element("B", vector, lanes)

    def next_rows(p) -> None:
        for c in range(0, tile.nr, CACHE_LINE // g.elements.panels.itemsize):
            g.panels["B"].prefetch(at["jr"], p + const(microkernel.PREFETCH_ROWS), const(c))

    def run(full: bool, unit: bool = False) -> None:
        asks = ahead.prefetches(g)
        microkernel.multiply_add(
            tile, steps, a_at(full, unit), b_at(full), next_rows if asks and "B" in g.packed else None,
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


def resident_operand(g: Generator, blocks: dict[str, Block], task) -> None:
    """Every micro-tile of A (or B): load it, then add its product with each column of B (row of A) to one of C."""
    across, _ = PANELS[g.variant.resident][g.variant.resident]
    outer, inner = (LOOP_DIMENSION[name] for name in g.variant.inner)
    count = {LOOP_DIMENSION[name]: _tiles(g, name, blocks) for name in g.variant.inner}
    with loop(outer, count[outer]) as x, loop(inner, count[inner]) as y:
        last = y + const(1) == count[inner]
        following = {outer: emit.tirx.Select(last, x + const(1), x), inner: emit.tirx.Select(last, const(0), y + const(1))}
        _ResidentTile(g, blocks, across, {outer: x, inner: y}, following, task).multiply()


class _ResidentTile:
    """One micro-tile of the resident operand: ``width`` elements across, kr along k, in registers.

    ``at`` and ``following`` count this tile and the next, by dimension. At the end of k the tile is filled up with -0 and what it
    meets with +0: their product -0 changes no sum, not even one that has vanished to -0.
    """

    def __init__(
        self, g: Generator, blocks: dict[str, Block], across: str, at: dict[str, Any], following: dict[str, Any], task
    ) -> None:
        self.g, self.blocks, self.across, self.task = g, blocks, across, task
        self.panel, self.pr = panel, pr = at[across], at["k"]
        self.width, self.kr = g.tile[across], g.tile["k"]
        self.stream = blocks[g.variant.stream]
        self.other = "B" if g.variant.resident == "A" else "A"
        self.q0 = let("q0", blocks["k"].start + pr * const(self.kr))
        self.depth = let("depth", emit.minimum(blocks["k"].size - pr * const(self.kr), const(self.kr)))
        self.e0 = let("e0", blocks[across].start + panel * const(self.width))
        self.valid = let("valid", blocks[across].size - panel * const(self.width))
        self.next = None
        if ahead.prefetches(g):
            e0, q0 = (blocks[d].start + following[d] * const(g.tile[d]) for d in (across, "k"))
            self.next = ahead.lines_of_tile(g, g.variant.resident, e0, replace(blocks["k"], start=q0, size=const(self.kr)))

    @property
    def chunks(self) -> range:
        """First elements of the vectors across the tile."""
        return range(0, self.width, self.g.vectors.lanes)

    def multiply(self) -> None:
        """Load the tile, stream the other operand and C past it."""
        self._load()
        g = self.g
        if self.other in g.packed:
            self._stream_c(lambda s, q: g.panels[self.other].get(self.pr, s, const(q)))
            return
        source = g.sources[self.other]

        def in_place(s, q):
            return source.unit_e.get(self.stream.start + s, self.q0 + const(q))

        def clamped(s, q):
            index = emit.minimum(const(q), self.depth - const(1))
            value = source.any.get(self.q0 + index, self.stream.start + s)
            return emit.tirx.Select(const(q) < self.depth, value, g.vectors.scalar(0.0))

        simple = emit.both(source.stride_e == const(1), self.depth >= const(self.kr))
        emit.branch(simple, lambda: self._stream_c(in_place), lambda: self._stream_c(clamped))

    def _load(self) -> None:
        """Bring the tile to registers: a whole one with contiguous rows as it is, any other by way of ``work``, which makes one
        layout of every layout."""
        g, lanes = self.g, self.g.vectors.lanes
        source = g.sources[g.variant.resident]
        registers = {(q, c): g.vectors.register(f"x{q}_{c}") for q in range(self.kr) for c in self.chunks}

        def as_it_is() -> None:
            for (q, c), register in registers.items():
                register.set(source.unit_e.get_vector(lanes, self.q0 + const(q), self.e0 + const(c)))

        whole = emit.both(self.depth >= const(self.kr), self.valid >= const(self.width))
        simple = emit.both(source.stride_e == const(1), whole) if g.vectorised_packing else False
        emit.branch(simple, as_it_is, lambda: self._load_through_panel(registers))
        self.x = {}
        for (q, c), register in registers.items():
            value = register.get()
            if self._scales_itself:
                value = g.vectors.splat(let("alpha", g.scale.get(const(0)))) * value
            self.x[q, c] = let(f"x{q}_{c}", value)

    def _load_through_panel(self, registers: dict) -> None:
        g, lanes = self.g, self.g.vectors.lanes
        tile = g.memory.panels("X", self.task)
        pack_panels(
            g.elements, g.isa, tile, g.sources[g.variant.resident],
            width=self.width, first=const(0), e0=self.e0, extent=self.valid, count=const(1), p0=self.q0, kb=self.depth,
            vectorised=g.vectorised_packing,
        )  # fmt: skip
        with loop("q", const(self.kr) - self.depth, self.depth) as q:
            for c in self.chunks:
                tile.set_vector(g.vectors.splat(-0.0), lanes, const(0), q, const(c))
        for (q, c), register in registers.items():
            register.set(tile.get_vector(lanes, const(0), const(q), const(c)))

    @property
    def _scales_itself(self) -> bool:
        """Sums go straight to C, so alpha cannot wait until they are complete."""
        return self.g.spec.op == "gemm" and "C" not in self.g.packed

    def _stream_c(self, y_at) -> None:
        g = self.g
        lanes = g.vectors.lanes
        if "C" in g.packed:
            sums = g.panels["sums"]
            self._steps(
                y_at,
                lambda s, c: sums.get_vector(lanes, self.panel, s, const(c)),
                lambda s, c, value: sums.set_vector(value, lanes, self.panel, s, const(c)),
            )
            return

        def to_c(start) -> None:
            emit.branch(self.valid >= const(self.width), lambda: whole(start), lambda: masked(start))

        def at(s, c):
            return self.stream.start + s, self.e0 + const(c)

        def whole(start) -> None:
            self._steps(
                y_at,
                lambda s, c: start(lambda: g.c_rows.get_vector(lanes, *at(s, c))),
                lambda s, c, value: g.c_rows.set_vector(value, lanes, *at(s, c)),
            )

        def masked(start) -> None:
            masks = {c: g.vectors.mask(f"inside{c}", self.valid - const(c)) for c in self.chunks}
            self._steps(
                y_at,
                lambda s, c: start(lambda: g.vectors.masked_load(g.c_rows.address(*at(s, c)), masks[c])),
                lambda s, c, value: g.vectors.masked_store(value, g.c_rows.address(*at(s, c)), masks[c]),
            )

        first = self.q0 == const(0)

        def begin() -> None:
            zero = g.vectors.splat(0.0)
            if g.spec.op == "matmul":
                to_c(lambda old: zero)
                return
            beta = let("beta", g.scale.get(const(1)))
            emit.branch(
                beta == g.vectors.scalar(0.0),
                lambda: to_c(lambda old: zero),
                lambda: to_c(lambda old: g.vectors.splat(beta) * old()),
            )

        emit.branch(first, begin, lambda: to_c(lambda old: old()))

    def _steps(self, y_at, load, save) -> None:
        """The micro-kernel: for each column (row) one vector of C per chunk, kr broadcasts, kr FMAs per chunk."""

        def step(s) -> None:
            sums = {c: load(s, c) for c in self.chunks}
            for q in range(self.kr):
                y = self.g.vectors.splat(let(f"y{q}", y_at(s, q)))
                for c in self.chunks:
                    sums[c] = let(f"c{c}_{q}", self.g.vectors.multiply_add(y, self.x[q, c], sums[c]))
            for c in self.chunks:
                save(s, c, sums[c])

        if self.next is None:
            with loop("s", self.stream.size) as s:
                step(s)
            return
        stretches = self.kr
        ahead.in_stretches("s", self.stream.size, stretches, lambda stretch: self.next.ask(stretch, const(stretches)), step)

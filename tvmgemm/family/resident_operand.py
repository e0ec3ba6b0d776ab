"""The macro-kernel with a tile of A or B in registers: the loops over such tiles, and in them over columns or rows of
C."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import ahead, emit
from .emit import const, let, loop
from .packing import pack_panels
from .variants import LOOP_DIMENSION, PANELS

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block


def multiply(g: Generator, blocks: dict[str, Block], task) -> None:
    """Every micro-tile of A (or B): load it, then add its product with each column of B (row of A) to one of C."""
    across, _ = PANELS[g.variant.resident][g.variant.resident]
    loops = g.variant.inner
    outer, inner = (LOOP_DIMENSION[name] for name in loops)
    count = {LOOP_DIMENSION[name]: g.count_tiles(name, blocks) for name in loops}
    with loop(loops[0], count[outer]) as x, loop(loops[1], count[inner]) as y:
        last = y + const(1) == count[inner]
        following = {outer: emit.tirx.Select(last, x + const(1), x), inner: emit.tirx.Select(last, const(0), y + const(1))}
        _ResidentTile(g, blocks, across, {outer: x, inner: y}, following, task).multiply()


class _ResidentTile:
    """One micro-tile of the resident operand: ``width`` elements across, kr along k, in registers.

    ``at`` and ``following`` count this tile and the next, by dimension. At the end of k the tile is filled up with -0
    and what it meets with +0: their product -0 changes no sum, not even one that has vanished to -0.
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
        self.next: ahead.Lines | None = None
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
        """Bring the tile to registers: a whole one with contiguous rows as it is, any other by way of ``work``, which
        makes one layout of every layout."""
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
        """Add the tile's products to C: to its panels where it is packed, else to C itself."""
        if "C" not in self.g.packed:
            self._stream_c_in_place(y_at)
            return
        lanes, sums = self.g.vectors.lanes, self.g.panels["sums"]
        self._steps(
            y_at,
            lambda s, c: sums.get_vector(lanes, self.panel, s, const(c)),
            lambda s, c, value: sums.set_vector(value, lanes, self.panel, s, const(c)),
        )

    def _stream_c_in_place(self, y_at) -> None:
        """At the start of k from 0, for gemm from beta.C (0 where beta is 0: C is not read); later from what is there."""
        g = self.g

        def to_c(start) -> None:
            emit.branch(
                self.valid >= const(self.width), lambda: self._to_whole_vectors(y_at, start), lambda: self._to_masked(y_at, start)
            )

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

        emit.branch(self.q0 == const(0), begin, lambda: to_c(lambda old: old()))

    def _in_c(self, s, c) -> tuple[Any, Any]:
        """Indices in C of the vector in step s from element c of the tile on."""
        return self.stream.start + s, self.e0 + const(c)

    def _to_whole_vectors(self, y_at, start) -> None:
        """Sums begin with ``start(old)``, where ``old()`` is the vector of C."""
        c_rows, lanes = self.g.c_rows, self.g.vectors.lanes
        self._steps(
            y_at,
            lambda s, c: start(lambda: c_rows.get_vector(lanes, *self._in_c(s, c))),
            lambda s, c, value: c_rows.set_vector(value, lanes, *self._in_c(s, c)),
        )

    def _to_masked(self, y_at, start) -> None:
        """The same at the edge of C."""
        c_rows, vectors = self.g.c_rows, self.g.vectors
        masks = {c: vectors.mask(f"inside{c}", self.valid - const(c)) for c in self.chunks}
        self._steps(
            y_at,
            lambda s, c: start(lambda: vectors.masked_load(c_rows.address(*self._in_c(s, c)), masks[c])),
            lambda s, c, value: vectors.masked_store(value, c_rows.address(*self._in_c(s, c)), masks[c]),
        )

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

        lines = self.next
        if lines is None:
            with loop("s", self.stream.size) as s:
                step(s)
            return
        stretches = self.kr
        ahead.in_stretches("s", self.stream.size, stretches, lambda stretch: lines.ask(stretch, const(stretches)), step)

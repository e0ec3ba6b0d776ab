"""The kernel for small products: micro-tiles of C and nothing around them.

There are no loops over cache blocks, no packing and no work space, so a call of 4 x 4 x 4 pays for what it computes and
for little else. (A kernel that packs B is for a B without contiguous rows: it copies all of B to contiguous rows
first.)

The spec's tile is the widest one. It says how many registers hold a tile, and how many vectors a row of it has at most;
a narrower tile may have more rows (``heights``). C is cut into as few columns of tiles as can be, of equal width to
within a vector, and each of those into as few tiles as can be, of equal height to within a row. So no row of C is
computed twice or in vain, whatever m and n are. The price is one micro-kernel for each width and height. k is cut into
blocks as in every other kernel, so sums come out the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import emit, microkernel, one_row, pairs, side_by_side
from .arithmetic import bits
from .elements import Elements
from .emit import const, let, loop
from .packing import pack_panels
from .tiles import heights
from .update import update_c
from .vectors import variable
from .views import View

if TYPE_CHECKING:
    from .generator import Generator

#: Bytes of one product's operands between which those of the next product of a stack are prefetched. Less, L1 holds: it
#: goes by in few streams, which the hardware prefetches by itself, and faster. More would have left L2 before it is
#: used.
PREFETCHED = (28 << 10, 512 << 10)

#: Bytes per multiply-add up to which they are prefetched: with more, memory decides the speed.
DENSE = 1

#: Cache lines prefetched in each step of a tile: at 64 x 64 x 64 one is too few.
LINES, LINE = 2, 64

#: Width of a tile in vectors from which it prefetches: a step of a narrower one is too short for that.
WIDE = 2

#: Where rows of A lie a multiple of ``WAY`` bytes (a way of L1) apart, the lines in use belong to one set of L1, which
#: has room for ``WAYS`` of them. So a tile reads no more rows than that: more would drive each other out before they
#: are read to their end.
WAYS, WAY = 8, 4096

#: ``Following.rate`` is a fixed-point number with so many bits behind the point.
_FRACTION = 16


@dataclass(frozen=True)
class Following:
    """What a product of a stack prefetches: the operands of the next one, one after the other, evenly over its
    multiply-adds.

    ``start(operand, q)``: address of an operand of product q. ``bytes``: size of each operand. ``rate``: bytes to
    prefetch for each multiply-add, 0 for none. ``last``: the last product of the stack.
    """

    start: Callable[[str, Any], Any]
    bytes: dict[str, Any]
    rate: Any
    last: Any

    def begin(self, q, done, step: int) -> Callable[[Any], None]:
        """What a tile prefetches in its step p, if ``done`` multiply-adds came before it and a step has so many."""
        first = variable("ahead", self.start("A", const(0)))

        def find() -> None:
            here = let("here", done * self.rate >> const(_FRACTION))
            in_b = let("in_b", here - self.bytes["A"])
            in_c = let("in_c", in_b - self.bytes["B"])
            # Pinned, or LLVM would find the addresses ahead of all tiles, for products of any size.
            after = emit.minimum(emit.pinned("q", q) + const(1), self.last)
            in_a_or_b = emit.T.if_then_else(in_b >= const(0), self.start("B", after) + in_b, self.start("A", after) + here)
            first.set(emit.T.if_then_else(in_c >= const(0), self.start("C", after) + in_c, in_a_or_b))

        emit.branch(self.rate > const(0), find)
        start = emit.opaque("ahead", first.get())
        stride = emit.opaque("ahead_step", const(step) * self.rate >> const(_FRACTION))

        def ahead(p) -> None:
            for line in range(LINES):
                emit.prefetch(start + p * stride + const(line * LINE))

        return ahead


def following(g: Generator, given: dict[str, Any]) -> Following | None:
    """What products of a stack prefetch, whose first one is at the pointers ``given``; None: nothing."""
    if g.spec.blocked or g.spec.parallel:
        return None
    v, sizes = g.values, {x: const(bits(g.elements.stored[x]) // 8 * g.elements.parts) for x in "ABC"}
    rows, columns = (v[x] if g.elements.parts == 1 else emit.tirx.truncdiv(v[x], const(g.elements.parts)) for x in "mn")
    extents = {"A": rows * v["k"], "B": v["k"] * columns, "C": rows * columns}
    size = {x: extents[x] * sizes[x] for x in extents}
    total, low, high = size["A"] + size["B"] + size["C"], *map(const, PREFETCHED)
    work = v["m"] * v["n"] * v["k"]
    wanted = emit.both(emit.both(total >= low, total <= high), total <= work * const(DENSE))
    each = emit.tirx.truncdiv(total << const(_FRACTION), emit.maximum(work, const(1)))
    in_stack = emit.T.if_then_else(wanted, each, const(0))
    rate = let("rate", emit.T.if_then_else(v["batch"] > const(1), in_stack, const(0)))

    def start(operand: str, q):
        return emit.address(given[operand], q * v[f"s{operand.lower()}"] * sizes[operand])

    return Following(start, size, rate, v["batch"] - const(1))


def _packed_row(g: Generator):
    """Elements from row to row of a packed B: an odd number of vectors, so that rows do not meet in the same sets of
    L1."""
    lanes = const(g.vectors.lanes)
    return (emit.ceil_div(g.values["n"], lanes) | const(1)) * lanes


def scratch(g: Generator):
    """Elements of a packed B; of one for each task, where tasks share rows."""
    size = g.values["k"] * _packed_row(g)
    return size * g.values["tasks"] if g.spec.parallel == "ic" else size


def _rows_of_b(g: Generator, task, first, number) -> View:
    """B with contiguous rows: as it is, or a copy in ``work`` of ``number`` vectors of columns from ``first`` on.

    A task copies what it reads: all of B, or its own columns. (If each copied a part, tasks would have to wait for each
    other, and then fetch the parts from each other's caches, which takes longer.)
    """
    if g.spec.packing == "none":
        return g.sources["B"].unit_e
    lanes, row = g.vectors.lanes, let("packed_row", _packed_row(g))
    own = None if task is None or g.spec.parallel != "ic" else task * (g.values["k"] * row)
    pack_panels(
        g.elements, g.isa, View("Bc", g.pointers["work"], g.elements.panels.dtype, (lanes, row, 1), own), g.sources["B"],
        width=lanes, first=first, e0=const(0), extent=g.values["n"], count=number, p0=const(0), kb=g.values["k"],
        surplus=False,
    )  # fmt: skip
    return View("Bc_rows", g.pointers["work"], g.elements.panels.dtype, (row, 1), own)


def product(g: Generator, q) -> None:
    """C = A.B (or alpha.A.B + beta.C), the q-th of a stack, each task its share of the rows or of the vectors of
    columns."""
    m, n, lanes = g.values["m"], g.values["n"], const(g.vectors.lanes)
    vectors = let("vectors", emit.ceil_div(n, lanes))
    if not g.spec.parallel:
        g.rows_of_b = _rows_of_b(g, None, const(0), vectors)
        _blocks_of_k(g, q, const(0), m, const(0), n)
        return
    with emit.parallel("task", g.values["tasks"]) as task:
        if g.spec.parallel == "ic":
            parts = const(g.elements.parts)
            first, share = g.share(emit.tirx.truncdiv(m, parts), task)
            g.rows_of_b = _rows_of_b(g, task, const(0), vectors)
            _blocks_of_k(g, q, first * parts, share * parts, const(0), n)
        else:
            first, share = g.share(vectors, task)
            g.rows_of_b = _rows_of_b(g, task, first, share)
            start = let("start", first * lanes)
            _blocks_of_k(g, q, const(0), m, start, let("own", emit.minimum(share * lanes, n - start)))


def _blocks_of_k(g: Generator, q, i0, rows, j0, columns) -> None:
    k, kc = g.values["k"], g.values["kc"]
    if g.elements.rounds_once:  # sums cannot wait anywhere: one block, whatever kc is
        kc = let("kc_used", emit.maximum(k, const(1)))
    count = let("blocks", emit.maximum(emit.blocks_in(k, kc), const(1)))

    def in_turn() -> None:
        with loop("pc", count) as index:
            p0 = let("p0", index * kc)
            _Product(g, q, i0, rows, j0, columns, p0, let("kb", emit.minimum(kc, k - p0))).columns_of_tiles()

    def row_or_tiles() -> None:
        emit.branch(one_row.applies(g, rows, columns), lambda: one_row.product(g, i0, rows, j0, columns, count), in_turn)

    emit.branch(
        side_by_side.applies(g, rows, columns, count), lambda: side_by_side.product(g, i0, rows, j0, columns, count), row_or_tiles
    )


@dataclass(frozen=True)
class _Product:
    """The product of ``kb`` steps along k, from ``p0`` on, to a part of C."""

    g: Generator
    q: Any
    i0: Any
    rows: Any
    j0: Any
    columns: Any
    p0: Any
    kb: Any

    def columns_of_tiles(self) -> None:
        """The loop jr over columns of tiles, then one more column for what is left over. Where masks cost nothing a
        whole vector under a mask computes what is left, unless half a vector is enough; elsewhere whatever does not
        fill a vector is left over."""
        elements, masks = self.g.elements, self.g.isa.masks
        lanes, most_left = elements.lanes, elements.lanes // 2 if masks else elements.lanes - 1
        whole = let("whole", emit.tirx.truncdiv(self.columns + const(lanes - 1 - most_left), const(lanes)))
        rest = let("rest", whole * const(lanes))
        widest = self.g.tile["n"] // lanes
        _in_shares("jr", whole, widest, lambda first, width: self._tiles(elements, first * const(lanes), width, masks))
        narrow = elements.in_lanes(lanes // 2) if masks else elements
        emit.branch(rest < self.columns, lambda: self._few_columns(narrow, rest))

    def _few_columns(self, elements: Elements, column) -> None:
        """The last column of tiles, a vector wide at most: as many rows as can be in pairs, the others one by one."""
        if not pairs.exist(self.g):
            self._tiles(elements, column, 1, True)
            return
        done = pairs.rows_in_pairs(self.g, self.rows, self.columns - column, self.kb)
        emit.branch(done > const(0), lambda: pairs.product(self, column, done))
        rest = replace(self, i0=emit.opaque("from_row", self.i0 + done), rows=emit.opaque("rows_left", self.rows - done))
        rest._tiles(elements, column, 1, True)

    def _tiles(self, elements: Elements, column, width: int, masked: bool) -> None:
        """The loop ir, over the tiles of one column of tiles, ``width`` vectors wide; ``masked``: the last may not be
        full."""
        column = let("column", column)
        most = heights(self.g.tile["m"], self.g.tile["n"] // self.g.vectors.lanes)[width]
        parts = elements.parts

        def tile(row, height: int) -> None:
            row, height, nr = row * const(parts), height * parts, width * elements.lanes
            registers = microkernel.registers(elements.sums, height, nr)
            i0, j0 = let("i0", self.i0 + row), let("j0", self.j0 + column)
            left = let("left", self.columns - column)
            self._compute(microkernel.Tile(elements, height, nr, i0, j0, const(height), left, registers), masked)

        rows = emit.opaque("rows", self.rows)
        fewer = (lambda: self._rows_meet, WAYS // parts) if most > WAYS else None
        _in_shares("ir", rows if parts == 1 else emit.tirx.truncdiv(rows, const(parts)), most // parts, tile, fewer)

    @property
    def _rows_meet(self):
        """Condition: the lines of all rows of A, at one step along k, belong to one set of L1."""
        row = emit.opaque("row", self.g.values["rsa"]) * const(bits(self.g.elements.stored["A"]) // 8 * self.g.elements.parts)
        return emit.both(self.g.values["csa"] == const(1), emit.tirx.bitwise_and(row, const(WAY - 1)) == const(0))

    def _compute(self, tile: microkernel.Tile, masked: bool) -> None:
        """Clear the tile, multiply and add, bring it to C."""
        g, elements = self.g, tile.elements
        lanes, last = elements.lanes, tile.nr - elements.lanes if masked else -1
        mask = elements.sums.mask("inside", tile.columns - const(last)) if masked else None

        def load(operand: str, view: View, i, c: int) -> Any:
            if c == last:
                outside = elements.outside(operand)
                return elements.memory(operand).masked_load(view.address(i, const(c)), mask, outside)
            return view.get_vector(lanes, i, const(c))

        microkernel.clear(tile)
        parts = elements.parts
        start = (tile.row(0), self.p0) if parts == 1 else (tile.row(0), self.p0, const(0))
        a, b = g.sources["A"].any.moved(*start), g.rows_of_b.moved(self.p0, tile.j0)
        microkernel.multiply_add(
            tile,
            self.kb,
            lambda i, p: elements.repeated("A", a.get(*((const(i), p) if parts == 1 else (const(i // 2), p, const(i % 2))))),
            lambda c, p: elements.element("B", load("B", b, p, c), lanes),
            self._prefetches(tile),
            rolled=tile.mr > 1,  # of several rows, LLVM would get more addresses than registers
        )

        def write(update: Callable) -> None:
            to = g.c_rows.moved(tile.row(0), tile.j0)
            for i, c in itertools.product(range(tile.mr // parts), tile.chunks()):
                value = update(tile.sum(i, c), lambda: load("C", to, const(i), c), elements.sums.splat)
                if c == last:
                    elements.c.masked_store(value, to.address(const(i), const(c)), mask)
                else:
                    to.set_vector(value, lanes, const(i), const(c))

        update_c(g, self.p0 == const(0), write)

    def _prefetches(self, tile: microkernel.Tile) -> Callable[[Any], None] | None:
        """What a step of the tile prefetches of the next product."""
        if self.g.following is None or tile.nr // tile.elements.lanes < WIDE:
            return None
        done = (tile.j0 * self.rows + tile.i0 * const(tile.nr)) * self.kb
        return self.g.following.begin(self.q, done, tile.mr * tile.nr)


def _if_several(name: str, several, otherwise, shares: Callable[[], Any]):
    """``shares()`` if there are several, else ``otherwise``. Computed only if needed: its cost shows in small
    products."""
    found = variable(f"{name}_shares", otherwise)
    emit.branch(several, lambda: found.set(shares()))
    return found.get()


def _in_shares(name: str, extent, most: int, then: Callable[[Any, int], None], fewer: tuple[Callable[[], Any], int] | None = None) -> None:
    """Cut ``extent`` into as few shares of at most ``most`` as can be, equal to within 1: ``then(start, size)`` for
    each, with the size made a constant of the code. (In a short last share FMAs would wait for each other.) ``fewer``:
    a function that makes a condition, and what replaces ``most`` where it holds and there are several shares."""
    several = extent > const(most)
    shares = emit.ceil_div(extent, const(most))
    if fewer is not None:
        condition, at_most = fewer
        shares = _if_several(name, several, shares, lambda: emit.tirx.Select(condition(), emit.ceil_div(extent, const(at_most)), shares))
    one = emit.minimum(extent, const(1))
    count = let(f"{name}_count", emit.T.if_then_else(several, shares, one))
    size = let(f"{name}_size", emit.T.if_then_else(several, emit.tirx.truncdiv(extent, count), extent))
    larger = let(f"{name}_larger", extent - count * size)
    with loop(name, count) as index:
        start = index * size + emit.minimum(index, larger)
        here = let(f"{name}_here", size + emit.tirx.Select(index < larger, const(1), const(0)))
        emit.by_size(here, 1, most, lambda constant: then(start, constant))

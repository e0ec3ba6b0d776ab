"""The resident-C micro-kernel: an mr x nr tile of C stays in registers while a loop over k adds outer products.

Per step of k it loads nr/lanes vectors of B, broadcasts mr elements of A and issues mr.nr/lanes multiply-adds. Where an
operand is packed it reads a micro-panel with unit stride; where it is not, the operand itself, and converts it on the way. A
step is one element of a panel: several k where panels hold groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import early, emit, gapped
from .ahead import in_stretches
from .elements import Elements
from .emit import const, let, loop
from .vectors import Register, Vectors, lanes_of
from .views import View

#: Rows of a packed B panel between the row in use and the row asked for ahead of time.
PREFETCH_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """One micro-tile of C: where it starts, how much of it lies inside the matrix, and its registers."""

    elements: Elements
    mr: int
    nr: int
    i0: Any
    j0: Any
    rows: Any
    columns: Any
    registers: dict[tuple[int, int], Register]

    @property
    def vectors(self) -> Vectors:
        """Vectors of sums."""
        return self.elements.sums

    @property
    def full(self):
        """Condition: no row and no column of the tile lies outside the matrix."""
        return emit.both(self.rows >= const(self.mr), self.columns >= const(self.nr))

    def row(self, i: int):
        """Index of row i of the tile in C and A; of complex numbers, where two of the tile's are one, of two of them."""
        parts = self.elements.parts
        return (self.i0 if parts == 1 else emit.tirx.truncdiv(self.i0, const(parts))) + const(i)

    def sum(self, i: int, c: int):
        """A finished vector of row i of C."""
        if self.elements.parts == 1:
            return self.registers[i, c].get()
        return self.elements.complex_sum(self.registers[2 * i, c].get(), self.registers[2 * i + 1, c].get())

    def chunks(self) -> range:
        """First columns of the vectors that make up a row of the tile."""
        return range(0, self.nr, self.vectors.lanes)

    def masks(self) -> list:
        """One mask per vector of a row: the columns inside the matrix."""
        return [self.vectors.mask(f"inside{c}", self.columns - const(c)) for c in self.chunks()]


def registers(vectors: Vectors, mr: int, nr: int) -> dict[tuple[int, int], Register]:
    """The registers of a tile: (row, first column) -> register."""
    return {(i, c): vectors.register(f"c{i}_{c}") for i in range(mr) for c in range(0, nr, vectors.lanes)}


def clear(tile: Tile, start: Callable[[int], Any] | None = None) -> None:
    """Start from +0, as NumPy's sums do; or from ``start(c)``, one vector for all rows."""
    for c in tile.chunks():
        value = tile.vectors.splat(0.0) if start is None else let(f"start{c}", start(c))
        for i in range(tile.mr):
            tile.registers[i, c].set(value)


def add_sums(tile: Tile, sums: View, at: Callable[[int], tuple]) -> None:
    """Tile += what earlier blocks of k came to: row i is at ``at(i)`` of ``sums``."""
    for i in range(tile.mr):
        for c in tile.chunks():
            register = tile.registers[i, c]
            register.set(sums.get_vector(tile.vectors.lanes, *at(i), const(c)) + register.get())


def keep_sums(tile: Tile, sums: View, at: Callable[[int], tuple]) -> None:
    """``sums`` = tile, all of it, whatever lies outside the matrix."""
    for i in range(tile.mr):
        for c in tile.chunks():
            sums.set_vector(tile.registers[i, c].get(), tile.vectors.lanes, *at(i), const(c))


def outer_product(
    tile: Tile, p, a_at: Callable[[int, Any], Any], b_at: Callable[[int, Any], Any], register_loads: bool = True
) -> None:
    """C tile += column p of A . row p of B: one step of ``multiply_add``."""
    b = {c: let(f"b{c}", b_at(c, p)) for c in tile.chunks()} if register_loads else {}
    again = p
    for i in range(tile.mr):
        a = let(f"a{i}", a_at(i, p))
        a = tile.elements.panels.splat(a) if lanes_of(a) == 1 else a
        if not register_loads:
            again = emit.opaque("again", again)
            b = {c: b_at(c, again) for c in tile.chunks()}
        for c in tile.chunks():
            register = tile.registers[i, c]
            register.set(tile.elements.multiply_add(a, b[c], register.get()))


def multiply_add(
    tile: Tile,
    steps,
    a_at: Callable[[int, Any], Any],
    b_at: Callable[[int, Any], Any],
    ahead: Callable[[Any], None] | None = None,
    register_loads: bool = True,
    rolled: bool = False,
    stretches: int = 1,
    begin: Callable[[Any], None] | None = None,
) -> None:
    """C tile += A . B over so many steps along k.

    ``a_at(i, p)`` is an element of A as panels hold it, or a vector of it, ``b_at(c, p)`` a vector of B; ``ahead(p)`` emits prefetches.
    The loop is cut into ``stretches``, each of which ``begin(stretch)`` precedes, where there is such a function.
    ``register_loads``: a vector of B is loaded once for all rows; otherwise each of its multiply-adds reads it from memory.
    ``rolled``: LLVM is to leave the loop as it is.
    """

    def step(p) -> None:
        if rolled:
            emit.rolled()
        if ahead is not None:
            ahead(p)
        outer_product(tile, p, a_at, b_at, register_loads)

    saturates = tile.elements.arithmetic.saturates
    if begin is not None:
        in_stretches("p", steps, stretches, begin, step)  # (A way out between them makes LLVM keep sums on the stack.)
    elif saturates:
        with loop("block", emit.ceil_div(steps, const(early.UNDECIDED))) as block:
            start = let("start", block * const(early.UNDECIDED))
            count = let("count", emit.minimum(steps - start, const(early.UNDECIDED)))
            with loop("p", count, start) as p:
                step(p)
            early.leave_if_true(tile, count)
    else:
        with loop("p", steps) as p:
            step(p)


def write_back(
    tile: Tile, c_any: View, c_unit: View, unit_columns, column_stride, vectorised: tuple[int, ...], scratch: View, update: Callable
) -> None:
    """Bring the tile to C: whole vectors inside the matrix, masked ones at its edge; if C has gaps, by way of ``scratch``, in
    vectors if its ``column_stride`` is one of ``vectorised``, else one by one.

    ``update(accumulated, load, splat)`` is the new value of C from the accumulated one; it calls ``load()`` only
    where it needs the old one. ``c_unit`` views C with unit column stride, which ``unit_columns`` says it has;
    ``scratch`` is memory for one tile.
    """
    vectors, parts = tile.vectors, tile.elements.parts
    height = tile.mr // parts

    def whole() -> None:
        for i in range(height):
            for c in tile.chunks():
                at = (vectors.lanes, tile.row(i), tile.j0 + const(c))
                value = update(tile.sum(i, c), lambda: c_unit.get_vector(*at), vectors.splat)
                c_unit.set_vector(value, *at)

    def rows(each: Callable[[int], None]) -> None:
        for i in range(height):
            emit.branch(tile.rows > const(i * parts), lambda: each(i))

    def masked() -> None:
        masks = tile.masks()
        rows(lambda i: masked_row(i, masks))

    def masked_row(i: int, masks: list) -> None:
        old, outside = tile.elements.c, tile.elements.outside("C")
        for c, mask in zip(tile.chunks(), masks):
            at = c_unit.address(tile.row(i), tile.j0 + const(c))
            value = update(tile.sum(i, c), lambda: old.masked_load(at, mask, outside), vectors.splat)
            old.masked_store(value, at, mask)

    def scattered() -> None:
        for i in range(tile.mr):
            for c in tile.chunks():
                scratch.set_vector(tile.registers[i, c].get(), vectors.lanes, const(i), const(c))
        wide = let("wide", emit.minimum(tile.columns, const(tile.nr)))
        done = const(0)
        if vectorised:
            whole = emit.tirx.truncdiv(wide, const(vectors.lanes))
            fits = functools.reduce(emit.either, [column_stride == const(step) for step in vectorised])
            count = let("vectors", emit.T.if_then_else(fits, whole, const(0)))
            done = let("done", count * const(vectors.lanes))
        with loop("i", emit.minimum(tile.rows, const(tile.mr))) as i:
            for step in vectorised:
                emit.branch(column_stride == const(step), lambda: spread(i, count, step))  # noqa: B023
            with loop("j", wide - done, done) as j:
                at = (tile.i0 + i, tile.j0 + j)
                c_any.set(update(scratch.get(i, j), lambda: c_any.get(*at), lambda scalar: scalar), *at)

    def spread(i, count, step: int) -> None:
        with loop("v", count) as v:
            j = let("j", v * const(vectors.lanes))
            value = scratch.get_vector(vectors.lanes, i, j)
            gapped.update(
                tile.elements.c, c_any.in_line(), (tile.i0 + i, tile.j0 + j), step,
                lambda old: update(value, old, vectors.splat), tile.elements.outside("C"),
            )  # fmt: skip

    def scattered_pairs() -> None:
        rows(lambda i: [scratch.set_vector(tile.sum(i, c), vectors.lanes, const(i), const(c)) for c in tile.chunks()])
        count, wide = (emit.tirx.truncdiv(x, const(2)) for x in (tile.rows, tile.columns))
        first, j0 = tile.row(0), emit.tirx.truncdiv(tile.j0, const(2))
        with (
            loop("i", emit.minimum(count, const(height))) as i,
            loop("j", emit.minimum(wide, const(tile.nr // 2))) as j,
        ):
            at = (2, first + i, j0 + j, const(0))
            value = update(
                scratch.get_vector(2, i, j * const(2)), lambda: c_any.get_vector(*at), lambda x: emit.T.broadcast(x, 2)
            )
            c_any.set_vector(value, *at)

    gaps = scattered if parts == 1 else scattered_pairs
    emit.branch(unit_columns, lambda: emit.branch(tile.full, whole, masked), gaps)

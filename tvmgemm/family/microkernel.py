"""The resident-C micro-kernel: an mr x nr tile of C stays in registers while a loop over k adds outer products.

Per step of k it loads nr/lanes vectors of B, broadcasts mr elements of A and issues mr.nr/lanes multiply-adds. Where an
operand is packed it reads a micro-panel with unit stride; where it is not, the operand itself, and converts it on the
way. A step is one element of a panel: several k where panels hold groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import early, emit
from .ahead import in_stretches
from .elements import Elements
from .emit import const, let, loop
from .vectors import Register, Vectors, lanes_of
from .views import View

if TYPE_CHECKING:
    from .matrix_unit import StoredVector

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
    registers: Mapping[tuple[int, int], Register | StoredVector]

    @property
    def vectors(self) -> Vectors:
        """Vectors of sums."""
        return self.elements.sums

    @property
    def full(self):
        """Condition: no row and no column of the tile lies outside the matrix."""
        return emit.both(self.rows >= const(self.mr), self.columns >= const(self.nr))

    def row(self, i: int):
        """Index of row i of the tile in C and A; of complex numbers, where two of the tile's are one, of two of
        them."""
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

    ``a_at(i, p)`` is an element of A as panels hold it, or a vector of it, ``b_at(c, p)`` a vector of B; ``ahead(p)``
    emits prefetches. The loop is cut into ``stretches``, each of which ``begin(stretch)`` precedes, where there is such
    a function. ``register_loads``: a vector of B is loaded once for all rows; otherwise each of its multiply-adds reads
    it from memory. ``rolled``: LLVM is to leave the loop as it is.
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

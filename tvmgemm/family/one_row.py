"""A C of one row, wider than any tile, or of few rows of complex numbers: B goes by once, several rows of it side by side.

Tiles would walk down B, a few lines of cache of each row at a time, which caches beyond L1 deliver slowly, and a row of C in
registers is too few chains of FMAs. Here the sums of rows of C lie in L1, and rows of B are read from end to end, as memory and its
prefetchers like it. Each pass over the sums adds the products with several rows of B, in the order of k; the sums start from
+0 in every block of k: each is the chain of FMAs that it always is. Of several rows of C, some at a time meet the same rows of B,
which are in L1 then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .emit import const, let, loop
from .tiles import ROW_FAR, ROW_STEPS, WIDE_FAR, WIDE_ROWS, WIDE_STEPS
from .update import update_c
from .validity import STUDIED
from .views import View

if TYPE_CHECKING:
    from .generator import Generator

#: Rows of B side by side. Eight, and the sums, are more than L1 has ways where rows are a multiple of 4 KiB apart.
AT_ONCE = 4

#: Bytes of the sums of one row: a fourth of L1; half of it where B comes from memory, for a page should be read to its end.
SUMS, SUMS_FAR = 8 << 10, 16 << 10

#: Bytes of the sums of several rows: longer pieces of rows of B count for more than that L1 holds all sums.
SUMS_OF_ROWS = 32 << 10


def applies(g: Generator, rows, columns):
    """Condition: C is wide enough, k long enough, and these are as few rows as this is for."""
    parts = g.elements.parts
    if g.spec.dtype not in STUDIED and (parts == 1 or g.spec.packing != "none"):
        return False
    shape = emit.both(rows <= const(1 if parts == 1 else WIDE_ROWS * parts), columns > const(g.tile["n"]))
    wide = emit.both(shape, g.values["k"] >= const(ROW_STEPS if parts == 1 else WIDE_STEPS))
    return wide if parts == 1 else emit.both(wide, _beyond(g, WIDE_FAR))


def _beyond(g: Generator, size: int):
    """Condition: B has so many bytes at least."""
    return g.values["k"] * g.values["n"] >= const(size // g.vectors.itemsize)


def product(g: Generator, i0, rows, j0, columns, count) -> None:
    """All ``count`` blocks of k of ``rows`` x ``columns`` of C; of complex numbers, of their parts."""
    lanes, size, parts = const(g.vectors.lanes), g.vectors.itemsize, g.elements.parts
    sums = View.on_stack("sums", g.vectors.dtype, (1, (SUMS_FAR if parts == 1 else SUMS_OF_ROWS) // size)).started("sums")
    if parts == 1:
        far = _beyond(g, ROW_FAR)
        room = emit.T.if_then_else(far, const(SUMS_FAR // size), const(SUMS // size))
    else:
        far, room = True, let("room", tirx.truncdiv(const(SUMS_OF_ROWS // size // g.vectors.lanes), rows) * lanes)
    panels = let("panels", emit.ceil_div(columns, room))
    width = let("width", emit.round_up(emit.ceil_div(columns, panels), lanes))
    with loop("panel", panels) as panel:
        passed = let("passed", panel * width)
        wide = let("wide", emit.minimum(width, columns - passed))
        whole = let("whole", tirx.truncdiv(wide, lanes) * lanes)
        part = _Part(g, sums, width, far, i0, rows, let("j", j0 + passed), wide, whole)
        with loop("pc", count) as index:
            p0 = let("p0", index * g.values["kc"])
            part.block(p0, let("kb", emit.minimum(g.values["kc"], g.values["k"] - p0)))


@dataclass(frozen=True)
class _Part:
    """Columns of C that ``sums`` has room for: ``columns`` of them, ``whole`` in whole vectors. ``row``: elements from one row of
    sums to the next. ``far``: B comes from memory."""

    g: Generator
    sums: View
    row: Any
    far: Any
    i0: Any
    rows: Any
    j0: Any
    columns: Any
    whole: Any

    def block(self, p0, kb) -> None:
        """Clear the sums, add up ``kb`` steps from p0 on, bring the sums to C."""
        g, lanes, parts = self.g, self.g.vectors.lanes, self.g.elements.parts
        with loop("c", tirx.truncdiv(self.rows * self.row, const(lanes))) as index:
            self.sums.set_vector(g.vectors.splat(0.0), lanes, const(0), index * const(lanes))
        done = let("done", tirx.truncdiv(kb, const(AT_ONCE)) * const(AT_ONCE))
        emit.branch(self.far, lambda: self._passes(p0, done, AT_ONCE, True), lambda: self._passes(p0, done, AT_ONCE, False))
        self._passes(p0 + done, kb - done, 1, False)

        def write(update: Callable) -> None:
            with loop("i", tirx.truncdiv(self.rows, const(parts))) as i:
                sums = self._sums(i * const(parts), parts)
                to = g.c_rows.moved(tirx.truncdiv(self.i0, const(parts)) + i, self.j0)

                def bring(c, mask) -> None:
                    found = [each.get_vector(lanes, const(0), c) for each in sums]
                    found = found[0] if parts == 1 else g.elements.complex_sum(*found)
                    value = update(found, lambda: self._load(to, const(0), c, mask), g.vectors.splat)
                    if mask is None:
                        to.set_vector(value, lanes, const(0), c)
                    else:
                        g.vectors.masked_store(value, to.address(const(0), c), mask)

                self._vectors(bring)

        update_c(g, p0 == const(0), write)

    def _sums(self, first, number: int) -> list[View]:
        """So many rows of sums."""
        return [self.sums.moved(const(0), (first + const(i)) * self.row).started(f"sums{i}") for i in range(number)]

    def _passes(self, p0, steps, number: int, far: bool) -> None:
        """Add ``steps`` of k, a multiple of ``number``, from p0 on: so many in each pass over the sums."""
        g, parts = self.g, self.g.elements.parts
        at_once = parts * (2 if g.isa.vector_registers > 16 else 1)
        with loop("pass", tirx.truncdiv(steps, const(number))) as index:
            first = let("first", p0 + index * const(number))
            if parts == 1:
                self._pass(first, number, const(0), 1, far)
                return
            with loop("group", tirx.truncdiv(self.rows, const(at_once))) as group:
                self._pass(first, number, let("row", group * const(at_once)), at_once, far)
            left = let("left", tirx.truncmod(self.rows, const(at_once)))
            if at_once > parts:
                emit.branch(left > const(0), lambda: self._pass(first, number, let("row", self.rows - left), parts, far))

    def _pass(self, first, number: int, row, rows: int, far: bool) -> None:
        """Add ``number`` steps from ``first`` on to ``rows`` rows of sums."""
        g, lanes, parts = self.g, self.g.vectors.lanes, self.g.elements.parts
        i0 = tirx.truncdiv(self.i0 + row, const(parts))

        def element(i: int, q: int):
            part = () if parts == 1 else (const(i % parts),)
            return g.sources["A"].any.get(i0 + const(i // parts), first + const(q), *part)

        a = [[let(f"a{i}_{q}", g.vectors.splat(element(i, q))) for q in range(number)] for i in range(rows)]
        b = [g.rows_of_b.moved(first + const(q), self.j0).started(f"b{q}") for q in range(number)]
        ahead = [g.rows_of_b.moved(first + const(number + q), self.j0).started(f"ahead{q}") for q in range(number)] if far else []
        sums = self._sums(row, rows)

        def add(c, mask) -> None:
            values = [each.get_vector(lanes, const(0), c) for each in sums]
            for q in range(number):
                y = let(f"y{q}", self._load(b[q], const(0), c, mask))
                values = [let(f"sum{i}_{q}", g.vectors.multiply_add(a[i][q], y, value)) for i, value in enumerate(values)]
                if ahead:
                    ahead[q].prefetch(const(0), c, into=2)
            for each, value in zip(sums, values):
                each.set_vector(value, lanes, const(0), c)

        self._vectors(add)

    def _vectors(self, each: Callable[[Any, Any], None]) -> None:
        """``each(c, mask)`` for the vectors from column c on; the last, if it is not whole, under a mask."""
        lanes = const(self.g.vectors.lanes)
        with loop("c", tirx.truncdiv(self.whole, lanes)) as index:
            each(index * lanes, None)
        rest = self.columns - self.whole
        emit.branch(rest > const(0), lambda: each(self.whole, self.g.vectors.mask("inside", rest)))

    def _load(self, view: View, row, c, mask):
        """A vector of a row; what is outside the mask is not touched."""
        if mask is None:
            return view.get_vector(self.g.vectors.lanes, row, c)
        return self.g.vectors.masked_load(view.address(row, c), mask)

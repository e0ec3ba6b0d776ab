"""A C of one row, wider than any tile: B goes by once, several rows of it side by side.

Tiles would walk down B, a few lines of cache of each row at a time, which caches beyond L1 deliver slowly, and a row of C in
registers is too few chains of FMAs. Here the sums of a row of C lie in L1, and rows of B are read from end to end, as memory and its
prefetchers like it. Each pass over the sums adds the products with several rows of B, in the order of k; the sums start from
+0 in every block of k: each is the chain of FMAs that it always is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .emit import const, let, loop
from .tiles import ROW_FAR, ROW_STEPS
from .update import update_c
from .validity import STUDIED
from .views import View

if TYPE_CHECKING:
    from .generator import Generator

#: Rows of B side by side. Eight, and the sums, are more than L1 has ways where rows are a multiple of 4 KiB apart.
AT_ONCE = 4

#: Bytes of the sums: a fourth of L1; half of it where B comes from memory, for a page should be read to its end.
SUMS, SUMS_FAR = 8 << 10, 16 << 10


def applies(g: Generator, rows, columns):
    """Condition: this is one row of C, wide enough, and k long enough."""
    if g.spec.dtype not in STUDIED:
        return False
    shape = emit.both(rows == const(1), columns > const(g.tile["n"]))
    return emit.both(shape, g.values["k"] >= const(ROW_STEPS))


def product(g: Generator, i0, j0, columns, count) -> None:
    """All ``count`` blocks of k of ``columns`` of C."""
    lanes, size = const(g.vectors.lanes), g.vectors.itemsize
    sums = View.on_stack("sums", g.spec.dtype, (1, SUMS_FAR // size)).started("sums")
    far = g.values["k"] * g.values["n"] >= const(ROW_FAR // size)
    panels = let("panels", emit.ceil_div(columns, emit.T.if_then_else(far, const(SUMS_FAR // size), const(SUMS // size))))
    width = let("width", emit.round_up(emit.ceil_div(columns, panels), lanes))
    with loop("panel", panels) as panel:
        passed = let("passed", panel * width)
        wide = let("wide", emit.minimum(width, columns - passed))
        part = _Part(g, sums, far, i0, let("j", j0 + passed), wide, let("whole", tirx.truncdiv(wide, lanes) * lanes))
        with loop("pc", count) as index:
            p0 = let("p0", index * g.values["kc"])
            part.block(p0, let("kb", emit.minimum(g.values["kc"], g.values["k"] - p0)))


@dataclass(frozen=True)
class _Part:
    """Columns of C that ``sums`` has room for: ``columns`` of them, ``whole`` in whole vectors. ``far``: B comes from memory."""

    g: Generator
    sums: View
    far: Any
    i0: Any
    j0: Any
    columns: Any
    whole: Any

    def block(self, p0, kb) -> None:
        """Clear the sums, add up ``kb`` steps from p0 on, bring the sums to C."""
        g, lanes = self.g, self.g.vectors.lanes

        def clear(c, mask) -> None:
            self.sums.set_vector(g.vectors.splat(0.0), lanes, const(0), c)

        self._vectors(clear)
        done = let("done", tirx.truncdiv(kb, const(AT_ONCE)) * const(AT_ONCE))
        emit.branch(self.far, lambda: self._passes(p0, done, AT_ONCE, True), lambda: self._passes(p0, done, AT_ONCE, False))
        self._passes(p0 + done, kb - done, 1, False)

        def write(update: Callable) -> None:
            to = g.c_rows.moved(self.i0, self.j0)

            def bring(c, mask) -> None:
                value = update(self.sums.get_vector(lanes, const(0), c), lambda: self._load(to, const(0), c, mask), g.vectors.splat)
                if mask is None:
                    to.set_vector(value, lanes, const(0), c)
                else:
                    g.vectors.masked_store(value, to.address(const(0), c), mask)

            self._vectors(bring)

        update_c(g, p0 == const(0), write)

    def _passes(self, p0, steps, number: int, far: bool) -> None:
        """Add ``steps`` of k, a multiple of ``number``, from p0 on: so many in each pass over the sums."""
        g, lanes = self.g, self.g.vectors.lanes
        with loop("pass", tirx.truncdiv(steps, const(number))) as index:
            first = let("first", p0 + index * const(number))
            a = [let(f"a{q}", g.vectors.splat(g.sources["A"].any.get(self.i0, first + const(q)))) for q in range(number)]
            b = [g.rows_of_b.moved(first + const(q), self.j0).started(f"b{q}") for q in range(number)]
            ahead = [g.rows_of_b.moved(first + const(number + q), self.j0).started(f"ahead{q}") for q in range(number)] if far else []

            def add(c, mask) -> None:
                value = self.sums.get_vector(lanes, const(0), c)
                for q in range(number):
                    value = let(f"sum{q}", g.vectors.multiply_add(a[q], self._load(b[q], const(0), c, mask), value))  # noqa: B023
                    if ahead:  # noqa: B023
                        ahead[q].prefetch(const(0), c, into=2)  # noqa: B023
                self.sums.set_vector(value, lanes, const(0), c)

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

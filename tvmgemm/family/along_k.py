"""Products with few columns: which of them are computed without packing, and those with rows of A in any strides.

One column of C, or a few, would leave most lanes of a tile empty, and packing A takes longer than multiplying it by so little. Sums
whose order does not count are dot products instead (``dot_products``), bools are searched for the first true term (``early``),
and what suits neither is multiplied element by element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import tirx

from . import early, emit
from .dot_products import COLUMNS, DotProducts, finish, room, scalar_step, scalar_sum
from .emit import const, let, loop

if TYPE_CHECKING:
    from .generator import Generator

#: k up to which the lanes of a vector cost more to add up than so many terms do one by one.
SHORT = 8

#: The same of bfloat16, of which packed tiles are faster: so much for each column beyond so many.
SHORT_EACH, WIDE = 16, 5

#: m.n.k up to which they do so in any number of columns: with less, to begin packing takes longer than all of it.
LITTLE = 256

#: Rows at a time where elements are multiplied one by one: rows that lie close to each other share lines of cache.
SCALAR_ROWS = (8, 4, 1)


def product(g: Generator, otherwise: Callable[[], None]) -> None:
    """The product, if its columns are few and its strides suit; ``otherwise()`` multiplies all others."""
    how, v = g.elements.arithmetic, g.values
    if not how.any_order or g.spec.symmetric or g.variant.resident != "C" or g.spec.packing != "ab" or not g.vectorised_packing:
        otherwise()
        return
    few = v["n"] <= const(COLUMNS)
    rows = v["csa"] == const(1)
    direct = emit.both(rows, v["rsb"] == const(1))
    short = v["k"] <= const(SHORT)
    if how.saturates:
        few = emit.minimum(v["m"], v["n"]) <= const(early.FEW)
        vectors = emit.both(tirx.Not(short), direct)

        def few_or_others() -> None:
            def by_vectors() -> None:
                _shared_out(g, DotProducts(g, True).rows)

            emit.branch(few, lambda: emit.branch(vectors, by_vectors, lambda: early.few(g)), otherwise)

        early.unless_soon(g, few_or_others)
        return
    if how.floating:
        # No copies with gaps: 0 times what lies in a gap of A may be a NaN. And all of k at once, for sums are rounded once.
        short = emit.either(short, v["k"] <= const(SHORT_EACH) * (v["n"] - const(WIDE)))
        reached = emit.either(v["rsb"] == const(1), v["n"] * v["k"] <= const(room(g)))
        suits = emit.both(emit.both(tirx.Not(short), few), emit.both(rows, reached))
        emit.branch(suits, lambda: _shared_out(g, DotProducts(g, True).rows), otherwise)
        return
    direct = emit.both(few, direct)
    for step in (-1, 2, -2):
        rows = emit.either(rows, v["csa"] == const(step))
    copied = emit.both(few, emit.both(v["m"] > const(1), rows))
    suits = emit.both(tirx.Not(short), emit.either(direct, copied))
    singly = emit.both(few, emit.either(short, v["n"] == const(1)))
    singly = emit.either(singly, v["m"] * v["n"] * v["k"] <= const(LITTLE))

    def in_vectors() -> None:
        emit.branch(direct, lambda: _shared_out(g, DotProducts(g, True).rows), lambda: _shared_out(g, DotProducts(g, False).rows))

    emit.branch(suits, in_vectors, lambda: emit.branch(singly, lambda: _shared_out(g, _Scalars(g).rows), otherwise))


def _shared_out(g: Generator, rows: Callable) -> None:
    """``rows(first, number)`` for all rows of C, or each task's share of them."""
    if not g.spec.parallel:
        rows(const(0), g.values["m"])
        return
    with emit.parallel("task", g.values["tasks"]) as task:
        rows(*g.share(g.values["m"], task))


@dataclass(frozen=True)
class _Scalars:
    """Few columns, element by element, in any strides."""

    g: Generator

    def rows(self, first, number) -> None:
        """C[first : first + number]."""

        def some(row, count: int) -> None:
            with loop("j", self.g.values["n"]) as j:
                self._some(let("i0", first + row), count, j)

        done = const(0)
        for count in SCALAR_ROWS:
            groups = let("groups", tirx.truncdiv(number - done, const(count)))
            with loop("group", groups) as group:
                some(done + group * const(count), count)
            done = let("done", done + groups * const(count))

    def _some(self, i0, count: int, j) -> None:
        g, k = self.g, self.g.values["k"]
        sums = [scalar_sum(g, f"s{i}") for i in range(count)]
        a, b = g.sources["A"].any.moved(i0, const(0)), g.sources["B"].any.moved(j, const(0))
        with loop("p", k) as p:
            y = let("b", b.get(const(0), p))
            for i, register in enumerate(sums):
                register.set(scalar_step(g, a.get(const(i), p), y, register.get()))
        for i, register in enumerate(sums):
            finish(g, True, i0 + const(i), j, register.get())

"""A C of few columns, no wider than 128 bits: two of its rows in one vector.

A row alone leaves most of a vector empty, and each multiply-add reads an element of A: two such reads a cycle are what L1
delivers. Here a vector holds two rows, and A, whose rows have to be contiguous, comes in pieces of 128 bits along k, whose
elements are spread over the vector in registers. Every sum is the one that it always is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.tirx.script import builder as T

from . import emit
from .emit import const, let, loop
from .update import update_c
from .validity import STUDIED

if TYPE_CHECKING:
    from .elements import Elements
    from .generator import Generator
    from .unblocked import _Product
    from .views import View

#: Rows of a tile. More are no faster: their addresses take registers.
ROWS = 8


def exist(g: Generator) -> bool:
    """Whether the kernel has such tiles: where half of a vector is two pieces of 128 bits and masks cost nothing."""
    return g.spec.dtype in STUDIED and g.isa.masks and g.isa.vector_bytes == 64


def rows_in_pairs(g: Generator, rows, columns, kb):
    """How many of these rows of C, ``columns`` wide, are better computed so: a multiple of ``ROWS``."""
    width = const(g.elements.lanes // 4)
    wanted = emit.both(emit.both(columns <= width, kb >= width), emit.both(rows >= const(ROWS), g.values["csa"] == const(1)))
    return let("in_pairs", T.if_then_else(wanted, tirx.truncdiv(rows, const(ROWS)) * const(ROWS), const(0)))


def product(part: _Product, column, rows) -> None:
    """The first ``rows`` of the part, in tiles; of its columns those from ``column`` on, which are few enough."""
    left = let("left", part.columns - column)
    whole = left >= const(part.g.elements.lanes // 4)
    emit.branch(whole, lambda: _tiles(part, column, rows, None), lambda: _tiles(part, column, rows, left))


def _tiles(part: _Product, column, rows, left) -> None:
    """``left``: how many columns there are; None for as many as a row has in a vector."""
    g = part.g
    single, double = (g.elements.in_lanes(g.elements.lanes // by) for by in (4, 2))
    width, mask = single.lanes, None if left is None else single.sums.mask("inside", left)
    with loop("pairs", tirx.truncdiv(rows, const(ROWS))) as index:
        i0, j0 = let("i0", part.i0 + index * const(ROWS)), let("j0", part.j0 + column)
        sums = [double.sums.register(f"c{pair}") for pair in range(ROWS // 2)]
        for each in sums:
            each.set(double.sums.splat(0.0))
        a, b = g.sources["A"].unit_k.moved(i0, part.p0), g.rows_of_b.moved(part.p0, j0)

        def row_of_b(p):
            return _load(single, "B", b, p, mask)

        def multiply(pieces: Callable[[int], Any], p, step: int) -> None:
            row = let("row", row_of_b(p))
            twice = _joined(row, row)
            for pair, each in enumerate(sums):
                spread = _shuffled(pieces(pair), [step] * width + [width + step] * width)
                each.set(double.multiply_add(spread, twice, each.get()))

        whole = let("whole_steps", tirx.truncdiv(part.kb, const(width)))
        with loop("p", whole) as p:
            emit.rolled()
            first = p * const(width)
            pieces = [_joined(*(a.get_vector(width, const(2 * pair + half), first) for half in (0, 1))) for pair in range(ROWS // 2)]
            for step in range(width):
                multiply(pieces.__getitem__, first + const(step), step)
        done = let("done", whole * const(width))
        with loop("p", part.kb - done, done) as p:
            emit.rolled()
            multiply(lambda pair: _joined(*(single.sums.splat(a.get(const(2 * pair + half), p)) for half in (0, 1))), p, 0)
        _bring_back(g, single, sums, i0, j0, part.p0, mask)


def _bring_back(g: Generator, single: Elements, sums: list, i0, j0, p0, mask) -> None:
    """Each row to C."""
    width, to = single.lanes, g.c_rows.moved(i0, j0)

    def write(update: Callable) -> None:
        for i in range(ROWS):
            value = _shuffled(sums[i // 2].get(), [i % 2 * width + lane for lane in range(width)])
            value = update(value, lambda: _load(single, "C", to, const(i), mask), single.sums.splat)
            if mask is None:
                to.set_vector(value, width, const(i), const(0))
            else:
                single.c.masked_store(value, to.address(const(i), const(0)), mask)

    update_c(g, p0 == const(0), write)


def _load(elements: Elements, operand: str, view: View, row, mask):
    """A row's vector; without a mask all of it."""
    if mask is None:
        return view.get_vector(elements.lanes, row, const(0))
    return elements.memory(operand).masked_load(view.address(row, const(0)), mask, elements.outside(operand))


def _joined(low, high):
    """Two vectors as one."""
    lanes = int(str(low.ty).rpartition("x")[2])
    return T.bind(tirx.Shuffle([low, high], list(range(2 * lanes))))


def _shuffled(vector, lanes: list[int]):
    return T.bind(tirx.Shuffle([vector], lanes))

"""A.A^T with half the work: micro-tiles on and below the diagonal are computed, what is above is copied from them.

C is cut into columns of panels, nr wide. Of each, the tiles from the diagonal down are computed; those that cross the
diagonal as a whole, so the nr x nr square of C there is complete. The rest of the panel, from the square down, is
transposed in registers into the rows of C to the right of the square, while the caches hold it. Both halves get the
same bits. Tasks share out rows, with equal areas below the diagonal. As mr divides nr, every element is written by one
task.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .emit import T, const, let, loop

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block


def row_blocks(g: Generator, columns: Block, body: Callable[[Any, Any, Any], None]) -> None:
    """``body(first row, rows, task)`` for blocks of at most mc rows from the first of ``columns`` on down."""
    rows = let("rows", g.values["m"] - columns.start)

    def blocks(first, number, task) -> None:
        count = let("ic_blocks", emit.ceil_div(number, g.values["mc"]))
        even = emit.ceil_div(number, emit.maximum(count, const(1)))
        step = let("step", emit.round_up(even, const(g.tile["m"])))
        with loop("ic", count) as index:
            offset = let("offset", index * step)
            size = emit.maximum(emit.minimum(step, number - offset), const(0))
            body(let("m0", columns.start + first + offset), let("mb", size), task)

    if not g.spec.parallel:
        blocks(const(0), rows, None)
        return
    tasks = g.values["tasks"]
    with emit.parallel("task", tasks) as task:
        first = let("first", _row_at(g, rows, columns.size, task, tasks))
        last = let("last", _row_at(g, rows, columns.size, task + const(1), tasks))
        blocks(first, let("number", last - first), task)


def _row_at(g: Generator, rows, width, part, parts):
    """The row, a multiple of mr, above which ``part`` of ``parts`` of the area to compute lies.

    Row r of the block has r + nr/2 columns to compute on average, but at most ``width``. So the area above it is that
    of a triangle as far as row x = width, in x = r + nr/2, and grows linearly from there.
    """
    half = _real(g.tile["n"] / 2)
    w, end = let("w", _as_real(width)), let("end", _as_real(rows) + half)

    def area(x):
        triangle = T.min(x, w)
        return triangle * triangle * _real(0.5) + (x - triangle) * w

    begin = let("begin", area(half))
    wanted = let("wanted", begin + (area(end) - begin) * _as_real(part) / _as_real(parts))
    full = let("full", w * w * _real(0.5))
    x = tirx.Select(wanted <= full, T.call_llvm_intrin("float64", "llvm.sqrt.f64", wanted * _real(2.0)), w + (wanted - full) / w)
    tile = const(g.tile["m"])
    row = let("row", tirx.Cast(emit.INDEX, x - half + _real(g.tile["m"] / 2)))
    inside = emit.minimum(emit.maximum(tirx.truncdiv(row, tile) * tile, const(0)), rows)
    return tirx.Select(part >= parts, rows, tirx.Select(part <= const(0), const(0), inside))


def _real(value: float):
    return tirx.const(value, "float64")


def _as_real(index):
    return tirx.Cast("float64", index)


def panels(g: Generator, blocks: dict[str, Block]):
    """How many panels of the block of columns have tiles in the block of rows."""
    m, n = blocks["m"], blocks["n"]
    to_diagonal = emit.minimum(n.size, m.start + m.size - n.start)
    return let("jr_tiles", emit.ceil_div(to_diagonal, const(g.tile["n"])))


def first_tile(g: Generator, blocks: dict[str, Block], jr):
    """The first tile of the block of rows that is not above the diagonal in panel ``jr``."""
    above = blocks["n"].start + jr * const(g.tile["n"]) - blocks["m"].start
    return let("ir_first", tirx.truncdiv(emit.maximum(above, const(0)), const(g.tile["m"])))


def mirror(g: Generator, blocks: dict[str, Block], jr) -> None:
    """Copy panel ``jr`` of the block, from below its square on, to the rows of C to the right of that square; once k is
    done."""
    m, k, nr = blocks["m"], blocks["k"], g.tile["n"]

    def copy() -> None:
        j = let("j", blocks["n"].start + jr * const(nr))
        start = let("below", emit.maximum(m.start, j + const(nr)))
        rows = let("rows", m.start + m.size - start)
        emit.branch(
            rows > const(0),
            lambda: emit.branch(g.unit_columns, lambda: _transposed(g, j, start, rows), lambda: _single(g, j, start, rows)),
        )

    emit.branch(k.start + k.size >= g.values["k"], copy)


def _transposed(g: Generator, j, start, rows) -> None:
    lanes, nr, parts = g.vectors.lanes, g.tile["n"], g.elements.parts
    steps = lanes // parts
    first, start, rows = (_elements(g, x) for x in (j, start, rows))
    whole = let("whole", tirx.truncdiv(rows, const(steps)))

    def columns(row_of: Callable[[int], Any], save: Callable[[Any, Any], None]) -> None:
        for group in range(0, nr, lanes):
            block = [T.bind(g.c_rows.get_vector(lanes, row_of(r), j + const(group))) for r in range(steps)]
            for c, value in enumerate(g.vectors.transpose(block, parts)):
                save(value, first + const(group // parts + c))

    with loop("block", whole) as block:
        i = let("i", start + block * const(steps))
        columns(lambda r: i + const(r), lambda value, row: g.c_rows.set_vector(value, lanes, row, i * const(parts)))
    done = let("done", start + whole * const(steps))
    left = let("left", start + rows - done)
    if not g.isa.masks:
        _single(g, j, done * const(parts), left * const(parts))
        return

    def rest() -> None:
        mask = g.vectors.mask("inside", left * const(parts))
        columns(
            lambda r: done + emit.minimum(const(r), left - const(1)),
            lambda value, row: g.vectors.masked_store(value, g.c_rows.address(row, done * const(parts)), mask),
        )

    emit.branch(left > const(0), rest)


def _single(g: Generator, j, start, rows) -> None:
    j, start, rows = (_elements(g, x) for x in (j, start, rows))
    parts = g.elements.parts
    with loop("i", rows, start) as i, loop("c", const(g.tile["n"] // parts)) as c:
        for part in [()] if parts == 1 else [(const(q),) for q in range(parts)]:
            g.c_any.set(g.c_any.get(i, j + c, *part), j + c, i, *part)


def _elements(g: Generator, parts):
    """Rows or columns of C, where ``parts`` counts those of real numbers."""
    return parts if g.elements.parts == 1 else tirx.truncdiv(parts, const(g.elements.parts))

"""The loop over blocks of k shared out to tasks: the sums of each block apart, then added up in the order of k.

Iterations of ``pc`` add to the same C. So each computes its sums into a *slot*, memory of its own; when as many blocks
as there are slots are done, tasks share out C and add the slots to it, first block first. Every element of C is then
the chain of additions of the serial kernel, whatever the number of tasks. A slot holds sums as the variant has them at
the end of a block of k: rows of C, or, where C is packed outside the loop, its panels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import emit, placement
from .emit import const, let, loop
from .packed_c import add_panels
from .update import update_c
from .views import View

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block

#: Bytes that slots may take beyond one per task: the more there are, the less often tasks wait for each other.
SLOTS_LIMIT = 4 << 20


def slots(g: Generator, size) -> Any:
    """How many slots of ``size`` elements there are: one per block of k if the memory for that is small."""
    blocks = emit.maximum(emit.ceil_div(g.values["k"], g.values["kc"]), const(1))
    room = emit.tirx.truncdiv(const(SLOTS_LIMIT // g.elements.panels.itemsize), emit.maximum(size, const(1)))
    return let("slots", emit.minimum(blocks, emit.maximum(room, g.values["tasks"])))


def share_out(g: Generator, count, blocks: dict[str, Block], body: Callable[[Any, Any], None]) -> None:
    """``body(block of k, task)`` for ``count`` blocks, its sums in slots, and the slots added to C."""
    available, tasks = g.memory.copies("S"), g.values["tasks"]
    with loop("round", emit.ceil_div(count, available)) as number:
        start = let("start", number * available)
        filled = let("filled", emit.minimum(available, count - start))
        with emit.parallel("task", tasks) as task:
            first, share = g.share(filled, task)
            with loop("slot", share, first) as slot, _sums_go_to(g, slot, blocks):
                body(start + slot, task)
        with emit.parallel("reducer", tasks) as task:
            if placement.collects(g.spec):
                _add_to_panels(g, blocks, start, filled, task)
            else:
                _add_to_c(g, blocks, start, filled, task)


@contextmanager
def _sums_go_to(g: Generator, slot, blocks: dict[str, Block]) -> Iterator[None]:
    """What is brought to C in the meantime goes to a slot as it is."""
    to_c = g.c_any, g.c_rows, g.unit_columns
    g.slot = slot
    if not placement.collects(g.spec):
        g.c_any = g.c_rows = _rows_of_slot(g, slot, blocks)
        g.unit_columns = True
    yield
    g.c_any, g.c_rows, g.unit_columns = to_c
    g.slot = None


def _rows_of_slot(g: Generator, slot, blocks: dict[str, Block]) -> View:
    """A slot by the indices of C: it holds the rows and columns that the loops outside of ``pc`` are at."""
    i0, j0 = (blocks[d].start if d in blocks else const(0) for d in "mn")
    return g.memory.panels("S", slot, origin=(_in_rows(g, i0), j0))


def _in_rows(g: Generator, count):
    """Rows of C, of a count of m: of complex numbers that counts two for each."""
    return count if g.elements.parts == 1 else emit.tirx.truncdiv(count, const(g.elements.parts))


def _add_to_c(g: Generator, blocks: dict[str, Block], start, filled, task) -> None:
    """Slots to C, or into it, by rows; slot after slot, so that memory is read in its order."""
    size = {d: blocks[d].size if d in blocks else g.values[d] for d in "mn"}
    i0, j0 = (blocks[d].start if d in blocks else const(0) for d in "mn")
    lanes, parts, i0 = g.vectors.lanes, g.elements.parts, _in_rows(g, i0)
    first, share = g.share(_in_rows(g, size["m"]), task)
    whole = let("whole", emit.tirx.truncdiv(size["n"], const(lanes)))
    done = let("done", whole * const(lanes))

    with loop("slot", filled) as slot:
        sums = _rows_of_slot(g, slot, blocks)

        def rows(update) -> None:
            with loop("i", share, i0 + first) as i:
                emit.branch(g.unit_columns, lambda: vectors(i, update), lambda: gaps(i, update))

        def vectors(i, update) -> None:
            with loop("c", whole) as c:
                at = (lanes, i, j0 + c * const(lanes))
                value = update(sums.get_vector(*at), lambda: g.c_rows.get_vector(*at), g.vectors.splat)
                g.c_rows.set_vector(value, *at)
            mask = g.vectors.mask("inside", size["n"] - done)
            to, rest = g.c_rows.address(i, j0 + done), g.vectors.masked_load(sums.address(i, j0 + done), mask)
            c, outside = g.elements.c, g.elements.outside("C")
            c.masked_store(update(rest, lambda: c.masked_load(to, mask, outside), g.vectors.splat), to, mask)

        def scattered(i, update) -> None:
            with loop("j", size["n"], j0) as j:
                g.c_any.set(update(sums.get(i, j), lambda: g.c_any.get(i, j), lambda scalar: scalar), i, j)

        def scattered_pairs(i, update) -> None:
            start, count = (emit.tirx.truncdiv(x, const(parts)) for x in (j0, size["n"]))
            with loop("j", count, start) as j:
                at = (parts, i, j, const(0))
                pair = sums.get_vector(parts, i, j * const(parts))
                g.c_any.set_vector(update(pair, lambda: g.c_any.get_vector(*at), lambda x: emit.T.broadcast(x, parts)), *at)

        gaps = scattered if parts == 1 else scattered_pairs
        update_c(g, start + slot == const(0), rows)


def _add_to_panels(g: Generator, blocks: dict[str, Block], start, filled, task) -> None:
    """Slots to the panels that collect C, or into them."""
    with loop("slot", filled) as slot:
        add_panels(g, blocks, g.memory.panels("S", slot), start + slot == const(0), lambda count: g.share(count, task))

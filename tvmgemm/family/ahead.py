"""Prefetches while the micro-kernel runs: of the tile of C that it ends with, and of what is packed next.

Both come from L3 or memory, where a cache line takes as long as hundreds of FMAs, and a core can wait for a few dozen
lines at a time (24 on Zen 4). If a tile asked for all of its lines at once, it would leave no place for what the
micro-kernel reads from L2. So the loop over k is cut into stretches, one for each row of the tile, and each stretch
begins with its share of the prefetches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .arithmetic import bits
from .emit import const, let, loop
from .variants import PANELS
from .views import View
from .workspace import CACHE_LINE

if TYPE_CHECKING:
    from .generator import Generator
    from .microkernel import Tile
    from .outer_loops import Block


def prefetches(g: Generator) -> bool:
    """Whether the kernel asks for memory ahead of its use."""
    return bool(g.packed) and "prefetch" not in g.spec.without


@dataclass(frozen=True)
class Lines:
    """The cache lines of a block of an operand: ``runs`` rows (or columns) of ``length`` lines each, which begin
    ``stride`` elements apart."""

    view: View
    start: Any
    stride: Any
    runs: Any
    length: Any

    def ask(self, turn, turns) -> None:
        """Ask for the share of ``turn``, one of ``turns``: equal ones until no lines are left."""
        count = self.runs * self.length
        share = let("share", emit.ceil_div(count, turns))
        first = let("first_line", turn * share)
        with loop("line", emit.minimum(count - first, share), first) as line:
            run = let("run", tirx.truncdiv(line, self.length))
            self.view.prefetch(self.start + run * self.stride, (line - run * self.length) * const(_in_line(self.view)))


@dataclass(frozen=True)
class Turn:
    """Micro-tile ``number`` of ``tiles`` in a block, which share the lines of what is packed next."""

    g: Generator
    number: Any = 0
    tiles: Any = 1

    def stretches(self, tile: Tile) -> int:
        """How many stretches the micro-kernel's loop has: one for each row of C."""
        return tile.mr // self.g.elements.parts if prefetches(self.g) else 1

    def begin(self, tile: Tile, stretch) -> None:
        """Ask for a row of the tile, and for this stretch's share of the lines."""
        g = self.g
        for c in range(0, tile.nr, CACHE_LINE // g.elements.c.itemsize):
            g.c_rows.prefetch(tile.row(0) + stretch, tile.j0 + const(c))
        if g.packed_next is not None:
            stretches = const(self.stretches(tile))
            g.packed_next.ask(self.number * stretches + stretch, self.tiles * stretches)


def in_stretches(name: str, steps, stretches: int, begin: Callable[[Any], None], step: Callable[[Any], None]) -> None:
    """A loop over so many steps, cut into stretches, each of which ``begin(stretch)`` precedes."""
    with loop("stretch", const(stretches)) as stretch:
        begin(stretch)
        first, end = (tirx.truncdiv(steps * each, const(stretches)) for each in (stretch, stretch + const(1)))
        first = let("first_step", first)
        with loop(name, end - first, first) as s:
            step(s)


def lines_behind(g: Generator, name: str, e: Block, extent, p: Block) -> Lines:
    """The lines of the block that is packed after block ``e``, in the operand's own dimension, which ends at
    ``extent``; none after the last block. (After the last block of a task's share they are another task's, and
    prefetched in vain.)"""
    start = let("next", e.start + e.size)
    return _lines(g, name, start, emit.maximum(emit.minimum(e.size, extent - start), const(0)), p)


def lines_of_tile(g: Generator, name: str, e0, p: Block) -> Lines:
    """The lines of a tile of the resident operand."""
    return _lines(g, name, e0, const(g.tile[PANELS[name][name][0]]), p)


def _lines(g: Generator, name: str, start, size, p: Block) -> Lines:
    """The lines of ``size`` elements of the operand's own dimension by block ``p`` of k.

    If neither stride is 1, hardly two elements share a line, and none are asked for.
    """
    operand, parts = g.sources[name], g.elements.parts
    view = View(f"{name}_next", g.pointers[name], g.elements.stored[name], (1, 1))
    across = operand.stride_e == const(1)
    along = tirx.And(tirx.Not(across), operand.stride_k == const(1))
    first, rows = (x if parts == 1 else tirx.truncdiv(x, const(parts)) for x in (start, size))

    def chosen(what: str, if_across, if_along, otherwise):
        return let(what, tirx.Select(across, if_across, tirx.Select(along, if_along, otherwise)))

    return Lines(
        view,
        start=let("next_at", (first * operand.stride_e + p.start * operand.stride_k) * const(parts)),
        stride=chosen("next_stride", operand.stride_k, operand.stride_e, const(0)) * const(parts),
        runs=chosen("next_runs", p.size, rows, const(0)),
        length=emit.ceil_div(chosen("next_length", size, p.size * const(parts), const(1)), const(_in_line(view))),
    )


def _in_line(view: View) -> int:
    """Elements in a cache line."""
    return CACHE_LINE * 8 // bits(view.dtype)

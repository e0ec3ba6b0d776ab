"""Two loops shared out as one, so that neither rows nor columns of C alone must make up a share for every task.

With resident C the innermost loop over cache blocks (ic in B3A2C0, jc in A3B2C0) and the outer loop over micro-tiles
(jr, ir) run over the two dimensions of C. All panels of all blocks are numbered, block after block, and cut into
contiguous ranges with equal numbers of micro-tiles, one a task. So of its first and of its last block a task may have
some panels only. What is packed outside of these loops is shared; a block that two tasks have panels of is packed by
both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import tirx

from ..spec import STEPS
from . import emit
from .emit import const, let, loop
from .variants import LOOP_DIMENSION

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block

#: Micro-tiles that a block keeps along its own dimension, if possible: a panel is read from L2 or L3 once per block.
TILES_OF_BLOCK = 8

#: Panels of blocks per task from which their number no longer matters: the last task waits for at most one of them.
PIECES = 4


def applies(g: Generator) -> bool:
    """Whether the kernel shares out panels and not only whole blocks."""
    variant, spec = g.variant, g.spec
    last = variant.outer[-1]
    return variant.resident == "C" and spec.step == STEPS[-1] and spec.parallel == last != "pc" and not spec.symmetric


def blocks_to_share(g: Generator, extent, tile):
    """The least number of blocks that ``extent`` is cut into for the tasks' sake: one for each, but no smaller than
    ``TILES_OF_BLOCK`` unless there are few panels."""
    other = LOOP_DIMENSION[g.variant.inner[0]]
    panels = emit.ceil_div(emit.minimum(g.values[other], g.values[other + "c"]), const(g.tile[other]))
    tasks = g.values["tasks"]
    for_panels = emit.ceil_div(tasks * const(PIECES), emit.maximum(panels, const(1)))
    large = tirx.truncdiv(extent, tile * const(TILES_OF_BLOCK))
    return emit.maximum(emit.minimum(tasks, emit.maximum(large, for_panels)), const(1))


def share_out(g: Generator, name: str, count, blocks: dict[str, Block], body: Callable[[Any, Any], None]) -> None:
    """``body(block, task)`` for the blocks of each task, ``g.panels_here`` saying which panels of the block are its
    own.

    The last of ``count`` blocks may be narrower, so shares are counted in micro-tiles.
    """
    inner, across = g.variant.inner[0], LOOP_DIMENSION[name]
    dimension, tasks = LOOP_DIMENSION[inner], g.values["tasks"]
    panels = let(f"{inner}_panels", emit.ceil_div(blocks[dimension].size, const(g.tile[dimension])))
    extent = blocks[across].size if across in blocks else g.values[across]
    strips = let("strips", emit.ceil_div(extent, const(g.tile[across])))  # one micro-tile wide
    in_block = let("strips_of_block", tirx.truncdiv(g.values[across + "c"], const(g.tile[across])))

    def cut(which: str, number):
        """The block and the panel in it that share ``number`` begins with."""
        tile = let(f"{which}_tile", tirx.truncdiv(strips * panels * number, tasks))
        block = let(f"{which}_block", tirx.truncdiv(tile, emit.maximum(in_block * panels, const(1))))
        width = emit.maximum(emit.minimum(in_block, strips - block * in_block), const(1))
        return block, let(f"{which}_panel", tirx.truncdiv(tile - block * in_block * panels, width))

    with emit.parallel("task", tasks) as task:
        (start, from_panel), (stop, to_panel) = cut("first", task), cut("last", task + const(1))
        end = tirx.Select(to_panel > const(0), stop + const(1), stop)
        with loop(name, emit.minimum(end, count) - start, start) as index:
            from_ = let(f"{inner}_from", tirx.Select(index == start, from_panel, const(0)))
            to = let(f"{inner}_to", tirx.Select(index == stop, to_panel, panels))
            g.panels_here = from_, to - from_
            body(index, task)
            g.panels_here = None

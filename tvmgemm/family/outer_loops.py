"""The loops over cache blocks: their order, where operands are packed among them, and which of them tasks share out.

P4, P5 and P7 of the paper's generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..spec import STEPS
from . import ahead, early, emit, macrokernel, packed_ab, packed_c, partition, plain, resident_operand, split_k, triangle
from .emit import const, let, loop
from .variants import LOOP_DIMENSION
from .vectors import variable

if TYPE_CHECKING:
    from .generator import Generator


@dataclass
class Block:
    """The part of one dimension that the current iterations of the outer loops cover: start and size."""

    start: Any
    size: Any


def multiply(g: Generator) -> None:
    """One product with k > 0."""
    if g.spec.step == "basic":
        plain.triple_loop(g, {d: Block(const(0), g.values[d]) for d in "mnk"})
    else:
        _outer_loops(g, list(g.variant.outer), {}, None)


def _outer_loops(g: Generator, loops: list[str], blocks: dict[str, Block], task) -> None:
    """The cache-block loops ``loops``, outermost first, within ``blocks``; packings where the variant places them."""
    if not loops:
        _block_product(g, blocks, task)
        return
    name, rest = loops[0], loops[1:]
    if name == "pc" and g.elements.rounds_once and g.piece_dimension not in blocks:
        _pieces(g, loops, blocks, task)
        return
    dimension = LOOP_DIMENSION[name]
    whole = blocks.get(dimension)  # a piece of it, or all
    extent, step = whole.size if whole else g.values[dimension], g.values[dimension + "c"]

    def body(index, task) -> None:
        passed = let(dimension + ("_passed" if whole else "0"), index * step)
        start = let(dimension + "0", whole.start + passed) if whole else passed
        enter(start, let(dimension + "b", emit.minimum(step, extent - passed)), task)

    def enter(start, size, task) -> None:
        inner = blocks | {dimension: Block(start, size)}
        here = [operand for operand, at in g.packed.items() if at == name]
        for operand in here:
            packed_ab.pack(g, operand, name, inner, task)
            if not rest and _asks_for_next(g):
                end = whole.start + whole.size if whole else g.values[dimension]
                g.packed_next = ahead.lines_behind(g, operand, inner[dimension], end, inner["k"])
        with packed_c.partial_sums(g, name, inner, task):
            _outer_loops(g, rest, inner, task)

    if g.spec.symmetric and name == "ic":
        triangle.row_blocks(g, blocks["n"], enter)
        return
    if name == "pc" and g.elements.arithmetic.saturates and g.spec.parallel != name:
        _until_decided(g, blocks, extent, step, lambda start, size: enter(start, size, task))
        return
    _iterate(g, name, let(f"{name}_blocks", emit.blocks_in(extent, step)), blocks, task, body)


def _iterate(g: Generator, name: str, count, blocks: dict[str, Block], task, body: Callable[[Any, Any], None]) -> None:
    """``body(index, task)`` for the ``count`` iterations of loop ``name``: all in the current ``task``, or shared out."""
    if g.spec.parallel != name:
        with loop(name, count) as index:
            body(index, task)
    elif name == "pc":
        split_k.share_out(g, count, blocks, body)
    elif partition.applies(g):
        partition.share_out(g, name, count, blocks, body)
    else:
        with emit.parallel("task", g.values["tasks"]) as task:
            first, share = g.share(count, task)
            with loop(name, share, first) as index:
                body(index, task)


def _until_decided(g: Generator, blocks: dict[str, Block], extent, step, then: Callable[[Any, Any], None]) -> None:
    """``then(start, size)`` for blocks of k, until all sums of bools in this part of C are true: the others change nothing. Where
    many elements are true the first blocks are short."""
    m, n = (blocks.get(d) or Block(const(0), g.values[d]) for d in "mn")
    first = let("first_kb", emit.minimum(early.first_block(g, m, n, extent, step), step))
    start, size = variable("from_k", const(0)), variable("next_kb", first)
    with loop("pc", emit.blocks_in(extent, first)):
        emit.branch(start.get() >= extent, emit.leave)
        decided = lambda: early.all_true(g, m.start, m.size, n.start, n.size)  # noqa: E731
        emit.branch(start.get() > const(0), lambda: emit.branch(decided(), emit.leave))
        k0 = emit.opaque("k0", start.get())
        kb = emit.opaque("kb", emit.minimum(size.get(), extent - k0))
        then(k0, kb)
        start.set(k0 + kb)
        size.set(emit.minimum(kb * const(early.GROWTH), step))


def _asks_for_next(g: Generator) -> bool:
    """Whether tiles prefetch what is packed after their block. Not in ``symmetric`` kernels, where the tiles of a block
    are not counted, nor on a matrix unit, whose tiles have no loop to do so in."""
    spec = g.spec
    resident_c = g.variant.resident == "C" and spec.step == STEPS[-1] and not spec.symmetric
    return resident_c and ahead.prefetches(g) and not g.elements.arithmetic.matrix


def _pieces(g: Generator, loops: list[str], blocks: dict[str, Block], task) -> None:
    """All blocks of k for one piece of C after the other: see ``block_sizes``."""
    dimension, step = g.piece_dimension, g.values["piece"]
    extent = g.values[dimension]
    with loop("piece_index", emit.blocks_in(extent, step)) as index:
        start = let("piece0", index * step)
        piece = Block(start, let("piece_size", emit.minimum(step, extent - start)))
        inner = blocks | {dimension: piece}
        g.sums_origin = inner["m"].start, inner["n"].start
        _outer_loops(g, loops, inner, task)


def _block_product(g: Generator, blocks: dict[str, Block], task) -> None:
    step = g.spec.step
    if step == "blocked":
        plain.triple_loop(g, blocks)
    elif step == "packed":
        plain.packed_loops(g, blocks, task, in_tile=False)
    elif step == "microkernel":
        plain.packed_loops(g, blocks, task, in_tile=True)
    elif g.variant.resident == "C":
        macrokernel.resident_c(g, blocks, task)
    else:
        resident_operand.multiply(g, blocks, task)

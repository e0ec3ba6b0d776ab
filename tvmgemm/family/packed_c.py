"""A block of C kept in micro-panels while products are added to it, and brought back to C when its sums are done.

The sums of one block of k start from +0 and are added to those of earlier blocks as a whole, in every variant: so an
element of C is the same chain of additions whichever variant computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import emit, placement
from .emit import const, let, loop
from .update import update_c
from .variants import PANELS
from .views import View

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block


@contextmanager
def partial_sums(g: Generator, name: str, blocks: dict[str, Block], task):
    """Around the inner loops of outer loop ``name``: choose and clear the panels that they add to, then move the sums
    on.

    C packed inside the loop over k: its panels hold the sums of one block of k, and go to C. C packed outside: they
    hold all sums; the first block of k is added up in them, later ones in panels of their own that are then added.
    Where tasks share out the loop over k, each block has panels of its own (``split_k`` adds them).
    """
    at = g.packed.get("C")
    collects = placement.collects(g.spec)
    if name == "pc" and collects and g.slot is not None:
        g.panels["sums"] = g.memory.panels("S", g.slot)
        _clear(g, blocks)
        yield
    elif name == "pc" and collects:
        first = blocks["k"].start == const(0)
        g.panels["sums"] = g.memory.either(first, "C", "P", task)
        _clear(g, blocks)
        yield
        emit.branch(first, lambda: None, lambda: add_panels(g, blocks, g.memory.panels("P", task), False))
    elif name == at:
        if not collects:
            g.panels["sums"] = g.panels["C"]
            _clear(g, blocks)
        yield
        first = True if collects else blocks["k"].start == const(0)
        bring = _bring_rows if g.variant.resident == "B" else _bring_columns
        update_c(g, first, lambda update: bring(g, blocks, update))
    else:
        yield


def _all(count) -> tuple[Any, Any]:
    return const(0), count


@contextmanager
def _vectors_of_panels(g: Generator, blocks: dict[str, Block], share: Callable = _all):
    """A loop over the panels of the block and their steps; yields (panel, step, columns of the vectors).

    ``share(count)``: (first, number) of the panels."""
    across, along = PANELS[g.variant.resident]["C"]
    width = g.tile[across]
    first, panels = share(emit.ceil_div(blocks[across].size, const(width)))
    with loop("panel", panels, first) as panel, loop("step", blocks[along].size) as step:
        yield panel, step, range(0, width, g.vectors.lanes)


def _clear(g: Generator, blocks: dict[str, Block]) -> None:
    with _vectors_of_panels(g, blocks) as (panel, step, chunks):
        for c in chunks:
            g.panels["sums"].set_vector(g.vectors.splat(0.0), g.vectors.lanes, panel, step, const(c))


def add_panels(g: Generator, blocks: dict[str, Block], partial: View, first, share: Callable = _all) -> None:
    """Panels of C += those of one block of k; ``first``: C = the first of them. ``share`` as above."""
    lanes, total = g.vectors.lanes, g.panels["C"]

    def each(value) -> None:
        with _vectors_of_panels(g, blocks, share) as (panel, step, chunks):
            for c in chunks:
                at = (lanes, panel, step, const(c))
                total.set_vector(value(partial.get_vector(*at), at), *at)

    emit.branch(first, lambda: each(lambda x, at: x), lambda: each(lambda x, at: total.get_vector(*at) + x))


def _bring_rows(g: Generator, blocks: dict[str, Block], update) -> None:
    """Panels cut up n: a step is a row of C, its vectors are contiguous there."""
    lanes, sums = g.vectors.lanes, g.panels["C"]
    with _vectors_of_panels(g, blocks) as (panel, step, chunks):
        i = let("i", blocks["m"].start + step)
        j = let("j", blocks["n"].start + panel * const(g.tile["n"]))
        columns = let("columns", blocks["n"].size - panel * const(g.tile["n"]))

        def whole() -> None:
            for c in chunks:
                at = (lanes, i, j + const(c))
                value = update(
                    sums.get_vector(lanes, panel, step, const(c)), lambda: g.c_rows.get_vector(*at), g.vectors.splat
                )
                g.c_rows.set_vector(value, *at)

        def masked() -> None:
            for c in chunks:
                _masked_update(g, i, j + const(c), columns - const(c), sums.get_vector(lanes, panel, step, const(c)), update)

        def scattered() -> None:
            with loop("c", emit.minimum(columns, const(g.tile["n"]))) as c:
                _single_update(g, i, j + c, sums.get(panel, step, c), update)

        emit.branch(
            g.unit_columns, lambda: emit.branch(columns >= const(g.tile["n"]), whole, masked), scattered
        )


def _bring_columns(g: Generator, blocks: dict[str, Block], update) -> None:
    """Panels cut up m: a step is a column of C, so blocks of lanes x lanes are transposed on their way."""
    lanes, sums, height = g.vectors.lanes, g.panels["C"], g.tile["m"]
    panels = emit.ceil_div(blocks["m"].size, const(height))
    with loop("panel", panels) as panel:
        i = let("i", blocks["m"].start + panel * const(height))
        rows = let("rows", emit.minimum(blocks["m"].size - panel * const(height), const(height)))

        def single(first) -> None:
            with loop("step", blocks["n"].size - first, first) as step, loop("r", rows) as r:
                _single_update(g, i + r, blocks["n"].start + step, sums.get(panel, step, r), update)

        def transposed() -> None:
            whole = let("whole", emit.tirx.truncdiv(blocks["n"].size, const(lanes)))
            with loop("block", whole) as block:
                step = let("step", block * const(lanes))
                j = let("j", blocks["n"].start + step)
                for group in range(0, height, lanes):
                    columns = [
                        emit.T.bind(sums.get_vector(lanes, panel, step + const(s), const(group))) for s in range(lanes)
                    ]
                    for r, value in enumerate(g.vectors.transpose(columns)):
                        emit.branch(rows > const(group + r), lambda: row(group + r, j, value))
            single(whole * const(lanes))

        def row(r: int, j, value) -> None:
            at = (lanes, i + const(r), j)
            g.c_rows.set_vector(update(value, lambda: g.c_rows.get_vector(*at), g.vectors.splat), *at)

        emit.branch(g.unit_columns, transposed, lambda: single(const(0)))


def _masked_update(g: Generator, i, j, limit, value, update) -> None:
    """Bring a vector to the first ``limit`` columns from (i, j) of C."""
    mask = g.vectors.mask("inside", limit)
    at = g.c_rows.address(i, j)
    g.vectors.masked_store(update(value, lambda: g.vectors.masked_load(at, mask), g.vectors.splat), at, mask)


def _single_update(g: Generator, i, j, value: Any, update) -> None:
    g.c_any.set(update(value, lambda: g.c_any.get(i, j), lambda scalar: scalar), i, j)

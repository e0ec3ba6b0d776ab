"""Vectors of elements that lie apart in memory, for the strides that arrays have most often: every other element
(``x[:, ::2]``, one part of complex numbers), and all of them backwards (``x[:, ::-1]``).

What is read is between the first and the last element in memory, gaps included; written is only what is an element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

from .emit import T, const
from .isa import Isa
from .vectors import Vectors
from .views import View

#: Strides, in elements, that ``load`` is for.
STEPS = (2, -1)


def load(line: Callable[[int, int], Any], lanes: int, step: int, parts: int = 1):
    """The vector of elements that lie ``step`` apart, each of them ``parts`` numbers, ``lanes`` numbers in all.

    ``line(offset, count)``: so many numbers as they lie in memory, from ``offset`` numbers behind the first element.
    """
    elements = lanes // parts
    if step < 0:
        order, vectors = list(range(elements - 1, -1, -1)), [line(parts - lanes, lanes)]
    else:  # the second vector ends with the last element, so it begins with a gap, unless it is the first
        order = [*range(0, elements, 2), *range(elements + 1, 2 * elements, 2)]
        vectors = [line(0, lanes), line(lanes - parts, lanes)]
    return tirx.Shuffle([T.bind(x) for x in vectors], [e * parts + part for e in order for part in range(parts)])


def inside(vectors: Vectors, valid, step: int, parts: int = 1) -> dict[int, Any]:
    """By the offset of each line that ``load`` asks for: the mask of what lies between the first and the last of ``valid`` numbers."""
    lanes = vectors.lanes
    if step < 0:
        return {parts - lanes: vectors.mask_from("outside", const(lanes) - valid)}
    extent = valid * const(2) - const(parts)
    return {offset: vectors.mask("inside", extent - const(offset)) for offset in (0, lanes - parts)}


def _int(value: int):
    return tirx.const(value, "int32")


def stored_steps(isa: Isa) -> tuple[int, ...]:
    """Strides that ``update`` is for. Gaps are left out by masks; where those are not single instructions there are
    none, for tiles that may go to memory in so many ways leave too few registers to their loops."""
    return STEPS if isa.masks else ()


def update(vectors: Vectors, view: View, at: tuple, step: int, value: Callable[[Callable], Any], outside) -> None:
    """``value(old)`` to the elements of ``view`` from the indices ``at`` on, ``step`` apart; ``old()`` is what was
    there.

    ``outside``: what the lanes of gaps are loaded as.
    """
    lanes = vectors.lanes
    if step < 0:
        first, backwards = (*at, const(1 - lanes)), list(range(lanes - 1, -1, -1))
        new = value(lambda: tirx.Shuffle([T.bind(view.get_vector(lanes, *first))], backwards))
        view.set_vector(tirx.Shuffle([T.bind(new)], backwards), lanes, *first)
        return
    lane, odd, none = T.ramp(_int(0), _int(1), lanes), T.broadcast(_int(1), lanes), T.broadcast(_int(0), lanes)
    mask = tirx.bitwise_and(lane, odd) == none
    halves = [view.address(*at, const(offset)) for offset in (0, lanes)]

    def old():
        return tirx.Shuffle(
            [T.bind(vectors.masked_load(half, mask, outside)) for half in halves], list(range(0, 2 * lanes, 2))
        )

    new = T.bind(value(old))
    for half, place in enumerate(halves):
        spread = [lane // 2 + half * (lanes // 2) for lane in range(lanes)]
        vectors.masked_store(tirx.Shuffle([new], spread), place, mask)

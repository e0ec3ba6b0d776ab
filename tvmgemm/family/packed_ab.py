"""The packed blocks of A and B: filled by one task or by all, where the variant packs them. (C's are in
``packed_c``.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import emit, matrix_unit
from .emit import const, let, loop
from .packing import append_shift, pack_panels
from .placement import private
from .variants import PANELS
from .views import View

if TYPE_CHECKING:
    from .elements import Elements
    from .generator import Generator
    from .outer_loops import Block


def pack(g: Generator, operand: str, at: str, blocks: dict[str, Block], task) -> None:
    """Pack the current block of A or B; of C, only find the place (``partial_sums`` fills it)."""
    panels = g.panels[operand] = g.memory.panels(operand, task)
    if operand == "C":
        return
    if g.elements.arithmetic.matrix:
        with loop("plane", const(g.elements.arithmetic.planes)) as plane:
            _pack_panels(g, operand, at, blocks, panels.sliced(1, plane), g.elements.plane(plane))
    else:
        _pack_panels(g, operand, at, blocks, panels, g.elements)


def _pack_panels(
    g: Generator, operand: str, at: str, blocks: dict[str, Block], panels: View, elements: Elements
) -> None:
    across, along = PANELS[g.variant.resident][operand]
    width, e, p = g.tile[across], blocks[across], blocks[along]
    count = let("panels", emit.ceil_div(e.size, const(width)))
    matrix = elements.arithmetic.matrix

    def fill(first, number) -> None:
        if operand == "A" and matrix:
            matrix_unit.pack_rows(
                elements, panels, g.sources[operand], width=width, first=first, e0=e.start, extent=e.size,
                count=number, p0=p.start, kb=p.size, vectorised=g.vectorised_packing,
            )  # fmt: skip
            return
        pack_panels(
            elements, g.isa, panels, g.sources[operand],
            width=width, first=first, e0=e.start, extent=e.size, count=number, p0=p.start, kb=p.size,
            zero_padded=across == "k", vectorised=g.vectorised_packing,
        )  # fmt: skip
        if operand == "B" and elements.shifted:
            append_shift(elements, panels, width, first, number, g.steps(p.size))
        if matrix:
            packed = emit.ceil_div(p.size, const(elements.group))
            matrix_unit.fill_chunks(elements, panels, width, first, number, packed, g.steps(p.size))

    if g.spec.parallel and not private(g.spec, at):
        with emit.parallel("packer", g.values["tasks"]) as packer:
            fill(*g.share(count, packer))
    else:
        fill(const(0), count)

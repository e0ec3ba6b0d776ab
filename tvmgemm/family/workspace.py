"""What lies where in ``work``, the scratch memory that the caller hands to a kernel.

The regions, by name: ``A``, ``B``, ``C`` packed blocks; ``Cs`` a tile on its way to a C with gaps; ``T`` a tile on its
way from a matrix unit to vector registers, ``U`` the sums of one weight of its bytes; ``X`` a tile of resident A or B
on its way to registers; ``P`` the sums of one block of k, apart from those before; ``S`` one slot for each block of k
that tasks share out (``split_k``); ``W`` float32 sums that wait for the next block of k before they are rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit, placement
from .arithmetic import MATRIX_ROWS
from .emit import const, let
from .packing import slack
from .split_k import slots
from .variants import LOOP_DIMENSION, PANELS
from .views import View

if TYPE_CHECKING:
    from .generator import Generator

#: Buffers start on cache-line boundaries.
CACHE_LINE = 64

#: Bytes of the sums that wait for later blocks of k, where they cannot wait in C. One block of C by tasks may need
#: more.
SUMS_LIMIT = 4 << 20


@dataclass(frozen=True)
class _Region:
    """One buffer: its offset and the size of one copy in elements, its strides, and how many copies there are, one for
    each task or slot (None: one for all)."""

    offset: Any
    size: Any
    strides: tuple[Any, ...]
    copies: Any


class Workspace:
    """The layout for one spec. ``size`` is the whole, in elements of panels, which are as large as sums."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._regions: dict[str, _Region] = {}
        self.size = const(0)
        spec, variant, tile = generator.spec, generator.variant, generator.tile
        for operand, at in generator.packed.items():
            self._add_panels(operand, operand, at)
        if variant.resident == "C":
            # A tile on its way to a C with gaps.
            needed = tirx.Select(generator.values["csc"] == const(1), const(0), const(1))
            self._add("Cs", needed * const(tile["m"] * tile["n"]), (const(tile["n"]), 1), self._per_task)
            if (how := generator.elements.arithmetic).matrix or how.halves:  # and one on its way from the unit to vector registers
                self._add("T", const(tile["m"] * tile["n"]), (const(tile["n"]), 1), self._per_task)
                if how.planes > 1 and not how.floating:  # and a part of it, of one weight
                    self._add("U", const(tile["m"] * tile["n"]), (const(tile["n"]), 1), self._per_task)
            if generator.elements.rounds_once:
                self._add_sums()
        elif spec.step == "optimised":
            if placement.collects(spec) and spec.parallel != "pc":  # the sums of one block of k, apart from all earlier ones
                self._add_panels("P", "C", generator.packed["C"])
            across, _ = PANELS[variant.resident][variant.resident]
            width = tile[across]
            size = const(tile["k"] * width + slack(width, generator.vectors.lanes))
            self._add("X", size, (const(0), const(width), 1), self._per_task)
        if spec.parallel == "pc":
            self._add_slots()

    @property
    def _per_task(self):
        return self._generator.values["tasks"] if self._generator.spec.parallel else None

    def _add_slots(self) -> None:
        """Memory for the sums of several blocks of k: panels where C collects all sums in such, otherwise rows of C, of
        the part that the loops outside of ``pc`` are at."""
        generator = self._generator
        if placement.collects(generator.spec):
            self._add_panels("S", "C", generator.packed["C"], slots)
            return
        outer, values = generator.variant.outer, generator.values
        outside = [LOOP_DIMENSION[loop] for loop in outer[: outer.index("pc")]]
        rows, columns = (values[d + "c"] if d in outside else values[d] for d in "mn")
        rows = tirx.truncdiv(rows, const(generator.elements.parts))
        stride = let("S_row", emit.round_up(columns, const(CACHE_LINE // generator.elements.sums.itemsize)))
        self._add("S", rows * stride, (stride, 1), slots)

    def _add(self, name: str, size, strides: tuple, copies=None) -> None:
        """``copies``: None for one, or their number, or ``slots``, which computes it from the size of one."""
        generator = self._generator
        if not self._of_panels(name):
            size = size * const(self._sums_width)
        size = let(name + "_size", emit.round_up(size, const(CACHE_LINE // generator.elements.panels.itemsize)))
        offset = let(name + "_offset", self.size)
        copies = slots(generator, size) if copies is slots else copies
        self._regions[name] = _Region(offset, size, strides, copies)
        self.size = offset + (size if copies is None else size * copies)

    @staticmethod
    def _of_panels(name: str) -> bool:
        """Whether a buffer has the elements of panels; the others have sums. (Parts of sums on a matrix unit have 32
        bits.)"""
        return name in ("A", "B", "U")

    @property
    def _sums_width(self) -> int:
        """The width of a sum, in elements of panels."""
        elements = self._generator.elements
        return elements.sums.itemsize // elements.panels.itemsize

    def _add_panels(self, name: str, operand: str, at: str, copies=None) -> None:
        """Micro-panels of the operand's block: (panel, step along it, element across it)."""
        generator = self._generator
        across, along = PANELS[generator.variant.resident][operand]
        width = generator.tile[across]
        steps = generator.values[along + "c"]
        if along == "k":
            steps = generator.steps(steps)
        if operand == "B" and generator.elements.shifted:
            steps = steps + const(1)
        panels = emit.ceil_div(generator.values[across + "c"], const(width))
        stride = let(name + "_panel", steps * const(width) + const(slack(width, generator.vectors.lanes)))
        if copies is None and placement.private(generator.spec, at):
            copies = self._per_task
        strides = (stride, const(width), 1)
        if (how := generator.elements.arithmetic).matrix:  # (panel, plane, step, column) or (panel, plane, chunk, row, step)
            # Planes lie side by side, at distances that are in the code: so all of them take one address.
            plane, within = (width, ()) if operand == "B" else (width * MATRIX_ROWS, (const(MATRIX_ROWS),))
            stride = stride * const(how.planes)
            strides = (stride, const(plane), const(plane * how.planes), *within, 1)
        self._add(name, panels * stride, strides, copies)

    def _add_sums(self) -> None:
        """Sums of all of C that lies inside the loop over k, in panels as wide as a tile: (panel, row, column)."""
        generator = self._generator
        values, tile, outer = generator.values, generator.tile, generator.variant.outer
        inside = generator.piece_dimension
        sizes = {"m": values["mc"], "n": values["nc"], inside: emit.minimum(values["piece"], values[inside])}
        rows = let("sums_rows", emit.round_up(sizes["m"], const(tile["m"])))
        stride = let("sums_stride", rows * const(tile["n"]))
        needed = tirx.Select(values["k"] > values["kc"], const(1), const(0))
        own = generator.spec.parallel and outer.index(generator.spec.parallel) < outer.index("pc")
        panels = emit.ceil_div(sizes["n"], const(tile["n"]))
        self._add("W", needed * panels * stride, (stride, const(tile["n"]), 1), self._per_task if own else None)

    def copies(self, name: str):
        """How many copies of the buffer ``name`` there are."""
        return self._regions[name].copies

    def panels(self, name: str, index, origin: tuple = ()) -> View:
        """The buffer ``name``; of one that has copies, that of task or slot ``index``. ``origin``: indices of its
        start."""
        region = self._regions[name]
        offset = self._offset(name, index)
        for start, stride in zip(origin, region.strides):
            offset = offset - start * (const(stride) if isinstance(stride, int) else stride)
        return self._view(name, region, let("offset", offset) if origin else offset)

    def either(self, condition, name: str, other: str, task) -> View:
        """The one or the other of two buffers of one layout, decided at run time."""
        offset = let("chosen", tirx.Select(condition, self._offset(name, task), self._offset(other, task)))
        return self._view("chosen", self._regions[name], offset)

    def _offset(self, name: str, index):
        """The offset of a buffer, in its own elements."""
        region = self._regions[name]
        offset = region.offset if index is None or region.copies is None else region.offset + index * region.size
        wide = not self._of_panels(name) and self._sums_width > 1
        return tirx.truncdiv(offset, const(self._sums_width)) if wide else offset

    def _view(self, name: str, region: _Region, offset) -> View:
        generator = self._generator
        vectors = generator.elements.panels if self._of_panels(name) else generator.elements.sums
        name = name if len(name) > 1 else name + "c"
        return View(name, generator.pointers["work"], vectors.dtype, region.strides, offset)

"""What lies where in ``work``, the scratch memory that the caller hands to a kernel: packed blocks and small tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .emit import const, let
from .packing import slack
from .variants import PANELS

if TYPE_CHECKING:
    from .generator import Generator

#: Buffers start on cache-line boundaries.
CACHE_LINE = 64


@dataclass(frozen=True)
class _Region:
    """One buffer: its offset and the size of one task's copy in elements, its strides, whether each task has its own."""

    offset: Any
    size: Any
    strides: tuple[Any, ...]
    private: bool


class Workspace:
    """The layout for one spec. ``size`` is the whole, in elements."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._regions: dict[str, _Region] = {}
        self.size = const(0)
        spec, variant, tile = generator.spec, generator.variant, generator.tile
        for operand, at in generator.packed.items():
            self._add_panels(operand, operand, at)
        if variant.resident == "C":
            # A tile on its way to a C with gaps.
            always = spec.step == "microkernel"
            needed = const(1) if always else tirx.Select(generator.values["csc"] == const(1), const(0), const(1))
            self._add("Cs", needed * const(spec.mr * spec.nr), (const(spec.nr), 1), bool(spec.parallel))
        elif spec.step == "optimised":
            if self.total_in_panels:  # the sums of one block of k, apart from those of all earlier ones
                self._add_panels("P", "C", generator.packed["C"])
            across, _ = PANELS[variant.resident][variant.resident]
            width = tile[across]
            size = const(tile["k"] * width + slack(width, generator.vectors.lanes))
            self._add("X", size, (const(0), const(width), 1), bool(spec.parallel))

    @property
    def total_in_panels(self) -> bool:
        """Whether the packed C collects all blocks of k (it is packed outside the loop over them)."""
        generator = self._generator
        outer = generator.variant.outer
        return "C" in generator.packed and outer.index(generator.packed["C"]) < outer.index("pc")

    def _add(self, name: str, size, strides: tuple, private: bool) -> None:
        generator = self._generator
        size = let(name + "_size", emit.round_up(size, const(CACHE_LINE // generator.itemsize)))
        offset = let(name + "_offset", self.size)
        self._regions[name] = _Region(offset, size, strides, private)
        self.size = offset + size * (generator.values["tasks"] if private else const(1))

    def _add_panels(self, name: str, operand: str, at: str) -> None:
        """Micro-panels of the operand's block: (panel, step along it, element across it)."""
        generator = self._generator
        across, along = PANELS[generator.variant.resident][operand]
        width = generator.tile[across]
        steps = generator.values[along + "c"]
        panels = emit.ceil_div(generator.values[across + "c"], const(width))
        stride = let(name + "_panel", steps * const(width) + const(slack(width, generator.vectors.lanes)))
        self._add(name, panels * stride, (stride, const(width), 1), generator.private(at))

    def panels(self, name: str, task) -> emit.View:
        """The buffer ``name``, as ``task`` sees it."""
        return self._view(name, self._regions[name], self._offset(name, task))

    def either(self, condition, name: str, other: str, task) -> emit.View:
        """The one or the other of two buffers of one layout, decided at run time."""
        offset = let("chosen", tirx.Select(condition, self._offset(name, task), self._offset(other, task)))
        return self._view("chosen", self._regions[name], offset)

    def _offset(self, name: str, task):
        region = self._regions[name]
        return region.offset if task is None or not region.private else region.offset + task * region.size

    def _view(self, name: str, region: _Region, offset) -> emit.View:
        generator = self._generator
        name = name if len(name) > 1 else name + "c"
        return emit.View(name, generator.pointers["work"], generator.spec.dtype, region.strides, offset)

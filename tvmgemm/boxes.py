"""Boxes of problems, and rules: what serves the problems of a box."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from .problem import Problem

#: The loop over a stack, as one that tasks share.
STACK = "stack"

_UNBOUNDED = (0, 2**62)
_EVERY = (0.0, math.inf)


@dataclass(frozen=True)
class Box:
    """Inclusive bounds on what a problem's numbers may be; ``mn``, ``kn`` and ``work`` are m.n, k.n and m.n.k as floats."""

    m: tuple[float, float] = _UNBOUNDED
    n: tuple[float, float] = _UNBOUNDED
    k: tuple[float, float] = _UNBOUNDED
    batch: tuple[float, float] = _UNBOUNDED
    mn: tuple[float, float] = _EVERY
    kn: tuple[float, float] = _EVERY
    work: tuple[float, float] = _EVERY

    PRODUCTS = ("mn", "kn", "work")
    SIDES = ("m", "n", "k", "batch", *PRODUCTS)

    @cached_property
    def limits(self) -> dict[str, tuple[float, float]]:
        """The sides that are bounded: most boxes bound few, and a miss in the table compares hundreds of boxes."""
        sides = ((side, getattr(self, side)) for side in self.SIDES)
        return {side: bounds for side, bounds in sides if bounds != (_EVERY if side in self.PRODUCTS else _UNBOUNDED)}

    def holds(self, problem: Problem) -> bool:
        """Whether the problem's numbers are within the bounds."""
        for side, (low, high) in self.limits.items():
            if not low <= getattr(problem, side) <= high:
                return False
        return True

    def clipped(self, side: str, low: float, high: float) -> Box:
        """This box with one side narrowed to within [low, high]."""
        now_low, now_high = getattr(self, side)
        return replace(self, **{side: (max(low, now_low), min(high, now_high))})

    def beside(self, others: Iterable[Box], problem: Problem) -> Box:
        """A part of this box, with the problem in it, that meets none of ``others``, none of which holds the problem."""
        box = Box()  # whose bounds are whole numbers
        for side in self.SIDES:
            box = box.clipped(side, *getattr(self, side))
        for other in others:
            if box.meets(other):
                box = box.without(other, problem)
        return box

    def meets(self, other: Box) -> bool:
        """Whether the bounds of both can be kept at once."""
        for side, (low, high) in other.limits.items():
            ours = getattr(self, side)
            if max(ours[0], low) > min(ours[1], high):
                return False
        return True

    def without(self, other: Box, problem: Problem) -> Box:
        """The part of this box on the problem's side of a bound of ``other`` that the problem breaks."""
        for side, (low, high) in other.limits.items():
            value = getattr(problem, side)
            exact = side not in self.PRODUCTS
            if value < low:
                return self.clipped(side, -math.inf, low - 1 if exact else math.nextafter(low, -math.inf))
            if value > high:
                return self.clipped(side, high + 1 if exact else math.nextafter(high, math.inf), math.inf)
        raise ValueError("the problem lies inside the box that is to be cut away")


@dataclass(frozen=True)
class Rule:
    """What serves the problems of a box. ``variant`` None: NumPy. ``tile`` is an index into ``TILES``, or None for a kernel
    without loops over cache blocks, which chooses its tiles itself. ``parallel``: the loop that tasks share, ``"stack"``
    among them."""

    box: Box
    variant: str | None
    packing: str
    tile: int | None
    reason: str
    parallel: str = ""
    tasks: int = 1
    symmetric: bool = False


def possible(box: Box) -> bool:
    return all(low <= high for low, high in (getattr(box, side) for side in Box.SIDES))

"""Boxes of problems, and rules: what serves the problems of a box."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .problem import Problem

#: The loop over a stack, as one that tasks share.
STACK = "stack"

_UNBOUNDED = (0, 2**62)


@dataclass(frozen=True)
class Box:
    """Inclusive bounds on what a problem's numbers may be; ``mn``, ``kn`` and ``work`` are m.n, k.n and m.n.k as floats."""

    m: tuple[float, float] = _UNBOUNDED
    n: tuple[float, float] = _UNBOUNDED
    k: tuple[float, float] = _UNBOUNDED
    batch: tuple[float, float] = _UNBOUNDED
    mn: tuple[float, float] = (0.0, math.inf)
    kn: tuple[float, float] = (0.0, math.inf)
    work: tuple[float, float] = (0.0, math.inf)

    PRODUCTS = ("mn", "kn", "work")
    SIDES = ("m", "n", "k", "batch", *PRODUCTS)

    def holds(self, problem: Problem) -> bool:
        """Whether the problem's numbers are within the bounds."""
        return all(low <= getattr(problem, side) <= high for side in self.SIDES for low, high in (getattr(self, side),))

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
        return all(
            max(ours[0], theirs[0]) <= min(ours[1], theirs[1])
            for ours, theirs in ((getattr(self, side), getattr(other, side)) for side in self.SIDES)
        )

    def without(self, other: Box, problem: Problem) -> Box:
        """The part of this box on the problem's side of a bound of ``other`` that the problem breaks."""
        for side in self.SIDES:
            value, (low, high) = getattr(problem, side), getattr(other, side)
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

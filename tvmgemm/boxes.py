"""Boxes of problems, and rules: what serves the problems of a box.

A box bounds a problem's numbers: m, n, k, the length of the stack, and three products of these. The planner goes through
rules in order, and the first whose box holds the problem decides. It decides for all of that box that earlier rules have
not taken, which is no box in general. ``Box.beside`` finds a large box in it that holds the problem; it goes to the native
table with the plan, and later problems inside need no planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .forks import once
from .problem import Problem

#: The loop over a stack, as one that tasks share.
STACK = "stack"

_UNBOUNDED = (0, 2**62)
_EVERY = (0.0, math.inf)

#: Sizes beyond these count for nothing when ``_cut`` compares what would be left.
_USUAL = {"m": 2.0**12, "n": 2.0**12, "k": 2.0**12, "batch": 2.0**12, "mn": 2.0**24, "kn": 2.0**24, "work": 2.0**36}

Bounds = tuple[float, float]

#: The sides of a box that are bounded, and how.
Limits = dict[str, Bounds]


@dataclass(frozen=True)
class Box:
    """Inclusive bounds on what a problem's numbers may be; ``mn``, ``kn`` and ``work`` are m.n, k.n and m.n.k as floats."""

    m: Bounds = _UNBOUNDED
    n: Bounds = _UNBOUNDED
    k: Bounds = _UNBOUNDED
    batch: Bounds = _UNBOUNDED
    mn: Bounds = _EVERY
    kn: Bounds = _EVERY
    work: Bounds = _EVERY

    PRODUCTS = ("mn", "kn", "work")
    SIDES = ("m", "n", "k", "batch", *PRODUCTS)

    @once
    def limits(self) -> Limits:
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
        """A part of this box that holds the problem and meets none of ``others``; none of them may hold the problem.

        Each one is cut away along one of its bounds that the problem breaks.
        """
        limits = dict(self.limits)
        met = (other.limits for other in others if meet(limits, other.limits))
        # Those first that leave little choice: after their cuts many others are not met any more.
        for other in sorted(met, key=lambda other: _broken(other, problem)):
            if meet(limits, other):
                _cut(limits, other, problem)
        whole = Box()  # whose bounds are whole numbers
        return replace(whole, **{side: _both(getattr(whole, side), bounds) for side, bounds in limits.items()})


def meet(ours: Limits, theirs: Limits) -> bool:
    """Whether the bounds of both can be kept at once."""
    for side, (low, high) in theirs.items():
        if side in ours and (ours[side][0] > high or ours[side][1] < low):
            return False
    return True


def _broken(limits: Limits, problem: Problem) -> int:
    """How many of the bounds the problem breaks."""
    return sum(not low <= getattr(problem, side) <= high for side, (low, high) in limits.items())


def _both(x: Bounds, y: Bounds) -> Bounds:
    return max(x[0], y[0]), min(x[1], y[1])


def _cut(limits: Limits, other: Limits, problem: Problem) -> None:
    """Narrow ``limits`` to the problem's side of one of the bounds of ``other`` that the problem breaks. It is the bound that
    leaves most of ``limits``: the larger the boxes, the fewer are needed."""
    best, most = None, -1.0
    for side, (low, high) in other.items():
        value, exact = getattr(problem, side), side not in Box.PRODUCTS
        if value < low:
            left = (0.0, low - 1 if exact else math.nextafter(low, -math.inf))
        elif value > high:
            left = (high + 1 if exact else math.nextafter(high, math.inf), math.inf)
        else:
            continue
        now = limits.get(side, _EVERY)
        left = _both(now, left)
        part = (_extent(side, left) + 0.01) / (_extent(side, now) + 0.01)
        if part > most:
            best, most = (side, left), part
    if best is None:
        raise ValueError("the problem lies inside the box that is to be cut away")
    limits[best[0]] = best[1]


def _extent(side: str, bounds: Bounds) -> float:
    """The extent between the bounds, as a logarithm to base 2, within ``_USUAL``."""
    low, high = (math.log2(min(bound, _USUAL[side]) + 1.0) for bound in bounds)
    return high - low


@dataclass(frozen=True)
class Rule:
    """What serves the problems of a box, and why.

    ``variant``: None for NumPy. ``tile``: an index into ``TILES``, such as ``tiles.PACKED``, or ``tiles.UNBLOCKED`` (None)
    for a kernel without loops over cache blocks, which chooses its tiles itself. ``parallel``: the loop that tasks share
    out, ``"stack"``, or ``""`` for one task.
    """

    box: Box
    variant: str | None
    packing: str
    tile: int | None
    reason: str
    parallel: str = ""
    tasks: int = 1
    symmetric: bool = False


def possible(box: Box) -> bool:
    """Whether a problem can be in the box: no bound is below its opposite."""
    return all(low <= high for low, high in (getattr(box, side) for side in Box.SIDES))

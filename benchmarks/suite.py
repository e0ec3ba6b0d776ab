"""What a suite is: cases, how they are measured, and what they have to reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .report import View

#: How much of a suite is run: a few cases that stand for the rest, the usual ones, or all there are.
EXTENTS = ("quick", "usual", "full")

#: A number of threads: the cores that this process may use.
ALL_CORES = 0

#: How an operand lies in memory: a function from its logical shape and a fresh C-contiguous array maker to
#: the array. A layout keeps the logical shape and changes the strides only.
LAYOUTS: dict[str, Callable[[tuple[int, ...], Callable[[tuple[int, ...]], np.ndarray]], np.ndarray]] = {
    "C": lambda shape, make: make(shape),
    "F": lambda shape, make: make((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2),
}


@dataclass(frozen=True)
class Case:
    """One product: shapes of A and B as ``np.matmul`` takes them, and layouts (names of ``LAYOUTS``)."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    a_layout: str = "C"
    b_layout: str = "C"
    note: str = ""

    @property
    def label(self) -> str:
        """What a report calls it: ``m x n x k``, before it the batch, behind it layouts that are not C."""
        m = self.a[-2] if len(self.a) > 1 else 1
        n = self.b[-1] if len(self.b) > 1 else 1
        batch = "".join(f"{size}*" for size in self.batch)
        layouts = "" if self.a_layout == self.b_layout == "C" else f" {self.a_layout}{self.b_layout}"
        return f"{batch}{m}x{n}x{self.a[-1]}{layouts}{self.note and f' ({self.note})'}"

    @property
    def batch(self) -> tuple[int, ...]:
        """The broadcast batch dimensions."""
        return np.broadcast_shapes(self.a[:-2], self.b[:-2])

    @property
    def flops(self) -> float:
        """Floating-point operations: a multiplication and an addition per term."""
        m = self.a[-2] if len(self.a) > 1 else 1
        n = self.b[-1] if len(self.b) > 1 else 1
        return 2.0 * math.prod(self.batch) * m * n * self.a[-1]

    def operands(self, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """A and B with standard normal elements, the same for the same seed."""
        random = np.random.default_rng(seed)

        def make(shape: tuple[int, ...]) -> np.ndarray:
            return random.standard_normal(shape).astype(dtype)

        return LAYOUTS[self.a_layout](self.a, make), LAYOUTS[self.b_layout](self.b, make)


def product(m: int, n: int, k: int, note: str = "") -> Case:
    """The plain case: row-major A (m x k) times row-major B (k x n)."""
    return Case((m, k), (k, n), note=note)


@dataclass(frozen=True)
class Conditions:
    """How a case is to be measured: which extent of its suite, with so many ``threads``, for about ``seconds``,
    and GFLOP/s of the ``peak`` of one core, where it is known."""

    extent: str = "usual"
    threads: int = 1
    seconds: float = 1.0
    peak: float | None = None


@dataclass(frozen=True)
class Suite:
    """A named table of cases.

    ``cases(dtype, extent)`` lists them for an extent of ``EXTENTS``. ``targets`` gives, per peer, the ratio
    that each row has to reach (a ratio above 1: tvmgemm is faster); a peer that it doesn't name is shown
    without a target. ``entries`` are the ways in that are measured (names of ``runner.ENTRIES``). ``threads``
    is the default of ``--threads``; ``ALL_CORES`` stands for as many as this process may use. ``into_out``:
    results go into an existing array, so that nobody's allocator is measured. ``unit``: what the columns
    show, ``"GFLOP/s"``, ``"us"`` or ``"ms"``. ``measure(suite, case, dtype, conditions)`` is given where a suite
    does not pair tvmgemm's ways in with peers, and ``view`` where its rows are not shown like those pairs.
    """

    name: str
    title: str
    cases: Callable[[str, str], Iterable[Case]]
    targets: Mapping[str, float] = field(default_factory=lambda: {"numpy": 1.0})
    entries: tuple[str, ...] = ("matmul",)
    dtypes: tuple[str, ...] = ("float32", "float64")
    threads: tuple[int, ...] = (1, ALL_CORES)
    into_out: bool = True
    unit: str = "GFLOP/s"
    measure: Callable[..., Iterable] | None = None
    view: View | None = None

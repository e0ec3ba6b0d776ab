"""What a suite is: cases, how they are measured, and what they have to reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from . import elements

if TYPE_CHECKING:
    from .report import View

#: How much of a suite is run: a few cases that stand for the rest, the usual ones, or all there are.
EXTENTS = ("quick", "usual", "full")

#: A number of threads: the cores that this process may use.
ALL_CORES = 0

#: Makes a fresh C-contiguous array of a shape.
Make = Callable[[tuple[int, ...]], np.ndarray]


def _every_second(shape: tuple[int, ...], make: Make) -> np.ndarray:
    *rest, columns = shape
    return make((*rest, 2 * columns))[..., ::2]


def _every_second_row(shape: tuple[int, ...], make: Make) -> np.ndarray:
    *rest, rows, columns = shape
    return make((*rest, 2 * rows, columns))[..., ::2, :]


#: How an array lies in memory: a function from its logical shape and a maker to the array. A layout keeps the logical
#: shape and changes the strides only; ``[:,...]`` ones are also for vectors.
LAYOUTS: dict[str, Callable[[tuple[int, ...], Make], np.ndarray]] = {
    "C": lambda shape, make: make(shape),
    "F": lambda shape, make: make((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2),
    "[::2]": _every_second_row,
    "[:,::2]": _every_second,
    "[::-1]": lambda shape, make: make(shape)[..., ::-1, :],
    "[:,::-1]": lambda shape, make: make(shape)[..., ::-1],
    "one row": lambda shape, make: np.broadcast_to(make((*shape[:-2], 1, shape[-1])), shape),
}


@dataclass(frozen=True)
class Case:
    """One product: shapes of A and B as ``np.matmul`` takes them, and how they lie (names of ``LAYOUTS``).

    ``out_layout`` is that of the array for the result, where the suite has one. ``mirrored``: B is A's transpose, the
    same memory. ``targets`` are ratios to reach by peer, if not those of the suite; ``peak`` the fraction of the
    machine's peak to reach. ``max_isa`` caps the instruction set of our kernels. ``density``: of a bool operand, the
    fraction of True.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    a_layout: str = "C"
    b_layout: str = "C"
    out_layout: str = "C"
    note: str = ""
    mirrored: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    peak: float | None = None
    max_isa: str | None = None
    density: float = 0.5

    @property
    def label(self) -> str:
        """What a report calls it: ``m x n x k``, before it the batch, behind it what is out of the ordinary."""
        m = self.a[-2] if len(self.a) > 1 else 1
        n = self.b[-1] if len(self.b) > 1 else 1
        batch = "".join(f"{size}*" for size in self.batch)
        layouts = {"A": self.a_layout, "B": "A.T" if self.mirrored else self.b_layout, "out": self.out_layout}
        parts = [f"{batch}{m}x{n}x{self.a[-1]}", *(f"{name}={layout}" for name, layout in layouts.items() if layout != "C")]
        return " ".join(parts) + (self.note and f" ({self.note})")

    @property
    def batch(self) -> tuple[int, ...]:
        """The broadcast batch dimensions."""
        return np.broadcast_shapes(self.a[:-2], self.b[:-2])

    @property
    def flops(self) -> float:
        """Operations: a multiplication and an addition per term, of whatever elements (complex: one each)."""
        m = self.a[-2] if len(self.a) > 1 else 1
        n = self.b[-1] if len(self.b) > 1 else 1
        return 2.0 * math.prod(self.batch) * m * n * self.a[-1]

    def operands(self, dtype: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """A and B with random elements (``elements.random``), the same for the same seed."""
        random = np.random.default_rng(seed)
        a_dtype, b_dtype, _ = elements.of(dtype)

        def make(name: str) -> Make:
            return lambda shape: elements.random(random, shape, name, self.density)

        a = LAYOUTS[self.a_layout](self.a, make(a_dtype))
        return a, a.swapaxes(-1, -2) if self.mirrored else LAYOUTS[self.b_layout](self.b, make(b_dtype))

    def result(self, like: np.ndarray) -> np.ndarray:
        """A new array for the result, of the shape and dtype of ``like``, laid out as the case says."""
        return LAYOUTS[self.out_layout](like.shape, lambda shape: np.empty(shape, like.dtype))


def product(m: int, n: int, k: int, note: str = "", **fields) -> Case:
    """The plain case: row-major A (m x k) times row-major B (k x n)."""
    return Case((m, k), (k, n), note=note, **fields)


@dataclass(frozen=True)
class Conditions:
    """How a case is to be measured: which extent of its suite, with so many ``threads``, for about ``seconds``, and what
    measures the ``peak`` of as many cores at once, in GFLOP/s, where there is one."""

    extent: str = "usual"
    threads: int = 1
    seconds: float = 1.0
    peak: Callable[[], float] | None = None


@dataclass(frozen=True)
class Suite:
    """A named table of cases.

    ``cases(dtype, extent)`` lists them for an extent of ``EXTENTS``. ``targets`` gives, per peer, the ratio that each
    row has to reach (a ratio above 1: tvmgemm is faster); a case's own targets replace them. The peers named there are
    those that the suite is run against; one asked for beside them is shown without a target. ``mean`` is what the
    geometric mean of the ratios has to reach, over the better peer of each case. ``entries`` are the ways in that are
    measured (names of ``runner.ENTRIES``). ``threads`` is the default of ``--threads``; ``ALL_CORES`` stands for as
    many as this process may use. ``hot``: small shapes are multiplied until they have kernels of their own, before
    anything is timed. ``into_out``: results go into an existing array, so that nobody's allocator is measured.
    ``unit``: what the columns show, ``"GFLOP/s"``, ``"us"`` or ``"ms"``. ``measure(suite, case, dtype, conditions)`` is
    given where a suite does not pair tvmgemm's ways in with peers, and ``view`` where its rows are not shown like those
    pairs.
    """

    name: str
    title: str
    cases: Callable[[str, str], Iterable[Case]]
    targets: Mapping[str, float] = field(default_factory=lambda: {"numpy": 1.0})
    mean: float | None = None
    entries: tuple[str, ...] = ("matmul",)
    dtypes: tuple[str, ...] = ("float32", "float64")
    threads: tuple[int, ...] = (1, ALL_CORES)
    hot: bool = False
    into_out: bool = True
    unit: str = "GFLOP/s"
    measure: Callable[..., Iterable] | None = None
    view: View | None = None

"""Operands of every layout, exact references and error bounds: what the equivalence tests share.

An operand is a view into a larger buffer. Everything around an input is NaN, so a kernel that reads past an
edge is seen in the result; everything around an output is remembered, so a kernel that writes past one is
seen there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

import tvmgemm
from tvmgemm import dispatch, kernels, planner, rules, sharing
from tvmgemm.blocking import BlockSizes
from tvmgemm.family.isa import ISAS
from tvmgemm.family.tiles import TILES
from tvmgemm.host import host

FORCED = planner.DEFAULT_VARIANT

#: The dtypes whose kernels are those of docs/design.md section 3: one order of summation, NaN pads.
FLOATS = ("float32", "float64")

#: The micro-tiles of those dtypes.
FLOAT_TILES = {key: tiles for key, tiles in TILES.items() if key[1] in FLOATS}

#: The instruction sets that this machine runs and that have kernels of those dtypes, narrow to wide.
RUNNABLE = [
    isa.name
    for isa in ISAS.values()
    if isa.arch == host().arch and isa.requires <= host().features and (isa.name, FLOATS[0]) in FLOAT_TILES
]

#: Sizes at which something changes: nothing, one, and one below, at and above the edges of every micro-tile
#: and vector.
_EDGES = {edge for isa in RUNNABLE for dtype in FLOATS for tile in FLOAT_TILES[isa, dtype]["C"][:3] for edge in tile}
_EDGES |= {2 * edge for edge in _EDGES}
EDGE_SIZES = sorted({0, 1, 2, 3} | {edge + d for edge in _EDGES for d in (-1, 0, 1)})

#: The mark of tests of those kernels.
NEEDS_KERNELS = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

every_dtype = pytest.mark.parametrize("dtype", FLOATS)
every_isa = pytest.mark.parametrize("isa", RUNNABLE)
#: For tests that need many kernels: the oldest instruction set has the code of the next one with shorter vectors, and is left to
#: the slow tests where there is a next.
newer_isas = pytest.mark.parametrize(
    "isa", RUNNABLE if len(RUNNABLE) < 2 else [pytest.param(RUNNABLE[0], marks=pytest.mark.slow), *RUNNABLE[1:]]
)
one_and_two_threads = pytest.mark.parametrize("threads", [1, 2])


# -- layouts


@dataclass(frozen=True)
class Layout:
    """How a view lies in its buffer.

    ``order``: its axes from the slowest to the fastest. ``steps``: per axis, every how many elements the next
    one lies, negative for backwards, 0 for one element that stands for all. ``gaps``: per axis, elements left
    free behind it. ``start``: elements before the first one. ``misaligned``: bytes that the buffer is off its
    item size.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    gaps: tuple[int, ...]
    start: int = 0
    misaligned: int = 0


def row_major(ndim: int = 2) -> Layout:
    """The layout of a new array."""
    return Layout(tuple(range(ndim)), (1,) * ndim, (0,) * ndim)


def col_major() -> Layout:
    """Fortran's layout of a matrix."""
    return Layout((1, 0), (1, 1), (0, 0))


@dataclass(frozen=True)
class Operand:
    """A view, and the whole buffer that it lies in as bytes."""

    view: np.ndarray
    buffer: np.ndarray

    def outside(self) -> np.ndarray:
        """A copy of the buffer's bytes with those of the view set to 0: equal before and after iff nothing
        was written past the view.
        """
        image = self.buffer.copy()
        offset = self.view.__array_interface__["data"][0] - self.buffer.__array_interface__["data"][0]
        if self.view.size:
            same = np.ndarray(self.view.shape, self.view.dtype, image, offset, self.view.strides)
            same[...] = 0
        return image


def lay_out(shape: tuple[int, ...], dtype: str, layout: Layout, around: float = math.nan) -> Operand:
    """A view of ``shape`` with that layout; its elements, and all around them, are ``around``."""
    itemsize = np.dtype(dtype).itemsize
    strides, unit = [0] * len(shape), 1
    for axis in reversed(layout.order):
        strides[axis] = unit * layout.steps[axis]
        unit = (
            unit * max(1, abs(layout.steps[axis])) * max(1, shape[axis] if layout.steps[axis] else 1)
            + layout.gaps[axis]
        )
    first = layout.start + sum(-s * (size - 1) for s, size in zip(strides, shape) if s < 0 < size)
    elements = layout.start + unit + 64
    buffer = np.zeros(elements * itemsize + layout.misaligned, "u1")
    inner = buffer[layout.misaligned :].view(dtype)
    inner[...] = around
    byte_strides = [s * itemsize for s in strides]
    view = np.ndarray(shape, dtype, buffer, layout.misaligned + first * itemsize, byte_strides)
    return Operand(view, buffer)


def layouts(ndim: int, *, output: bool = False) -> st.SearchStrategy[Layout]:
    """Every class of layouts of an array; those of an ``output`` have no two elements in one place."""
    step = st.sampled_from([1, 1, 1, 1, -1, 2, -3] + ([] if output else [0]))
    plain = st.sampled_from(
        [row_major(ndim), Layout((*range(ndim - 2), *range(ndim)[-1:-3:-1]), (1,) * ndim, (0,) * ndim)]
    )
    general = st.builds(
        Layout,
        order=st.permutations(range(ndim)).map(tuple),
        steps=st.tuples(*[step] * ndim),
        gaps=st.tuples(*[st.sampled_from([0, 0, 1, 5])] * ndim),
        start=st.integers(0, 17),
        misaligned=st.sampled_from([0, 0, 0, 0, 1, 4]),
    )
    return st.one_of(plain, general)


# -- sizes

sizes = st.one_of(st.sampled_from(EDGE_SIZES), st.integers(0, 20), st.integers(0, 300))
seeds = st.integers(0, 2**32 - 1)

#: None: the block sizes of this machine; else so small that small operands have several blocks in every loop.
blockings = st.sampled_from([None, None, (1, 1, 3), (2, 1, 7), (1, 2, 32)])


@st.composite
def shapes(draw, work: int = 1_500_000):
    """m, n, k with at most ``work`` multiply-adds: exact references of float64 are slow."""
    few = draw(st.sampled_from([None, None, "rows", "columns"]))
    m = draw(st.integers(1, 12) if few == "rows" else sizes)
    n = draw(st.integers(1, 12) if few == "columns" else sizes)
    k = draw(sizes)
    assume(m * n * k <= work and max(1, m) * max(1, n) <= 100_000)
    return m, n, k


# -- numbers


def fill(view: np.ndarray, rng: np.random.Generator, spread: int = 3) -> None:
    """Normal numbers of magnitudes 2**-spread to 2**spread, some of them zero of either sign."""
    values = rng.standard_normal(view.shape) * np.exp2(rng.integers(-spread, spread + 1, view.shape))
    values[rng.random(view.shape) < 0.05] = 0.0
    values[rng.random(view.shape) < 0.05] = -0.0
    view[...] = values


def wide(x: np.ndarray) -> np.ndarray:
    """``x`` in a dtype in which its products are exact, or nearly so."""
    return x.astype(np.float64 if x.dtype == np.float32 else np.longdouble)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A.B of wide operands by NumPy, never by us: ``np.dot`` is not affected by patching."""
    if a.ndim <= 2 and b.ndim <= 2:
        return np.dot(a, b)
    vector_a, vector_b = a.ndim == 1, b.ndim == 1
    a = a[None, :] if vector_a else a
    b = b[:, None] if vector_b else b
    stack = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    wide_a, wide_b = np.broadcast_to(a, stack + a.shape[-2:]), np.broadcast_to(b, stack + b.shape[-2:])
    result = np.zeros(stack + (a.shape[-2], b.shape[-1]), a.dtype)
    for index in np.ndindex(stack):
        result[index] = np.dot(wide_a[index], wide_b[index])
    if vector_a:
        result = result[..., 0, :]
    return result[..., 0] if vector_b else result


def assert_close(
    ours, a: np.ndarray, b: np.ndarray, slack: np.ndarray | float = 0.0, scale: float = 1.0
) -> None:
    """|ours - A.B| <= k eps |A|.|B|, elementwise: what any order of summation keeps, with or without FMA.

    ``scale`` multiplies the product (exactly, so a power of two), ``slack`` is allowed on top.
    """
    k, info = a.shape[-1], np.finfo(a.dtype)
    exact = scale * product(wide(a), wide(b))
    bound = (
        k
        * (
            float(info.eps) * abs(scale) * product(abs(wide(a)), abs(wide(b)))
            + float(info.smallest_subnormal)
        )
        + slack
    )
    error = abs(wide(np.asarray(ours)) - exact)
    worst = np.unravel_index(np.argmax(error - bound), error.shape) if error.size else ()
    assert (error <= bound).all(), (
        f"element {worst}: {error[worst]} off, {bound[worst]} allowed, exact is {exact[worst]}"
    )


def assert_same_bits(x, y) -> None:
    """Equal to the last bit, signs of zeros included (NaNs need not have one payload)."""
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(np.signbit(x[~np.isnan(x)]), np.signbit(y[~np.isnan(y)]))


# -- who computed


@contextlib.contextmanager
def served_by_us(dtype: str, computed: bool = True) -> Iterator[None]:
    """Our kernels, and nobody else, serve the calls of that dtype in the block; ``computed``: there are
    elements.
    """
    before = tvmgemm.stats()
    yield
    after = tvmgemm.stats()
    assert after.declined[dtype] == before.declined[dtype], "a call was declined, NumPy computed it"
    if computed:
        assert after.served[dtype] > before.served[dtype], "no kernel of ours ran"


@contextlib.contextmanager
def planned(
    blocks: tuple[int, int, int] | None = None, parallel_work: int | None = None, **options
) -> Iterator[None]:
    """Options for a block; there, every plan has ``blocks`` (mc in micro-tiles, nc in micro-tiles, kc) and
    products are shared out to threads from ``parallel_work`` multiply-adds. So small operands run through
    every loop of a kernel.
    """
    with contextlib.ExitStack() as stack:
        if blocks is not None:

            def small(spec, host):
                return BlockSizes(blocks[0] * (spec.mr or 8), blocks[1] * (spec.nr or 8), blocks[2])

            stack.enter_context(mock.patch.object(planner, "blocks_of", small))
        if parallel_work is not None:
            stack.enter_context(mock.patch.object(sharing, "PARALLEL_WORK", parallel_work))
        with tvmgemm.options(**options):
            forget_plans()
            yield
    forget_plans()


def forget_plans() -> None:
    """Make the planner decide anew; loaded kernels stay."""
    rules.rules_of_kind.cache_clear()  # PARALLEL_WORK may be another
    with kernels.lock:
        dispatch.lib.tg_clear_plans()
        dispatch._published.clear()


def multiply(a, b, c, dtype: str) -> None:
    """C = A.B by a kernel of ours, which writes nothing else."""
    outside = c.outside()
    with served_by_us(dtype):
        tvmgemm.matmul(a.view, b.view, out=c.view)
    np.testing.assert_array_equal(c.outside(), outside)

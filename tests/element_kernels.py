"""Kernels of every dtype, called directly: operands over all that a type holds, and what they have to come to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from direct_kernels import stored
from hypothesis import strategies as st

from tvmgemm.family.arithmetic import arithmetic_of, lanes_of
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec


def numbers(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """The whole range of an integer type, its ends often; any byte for a boolean; normal numbers of 1/8 to 8 and zeros."""
    if kind == "bool":
        return (rng.integers(0, 256, shape) * (rng.random(shape) < 0.2)).astype("u1").view("?")
    if kind.startswith(("int", "uint")):
        info = np.iinfo(kind)
        values = rng.integers(info.min, info.max, shape, kind, endpoint=True)
        for end in (info.min, info.max):
            values[rng.random(shape) < 0.1] = end
        return values
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))
    values[rng.random(shape) < 0.05] = 0.0
    return bits_of(values, kind)


def bits_of(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounded to a floating-point type, as kernels take it."""
    if kind != "bfloat16":
        return values.astype(kind)
    # float32 rounded to its upper 16 bits, to nearest, ties to even
    whole = values.astype("f4").view("u4")
    rounded = whole + 0x7FFF + (whole >> 16 & 1)
    return np.where(np.isnan(values), whole >> 16 | 0x40, rounded >> 16).astype("u2")


def wide(x: np.ndarray, kind: str) -> np.ndarray:
    """Floating-point operands in float64, where their products are exact."""
    return (x.astype("u4") << 16).view("f4").astype("f8") if kind == "bfloat16" else x.astype("f8")


LAYOUTS = {
    "row": lambda rows, columns: (columns + 1, 1),
    "col": lambda rows, columns: (1, rows + 2),
    "strided": lambda rows, columns: (3 * columns, 3),
    "backwards": lambda rows, columns: (-2 * columns - 1, -2),
}


def lay_out(values: np.ndarray, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """``values`` with such strides, and the buffer that they lie in; between them are bytes 0x7F, NaNs of most kinds."""
    rows, columns = values.shape
    strides = LAYOUTS[layout](rows, columns)
    size = sum(abs(stride) * max(0, extent - 1) for stride, extent in zip(strides, values.shape)) + 1
    buffer = np.full(size * values.itemsize, 0x7F, "u1")
    first = sum(-stride * max(0, extent - 1) for stride, extent in zip(strides, values.shape) if stride < 0)
    view = np.ndarray(
        values.shape, values.dtype, buffer, first * values.itemsize, tuple(s * values.itemsize for s in strides)
    )
    view[...] = values
    return view, buffer


def assert_right(spec: KernelSpec, a: np.ndarray, b: np.ndarray, c: np.ndarray, scale=None, old=None) -> None:
    """C is A.B (alpha A.B + beta C) as NumPy defines it for the dtype, after its cast of the operands to C's."""
    row, k = DTYPES[spec.dtype], a.shape[1]
    if row.c == "bool":
        truth = np.dot((a.view("u1") != 0).astype("f4"), (b.view("u1") != 0).astype("f4")) > 0
        np.testing.assert_array_equal(c.view("u1"), truth.astype("u1"))
        return
    alpha, beta = (1, 0) if scale is None else scale.tolist()
    if row.c.startswith(("int", "uint")):
        modulo = np.dot(a.astype("i8").astype("u8"), b.astype("i8").astype("u8")) * np.uint64(alpha % 2**64)
        if beta:
            modulo += old.astype("i8").astype("u8") * np.uint64(beta % 2**64)
        np.testing.assert_array_equal(c, modulo.astype(row.c))
        return
    a, b, c = wide(a, row.a), wide(b, row.b), wide(c, row.c)
    exact, magnitude = alpha * np.dot(a, b), abs(alpha) * np.dot(abs(a), abs(b))
    if beta:
        exact, magnitude = exact + beta * wide(old, row.c), magnitude + abs(beta * wide(old, row.c))
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0.0}[row.c]
    least = {"float16": 2.0**-25, "bfloat16": 0.0, "float32": 0.0}[row.c]
    terms = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic).products * k
    bound = (terms + 2) * 2.0**-24 * magnitude
    bound = bound + unit * (abs(exact) + bound) + least
    off = abs(c - exact) - bound
    worst = np.unravel_index(np.argmax(off), off.shape)
    assert off[worst] <= 0, f"element {worst}: {c[worst]} instead of {exact[worst]}, {bound[worst]} is allowed"


@dataclass(frozen=True)
class Call:
    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    blocks: tuple[int, int, int]
    tasks: int
    seed: int


@st.composite
def calls(draw, spec: KernelSpec) -> Call:
    """Sizes around tiles and groups, every layout that the kernel takes, blocks of one tile, of few and of everything."""
    group = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic).group
    lanes = lanes_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)

    def near(*edges: int):
        return draw(st.sampled_from([max(1, e + d) for e in edges for d in (-1, 0, 1)]))

    m, n = near(2, spec.mr, 2 * spec.mr), near(2, lanes, spec.nr, 2 * spec.nr)
    k = draw(st.sampled_from([0, near(2, group, 3 * group), near(4 * lanes), 70]))
    in_place = ("row",) if "b" not in spec.packing else tuple(LAYOUTS)
    of_c = ("row", "strided") if spec.blocked else ("row",)
    blocks = draw(st.sampled_from([(spec.mr, spec.nr, 2 * group), (2 * spec.mr, 2 * spec.nr, 8 * group), (10**6,) * 3]))
    kinds = [draw(st.sampled_from(choices)) for choices in (tuple(LAYOUTS), in_place, of_c)]
    return Call(m, n, k, *kinds, blocks, draw(st.sampled_from([1, 3])) if spec.parallel else 1, draw(st.integers(0, 99)))


def run(kernels, spec: KernelSpec, call: Call, scale: np.ndarray | None = None) -> set[str]:
    """One call, checked; returns the flags that it raised."""
    row, rng = DTYPES[spec.dtype], np.random.default_rng(call.seed)
    a, _ = lay_out(numbers(row.a, (call.m, call.k), rng), call.a)
    b, _ = lay_out(numbers(row.b, (call.k, call.n), rng), call.b)
    old = numbers(row.c, (call.m, call.n), rng)
    c, buffer = lay_out(old, call.c)
    places = np.ones(buffer.size, bool)
    inside = np.ndarray(c.shape, c.dtype, places, c.__array_interface__["data"][0] - buffer.__array_interface__["data"][0], c.strides)
    inside[...] = 0
    flags = kernels.multiply(spec, a, b, c, call.blocks, call.tasks, scale)
    assert_right(spec, a, b, c, scale, old)
    assert (buffer[places] == 0x7F).all(), "wrote between the elements of C"
    return flags


def flushes(spec: KernelSpec) -> bool:
    """Whether units for bfloat16 multiply, to which subnormal numbers are zeros and which raise no flags."""
    return "bfloat16" in spec.dtype and arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic).element == "uint16"


def check_not_finite(kernels, spec: KernelSpec) -> None:
    row = DTYPES[spec.dtype]
    rng = np.random.default_rng(1)
    for m, n, k in ((5, 7, 6), (17, 49, 33), (30, 100, 70)):
        a, b = 1 + rng.random((m, k)), 1 + rng.random((k, n))
        a[0], a[1, 3], b[2, -1] = np.nan, np.inf, np.inf
        a, b = bits_of(a, row.a), bits_of(b, row.b)
        c = np.zeros((m, n), stored(row.c))
        assert kernels.multiply(spec, a, b, c, (spec.mr, spec.nr, 16)) == set()
        with np.errstate(invalid="ignore"):
            exact = np.dot(wide(a, row.a), wide(b, row.b))
        found = wide(c, row.c)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
        np.testing.assert_array_equal(np.isinf(found), np.isinf(exact))
        a[2] = bits_of(np.zeros(k), row.a)
        assert kernels.multiply(spec, a, b, c, (spec.mr, spec.nr, 16)) == (set() if flushes(spec) else {"invalid"})


def check_flushed(kernels, spec: KernelSpec) -> None:
    """Exactly operands, products and sums below 2**-126 are zeros, whatever they meet; no flag says so."""
    row = DTYPES[spec.dtype]

    def product(a: list[float], b: list[float]) -> float:
        c = np.full((1, 1), 7, stored(row.c))
        assert kernels.multiply(spec, bits_of(np.array([a]), row.a), bits_of(np.array([b]).T, row.b), c, (64, 64, 512)) == set()
        return float(wide(c, row.c)[0, 0])

    least, below = 2.0**-126, 2.0**-127
    assert product([least], [1.0]) == least and product([-least], [0.5]) == 0
    assert product([below], [2.0]) == product([2.0], [below]) == product([below], [2.0**100]) == 0
    assert product([2.0**-63], [2.0**-63]) == least and product([2.0**-63], [2.0**-64]) == 0
    assert product([1.0, below], [1.0, 2.0**100]) == 1.0
    # Two products of which each is large enough, and whose sum is not.
    assert product([1.5 * least, 0, -least], [1.0, 0, 1.0]) == 0
    assert np.isnan(product([below], [np.inf])) and product([2.0**127], [4.0]) == np.inf

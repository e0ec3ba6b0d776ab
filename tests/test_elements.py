"""Kernels of every dtype, called directly: conversions, groups of elements, sums in a wider or narrower type, rounding.

By default what the widest level of this machine has for each dtype, and packed kernels of the levels below; the rest with
``-m slow``. Integers and booleans are exact, half-precision results within half a unit of the last place of a float32 sum.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from direct_kernels import announced, stored
from equivalence import FLOATS
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmgemm.family.arithmetic import WAYS, arithmetic_of, lanes_of
from tvmgemm.family.generator import generate
from tvmgemm.family.isa import ISAS
from tvmgemm.family.members import member, unblocked_member
from tvmgemm.family.tiles import TILES
from tvmgemm.host import host
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

pytest.importorskip("tvm", reason="needs the compiler")

RUNS = [isa for isa in ISAS.values() if isa.arch == host().arch and isa.requires <= host().features]
OTHERS = [dtype for dtype in DTYPES if any(dtype in WAYS[isa.name] for isa in RUNS) and dtype not in FLOATS]
OTHERS = [dtype for dtype in OTHERS if not dtype.startswith("complex")]  # those have test_complex.py


def specs() -> tuple[list[KernelSpec], list[KernelSpec]]:
    """Those that run every time, and the rest."""
    often, rest = [], []
    for isa, dtype in itertools.product(RUNS, OTHERS):
        if dtype not in WAYS[isa.name]:
            continue
        widest = isa == host().isa(None, dtype)
        packed = member("B3A2C0", dtype, isa.name, parallel="ic")
        often.append(packed)
        often += [member("B3A2C0", dtype, isa.name, parallel="pc")] if widest and dtype in ("int8", "uint8-int32", "bool") else []
        often += [unblocked_member(dtype, isa.name)] if widest else []
        rest += [unblocked_member(dtype, isa.name)]
        for variant, packing in itertools.product(("B3A2C0", "A3B2C0"), ("ab", "a", "b", "none")):
            rest.append(member(variant, dtype, isa.name, packing=packing, parallel="jc"))
        for tile in TILES[isa.name, dtype]["C"][2:]:
            rest.append(member("B3A2C0", dtype, isa.name, tile, "none"))
        for way in WAYS[isa.name][dtype][2:]:
            rest.append(member("B3A2C0", dtype, isa.name, arithmetic=way))
    return often, [spec for spec in dict.fromkeys(rest) if spec not in often]


OFTEN, REST = specs()
EVERY = [pytest.param(spec, id=spec.name) for spec in OFTEN]
EVERY += [pytest.param(spec, id=spec.name, marks=pytest.mark.slow) for spec in REST]


@pytest.fixture(scope="module")
def kernels(request, tmp_path_factory):
    with announced(request, tmp_path_factory.mktemp("elements")) as built:
        yield built


# -- operands and what they come to


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


@pytest.mark.parametrize("spec", EVERY)
def test_products(kernels, spec):
    """Of every shape, layout and blocking; without flags, since nothing overflows or vanishes."""

    @settings(max_examples=25)
    @given(calls(spec))
    def check(call):
        assert run(kernels, spec, call) <= ({"underflow"} if DTYPES[spec.dtype].c == "float16" else set())

    check()


# -- the ends of what a type holds


def widest(dtype: str, packing: str = "ab", **rest) -> KernelSpec:
    """The kernel that this machine uses."""
    isa = host().isa(None, dtype)
    if isa is None:
        pytest.skip(f"no kernels for {dtype} here")
    return member("B3A2C0", dtype, isa.name, packing=packing, **rest)


LOWEST = [dtype for dtype in OTHERS if DTYPES[dtype].a.startswith(("int", "uint"))]


@pytest.mark.parametrize("dtype", LOWEST)
def test_the_largest_products(kernels, dtype):
    """Lowest times lowest and highest times highest, for longer than any sum can hold them: they wrap, nothing saturates."""
    spec, row = widest(dtype), DTYPES[dtype]
    for end_a, end_b in itertools.product((np.iinfo(row.a).min, np.iinfo(row.a).max), (np.iinfo(row.b).min, np.iinfo(row.b).max)):
        for k in (7, 515, 2**17 + 4):
            a, b = np.full((3, k), end_a, row.a), np.full((k, 5), end_b, row.b)
            c = np.zeros((3, 5), row.c)
            kernels.multiply(spec, a, b, c, (1000, 1000, 2048))
            assert_right(spec, a, b, c)


def test_no_count_of_true_terms_is_false(kernels):
    for packing in ("ab", "none"):
        for k in (1, 255, 256, 65536, 2**17):
            a, b, c = np.ones((2, k), "?"), np.ones((k, 3), "?"), np.zeros((2, 3), "?")
            kernels.multiply(widest("bool", packing), a, b, c, (1000, 1000, 2048))
            assert (c.view("u1") == 1).all()


def test_any_byte_is_true(kernels):
    """1 times 2 has no bit in common."""
    for packing in ("ab", "none"):
        a, b, c = (np.zeros(shape, "u1") for shape in ((4, 9), (9, 70), (4, 70)))
        a[:, 5], b[5] = 1, 2
        kernels.multiply(widest("bool", packing), a.view("?"), b.view("?"), c.view("?"), (1000, 1000, 2048))
        assert (c == 1).all()


# -- half precision

HALVES = [dtype for dtype in OTHERS if "float16" in dtype]


def flushes(spec: KernelSpec) -> bool:
    """Whether units for bfloat16 multiply, to which subnormal numbers are zeros and which raise no flags."""
    return "bfloat16" in spec.dtype and arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic).element == "uint16"


@pytest.mark.parametrize("packing", ["ab", "none"])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays_where_it_is(kernels, dtype, packing):
    """Rows with NaN and infinity: no other element becomes one, and no flag is raised that the product does not raise."""
    check_not_finite(kernels, widest(dtype, packing))


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


@pytest.mark.parametrize("packing", ["ab", "none"])
def test_float16_overflows_as_numpy_does(kernels, packing):
    """To infinity, with the flag; a sum that comes back below the largest number does neither."""
    spec = widest("float16", packing)
    big, c = np.full((3, 40), 60000.0, "f2"), np.zeros((3, 20), "f2")
    assert "overflow" in kernels.multiply(spec, big, np.ones((40, 20), "f2"), c, (1000, 1000, 16))
    assert np.isposinf(c).all()
    signs = np.where(np.arange(40)[:, None] < 20, 1, -1) * np.ones((40, 20))
    assert kernels.multiply(spec, big, signs.astype("f2"), c, (1000, 1000, 16)) == set()
    assert (c == 0).all()


@pytest.mark.parametrize("packing", ["ab", "none"])
@pytest.mark.parametrize("dtype", HALVES)
def test_subnormal_numbers_count(kernels, dtype, packing):
    """Operands and results: nothing is flushed to zero, but by units for bfloat16."""
    spec, row = widest(dtype, packing), DTYPES[dtype]
    if flushes(spec):
        check_flushed(kernels, spec)
        return
    least = 2.0**-24 if row.a == "float16" else 2.0**-133
    steps = np.arange(1, 100) if row.a == "float16" else np.arange(1, 100) % 2 + 1
    a, b = bits_of(steps[:, None] * least, row.a), bits_of(np.ones((1, 50)), row.b)
    c = np.zeros((99, 50), stored(row.c))
    kernels.multiply(spec, a, b, c, (1000, 1000, 512))
    np.testing.assert_array_equal(wide(c, row.c), steps[:, None] * least * np.ones(50))


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


@pytest.mark.parametrize("dtype", [d for d in HALVES if DTYPES[d].c in ("float16", "bfloat16")])
def test_sums_are_rounded_once(kernels, dtype):
    """2048 + 1 + 1 ... : rounding between blocks of k would lose every 1. Blocks of m and n that share the sums' memory."""
    spec, row = widest(dtype, parallel="ic"), DTYPES[dtype]
    k = 600
    a, b = np.ones((2 * spec.mr + 3, k)), np.ones((k, 2 * spec.nr + 5))
    a[:, 0] = 2048
    c = np.zeros((a.shape[0], b.shape[1]), stored(row.c))
    a, b = bits_of(a, row.a), bits_of(b, row.b)
    for blocks, tasks in itertools.product([(spec.mr, spec.nr, 8), (1000, 1000, 64)], (1, 3)):
        kernels.multiply(spec, a, b, c, blocks, tasks)
        np.testing.assert_array_equal(wide(c, row.c), wide(bits_of(np.full(c.shape, 2048.0 + k - 1), row.c), row.c))


def test_sums_that_wait_take_bounded_memory(kernels):
    """C is looked at in pieces: m x n float32 numbers would be 64 MiB here."""
    spec = widest("float16", parallel="ic")
    m, n, k = 4096, 4096, 20
    rng = np.random.default_rng(2)
    a, b, c = numbers("float16", (m, k), rng), numbers("float16", (k, n), rng), np.zeros((m, n), "f2")
    assert kernels.workspace(spec, a, b, c, (48, 1024, 16), 1) < 6 << 20
    kernels.multiply(spec, a, b, c, (48, 1024, 16))
    assert_right(spec, a[:300], b, c[:300])
    assert_right(spec, a[-300:], b, c[-300:])


# -- gemm


@pytest.mark.parametrize("packing", ["ab", "none"])
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64", "float16", "bfloat16", "int8-int32"])
def test_gemm(kernels, dtype, packing):
    """alpha and beta are integers of C's type, or float32 numbers that scale the sum before it is rounded."""
    spec, row = widest(dtype, packing, op="gemm"), DTYPES[dtype]
    kind = "float32" if "float" in row.c else row.c
    for (alpha, beta), k, layout in itertools.product([(3, 0), (1, 1), (2, 5)], (0, 9, 70), ("row", "strided")):
        call = Call(2 * spec.mr + 1, spec.nr + 3, k, "row", "row", layout, (spec.mr, spec.nr, 16), 1, k)
        assert run(kernels, spec, call, np.array([alpha, beta], kind)) <= {"underflow"}


# -- refusals


@pytest.mark.parametrize(
    "spec, words",
    [
        (KernelSpec("int8", "x86-64-v4-vnni", "C3A2B0", 0, 64, 6, packing="ac"), "have the last step of B3A2C0 and A3B2C0"),
        (KernelSpec("int8", "x86-64-v4-vnni", "B3A2C0", 8, 48, step="packed"), "have the last step of B3A2C0 and A3B2C0"),
        (KernelSpec("float16", "x86-64-v2", "B3A2C0", 5, 8), "no kernels for float16 on x86-64-v2; there are some for float32"),
        (KernelSpec("int8", "x86-64-v4", "B3A2C0", 8, 48, arithmetic="dot8"), "int8 on x86-64-v4 has madd16, mul16"),
        (KernelSpec("int8", "x86-64-v4", "B3A2C0", 8, 48, packing="b", arithmetic="madd16"), "madd16 takes 2 elements of k at a time"),
        (KernelSpec("bool", "x86-64-v4", "B3A2C0", 8, 48, op="gemm"), "gemm of bool"),
        (KernelSpec("int32", "x86-64-v4", "B3A2C0", 8, 64), "needs 38 vector registers"),
    ],
)  # fmt: skip
def test_what_makes_no_kernel_is_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        generate(spec)


def test_names_tell_the_arithmetic():
    names = {spec.name for spec in (*OFTEN, *REST)}
    assert len(names) == len({*OFTEN, *REST})
    assert member("B3A2C0", "int8", "x86-64-v4-vnni", arithmetic="madd16").name.endswith("-madd16-x86-64-v4-vnni")

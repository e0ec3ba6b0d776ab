"""Kernels of every dtype, called directly: conversions, groups of elements, sums in a wider or narrower type, rounding.

By default what the widest level of this machine has for each dtype, and packed kernels of the levels below; the rest with
``-m slow``. Integers and booleans are exact, half-precision results within half a unit of the last place of a float32 sum.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from direct_kernels import announced, stored
from element_kernels import (
    Call,
    assert_right,
    bits_of,
    calls,
    check_flushed,
    check_not_finite,
    flushes,
    numbers,
    run,
    wide,
)
from equivalence import FLOATS
from hypothesis import given, settings

from tvmgemm.family.arithmetic import WAYS
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


# -- products


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


@pytest.mark.parametrize("packing", ["ab", "none"])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays_where_it_is(kernels, dtype, packing):
    """Rows with NaN and infinity: no other element becomes one, and no flag is raised that the product does not raise."""
    check_not_finite(kernels, widest(dtype, packing))


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

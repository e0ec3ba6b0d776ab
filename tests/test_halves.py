"""float16 numbers multiplied as two bfloat16 ones each, by AMX (the CPU's or emulated) and by AVX512-BF16."""

from __future__ import annotations

import itertools

import amx
import numpy as np
import pytest
from direct_kernels import Kernels
from element_kernels import assert_right, calls, check_not_finite, lay_out, numbers, run
from equivalence import forget_plans, planned, served_by_us
from hypothesis import given, settings

import tvmgemm
from tvmgemm import dispatch
from tvmgemm.family.arithmetic import ARITHMETICS, WAYS
from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.isa import ISAS
from tvmgemm.family.members import member
from tvmgemm.family.outline import outline
from tvmgemm.family.validity import check
from tvmgemm.host import Host, host
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

codegen = pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")

PAIRS = "x86-64-v4-bf16"
LEVELS = {"dot16x2": PAIRS, "tile16x2": amx.LEVEL}


def packed(arithmetic: str, dtype: str = "float16-float32", **rest) -> KernelSpec:
    return member(rest.pop("variant", "B3A2C0"), dtype, LEVELS[arithmetic], arithmetic=arithmetic, **rest)


OFTEN = [packed(way, parallel="ic") for way in LEVELS]
REST = [packed(way, "float16", parallel="ic", variant="A3B2C0") for way in LEVELS]
REST += [packed(way, "float16", op="gemm") for way in LEVELS] + [packed(way, parallel="pc") for way in LEVELS]
REST += [packed("dot16x2", tile=tile, parallel="jc") for tile in ((1, 16), (5, 48), (12, 16))]
EVERY = [pytest.param(spec, id=spec.name) for spec in OFTEN]
EVERY += [pytest.param(spec, id=spec.name, marks=pytest.mark.slow) for spec in REST]

#: Every float16 number, and the finite ones among them.
ALL = np.arange(1 << 16, dtype="u2").view("f2")
FINITE = np.isfinite(ALL)


@pytest.fixture(scope="module")
def unit(tmp_path_factory):
    with amx.unit(tmp_path_factory.mktemp("amx")) as unit:
        yield unit


@pytest.fixture(scope="module")
def kernels(request, tmp_path_factory):
    built = Kernels(tmp_path_factory.mktemp("halves"))
    built.announce(OFTEN)
    yield built
    built.close()


@pytest.fixture(params=LEVELS)
def way(request):
    """The arithmetic, where this machine can run it."""
    if request.param == "tile16x2":
        request.getfixturevalue("unit")
    elif not ISAS[PAIRS].requires <= host().features:
        pytest.skip("needs a CPU with AVX512-BF16")
    return request.param


@pytest.mark.parametrize("spec", EVERY)
def test_products(request, kernels, spec):
    """Of every shape, layout and blocking, as by kernels that convert."""
    if spec.isa == amx.LEVEL:
        request.getfixturevalue("unit")
    elif not ISAS[PAIRS].requires <= host().features:
        pytest.skip("needs a CPU with AVX512-BF16")
    scale = np.array([3, -2], DTYPES[spec.dtype].scale) if spec.op == "gemm" else None

    @settings(max_examples=25)
    @given(calls(spec))
    def check(call):
        assert run(kernels, spec, call, scale) <= {"underflow"}

    check()


def test_the_parts_are_all_of_a_number(kernels, way):
    """x times 1 is x, for each of the 65536, as either operand; infinities and NaNs are what they were. No flag is raised."""
    spec = packed(way, parallel="ic")
    quiet = ~np.isnan(ALL) | (ALL.view("u2") & 0x200 != 0)
    for x in (ALL[FINITE], ALL[quiet]):
        for layout in ("row", "col", "strided"):
            column, _ = lay_out(x[:, None], layout)
            c = np.zeros((x.size, 1), "f4")
            assert kernels.multiply(spec, column, np.ones((1, 1), "f2"), c, (1 << 20, 1 << 20, 64)) == set()
            np.testing.assert_array_equal(c[:, 0], x.astype("f4"))
            row, _ = lay_out(x[None, :], layout)
            c = np.zeros((1, x.size), "f4")
            assert kernels.multiply(spec, np.ones((1, 1), "f2"), row, c, (1 << 20, 1 << 20, 64)) == set()
            np.testing.assert_array_equal(c[0], x.astype("f4"))


def test_products_of_two_are_exact(kernels, way):
    """One term: 22 significant bits, which float32 has room for, down to the square of the least subnormal number."""
    spec, rng = packed(way, parallel="ic"), np.random.default_rng(5)
    a, b = (rng.choice(ALL[FINITE], size) for size in ((300, 1), (1, 300)))
    a[:2, 0] = b[0, :2] = [2.0**-24, 65504]
    c = np.zeros((300, 300), "f4")
    assert kernels.multiply(spec, a, b, c, (1 << 20, 1 << 20, 64)) == set()
    np.testing.assert_array_equal(c, a.astype("f4") * b.astype("f4"))


def test_what_is_not_finite_stays_where_it_is(kernels, way):
    for dtype in ("float16", "float16-float32"):
        check_not_finite(kernels, packed(way, dtype, parallel="ic"))


def test_a_second_part_meets_no_infinity(kernels, way):
    """inf . x is an infinity whichever part of x is zero, and inf . 0 a NaN with the flag; in blocks of k of their own too."""
    spec = packed(way, parallel="ic")
    a, b = np.ones((40, 100), "f2"), np.ones((100, 60), "f2")
    a[3, 50] = np.inf
    b[50] = [1, 2.0**-24, 2049, 0.0][:3] * 20  # no second part; no first part; both
    c = np.zeros((40, 60), "f4")
    for blocks in ((32, 48, 32), (1 << 20, 1 << 20, 1 << 20)):
        assert kernels.multiply(spec, a, b, c, blocks, 3) == set()
        assert np.isposinf(c[3]).all() and np.isfinite(np.delete(c, 3, 0)).all()
    a[3, 10] = -np.inf  # in another block of k: the sum is no number
    for blocks in ((32, 48, 32), (1 << 20, 1 << 20, 1 << 20)):
        assert kernels.multiply(spec, a, b, c, blocks, 3) == {"invalid"}
        assert np.isnan(c[3]).all() and np.isfinite(np.delete(c, 3, 0)).all()
    a[3, 10], b[50, 7] = 1, 0
    assert kernels.multiply(spec, a, b, c, (32, 48, 32)) == {"invalid"}
    assert np.isnan(c[3, 7]) and np.isposinf(np.delete(c[3], 7)).all()


def test_nothing_but_what_is_not_finite(kernels, way):
    """Operands without a finite element, with any layout: every sum is computed again."""
    spec, rng = packed(way, parallel="ic"), np.random.default_rng(6)
    for layouts in itertools.product(("row", "col", "strided"), repeat=2):
        values = (rng.choice([np.inf, -np.inf, np.nan], s, p=[0.6, 0.3, 0.1]).astype("f2") for s in ((35, 3), (3, 50)))
        a, b = (lay_out(x, layout)[0] for x, layout in zip(values, layouts))
        c = np.zeros((35, 50), "f4")
        assert kernels.multiply(spec, a, b, c, (32, 48, 32)) <= {"invalid"}
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(c, np.dot(a.astype("f8"), b.astype("f8")))


def test_float16_overflows_and_rounds_once(kernels, way):
    spec = packed(way, "float16", parallel="ic")
    big, c = np.full((3, 40), 60000.0, "f2"), np.zeros((3, 20), "f2")
    assert "overflow" in kernels.multiply(spec, big, np.ones((40, 20), "f2"), c, (1000, 1000, 32))
    assert np.isposinf(c).all()
    k = 600
    a, c = np.ones((3, k), "f2"), np.zeros((3, 5), "f2")
    a[:, 0] = 2048
    kernels.multiply(spec, a, np.ones((k, 5), "f2"), c, (1000, 1000, 64))
    np.testing.assert_array_equal(c, np.full((3, 5), 2048 + k - 1, "f4").astype("f2"))


def test_subnormal_numbers_count(kernels, way):
    spec = packed(way, "float16", parallel="ic")
    a, c = (np.arange(1, 1100) * 2.0**-24).astype("f2")[:, None], np.zeros((1099, 3), "f2")
    kernels.multiply(spec, a, np.ones((1, 3), "f2"), c, (1000, 1000, 64))
    np.testing.assert_array_equal(c, np.repeat(a, 3, 1))


# -- the whole way


def test_dispatch(request, way, monkeypatch):
    """With AMX by default; with AVX512-BF16 for those who force it."""
    machine = amx.host_with_amx() if way == "tile16x2" else host()
    monkeypatch.setattr(dispatch, "host", lambda: machine)
    forget_plans()
    rng = np.random.default_rng(3)
    a, b = (numbers("float16", shape, rng) for shape in ((2, 130, 200), (2, 200, 90)))
    try:
        for forced, kind in ((None, "f2"), (way, "f4")):
            ours = way in (forced, "tile16x2")
            with planned(parallel_work=1000, num_threads=2, arithmetic=forced):
                told = tvmgemm.explain(a, b, dtype=kind)
                assert told.served and (told.isa == LEVELS[way]) == ours, told
                assert (told.arithmetic == way) == ours and f", {told.arithmetic}\n" in str(told)
                with served_by_us("float16" if kind == "f2" else "float16-float32"):
                    c = tvmgemm.matmul(a, b, dtype=kind)
            for x, y, z in zip(a, b, c):
                assert_right(packed(way, told.dtype), x, y, z)
    finally:
        monkeypatch.undo()
        forget_plans()


def test_a_level_that_adds_nothing_by_default_is_not_used():
    """AVX512-BF16 takes longer for four products than float32 FMAs for one: kernels of the level below serve, unless forced."""
    features = ISAS[PAIRS].requires | {"avx512_vnni"}
    machine = Host("x86_64", features, (), 1)
    assert machine.isa(None, "float16").name == "x86-64-v4" and machine.isa(None, "bfloat16").name == PAIRS
    assert machine.isa(None, "float16", "dot16x2").name == PAIRS
    assert machine.isa(None, "int16").name == "x86-64-v4-vnni"  # the same arithmetic in one instruction


# -- what it looks like


def test_the_loops_are_those_of_the_units():
    loop = hottest(inner_loops(codegen.assembly(packed("dot16x2")), "x86_64"))
    assert (loop.fmas, loop.loads, loop.broadcasts, loop.stack) == (48, 3, 8, 0)
    loop = hottest(inner_loops(codegen.assembly(packed("tile16x2")), "x86_64"))
    assert (loop.matrix, loop.loads, loop.registers) == (16, 10, 8)
    assert loop.stack <= 1  # the workspace's start, once in 16 products of 16 cycles
    text = outline(packed("tile16x2"))
    assert "in 2 planes" in text and "Ac[q, ir:+32, p:+32]*Bc[r, p:+32, jr:+32]" in text
    for way in LEVELS:
        with pytest.raises(ValueError, match="parts of an element|2 elements of k"):
            check(member("B3A2C0", "float16", LEVELS[way], (16, 16), "b", arithmetic=way))
    assert all(ARITHMETICS[way].halves == (way in LEVELS) for row in WAYS.values() for ways in row.values() for way in ways)

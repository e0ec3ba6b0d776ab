"""Kernels for a matrix unit (AMX), run on it or, where the CPU has none, in the emulator."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from pathlib import Path

import amx
import numpy as np
import pytest
from direct_kernels import announced, stored
from element_kernels import assert_right, calls, check_flushed, check_not_finite, numbers, run
from equivalence import forget_plans, planned, served_by_us
from hypothesis import given, settings
from plain_kernels import compiler

import tvmgemm
from tvmgemm import dispatch
from tvmgemm.family.arithmetic import ARITHMETICS, WAYS
from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.members import member
from tvmgemm.family.outline import outline
from tvmgemm.family.validity import check
from tvmgemm.host import Host, host
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

codegen = pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")

MATRIX = [dtype for dtype, ways in WAYS[amx.LEVEL].items() if ARITHMETICS[ways[0]].matrix]
BYTES = [dtype for dtype in MATRIX if ARITHMETICS[WAYS[amx.LEVEL][dtype][0]].element == "uint8"]


def packed(dtype: str, **rest) -> KernelSpec:
    return member("B3A2C0", dtype, amx.LEVEL, **rest)


#: What differs in code: instructions, planes, sums, the way to C.
DIFFERENT = ("int8", "uint8-int8-int32", "int16", "int16-int32", "int64", "bfloat16-float32", "bfloat16", "float16")
OFTEN = [packed(dtype, parallel="ic") for dtype in DIFFERENT] + [packed("int32"), packed("uint8-int32", parallel="pc")]
REST = [packed(dtype, parallel="ic") for dtype in MATRIX if dtype not in DIFFERENT]
REST += [member("A3B2C0", dtype, amx.LEVEL, parallel="ic") for dtype in MATRIX]
REST += [packed("uint8-int32", tile=tile, parallel="jc") for tile in ((16, 16), (16, 32), (32, 16), (48, 16), (16, 48))]
REST += [packed(dtype, parallel="pc") for dtype in ("bfloat16-float32", "float16-float32", "int32", "int64")]
REST += [packed(dtype, op="gemm") for dtype in ("bfloat16", "float16", "int16", "int64")]
REST += [packed("int8-int32", op="gemm"), packed("int8", without=("vector-packing", "prefetch"))]
EVERY = [pytest.param(spec, id=spec.name) for spec in OFTEN]
EVERY += [pytest.param(spec, id=spec.name, marks=pytest.mark.slow) for spec in REST]


@pytest.fixture(scope="module")
def unit(tmp_path_factory):
    with amx.unit(tmp_path_factory.mktemp("amx")) as unit:
        yield unit


@pytest.fixture(scope="module")
def kernels(request, unit, tmp_path_factory):
    with announced(request, tmp_path_factory.mktemp("matrix")) as built:
        yield built


@pytest.mark.parametrize("spec", EVERY)
def test_products(unit, kernels, spec):
    """Of every shape, layout and blocking; the unit is in use, and in its initial state afterwards."""
    scale = np.array([3, -2], DTYPES[spec.dtype].scale) if spec.op == "gemm" else None

    @settings(max_examples=25)
    @given(calls(spec))
    def check(call):
        before = unit.instructions()
        assert run(kernels, spec, call, scale) <= ({"underflow"} if DTYPES[spec.dtype].c == "float16" else set())
        assert unit.released()
        assert before is None or (unit.instructions() > before) == (call.k > 0)

    check()


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d in DIFFERENT else pytest.mark.slow) for d in BYTES])
def test_the_largest_products(kernels, dtype):
    """Lowest times lowest and highest times highest, for longer than any sum can hold them: they wrap, nothing saturates."""
    spec, row = packed(dtype, parallel="ic"), DTYPES[dtype]
    for end_a, end_b in itertools.product((np.iinfo(row.a).min, np.iinfo(row.a).max), (np.iinfo(row.b).min, np.iinfo(row.b).max)):
        for k in (7, 515, 2**17 + 4 if row.a_size == 1 else 2**14 + 4):
            a, b = np.full((3, k), end_a, row.a), np.full((k, 5), end_b, row.b)
            c = np.zeros((3, 5), row.c)
            kernels.multiply(spec, a, b, c, (1000, 1000, 1 << 20))
            assert_right(spec, a, b, c)


@pytest.mark.parametrize("dtype", [dtype for dtype in MATRIX if "bfloat16" in dtype])
def test_bfloat16(kernels, dtype):
    """What is not finite, and what the unit takes for zero."""
    check_not_finite(kernels, packed(dtype))
    check_flushed(kernels, packed(dtype))


# -- the whole way


@pytest.fixture
def here(unit, monkeypatch):
    """This machine with AMX, for dispatch."""
    machine = amx.host_with_amx()
    monkeypatch.setattr(dispatch, "host", lambda: machine)
    forget_plans()
    yield machine
    monkeypatch.undo()
    forget_plans()


WHOLE_WAY = [pytest.param(dtype, 2) for dtype in ("int8", "int64", "bfloat16")]
WHOLE_WAY += [pytest.param(dtype, threads, marks=pytest.mark.slow) for dtype in MATRIX for threads in (1, 2)]


@pytest.mark.parametrize("dtype, threads", WHOLE_WAY)
def test_dispatch_uses_the_unit(unit, here, dtype, threads):
    """Through ufunc, planner, build and pool; capped, the next level gives the same."""
    row, rng = DTYPES[dtype], np.random.default_rng(3)
    kinds = [kind if kind != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16 for kind in (row.a, row.b, row.c)]
    a, b = (numbers(kind, size, rng).view(of) for kind, size, of in zip((row.a, row.b), ((2, 130, 200), (2, 200, 90)), kinds))
    found = []
    for cap in (None, "x86-64-v4-vnni"):
        with planned(parallel_work=1000, num_threads=threads, max_isa=cap):
            told = tvmgemm.explain(a, b, dtype=kinds[-1])
            assert told.served and (told.isa == amx.LEVEL) == (cap is None), told
            before = unit.instructions()
            with served_by_us(dtype):
                found.append(tvmgemm.matmul(a, b, dtype=kinds[-1]).view(stored(row.c)))
            assert before is None or (unit.instructions() > before) == (cap is None)
    if dtype in BYTES:
        np.testing.assert_array_equal(*found)
    for x, y, z in zip(a, b, found[0]):
        assert_right(packed(dtype), x.view(stored(row.a)), y.view(stored(row.b)), z)


@pytest.mark.parametrize("arithmetic", ["fma32", "dot16"])
def test_subnormal_bfloat16_is_kept_by_those_who_ask(arithmetic):
    """The unit that this machine has by default takes them for zeros; kernels that convert do not."""
    bf16 = pytest.importorskip("ml_dtypes").bfloat16
    if arithmetic not in WAYS[host().isa(None, "bfloat16").name]["bfloat16"]:
        pytest.skip(f"no {arithmetic} here")
    a, b = np.full((40, 50), 2.0**-130, bf16), np.ones((50, 60), bf16)
    with planned(arithmetic=arithmetic), served_by_us("bfloat16-float32"):
        assert tvmgemm.explain(a, b).kernel.endswith(f"-{arithmetic}-{tvmgemm.explain(a, b).isa}")
        assert (tvmgemm.matmul(a, b) == (50 * 2.0**-130 if arithmetic == "fma32" else 0)).all()


def test_without_permission_or_unit_it_is_the_next_level():
    features = amx.host_with_amx().features
    for missing in amx.EMULATED:
        capped = Host("x86_64", features - {missing}, (), 1)
        assert capped.isa(None, "int8").name == "x86-64-v4-vnni"


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="Linux on x86-64 wants to be asked")
def test_the_system_is_asked_once(tmp_path):
    """And only where CPU and system have the unit at all."""
    source, program = Path(__file__).with_name("cpu_harness.c"), tmp_path / "cpu"
    subprocess.run([compiler(), "-std=gnu11", "-Wall", "-Werror", "-o", program, source], check=True, timeout=120)

    def features(*arguments: str) -> tuple[str, str]:
        return tuple(subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60).stdout.splitlines())

    everything = "avx512f amx_tile amx_int8 amx_bf16"
    assert features("0x600e7", "1", "0") == (everything, "1")
    assert features("0x600e7", "1", "-1") == ("avx512f", "1")
    assert features("0x600e7", "0", "0") == features("0xe7", "1", "0") == ("avx512f", "0")


# -- what it looks like


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=() if d in ("int8", "int64") else pytest.mark.slow) for d in MATRIX])
def test_the_hot_loop_loads_once_for_each_product(dtype):
    for spec in (packed(dtype), member("A3B2C0", dtype, amx.LEVEL)):
        loop = hottest(inner_loops(codegen.assembly(spec), "x86_64"))
        how = ARITHMETICS[WAYS[amx.LEVEL][dtype][0]]
        assert loop.fmas == loop.matrix == loop.loads * (1.6 if how.halves else 1) >= 4 and loop.fmas % 4 == 0
        assert (loop.registers, loop.stores, loop.masked, loop.branches) == (8, 0, 0, 0)
        assert loop.stack <= how.halves  # of split float16 the workspace's start, once in 16 products


def test_the_loops_are_those_of_the_unit():
    text = outline(packed("int8", parallel="ic"))
    assert "tiles += Ac[ir:+32, p:+64]*Bc[p:+64, jr:+32]  # 4 loads, 4 products of 16 x 64 by 64 x 16" in text
    assert "registers: 4 hold the tile of C, 4 what streams past: 8 of 8 of the matrix unit" in text
    text = outline(packed("int32"))
    assert "for q in range(w+1):" in text and "Ac[q, ir:+32, p:+64]*Bc[w-q, p:+64, jr:+32]" in text


@pytest.mark.parametrize(
    "tile, words",
    [((48, 32), "needs 11 tile registers, x86-64-v4-amx has 8"), ((24, 32), "with tile8 both must be multiples of 16"),
     ((32, 24), "with tile8 both must be multiples of 16")],
)  # fmt: skip
def test_tiles_that_are_none(tile, words):
    with pytest.raises(ValueError, match=words):
        check(packed("int8", tile=tile))

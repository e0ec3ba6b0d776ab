"""The level of AVX-VNNI, whose instructions are those of AVX-512 VNNI in an encoding of their own: on CPUs that have it, or emulated."""

from __future__ import annotations

import amx
import numpy as np
import pytest
from direct_kernels import announced
from element_kernels import calls, numbers, run
from equivalence import forget_plans, planned, served_by_us
from hypothesis import given, settings

import tvmgemm
from tvmgemm import dispatch
from tvmgemm.family.along_k import LITTLE
from tvmgemm.family.arithmetic import WAYS
from tvmgemm.family.dot_products import COLUMNS
from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.members import default_members, member
from tvmgemm.problem import DTYPES

codegen = pytest.importorskip("tvmgemm.family.codegen", reason="needs the compiler")

OFTEN = [member("B3A2C0", dtype, amx.VNNI, parallel="ic") for dtype in ("int8-int32", "uint8-int32", "int16")]
REST = [member("B3A2C0", dtype, amx.VNNI, parallel="ic") for dtype in WAYS[amx.VNNI]]
REST += [member("A3B2C0", dtype, amx.VNNI, packing="none") for dtype in WAYS[amx.VNNI]]
REST += [member("B3A2C0", "int8", amx.VNNI, arithmetic="madd16"), member("B3A2C0", "int8", amx.VNNI, op="gemm")]
EVERY = [pytest.param(spec, id=spec.name) for spec in OFTEN]
EVERY += [pytest.param(spec, id=spec.name, marks=pytest.mark.slow) for spec in dict.fromkeys(REST) if spec not in OFTEN]


@pytest.fixture(scope="module")
def unit(tmp_path_factory):
    with amx.unit(tmp_path_factory.mktemp("vnni"), amx.VNNI) as unit:
        yield unit


@pytest.fixture(scope="module")
def kernels(request, unit, tmp_path_factory):
    with announced(request, tmp_path_factory.mktemp("kernels")) as built:
        yield built


@pytest.mark.parametrize("spec", EVERY)
def test_products(unit, kernels, spec):
    """Of every shape, layout and blocking, over the whole range; packed kernels use the instruction."""
    scale = np.array([3, -2], DTYPES[spec.dtype].scale) if spec.op == "gemm" else None

    @settings(max_examples=25)
    @given(calls(spec))
    def check(call):
        before = unit.instructions()
        assert run(kernels, spec, call, scale) == set()
        if spec.packing == "ab" and before is not None and call.n > COLUMNS:  # fewer take vectors along k, or single elements
            assert (unit.instructions() > before) == (call.m * call.n * call.k > LITTLE)

    check()


def test_dispatch(unit, monkeypatch):
    """A machine with AVX-VNNI and no AVX-512 to think of."""
    machine = amx.host_with(amx.VNNI)
    monkeypatch.setattr(dispatch, "host", lambda: machine)
    forget_plans()
    rng = np.random.default_rng(3)
    a, b = numbers("int8", (61, 130), rng), numbers("int8", (130, 50), rng)
    before = unit.instructions()
    try:
        with planned(max_isa=amx.VNNI), served_by_us("int8"):
            told = tvmgemm.explain(a, b)
            c = tvmgemm.matmul(a, b)
    finally:
        monkeypatch.undo()
        forget_plans()
    assert told.isa == amx.VNNI, told
    assert before is None or unit.instructions() > before
    np.testing.assert_array_equal(c, (a.astype("i8") @ b.astype("i8")).astype("i1"))


def test_no_default_kernel_of_bytes_uses_the_stack():
    for spec in default_members("int8", amx.VNNI):
        if spec.variant == "B3A2C0":
            loop = hottest(inner_loops(codegen.assembly(spec), "x86_64"))
            assert (loop.stack, loop.registers <= 16) == (0, True), loop

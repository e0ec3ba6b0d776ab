"""Products as people name them: their operands, calls and problems."""

from __future__ import annotations

import resource

import numpy as np
import pytest

import tvmgemm
from tvmgemm.probe import problem_of
from tvmgemm.problem import DTYPES
from tvmgemm.product import Product


@pytest.mark.parametrize("layouts", ["rr", "cr", "rc", "cc"])
@pytest.mark.parametrize("batch", [1, 6])
def test_operands_lie_as_they_should(layouts, batch):
    a, b, c = Product("float64", 3, 5, 4, batch=batch, layouts=layouts).operands()
    stack = (6,) if batch > 1 else ()
    assert (a.shape, b.shape, c.shape) == ((*stack, 3, 4), (*stack, 4, 5), (*stack, 3, 5))
    one = 3 if batch > 1 else ()
    for x, layout in zip((a[one], b[one], c[one]), layouts + "r"):
        assert (x.flags.c_contiguous, x.flags.f_contiguous) == (layout == "r", layout == "c")


@pytest.mark.parametrize("op", ["matmul", "gemm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_compute(dtype, op):
    if "bfloat16" in dtype:
        pytest.importorskip("ml_dtypes")
    product = Product(dtype, 60, 50, 100, op=op)
    if product.objection:
        assert op == "gemm" and dtype in product.objection
        return
    a, b, c = product.operands()
    assert [x.dtype.name for x in (a, b, c)] == [DTYPES[dtype].a, DTYPES[dtype].b, DTYPES[dtype].c]
    wide = "D" if a.dtype.kind == "c" else "d"
    expected = (a.astype(wide) @ b.astype(wide)) * (1 if op == "matmul" else 0.5 if c.dtype.kind in "fc" else 3)
    with tvmgemm.options(jit="off"):
        assert product.call(a, b, c)() is c and np.any(c)
    if c.dtype.kind in "iu":
        expected = expected.astype(np.int64).astype(c.dtype)
    np.testing.assert_allclose(c.astype(wide), expected.astype(bool if dtype == "bool" else expected.dtype), rtol=0.02, atol=0.2)
    asked = product.problem()
    assert (asked.dtype, asked.op, asked.m, asked.n, asked.k) == (dtype, op, 60, 50, 100)


def test_there_is_no_gemm_of_stacks():
    assert Product("float32", 3, 3, 3, batch=2, op="gemm").objection == "gemm takes no stacks"
    assert Product("float32", 3, 3, 3, batch=2).objection is None


def test_a_problem_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert Product("float64", 1 << 14, 1 << 14, 2).problem().m == 1 << 14  # C: 2 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 17  # KiB


@pytest.mark.parametrize("layouts", ["rr", "cr", "rc", "cc"])
@pytest.mark.parametrize("size", [(4, 700, 100), (16, 100, 300), (1, 500, 300), (300, 1, 500), (1, 1, 9), (60, 60, 60), (6, 5, 4)])
@pytest.mark.parametrize("batch", [1, 3])
def test_its_problem_is_that_of_a_call_of_users(size, batch, layouts):
    for dtype in ("float32", "float64", "int16"):
        product = Product(dtype, *size, batch=batch, layouts=layouts)
        a, b, _ = product.operands()
        assert product.problem() == problem_of(lambda: tvmgemm.matmul(a, b))[0]

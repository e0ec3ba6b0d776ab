"""bfloat16 of ml_dtypes: float32 results as NumPy's but without its cast, and dtype=bfloat16."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from arrays import LAYOUTS, arranged
from plain_kernels import native  # noqa: F401

import tvmgemm
from tvmgemm.frontend import matmul
from tvmgemm.problem import DTYPES

ml_dtypes = pytest.importorskip("ml_dtypes")

BF16 = np.dtype(ml_dtypes.bfloat16)
TO_FLOAT, ROUNDED = "bfloat16-float32", "bfloat16"
LETTERS = "?bBhHiIlLqQefdgFDGO"

#: The dtype of the product, and what asks for it.
KINDS = [(TO_FLOAT, {}), (TO_FLOAT, {"dtype": "f4"}), (TO_FLOAT, {"casting": "no"}), (ROUNDED, {"dtype": BF16})]


def whole_numbers(shape, seed):
    """Small integers: their products and sums are exact, in bfloat16 too while there are few."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(BF16)


@pytest.fixture(params=[True, False], ids=["served", "declined"])
def loops(request, native):
    """Plain kernels, or none."""
    for name in (TO_FLOAT, ROUNDED):
        if request.param:
            native.publish(native.kernel("plain_" + name.replace("-", "_")), DTYPES[name].native_id)
    native.served = request.param
    native.lib.tg_reset_counters()
    return native


def assert_ran(native, name: str, calls: int) -> None:
    dtype = DTYPES[name].native_id
    expected = (calls, 0) if native.served else (0, calls)
    assert (native.lib.tg_served(dtype), native.lib.tg_declined(dtype)) == expected


@pytest.mark.parametrize("name, keywords", KINDS)
@pytest.mark.parametrize("shapes", [((5, 7), (7, 6)), ((3, 5, 7), (3, 7, 6)), ((5, 7), (3, 7, 6)), ((7,), (7, 6)),
                                    ((7,), (7,)), ((5, 0), (0, 6))])  # fmt: skip
def test_products(loops, name, keywords, shapes):
    a, b = (whole_numbers(shape, seed) for seed, shape in enumerate(shapes))
    with np.errstate(all="raise"):
        result = matmul(a, b, **keywords)
    assert result.dtype == np.dtype(DTYPES[name].c) and type(result) is type(np.matmul(a, b).astype(result.dtype))
    np.testing.assert_array_equal(result.astype("f4"), np.matmul(a.astype("f4"), b.astype("f4")))
    assert_ran(loops, name, 1)


@pytest.mark.parametrize("name, keywords", [KINDS[0], KINDS[-1]])
@pytest.mark.parametrize("a_layout, b_layout", [*itertools.product(LAYOUTS, LAYOUTS)])
def test_layouts(loops, name, keywords, a_layout, b_layout):
    a, b = arranged(whole_numbers((2, 5, 7), 1), a_layout), arranged(whole_numbers((2, 7, 6), 2), b_layout)
    expected = np.matmul(a.astype("f4"), b.astype("f4"))
    for c_layout in LAYOUTS:
        out = arranged(np.full((2, 5, 6), 9, DTYPES[name].c), c_layout)
        matmul(a, b, out=out, **keywords)
        np.testing.assert_array_equal(out.astype("f4"), expected)
    assert_ran(loops, name, len(LAYOUTS))


def test_dtype_bfloat16_rounds_once(loops):
    """A sum that rounding to bfloat16 after each step would lose."""
    a, b = np.full((1, 1000), 1, BF16), np.full((1000, 1), 0.015625, BF16)
    assert matmul(a, b, dtype=BF16)[0, 0] == np.float32(15.625).astype(BF16)
    a = np.random.default_rng(0).standard_normal((20, 30)).astype(BF16)
    exact = np.matmul(a.astype("f8"), a.T.astype("f8"))
    result = matmul(a, a.T, dtype=BF16).astype("f8")
    assert (abs(result - exact) <= abs(exact) * 2**-8 * 1.001 + 1e-5).all()


def test_special_values(native):
    """Every bfloat16 but signalling NaNs: times one they are what they were, in both results."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = bits[(bits & 0x7F80 != 0x7F80) | (bits & 0x7F == 0) | (bits & 0x40 != 0)].view(BF16)
    one = np.ones((1, 1), BF16)
    with np.errstate(all="raise"):
        wide, rounded = matmul(values[:, None], one)[:, 0], matmul(values[:, None], one, dtype=BF16)[:, 0]
    np.testing.assert_array_equal(wide, values.astype("f4"))
    np.testing.assert_array_equal(rounded.astype("f4"), values.astype("f4"))
    assert (np.isnan(rounded) == np.isnan(values)).all()


@pytest.mark.parametrize("x", LETTERS)
def test_other_dtypes_and_dtype_are_numpys(x):
    def outcome(ufunc, *operands, **keywords):
        try:
            return ufunc(*operands, **keywords).dtype
        except TypeError as error:
            return type(error), str(error)

    other, bf16 = np.ones((1, 1), x), np.ones((1, 1), BF16)
    calls = [((other, bf16), {}), ((bf16, other), {}), ((bf16, bf16), {"dtype": x}), ((other, other), {"dtype": x})]
    calls += [((bf16, other), {"dtype": letter}) for letter in LETTERS]
    for operands, keywords in calls:
        assert outcome(matmul, *operands, **keywords) == outcome(np.matmul, *operands, **keywords)


def test_outputs_of_other_dtypes(loops):
    a = whole_numbers((5, 5), 1)
    for dtype in (BF16, "f8", "c8"):
        out, numpys = np.zeros((5, 5), dtype), np.zeros((5, 5), dtype)
        matmul(a, a, out=out)
        np.testing.assert_array_equal(out, np.matmul(a, a, out=numpys))
    assert matmul(np.ones((2, 2)), np.ones((2, 2)), dtype=BF16).dtype == BF16


def test_patched_numpy_converts_and_is_taken_back():
    a = np.random.default_rng(0).standard_normal((40, 40)).astype(BF16)
    expected, types = a @ a, np.matmul.types
    tvmgemm.reset_stats()
    with tvmgemm.patched():
        result = a @ a
    assert result.dtype == np.float32 and tvmgemm.stats().served["float32"] == 1
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    assert np.matmul.types == types
    with pytest.raises(TypeError):
        np.matmul(a, a, dtype=BF16)


def test_explain():
    a = np.ones((20, 30), BF16)
    told = tvmgemm.explain(a, a.T)
    assert told.problem.dtype in (TO_FLOAT, "float32")
    with tvmgemm.options(variant="numpy"):
        for keywords in ({}, {"dtype": BF16}):
            told = tvmgemm.explain(a, a.T, **keywords)
            assert not told.served and "A and B are converted to float32" in told.reason


@pytest.mark.parametrize("first", ["ml_dtypes", "tvmgemm"])
def test_either_may_be_imported_first(first):
    """And tvmgemm does not import ml_dtypes."""
    program = f"""if True:
        import sys, numpy as np
        import {first}
        assert ({first!r} == "ml_dtypes") == ("ml_dtypes" in sys.modules)
        import tvmgemm
        if {first!r} == "tvmgemm":
            assert tvmgemm.matmul(np.ones((2, 2), "i1"), np.ones((2, 2), "u1")).dtype == np.int16
        import ml_dtypes
        a = np.ones((3, 3), ml_dtypes.bfloat16)
        assert tvmgemm.matmul(a, a, dtype=ml_dtypes.bfloat16).dtype == ml_dtypes.bfloat16
        assert tvmgemm.matmul(a, a).dtype == np.float32
        print(tvmgemm.stats())
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "bfloat16-float32: " in done.stdout

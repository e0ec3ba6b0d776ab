"""Products whose output has another dtype than their inputs, which dtype= asks our own ufunc for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from arrays import LAYOUTS, arranged
from equivalence import planned
from plain_kernels import native  # noqa: F401

import tvmgemm
from tvmgemm.frontend import matmul
from tvmgemm.problem import DTYPES

#: Those that NumPy's own dtypes can ask for.
MIXED = [name for name, d in DTYPES.items() if d.a != d.c and d.a != "bfloat16"]
LETTERS = "?bBhHiIlLqQefdgFDGO"


def full_range(shape, dtype: str, seed: int) -> np.ndarray:
    """Every value of a narrow integer type, the least one often; float16 of moderate size."""
    rng = np.random.default_rng(seed)
    if dtype == "float16":
        return rng.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    values[rng.random(shape) < 0.1] = info.min
    return values


def operands(dtype: str, a_shape, b_shape):
    d = DTYPES[dtype]
    return full_range(a_shape, d.a, 1), full_range(b_shape, d.b, 2)


def assert_numpys(result, a, b, dtype: str) -> None:
    """What NumPy computes after its cast: exactly, unless it rounds."""
    expected = np.matmul(a, b, dtype=DTYPES[dtype].c)
    assert result.dtype == expected.dtype and type(result) is type(expected)
    if result.dtype.kind == "f":
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)
    else:
        np.testing.assert_array_equal(result, expected)


@pytest.fixture(params=MIXED)
def mixed(request, native):
    """Plain kernels for one mixed dtype."""
    native.name, native.dtype = request.param, DTYPES[request.param].native_id
    native.publish(native.kernel("plain_" + request.param.replace("-", "_")), native.dtype)
    native.lib.tg_reset_counters()
    return native


def counts(native) -> tuple[int, int]:
    return native.lib.tg_served(native.dtype), native.lib.tg_declined(native.dtype)


SHAPES = [((5, 7), (7, 6)), ((3, 5, 7), (3, 7, 6)), ((5, 7), (3, 7, 6)), ((3, 5, 7), (7, 6)), ((7,), (7, 6)),
          ((5, 7), (7,)), ((7,), (7,)), ((1, 300), (300, 1)), ((5, 0), (0, 6))]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("served", [True, False])
def test_dtype_chooses_it(mixed, shapes, served):
    if not served:
        mixed.lib.tg_clear_plans()
    a, b = operands(mixed.name, *shapes)
    with np.errstate(all="raise"):
        result = matmul(a, b, dtype=DTYPES[mixed.name].c)
    assert counts(mixed) == ((1, 0) if served else (0, 1))
    assert_numpys(result, a, b, mixed.name)


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("a_layout, b_layout", [*itertools.product(LAYOUTS, LAYOUTS)])
def test_layouts(mixed, served, a_layout, b_layout):
    if not served:
        mixed.lib.tg_clear_plans()
    a, b = operands(mixed.name, (2, 5, 7), (2, 7, 6))
    a, b = arranged(a, a_layout), arranged(b, b_layout)
    for c_layout in LAYOUTS:
        out = arranged(np.full((2, 5, 6), 9, DTYPES[mixed.name].c), c_layout)
        around = out.base.copy() if c_layout in ("padded", "strided") else None
        assert matmul(a, b, out=out, dtype=out.dtype) is out
        assert_numpys(out, a, b, mixed.name)
        if around is not None:
            out[...] = 9
            np.testing.assert_array_equal(out.base, around)
    assert counts(mixed) == ((len(LAYOUTS), 0) if served else (0, len(LAYOUTS)))


@pytest.mark.parametrize("served", [True, False])
def test_operands_that_numpy_prepares(mixed, served):
    """In foreign byte order, unaligned, overlapping the output, an output of another dtype, casting="no"."""
    if not served:
        mixed.lib.tg_clear_plans()
    a, b = operands(mixed.name, (8, 8), (8, 8))
    c = DTYPES[mixed.name].c
    unaligned = np.empty(a.nbytes + 1, "u1")[1:].view(a.dtype).reshape(a.shape)
    unaligned[...] = a
    room = np.zeros((8, 8), c)
    inside = room.view(a.dtype)[:, :8]
    inside[...] = a
    wide = np.zeros((8, 8), "f8")
    calls = [
        matmul(a.astype(a.dtype.newbyteorder()), b, dtype=c),
        matmul(unaligned, b, dtype=c),
        matmul(a, b, dtype=c, casting="no"),
        matmul(a, b, signature=(a.dtype, b.dtype, np.dtype(c))),
        matmul(a, b, dtype=c, order="F"),
        matmul(inside, b, dtype=c, out=room),
        matmul(a, b, dtype=c, out=wide).astype(c),
    ]
    for result in calls:
        assert_numpys(result, a, b, mixed.name)
    assert counts(mixed) == ((len(calls), 0) if served else (0, len(calls)))


def test_operands_of_two_types_are_never_exchanged(native):
    a, b = operands("uint8-int8-int32", (5, 7), (7, 6))
    _, p = native.probe(lambda: matmul(a, b, dtype="i4", order="F"))
    assert (p.dtype, p.transposed, p.c_layout) == (native.lib.TG_UINT8_INT8_INT32, 0, 2)
    assert (p.m, p.n, p.a_layout, p.b_layout) == (5, 6, 0, 0)
    _, p = native.probe(lambda: matmul(a, a.T, dtype="i4", order="F"))
    assert (p.dtype, p.transposed, p.symmetric) == (native.lib.TG_UINT8_INT32, 1, 1)
    both = np.zeros((6, 6), "u1")
    _, p = native.probe(lambda: matmul(both, both.view("i1").T, dtype="i4"))
    assert (p.dtype, p.symmetric) == (native.lib.TG_UINT8_INT8_INT32, 0)


@pytest.mark.parametrize("x", LETTERS)
def test_everything_else_is_numpys(x):
    """For each pair of dtypes and each dtype=: the same result dtype, or the same error."""

    def outcome(ufunc, **keywords):
        try:
            return ufunc(a, b, **keywords).dtype
        except TypeError as error:
            return type(error), str(error)

    a = np.ones((1, 1), x)
    for y in LETTERS:
        b = np.ones((1, 1), y)
        for keywords in ({}, *({"dtype": letter} for letter in LETTERS)):
            assert outcome(matmul, **keywords) == outcome(np.matmul, **keywords), (x, y, keywords)


@pytest.mark.parametrize("name", MIXED)
def test_without_dtype_nothing_is_mixed(native, name):
    native.lib.tg_reset_counters()
    a, b = operands(name, (5, 7), (7, 6))
    out = np.zeros((5, 6), DTYPES[name].c)
    for result in (matmul(a, b), matmul(a, b, out=out)):
        np.testing.assert_array_equal(result, np.matmul(a, b))
    assert sum(native.lib.tg_declined(DTYPES[mixed].native_id) for mixed in MIXED) == 0


def test_declined_float16_is_converted_exactly(native):
    """Every half but signalling NaNs, infinity and subnormal ones among them, and no floating-point exception."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves = bits[(bits & 0x7C00 != 0x7C00) | (bits & 0x3FF == 0) | (bits & 0x200 != 0)].view(np.float16)
    with np.errstate(all="raise"):
        result = matmul(halves[:, None], np.ones((1, 1), np.float16), dtype=np.float32)[:, 0]
    np.testing.assert_array_equal(result, halves.astype(np.float32))
    assert (np.signbit(result) == np.signbit(halves))[(halves != 0) & ~np.isnan(halves)].all()


def test_declined_without_memory(native):
    """NumPy's cast would need as much."""
    for k in (1 << 50, 1 << 62):  # the second: more bytes than an integer can count
        a = np.broadcast_to(np.ones(1, np.int8), (1, k))
        with pytest.raises(MemoryError, match="Out of memory in matmul"):
            matmul(a, a.T, dtype=np.int32)


@pytest.mark.parametrize("name", MIXED)
def test_explain(name):
    a, b = operands(name, (40, 30), (30, 50))
    told = tvmgemm.explain(a, b, dtype=DTYPES[name].c)
    assert told.problem.dtype == (name if "converted" not in told.reason else DTYPES[name].c)
    with planned(variant="numpy"):
        told = tvmgemm.explain(a, b, dtype=DTYPES[name].c)
    assert not told.served and f"A and B are converted to {DTYPES[name].c}" in told.reason

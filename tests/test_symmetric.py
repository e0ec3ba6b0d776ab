"""A @ A.T and A.T @ A: half of the tiles are computed, and the result is what the whole product would be, to the bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from equivalence import assert_close, assert_same_bits, newer_isas, planned, served_by_us

import tvmgemm
from tvmgemm import kernels
from tvmgemm.family.members import member
from tvmgemm.family.tiles import TILES
from tvmgemm.family.validity import check
from tvmgemm.rules import SYMMETRIC_ROWS

FLOATS = ("float32", "float64")

#: Nothing, one tile, a few panels with every kind of rest, several blocks.
SIZES = [(SYMMETRIC_ROWS + 1, 1), (64, 40), (97, 33), (130, 5), (144, 16), (251, 70)]


def calls_of_symmetric_kernels() -> int:
    return sum(kernel.calls for spec, kernel in list(kernels.loaded.items()) if spec.symmetric)


def multiply(a: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """a @ a.T by a kernel that computes half of it."""
    before = calls_of_symmetric_kernels()
    with served_by_us(a.dtype.name):
        result = tvmgemm.matmul(a, np.swapaxes(a, -1, -2), out=out)
    assert calls_of_symmetric_kernels() > before
    return result


def layouts(a: np.ndarray):
    """The matrix in rows, in columns, and with gaps."""
    yield a
    yield np.asfortranarray(a)
    gaps = np.full((2 * a.shape[0], 3 * a.shape[1]), np.nan, a.dtype)[::2, ::-3]
    gaps[...] = a
    yield gaps


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("dtype", FLOATS)
@newer_isas
def test_half_of_the_work_gives_the_same_bits(isa, dtype, threads):
    rng = np.random.default_rng(threads)
    for (m, k), blocks in itertools.product(SIZES, [(1, 1, 16), (3, 2, 512)]):
        a = rng.standard_normal((m, k)).astype(dtype)
        with planned(blocks, 0, max_isa=isa, num_threads=1):
            whole = tvmgemm.matmul(a, a.T.copy())
        assert_close(whole, a, a.T)
        with planned(blocks, 0, max_isa=isa, num_threads=threads):
            for x in layouts(a):
                result = multiply(x)
                assert_same_bits(result, whole)
                assert_same_bits(result, result.T)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_anywhere(threads):
    """Stacks, a given result in rows, in columns and with gaps; nothing around it is touched."""
    rng = np.random.default_rng(4)
    a = rng.standard_normal((5, 100, 30))
    with planned(None, 0, num_threads=threads):
        expected = np.stack([multiply(x) for x in a])
        assert_same_bits(multiply(a), expected)
        assert_same_bits(multiply(np.swapaxes(np.swapaxes(a, 1, 2).copy(), 1, 2)), expected)
        room = np.full((104, 3 * 104), 7.0)
        for out in (room[2:102, 5:105], room[2:102, 5:305:3], room[:100, :300:3].T, room.T[5:105, 2:102]):
            room[...] = 7.0
            multiply(a[0], out)
            assert_same_bits(out, expected[0])
            out[...] = 7.0
            assert (room == 7.0).all()


def test_without_terms_and_with_special_values():
    a = np.full((80, 0), 1.0)
    assert_same_bits(multiply(a), np.zeros((80, 80)))
    a = np.random.default_rng(0).standard_normal((90, 20))
    a[3, 4], a[70, 5], a[71, 5] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(np.isnan(multiply(a)), np.isnan(a @ a.T.copy()))


def test_the_same_buffer_is_not_enough():
    """Another stride, another part of it, or another order of rows: the whole product."""
    a = np.random.default_rng(0).standard_normal((200, 200))
    before = calls_of_symmetric_kernels()
    for x, y in [(a[:100], a.T[:, 100:]), (a[:100, :50], a[::-1][:100, :50].T), (a, a), (a[::2], a[:100].T)]:
        assert_close(tvmgemm.matmul(x, y), x, y)
    assert calls_of_symmetric_kernels() == before


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"variant": "A3B2C0"}, "not by variant A3B2C0"),
        ({"op": "gemm"}, "not by op gemm"),
        ({"step": "packed"}, "not by step packed"),
        ({"parallel": "jc"}, "not by parallel loop jc"),
        ({"tile": (14, 32)}, "not by micro-kernel 14x32"),
    ],
)
def test_what_cannot_compute_half_is_refused(fields, words):
    fields = {"variant": "B3A2C0", "tile": (8, 48)} | fields
    with pytest.raises(ValueError, match=words):
        check(member(dtype="float32", isa="x86-64-v4", symmetric=True, **fields))


def test_every_instruction_set_has_a_tile_for_it():
    for (_, dtype), tiles in TILES.items():
        assert dtype not in FLOATS or any(nr % mr == 0 for mr, nr in tiles["C"])

"""Products of every dtype that NumPy has a loop for, through tvmgemm.matmul and through patched NumPy: result dtypes,
wrap-around, special values, aliases, and what NumPy's machinery does to operands first.

Where kernels of a dtype exist, they and nobody else must have computed.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from equivalence import RUNNABLE, lay_out, layouts
from hypothesis import given, settings
from hypothesis import strategies as st
from references import assert_right, exactly, numbers

import tvmgemm
from tvmgemm.family.tiles import TILES
from tvmgemm.problem import DTYPES

#: NumPy's letters: each has a loop of its own, 64-bit integers two.
LETTERS = "?bBhHiIlLqQefdFD"

#: What can be written in their place.
ALIASES = [
    (np.bool_, "bool"), ("b1", "bool"), (np.byte, "int8"), ("i1", "int8"), (np.ubyte, "uint8"), (np.short, "int16"),
    (np.ushort, "uint16"), (np.intc, "int32"), (np.uintc, "uint32"), (np.int_, "int64"), (int, "int64"), (np.intp, "int64"),
    (np.longlong, "int64"), ("q", "int64"), (np.uint, "uint64"), (np.uintp, "uint64"), (np.ulonglong, "uint64"),
    (np.half, "float16"), ("f2", "float16"), (np.single, "float32"), (np.double, "float64"), (float, "float64"),
    (np.csingle, "complex64"), ("c8", "complex64"), (np.cdouble, "complex128"), (complex, "complex128"),
]  # fmt: skip

every_letter = pytest.mark.parametrize("letter", LETTERS)
both_ways = pytest.mark.parametrize("way", ["matmul", "patched"])


@contextlib.contextmanager
def ways(way: str):
    """The product: our ufunc, or NumPy's own while it is patched."""
    if way == "matmul":
        yield tvmgemm.matmul
    else:
        with tvmgemm.patched():
            yield np.matmul


def name_of(letter: str) -> str:
    return np.dtype(letter).name


@contextlib.contextmanager
def computed_by(dtype: str):
    """Our kernels, where there are any for this machine; otherwise NumPy, after one refusal a call."""
    before = tvmgemm.stats()
    yield
    after = tvmgemm.stats()
    served = after.served[dtype] - before.served[dtype]
    declined = after.declined[dtype] - before.declined[dtype]
    if any((isa, dtype) in TILES for isa in RUNNABLE):
        assert served > 0 and declined == 0, "a call was declined, NumPy computed it"
    else:
        assert served == 0 and declined > 0


SHAPES = [((2, 2), (2, 2)), ((5, 7), (7, 6)), ((33, 65), (65, 17)), ((100, 300), (300, 70)), ((3, 40, 30), (3, 30, 50)),
          ((3, 40, 30), (30, 50)), ((40, 30), (3, 30, 50)), ((2, 1, 9, 8), (3, 8, 7)), ((130, 1), (1, 130))]  # fmt: skip


@both_ways
@every_letter
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes(way, letter, shapes):
    a, b = (numbers(shape, letter, seed) for seed, shape in enumerate(shapes))
    with ways(way) as mm, computed_by(name_of(letter)), np.errstate(all="raise", under="ignore"):
        result = mm(a, b)
    assert_right(result, a, b)


@every_letter
@pytest.mark.parametrize("shapes", [((7,), (7,)), ((7,), (7, 6)), ((5, 7), (7,)), ((1, 7), (7, 6)), ((5, 7), (7, 1)),
                                    ((1, 1), (1, 1)), ((1, 1000), (1000, 1)), ((3, 5, 7), (7,))])  # fmt: skip
def test_vectors(letter, shapes):
    a, b = (numbers(shape, letter, seed) for seed, shape in enumerate(shapes))
    with np.errstate(all="raise", under="ignore"):
        result = tvmgemm.matmul(a, b)
    assert type(result) is type(np.matmul(a, b))
    assert_right(result, a, b)


@both_ways
@every_letter
@pytest.mark.parametrize("shapes", [((5, 0), (0, 6)), ((2, 5, 0), (0, 6)), ((0, 3), (3, 4)), ((3, 4), (4, 0)),
                                    ((0, 4, 3), (3, 5)), ((0,), (0,))])  # fmt: skip
def test_nothing_to_sum_and_nothing_to_compute(way, letter, shapes):
    a, b = (np.ones(shape, letter) for shape in shapes)
    with ways(way) as mm, np.errstate(all="raise"):
        out = np.full(np.matmul(a, b).shape, 1, letter)
        assert mm(a, b, out=out) is out and not out.any()
        assert mm(a, b).dtype == np.dtype(letter) and not np.any(mm(a, b))


@pytest.mark.parametrize("alias, dtype", ALIASES, ids=lambda x: str(getattr(x, "__name__", x)))
def test_aliases(alias, dtype):
    if np.dtype(alias).itemsize != DTYPES[dtype].itemsize:
        pytest.skip("another type on this platform")
    a = np.ones((20, 20), alias)
    with computed_by(dtype):
        result = tvmgemm.matmul(a, a)
    assert result.dtype == np.dtype(alias) and (result == np.array(20 if dtype != "bool" else 1)).all()


@every_letter
def test_layouts(letter):
    """Any strides of A, B and out; nothing around out is touched."""

    @settings(max_examples=30)
    @given(*(layouts(2, output=output) for output in (False, False, True)), st.integers(0, 1000))
    def check(a_layout, b_layout, c_layout, seed):
        a, b = (numbers(shape, letter, seed + i) for i, shape in enumerate([(9, 11), (11, 20)]))
        views = [laid_out(x, layout) for x, layout in ((a, a_layout), (b, b_layout), (np.ones((9, 20), letter), c_layout))]
        outside = views[2][1].copy()
        result = tvmgemm.matmul(views[0][0], views[1][0], out=views[2][0])
        assert_right(result, *(np.array(view) for view, _ in views[:2]))
        views[2][0][...] = 1
        np.testing.assert_array_equal(views[2][1], outside)

    check()


def laid_out(x: np.ndarray, layout) -> tuple[np.ndarray, np.ndarray]:
    """The values of ``x`` in a view with that layout, and the bytes of the buffer that it lies in."""
    operand = lay_out(x.shape, x.dtype, layout, around=1)
    operand.view[...] = x
    return operand.view, operand.buffer


@both_ways
@every_letter
def test_what_numpy_does_to_operands_first(way, letter):
    """Foreign byte order, no alignment, outputs that overlap or are of another dtype, dtype=, order=, axes=."""
    dtype, a, b = np.dtype(letter), numbers((12, 12), letter, 1), numbers((12, 12), letter, 2)
    unaligned = np.zeros(a.nbytes + 1, "u1")[1:].view(dtype).reshape(a.shape)
    unaligned[...] = a
    swapped = a.astype(dtype.newbyteorder())
    overlapping = np.zeros(a.size + 5, dtype)
    inside, out = overlapping[5:].reshape(a.shape), overlapping[:-5].reshape(a.shape)
    inside[...] = a
    with ways(way) as mm, computed_by(name_of(letter)):
        results = [
            mm(swapped, b), mm(unaligned, b), mm(a, b, order="F"), mm(a, b, dtype=dtype),
            mm(a, b, casting="no"), mm(a, b, out=np.zeros((12, 12), dtype.newbyteorder())).astype(dtype),
            mm(a.T, b, axes=[(1, 0), (0, 1), (0, 1)]), mm(a, b.copy(order="F")), mm(inside, b, out=out).copy(),
        ]  # fmt: skip
    for result in results:
        assert_right(result, a, b)
    same = a.copy()
    with ways(way) as mm:
        assert_right(mm(same, same, out=same), a, a)


@both_ways
@pytest.mark.parametrize("letter, out", [("b", "h"), ("h", "f4"), ("i", "q"), ("e", "f8"), ("f", "F"), ("?", "i8"),
                                         ("F", "D"), ("d", "f4"), ("q", "i4")])  # fmt: skip
def test_output_of_another_dtype(way, letter, out):
    """The product is that of the inputs' dtype, wrapped or rounded; then it is cast."""
    a, b = numbers((12, 12), letter, 1), numbers((12, 12), letter, 2)
    expected, given_out = np.zeros((12, 12), out), np.zeros((12, 12), out)
    np.matmul(a, b, out=expected)
    with ways(way) as mm:
        assert mm(a, b, out=given_out) is given_out
    np.testing.assert_allclose(given_out, expected, rtol=2e-3, atol=2e-3)


@both_ways
@every_letter
def test_promotion(way, letter):
    """With each other dtype: the loop's dtype and values are NumPy's."""
    for other in LETTERS:
        a, b = numbers((6, 5), letter, 1), numbers((5, 4), other, 2)
        with np.errstate(all="ignore"):
            expected = np.matmul(a, b)
            with ways(way) as mm:
                result = mm(a, b)
        assert result.dtype == expected.dtype
        scale = 1 if result.dtype.kind in "biu" else float(abs(expected).max())
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3 * scale if result.dtype.kind in "fc" else 0)


@pytest.mark.parametrize("letter", "bBhHiIlLqQ")
@pytest.mark.parametrize("k", [1, 3, 127, 1000, 70_000])
def test_integers_wrap_around(letter, k):
    """Extremes by extremes: the lowest by itself is the largest product there is."""
    info = np.iinfo(letter)
    ends = [info.min, info.max, info.min + 1, info.max - 1]
    with np.errstate(all="raise"):
        for x in ends:
            for y in ends:
                a, b = np.full((3, k), x, letter), np.full((k, 5), y, letter)
                result = tvmgemm.matmul(a, b)
                assert result.dtype == np.dtype(letter)
                assert all((int(r) - k * x * y) % 2**info.bits == 0 for r in result.ravel())


@pytest.mark.parametrize("m, n", [(1, 1), (3, 20), (8, 100)])
def test_float16_of_few_rows_and_many_terms_is_rounded_once(m, n):
    """2048 + 1 + 1 ...: rounded between blocks of k it would stay 2048."""
    a, b = np.ones((m, 1300), "e"), np.ones((1300, n), "e")
    a[:, 0] = 2048
    with computed_by("float16"):
        assert "-none-" in tvmgemm.explain(a, b).kernel
        np.testing.assert_array_equal(tvmgemm.matmul(a, b), np.full((m, n), 2048 + 1299, "e"))


def test_bool_is_or_of_ands_and_yields_zeros_and_ones():
    """Whatever non-zero bytes came in."""
    rng = np.random.default_rng(0)
    bytes_a, bytes_b = (rng.integers(0, 256, shape, np.uint8) * (rng.random(shape) < 0.1) for shape in [(40, 50), (50, 60)])
    for mm in (tvmgemm.matmul, np.matmul):
        with tvmgemm.patched():
            result = mm(bytes_a.view(bool), bytes_b.view(bool))
        expected = (bytes_a != 0).astype(int) @ (bytes_b != 0).astype(int) != 0
        np.testing.assert_array_equal(result, expected)
        assert set(np.unique(result.view(np.uint8))) <= {0, 1}
    many = np.ones((4, 300), bool)  # 256 times true is not false
    assert tvmgemm.matmul(many, many.T).all()


@pytest.mark.parametrize("letter", "efdFD")
def test_special_values_stay_in_their_rows_and_columns(letter):
    """NaN and infinity reach what NumPy lets them reach and nothing else."""
    clean = [numbers(shape, letter, seed) for seed, shape in enumerate([(19, 23), (23, 37)])]
    for value in (np.nan, np.inf, -np.inf):
        for operand, (i, j) in ((0, (3, 5)), (0, (18, 22)), (1, (4, 36)), (1, (22, 0))):
            a, b = (x.copy() for x in clean)
            (a, b)[operand][i, j] = value
            with np.errstate(all="ignore"):
                result, expected = tvmgemm.matmul(a, b), exactly(a, b)
            hit = ~np.isfinite(expected)
            np.testing.assert_array_equal(np.isfinite(result), ~hit)
            assert hit.sum() == (37 if operand == 0 else 19)
            if letter in "efd":
                np.testing.assert_array_equal(result[hit], expected[hit])


@pytest.mark.parametrize("letter", "FD")
def test_complex_never_conjugates(letter):
    a = np.array([[1j, 0], [0, 1]], letter)
    np.testing.assert_array_equal(tvmgemm.matmul(a, a), np.array([[-1, 0], [0, 1]], letter))
    x = numbers((30, 30), letter)
    assert_right(tvmgemm.matmul(x, x.conj()), x, x.conj())


@pytest.mark.parametrize("letter", "efdFD")
def test_warnings_are_numpys(letter):
    """Overflow and invalid are reported where there are any, and nowhere else."""
    big = np.full((20, 20), np.finfo(letter).max, letter)
    with np.errstate(all="raise"):
        with pytest.raises(FloatingPointError, match="overflow encountered in matmul"):
            tvmgemm.matmul(big, big)
        infinite = np.zeros((20, 20), letter)
        infinite[0, 0] = np.inf
        with pytest.raises(FloatingPointError, match="invalid value encountered in matmul"):
            tvmgemm.matmul(infinite, np.zeros((20, 20), letter))
        if letter in "efd":
            ones = np.ones((20, 20), letter)
            tvmgemm.matmul(np.full_like(ones, np.inf), ones)
            tvmgemm.matmul(np.full_like(ones, np.nan), ones)
    for shape in ((3, 3), (17, 33), (40, 100)):
        with np.errstate(all="raise", under="ignore"):
            tvmgemm.matmul(numbers(shape, letter), numbers(shape[::-1], letter))


def test_float16_accumulates_in_float32_and_rounds_once():
    a = np.ones((2, 4096), "e")
    assert (tvmgemm.matmul(a, a.T) == 4096).all()
    tiny = np.full((3, 3), 2.0**-24, "e")  # subnormal
    np.testing.assert_array_equal(tvmgemm.matmul(tiny, np.eye(3, dtype="e")), tiny)
    ties = np.array([[1, 2**-11], [1, 3 * 2**-11]], "e")
    np.testing.assert_array_equal(tvmgemm.matmul(ties, np.ones((2, 2), "e")), [[1, 1], [1 + 2**-9, 1 + 2**-9]])


@pytest.mark.parametrize("letter", "efd")
def test_sums_start_at_positive_zero(letter):
    result = tvmgemm.matmul(np.full((20, 20), -0.0, letter), np.ones((20, 20), letter))
    assert not np.signbit(result).any()

"""Products with few columns as dot products (``family.along_k``), and sums of bools that end early (``family.early``)."""

from __future__ import annotations

import numpy as np
import pytest
from equivalence import RUNNABLE, planned, served_by_us

import tvmgemm
from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.members import member
from tvmgemm.family.tiles import TILES

pytestmark = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")

#: Shapes (m, n, k) around vectors, groups of rows, copies of B and short sums.
SHAPES = [(1, 1, 1), (1, 1, 3000), (3, 1, 8), (5, 1, 9), (9, 1, 64), (8, 1, 65), (13, 1, 1000), (2, 8, 130), (5, 3, 9001),
          (6, 8, 7), (200, 1, 129), (1, 7, 500), (300, 2, 2), (18, 5, 63), (4, 3, 10), (9, 2, 11), (2, 12, 10)]  # fmt: skip

#: Views of M x N elements of a larger array, by how they lie.
LAYOUTS = {
    "rows": lambda x, m, n: x[:m, :n],
    "columns": lambda x, m, n: x[:n, :m].T,
    "every other": lambda x, m, n: x[: 2 * m : 2, : 2 * n : 2],
    "backwards": lambda x, m, n: x[:m, :n][:, ::-1],
    "every other backwards": lambda x, m, n: x[:m, : 2 * n][:, ::-2],
    "one in three": lambda x, m, n: x[:m, : 3 * n : 3],
    "repeated": lambda x, m, n: np.broadcast_to(x[:1, :n], (m, n)),
}


def operand(shape: tuple[int, int], dtype: str, layout: str, rng: np.random.Generator, density: float = 0.3) -> np.ndarray:
    """Integers over all of their range; bools of any byte."""
    size = tuple(3 * side for side in (shape[::-1] if layout == "columns" else shape))
    if layout == "backwards":
        size = shape
    if dtype == "bool":
        room = (rng.integers(1, 256, size) * (rng.random(size) < density)).astype("u1").view("?")
    else:
        room = np.frombuffer(rng.bytes(size[0] * size[1] * np.dtype(dtype).itemsize), dtype).reshape(size)
    return LAYOUTS[layout](room, *shape)


def exactly(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A.B modulo 2**64, of bools the number of true terms; by np.dot, which is not ours."""
    if a.dtype == bool:
        a, b = (x.view("u1") != 0 for x in (a, b))
        return np.dot(a.astype("f4"), b.astype("f4"))
    return np.dot(a.astype("i8"), b.astype("i8"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["bool", *INTEGERS])
def test_every_layout(dtype, threads):
    rng = np.random.default_rng(1)
    with planned(num_threads=threads, parallel_work=1 << 8):
        for m, n, k in SHAPES:
            for in_a, in_b in zip(LAYOUTS, [*list(LAYOUTS)[3:], *list(LAYOUTS)[:3]]):
                a, b = operand((m, k), dtype, in_a, rng), operand((k, n), dtype, in_b, rng)
                with served_by_us(dtype):
                    result = tvmgemm.matmul(a, b)
                expected = exactly(a, b)
                expected = (expected != 0) if dtype == "bool" else expected.astype(dtype)
                np.testing.assert_array_equal(result.view("u1"), expected.view("u1"), f"{m}x{k}x{n} {in_a} {in_b}")


@pytest.mark.parametrize("dtype, wider", [("int8", "int32"), ("uint8", "int32"), ("uint8", "uint32"), ("int16", "int32")])
def test_wider_results(dtype, wider):
    """Of bytes, one operand of which some CPUs move by 128."""
    rng = np.random.default_rng(2)
    for m, n, k in SHAPES:
        a, b = operand((m, k), dtype, "rows", rng), operand((k, n), dtype, "columns", rng)
        with planned(num_threads=1), served_by_us(f"{dtype}-{wider}"):
            np.testing.assert_array_equal(tvmgemm.matmul(a, b, dtype=wider), exactly(a, b).astype(wider))


@pytest.mark.parametrize("n", [1, 5])
def test_gemm_and_gaps_in_c(n):
    rng = np.random.default_rng(3)
    for k in (3, 40, 9001):
        a, b = operand((11, k), "int32", "every other", rng), operand((k, n), "int32", "rows", rng)
        room = rng.integers(-9, 9, (22, 3 * n), "i4")
        before, c = room.copy(), room[::2, ::3]
        expected = (3 * exactly(a, b) - 2 * c.astype("i8")).astype("i4")
        tvmgemm.gemm(a, b, c, alpha=3, beta=-2)
        np.testing.assert_array_equal(c, expected)
        before[::2, ::3] = expected
        np.testing.assert_array_equal(room, before)


@pytest.mark.skipif(not any((isa, "bool") in TILES for isa in RUNNABLE), reason="no kernels of bool")
@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("m, n, k", [
    (40, 70, 900), (3, 100, 3000), (100, 3, 3000), (1, 500, 700), (17, 33, 257), (300, 300, 600), (60, 129, 11), (40, 8, 100),
])  # fmt: skip
def test_bools_of_every_density(m, n, k, density):
    """Rows, columns and tiles of sums that end at different terms, some of them with none or with the last one."""
    rng = np.random.default_rng(4)
    for in_a, in_b in (("rows", "rows"), ("rows", "columns"), ("every other", "backwards"), ("columns", "one in three")):
        a, b = operand((m, k), "bool", in_a, rng, density), operand((k, n), "bool", in_b, rng, density)
        a[0] = a[-1] = b[:, -1] = False
        a[-1, -1] = b[-1, -1] = True
        for threads in (1, 2):
            with planned(num_threads=threads, parallel_work=1 << 8), served_by_us("bool"):
                result = tvmgemm.matmul(a, b)
            np.testing.assert_array_equal(result.view("u1"), exactly(a, b) != 0)


@pytest.mark.skipif(not any((isa, "bool") in TILES for isa in RUNNABLE), reason="no kernels of bool")
@pytest.mark.parametrize("variant", ["B3A2C0", "A3B2C0"])
@pytest.mark.parametrize("threads", [1, 2])
def test_sums_that_end_late_among_others_that_end_soon(variant, threads):
    """Where the sums that are looked at end soon, few terms of all are, or the first blocks of k are short: no other sum is cut short."""
    rng, (m, n, k) = np.random.default_rng(3), (70, 110, 1300)
    for last in (0, 8, 23, 24, 31, 32, 159, 160, 279, 280, 671, 672, k - 1, k):
        for density in (0.6, 1.0):
            a, b = operand((m, k), "bool", "columns", rng, density), operand((k, n), "bool", "rows", rng, density)
            a[7], b[:, 50] = False, False  # more sums than are searched one by one; of a[8], one
            b[a[8], 60] = False
            if last < k:
                a[7, last] = True
                b[last, 50] = True
            expected = exactly(a, b) != 0
            for blocks in (None, (2, 2, 8), (2, 2, 100)):
                with planned(blocks, num_threads=threads, parallel_work=1 << 8, variant=variant, packing="ab"), served_by_us("bool"):
                    np.testing.assert_array_equal(tvmgemm.matmul(a, b), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_few_columns_of_bfloat16_in_every_layout(threads):
    """Columns of B as they are, or of a copy; the largest copy there is, and one that would be larger."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(7)

    def numbers(layout: str, rows: int, columns: int) -> np.ndarray:
        size = tuple(3 * side for side in ((columns, rows) if layout == "columns" else (rows, columns)))
        return LAYOUTS[layout](rng.standard_normal(size).astype(ml_dtypes.bfloat16), rows, columns)

    for m, n, k in ((11, 2, 2018), (37, 4, 24), (5, 1, 33), (9, 8, 2048), (9, 8, 2049), (6, 7, 9), (23, 3, 10)):
        for in_a, in_b in (("rows", "rows"), ("rows", "columns"), ("rows", "every other"), ("every other", "backwards"), ("rows", "one in three")):
            a, b = numbers(in_a, m, k), numbers(in_b, k, n)
            exact = a.astype("f8") @ b.astype("f8")
            with planned(num_threads=threads, parallel_work=1 << 8), served_by_us("bfloat16-float32"):
                wide = tvmgemm.matmul(a, b, dtype=np.float32)
            np.testing.assert_allclose(wide, exact, rtol=1e-4, atol=1e-3)
            with planned(num_threads=threads, parallel_work=1 << 8), served_by_us("bfloat16"):
                x, y = tvmgemm.matmul(a, b, dtype=ml_dtypes.bfloat16), wide.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(x.astype("f4"), y.astype("f4"), err_msg="rounded once")


def test_equal_rows_of_bfloat16_have_equal_sums():
    """In dot products (one column, and several that are contiguous) and in tiles."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(5).standard_normal((1, 501)).astype(ml_dtypes.bfloat16)
    for n, order in ((1, "C"), (3, "C"), (3, "F")):
        b = np.asarray(np.random.default_rng(6).standard_normal((501, n)).astype(ml_dtypes.bfloat16), order=order)
        with planned(num_threads=1), served_by_us("bfloat16-float32"):
            result = tvmgemm.matmul(np.repeat(x, 23, axis=0), b)
        assert (result == result[0]).all()
        np.testing.assert_allclose(result[0], (x.astype("f8") @ b.astype("f8"))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa, dtype", [
    ("x86-64-v4-bf16", "bfloat16-float32"), ("x86-64-v4-bf16", "bfloat16"), ("x86-64-v4-vnni", "int8"), ("x86-64-v4", "int32"),
    ("x86-64-v4", "int64"), ("x86-64-v4", "bool"),
])  # fmt: skip
def test_loops_for_few_columns_leave_tiles_in_registers(isa, dtype):
    """They stand in one function, and what LLVM keeps for the ones must not push sums of the others out."""
    pytest.importorskip("tvm", reason="needs the compiler")
    from tvmgemm.family import codegen

    loop = hottest(inner_loops(codegen.assembly(member("B3A2C0", dtype, isa)), "x86_64"))
    assert (loop.stack, loop.stores, loop.branches, loop.masked) == (0, 0, 0, 0), loop
    assert loop.registers <= 32

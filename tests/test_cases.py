"""Public reports of wrong or surprising matrix products, as small inputs with the right result.

A row names the report and the dtypes whose loop runs; its function takes the product ``mm`` and is true if
the result is right. Every row runs through ``tvmgemm.matmul`` and through patched NumPy, in auto mode; rows
about dtypes that have kernels also with the variant forced, and then our kernels must have done the work.
"""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from equivalence import FORCED, RUNNABLE

import tvmgemm
from tvmgemm.family.tiles import TILES


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).random(shape)


def equal(x, y) -> bool:
    """The same values and no broadcasting of shapes."""
    return np.shape(x) == np.shape(y) and bool(np.all(np.asarray(x) == np.asarray(y)))


# -- what a lambda cannot say


def int64_is_exact(mm):
    a = np.arange(900, dtype="i8").reshape(30, 30)
    return equal(mm(a, a), (a.astype(object) @ a.astype(object)).astype("i8")) and mm(a, a).dtype == np.int64


def float16_rounds_once(mm):
    x = np.array([[0.8896484375, 0.767578125, 0.712890625, 0.76318359375, 0.5224609375]], "f2")
    y = np.array(
        [[0.76416015625, 0.68994140625], [0.82861328125, 0.85205078125], [0.99169921875, 0.95751953125],
         [0.5947265625, 0.89990234375], [0.61865234375, 0.98681640625]], "f2",
    )  # fmt: skip
    return np.abs(mm(x, y).astype("f8") - [[2.79993963, 3.15279126]]).max() < 1.3e-3


def bool_stays_bool(mm):
    a = np.array([[1, 0], [1, 1]], bool)
    for _ in range(21):
        a = mm(a, a)
    return equal(a, [[True, False], [True, True]]) and a.view("u1").max() == 1


def int8_products(mm):
    a = np.array([[-47, -123, -10, 92], [-96, -38, 82, 40], [70, -60, -66, -127], [-46, -91, 109, 101]], "i1")
    b = np.array([[124, 8, -74, 32], [-40, 4, -50, -84], [103, -84, 88, -66], [24, 115, 123, 54]], "i1")
    exact = np.einsum("ij,jk", a.astype("i4"), b.astype("i4"))
    return equal(mm(a.astype("i4"), b.astype("i4")), exact) and equal(mm(a, b), exact.astype("i1"))


def uint64_wraps(mm):
    a = np.array([2**63 + 3], "u8")
    return mm(a, a) == (a * a)[0]


def skinny_transposed(mm):
    a, b = random(0, 400, 2), random(1, 400, 1)
    return np.allclose(mm(a.T, b), mm(a.T.copy(), b)) and mm(a.T, b).shape == (2, 1)


def fortran_stack(mm):
    a, b = np.arange(24.0).reshape(4, 2, 3), np.arange(60.0).reshape(4, 3, 5)
    return equal(mm(a, b, order="F"), mm(a, b)) and mm(a, b, order="F").flags.f_contiguous


def negative_strides(mm):
    a, b = random(0, 5, 7)[::-1, ::-1], random(1, 7, 3)[::-1, ::-1]
    return np.allclose(mm(a, b), mm(a.copy(), b.copy()))


def out_is_both_inputs(mm):
    a = np.arange(9.0).reshape(3, 3)
    right = np.dot(a, a)
    return equal(mm(a, a, out=a), right)


def out_is_a_stack(mm):
    a = np.ones((2, 9, 9))
    return equal(mm(a, a, out=a), np.full((2, 9, 9), 9.0))


def memory_map(mm):
    with tempfile.NamedTemporaryFile() as file:
        x = np.memmap(file.name, shape=(2, 3), dtype=float, mode="w+")
        x[...] = 1
        return (
            equal(mm(x, x.T, out=np.empty((2, 2))), np.full((2, 2), 3.0)) and type(mm(x, x.T)) is np.ndarray
        )


def packed_struct(mm):
    v = np.zeros(6, [("i", "S1"), ("f", "f8")])
    v["f"] = np.arange(6.0)
    return mm(v["f"], np.ones(6)) == 15.0


def offset_pointer(mm):
    a = np.ones(13, "f4")[1:].reshape(3, 4)
    return equal(mm(a, a.T), np.full((3, 3), 4, "f4"))


def read_only(mm):
    a = np.arange(10.0)
    a.setflags(write=False)
    return mm(a, a) == 285.0


def matrix_by_vector(mm):
    r = mm(np.matrix([[1, 1], [1, 2]]), np.array([1, 2]))
    return type(r) is np.matrix and equal(r, [[3, 5]])


def nothing_to_sum(mm):
    return (
        equal(mm(np.ones((2, 0)), np.ones((0, 3))), np.zeros((2, 3)))
        and mm(np.ones((0, 3)), np.ones((3, 4))).shape == (0, 4)
        and mm(np.ones((0, 2, 3)), np.ones((3, 4))).shape == (0, 2, 4)
    )


def empty_stack_into_something(mm):
    with pytest.raises(ValueError, match="non-broadcastable"):
        mm(np.ones((0, 1, 1)), np.ones((0, 1, 1)), out=np.ones((1, 1, 1)))
    return True


def nan_in_out(dtype):
    def check(mm):
        shapes = [((5, 5), (5, 5), (5, 5)), ((5, 5), (5,), (5,)), ((5,), (5, 5), (5,))]
        return all(
            equal(mm(np.zeros(a, dtype), np.zeros(b, dtype), out=np.full(c, np.nan, dtype)), np.zeros(c))
            for a, b, c in shapes
        )

    return check


def nan_around(mm):
    room = np.full((8, 8), np.nan, "f4")
    x = room[2:4, 2:4]
    x[...] = [[1, 2], [3, 4]]
    return equal(mm(x, np.array([2, 1], "f4")), [4, 10]) and equal(mm(x, x), [[7, 10], [15, 22]])


def subnormals(dtype, tiny):
    return lambda mm: equal(
        mm(np.full((9, 9), tiny, dtype), np.eye(9, dtype=dtype)), np.full((9, 9), tiny, dtype)
    )


def no_warnings(mm):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mm(random(10, 8, 768), random(134, 768, 8))
        mm(np.identity(84), np.identity(84))
    return True


def times_identity(mm):
    a = np.arange(45 * 33, dtype="f4").reshape(45, 33)
    return equal(mm(a, np.eye(33, dtype="f4")), a)


def random_shapes(mm):
    b = {n: random(9, 13, n) for n in (3, 5, 11, 33, 63)}
    return all(
        np.allclose(mm(a, b[2 * m + 1]), np.einsum("ij,jk", a, b[2 * m + 1]))
        for m in (1, 2, 5, 16, 31)
        for a in [random(m, m, 13)]
    )


def outer_product(mm):
    x, y = random(0, 50), random(1, 60)
    return equal(mm(x[:, None], y[None]), x[:, None] * y)


def sixteen_million_ones(mm):
    """A float32 that counts one by one stops at 2**24."""
    k = 2**24 + 3
    ones = np.ones((1, k), "f4")
    sums = mm(np.broadcast_to(ones, (2, k)), np.broadcast_to(ones, (3, k)).T)
    return sums.shape == (2, 3) and np.abs(sums - np.float64(k)).max() <= 1e-6 * k


def many_callers(mm):
    wrong = []

    def work(number):
        points = np.ones((4000, 3)) * number
        for _ in range(5):
            if not equal(mm(points, np.identity(3).T), points):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return not wrong


def in_place_of_float64(letter):
    """Strides, overlap, empty operands and edges, reported of float64, with another dtype."""

    def check(mm):
        rng = np.random.default_rng(0)
        a, b = (rng.integers(0, 2 if letter == "?" else 4, shape).astype(letter) for shape in [(13, 33), (33, 11)])
        exact = (a.astype("i8") if letter == "?" else a.astype("D")) @ (b.astype("i8") if letter == "?" else b.astype("D"))
        exact = (exact != 0) if letter == "?" else exact.astype(letter) if letter in "FD" else exact.real.astype(letter)
        square = a[:9, :9].copy()
        right = mm(square, square.copy())
        stack = np.stack([square, square])
        results = [
            equal(mm(a, b), exact),
            equal(mm(a[::-1, ::-1][::-1, ::-1], b), exact) and equal(mm(a[::-1], b[:, ::-1]), exact[::-1, ::-1]),
            equal(mm(np.asfortranarray(a), b, order="F"), exact),
            equal(mm(np.ones((2, 4), letter), np.broadcast_to(np.ones((), letter), (4, 1))), np.full((2, 1), 4, letter)),
            equal(mm(stack, stack, out=stack), np.stack([right, right])),
            equal(mm(square, square, out=square), right),
            equal(mm(np.ones((2, 0), letter), np.ones((0, 3), letter)), np.zeros((2, 3), letter)),
            mm(np.ones((0, 3), letter), np.ones((3, 4), letter)).shape == (0, 4),
            equal(mm(a, np.eye(33, dtype=letter)), a),
        ]
        return all(results)

    return check


# -- the table


@dataclass(frozen=True)
class Case:
    """``source``: the public report. ``dtypes``: those whose loops run. ``check(mm)``: whether the result is
    right.
    """

    source: str
    symptom: str
    dtypes: tuple[str, ...]
    check: Callable[[Callable], bool]

    def ours(self, isa: str) -> bool:
        """Whether kernels for all of its dtypes exist on an instruction set or a narrower one."""
        levels = RUNNABLE[: RUNNABLE.index(isa) + 1]
        return all(any((level, dtype) in TILES for level in levels) for dtype in self.dtypes)


F4, F8 = ("float32",), ("float64",)
ONES = np.ones

# fmt: off
CASES = [
    Case("numpy/numpy#14556", "int64 is exact modulo 2**64", ("int64",), int64_is_exact),
    Case("numpy/numpy#11590", "float16 accumulates in float32", ("float16",),
         lambda mm: mm(ONES((1, 4096), "f2"), ONES((4096, 1), "f2"))[0, 0] == 4096),
    Case("chainer/chainer#5369", "float16 rounds once", ("float16",), float16_rounds_once),
    Case("numpy/numpy#14439", "bool wrapped around like an integer", ("bool",), bool_stays_bool),
    Case("uxlfoundation/oneDNN#476", "int8 products saturated", ("int32", "int8"), int8_products),
    Case("cupy/cupy#3941", "uint64 saturated", ("uint64",), uint64_wraps),
    Case("numpy/numpy#14306", "a.T @ b of skinny matrices", F8, skinny_transposed),
    Case("numpy/numpy#29164", "garbage with order='F' on a stack", F8, fortran_stack),
    Case("numpy/numpy#12156", "a vector of stride 0", F8,
         lambda mm: equal(mm(ONES((2, 4)), np.broadcast_to(1.0, (4, 1))), np.full((2, 1), 4.0))),
    Case("torch/torch7#58", "an expanded matrix of stride 0", F8,
         lambda mm: equal(mm(ONES((1, 2)), np.broadcast_to(ONES((2, 1)), (2, 2))), [[2.0, 2.0]])),
    Case("rust-ndarray/ndarray#173", "negative strides", F8, negative_strides),
    Case("Quansight-Labs/numpy_pytorch_interop#85", "out was broadcast", F8,
         lambda mm: equal(mm(ONES((5, 2)), ONES((2, 2)), out=np.zeros((5, 2))), np.full((5, 2), 2.0))),
    Case("numpy/numpy#8440", "out is both inputs", F8, out_is_both_inputs),
    Case("cupy/cupy#6214", "out is both inputs, a stack", F8, out_is_a_stack),
    Case("numpy/numpy#7124", "a memory map, and out=", F8, memory_map),
    Case("numpy/numpy#16660", "a misaligned field of a packed struct", F8, packed_struct),
    Case("pytorch/tvm#80", "a pointer that is no multiple of 64", F4, offset_pointer),
    Case("numpy/numpy#20742", "read-only inputs", F8, read_only),
    Case("numpy/numpy#10764", "np.matrix by a vector", ("int64",), matrix_by_vector),
    Case("cupy/cupy#1231", "empty operands gave uninitialised memory", F8, nothing_to_sum),
    Case("numpy TestMatmul::test_empty_out", "an empty stack, a full out", F8, empty_stack_into_something),
    Case("OpenMathLib/OpenBLAS#929", "NaN in out survived", F4, nan_in_out("f4")),
    Case("OpenMathLib/OpenBLAS#929", "NaN in out survived", F8, nan_in_out("f8")),
    Case("OpenMathLib/OpenBLAS#929", "NaN in out survived, complex64", ("complex64",), nan_in_out("c8")),
    Case("OpenMathLib/OpenBLAS#929", "NaN in out survived, complex128", ("complex128",), nan_in_out("c16")),
    Case("OpenMathLib/OpenBLAS#746", "NaN next to the data leaked in", F4, nan_around),
    Case("numpy/numpy#21342", "the sign of a zero", F8,
         lambda mm: equal(mm(np.array([[-0.0], [-0.0]]), np.array([[1.0]])), np.zeros((2, 1)))),
    Case("OpenMathLib/OpenBLAS#1237", "subnormals were flushed", F8, subnormals("f8", 1e-310)),
    Case("OpenMathLib/OpenBLAS#1237", "subnormals were flushed", F4, subnormals("f4", np.float32(1e-40))),
    Case("numpy/numpy#28687", "false floating-point warnings", F8, no_warnings),
    Case("numpy/numpy#18061", "NaN in a product of ones", F8,
         lambda mm: equal(mm(ONES((363, 2)), ONES((363, 2)).T), np.full((363, 363), 2.0))),
    Case("OpenMathLib/OpenBLAS#5429", "45x33 by the identity", F4, times_identity),
    Case("numpy/numpy#13828", "wrong edges of AVX-512 kernels", F8, random_shapes),
    Case("numpy/numpy#19945", "products do not conjugate", ("complex128",),
         lambda mm: mm(np.array([1j]), np.array([1j])) == -1),
    Case("pymc-devs/pytensor#486", "an outer product", F8, outer_product),
    *(Case("numpy/numpy#12156, #8440, #14306 and others", f"strides, overlap, edges in {np.dtype(letter).name}",
           (np.dtype(letter).name,), in_place_of_float64(letter)) for letter in "?bBhHiIlLeFD"),
    Case("OpenMathLib/OpenBLAS#1326", "a sum of more than 2**24 ones", F4, sixteen_million_ones),
    Case("OpenMathLib/OpenBLAS#1755", "many threads at once", F8, many_callers),
]
# fmt: on

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.source}-{case.dtypes[0]}")
#: On the oldest instruction set with the slow tests, where there is another.
forced_cases = pytest.mark.parametrize(
    "case, isa", [pytest.param(case, isa, id=f"{isa}-{case.source}-{case.dtypes[0]}",
                               marks=pytest.mark.slow if isa in RUNNABLE[:-1][:1] else ())
                  for case in CASES for isa in RUNNABLE if case.ours(isa)],
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
needs_kernels = pytest.mark.skipif(not RUNNABLE, reason="no kernels for this CPU")


def operator(a, b, **keywords):
    """``a @ b`` where that can be said, else np.matmul."""
    return np.matmul(a, b, **keywords) if keywords else a @ b


@every_case
def test_numpy_itself(case):
    """The rows are right: they hold for NumPy without us."""
    assert case.check(np.matmul)


@every_case
def test_matmul(case):
    assert case.check(tvmgemm.matmul)


@every_case
def test_patched(case):
    with tvmgemm.patched():
        assert case.check(operator)


@needs_kernels
@forced_cases
@pytest.mark.parametrize("through", ["matmul", "patched"])
def test_forced(case, isa, through):
    with tvmgemm.options(variant=FORCED, max_isa=isa):
        tvmgemm.reset_stats()
        if through == "matmul":
            assert case.check(tvmgemm.matmul)
        else:
            with tvmgemm.patched():
                assert case.check(operator)
        after = tvmgemm.stats()
        for dtype in case.dtypes:
            assert after.served[dtype] > 0 or case.check is empty_stack_into_something
            assert after.declined[dtype] == 0


@pytest.mark.parametrize("shape", [(3, 3), (2, 3)])
def test_masked_arrays(shape):
    """numpy/numpy#14992: ``@`` works; np.matmul knows square ones only. Whatever NumPy does with masks, it does with ours."""

    def seen(multiply):
        try:
            result = multiply(x, x.T)
        except ValueError as error:
            return str(error)
        return type(result), result.data.tolist(), np.ma.getmaskarray(result).tolist()

    x = np.ma.array(np.arange(1.0, 1 + np.prod(shape)).reshape(shape), mask=[[1, 0, 0]] * shape[0])
    functions = [np.matmul, lambda a, b: a @ b]
    numpys = [seen(function) for function in functions]
    assert seen(tvmgemm.matmul) == numpys[0]
    with tvmgemm.patched():
        assert [seen(function) for function in functions] == numpys

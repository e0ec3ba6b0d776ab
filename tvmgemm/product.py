"""A product as people name it, ``float32 4x700x100``, its operands, and the calls that compute it.

Which problem that is for the planner is decided by the inner loop (``Product.problem``): it exchanges operands, joins stacks,
and knows what NumPy calls BLAS for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from .frontend import gemm, matmul, numpys_matmul
from .probe import problem_of
from .problem import DTYPES, DType, Problem

#: Letters of layouts.
ROW, COL = "r", "c"

#: Of C = alpha.A.B + beta.C: numbers that every dtype has and that keep C finite, however often it is computed again.
_ALPHA = {True: 0.5, False: 3}
_BETA = {True: 0.5, False: -1}


@dataclass(frozen=True)
class Product:
    """C (m x n) = A (m x k) . B (k x n), ``batch`` times if ``batch`` > 1; of ``op`` gemm C = alpha.A.B + beta.C.

    ``dtype`` is a name of ``problem.DTYPES``. ``layouts``: of A and B, each ``"r"`` (row-major) or ``"c"`` (column-major);
    C is row-major.
    """

    dtype: str
    m: int
    n: int
    k: int
    batch: int = 1
    op: str = "matmul"
    layouts: str = ROW + ROW

    def __str__(self) -> str:
        op = "" if self.op == "matmul" else f"{self.op} "
        layouts = "" if self.layouts == ROW + ROW else f" {self.layouts}"
        return f"{op}{self.dtype} {self.size}{layouts}"

    @property
    def size(self) -> str:
        """``MxNxK``, of a stack ``BxMxNxK``."""
        return "x".join(map(str, ([self.batch] if self.batch > 1 else []) + [self.m, self.n, self.k]))

    @property
    def elements(self) -> DType:
        """What A, B and C are made of."""
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes of the operands and of two results, which are compared."""
        of = self.elements
        return self.batch * (of.a_size * self.m * self.k + of.b_size * self.k * self.n + 2 * of.c_size * self.m * self.n)

    @property
    def objection(self) -> str | None:
        """Why there is no such call, or None if there is."""
        of = self.elements
        if self.op == "gemm" and (not of.a == of.b == of.c or self.dtype in ("bool", "bfloat16")):
            return f"gemm takes no {self.dtype}"
        if self.op == "gemm" and self.batch > 1:
            return "gemm takes no stacks"
        return None

    def problem(self) -> Problem:
        """What the planner is asked in a call. Memory for the operands is reserved, but not touched."""
        problem, _ = problem_of(self.call(*map(self._room, "abc")))
        assert problem is not None  # nothing is empty, and strides are whole elements
        return problem

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A and B with random elements, and a C with zeros."""
        random, (a, b, c) = np.random.default_rng(0), map(self._room, "abc")
        for x in (a, b):
            x[...] = _random(random, x.shape, x.dtype)
        c[...] = 0
        return a, b, c

    def call(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Callable[[], np.ndarray]:
        """The call that computes it into ``c``."""
        if self.op == "gemm":
            inexact = c.dtype.kind in "fc"
            return partial(gemm, a, b, c, _ALPHA[inexact], _BETA[inexact])
        of = self.elements  # a product of bfloat16 is float32 unless dtype= says otherwise
        alike = of.a == of.b == of.c != "bfloat16"
        return partial(matmul, a, b, c) if alike else partial(matmul, a, b, c, dtype=c.dtype)

    def numpys_call(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Callable[[], np.ndarray]:
        """NumPy's call for it, of dtypes that NumPy's matmul has."""
        return partial(numpys_matmul, a, b, c)

    def _room(self, operand: str) -> np.ndarray:
        rows, columns = {"a": (self.m, self.k), "b": (self.k, self.n), "c": (self.m, self.n)}[operand]
        stack = (self.batch,) if self.batch > 1 else ()
        dtype = _numpy_dtype(getattr(self.elements, operand))
        if operand != "c" and self.layouts["ab".index(operand)] == COL:
            return np.empty((*stack, columns, rows), dtype).swapaxes(-1, -2)
        return np.empty((*stack, rows, columns), dtype)


@cache
def _numpy_dtype(name: str) -> np.dtype:
    if name == "bfloat16":  # which NumPy knows by name once this is imported
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _random(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":  # few true: sums of many end at once
        return random.random(shape) < 0.01
    if dtype.kind in "iu":
        return random.integers(0, 100, shape, dtype)
    wide = np.float64 if dtype in (np.float64, np.complex128) else np.float32
    return random.standard_normal(shape, wide).astype(dtype, copy=False)

"""What a call asks for: dtype, sizes and layout classes, as the native inner loop canonicalised them."""

from __future__ import annotations

from dataclasses import dataclass

#: Layout classes, numbered as in native/tvmgemm.h.
ROW, COL, STRIDED = 0, 1, 2
LAYOUT_NAMES = ("row", "col", "strided")

#: Operations: C = A.B, and C = alpha.A.B + beta.C. Numbered as in native/tvmgemm.h.
OPS = ("matmul", "gemm")


@dataclass(frozen=True)
class DType:
    """A dtype that kernels exist for: its NumPy name, its number in the native part, bytes per element."""

    name: str
    native_id: int
    itemsize: int


DTYPES: dict[str, DType] = {d.name: d for d in (DType("float32", 0, 4), DType("float64", 1, 8))}
_DTYPE_NAMES = {d.native_id: d.name for d in DTYPES.values()}


@dataclass(frozen=True)
class Problem:
    """C (m x n) = A (m x k) . B (k x n), ``batch`` times, after canonicalisation.

    Layouts are ``"row"`` (unit column stride), ``"col"`` (unit row stride) or ``"strided"``; C is never ``"col"``:
    a column-major C is computed as C^T = B^T.A^T, which ``transposed`` records (A, B, m and n are already swapped).
    ``symmetric``: A and B are one buffer and B = A^T.
    """

    dtype: str
    m: int
    n: int
    k: int
    batch: int = 1
    op: str = "matmul"
    a_layout: str = "row"
    b_layout: str = "row"
    c_layout: str = "row"
    transposed: bool = False
    symmetric: bool = False

    @property
    def work(self) -> float:
        """Multiply-adds of one product, as a float: sizes beyond 2**31 must not overflow in the native table."""
        return float(self.m) * float(self.n) * float(self.k)

    @classmethod
    def from_native(cls, p) -> Problem:
        """The Problem that a native ``tg_problem`` describes."""
        return cls(
            dtype=_DTYPE_NAMES[p.dtype],
            m=p.m,
            n=p.n,
            k=p.k,
            batch=p.batch,
            op=OPS[p.op],
            a_layout=LAYOUT_NAMES[p.a_layout],
            b_layout=LAYOUT_NAMES[p.b_layout],
            c_layout=LAYOUT_NAMES[p.c_layout],
            transposed=bool(p.transposed),
            symmetric=bool(p.symmetric),
        )

"""What a call asks for: dtype, sizes and layout classes, as the native inner loop canonicalised them."""

from __future__ import annotations

from dataclasses import dataclass

from .forks import once

#: Layout classes, numbered as in native/tvmgemm.h.
ROW, COL, STRIDED = 0, 1, 2
LAYOUT_NAMES = ("row", "col", "strided")

#: What NumPy has BLAS compute, numbered as in native/tvmgemm.h.
GEMV, SMALL_GEMM = 1, 2

#: Operations: C = A.B, and C = alpha.A.B + beta.C. Numbered as in native/tvmgemm.h.
OPS = ("matmul", "gemm")


#: Bytes of an element, by its NumPy name.
_SIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class DType:
    """What a product can be made of: its name, its number in the native part, the elements of A, B and C.

    ``a``, ``b``, ``c`` are NumPy's names of element types (``bfloat16`` is that of ml_dtypes). Where they differ, the
    product is a mixed one, named after its inputs and its output: ``"uint8-int8-int32"``.
    """

    name: str
    native_id: int
    a: str
    b: str
    c: str

    @property
    def a_size(self) -> int:
        """Bytes of an element of A."""
        return _SIZES[self.a]

    @property
    def b_size(self) -> int:
        """Bytes of an element of B."""
        return _SIZES[self.b]

    @property
    def c_size(self) -> int:
        """Bytes of an element of C."""
        return _SIZES[self.c]

    @property
    def scale(self) -> str:
        """NumPy's name of the type that the kernels of ``gemm`` take alpha and beta in."""
        return "float32" if self.c in ("float16", "bfloat16") else self.c

    @property
    def itemsize(self) -> int:
        """Bytes of an element of C; of every element, unless the product is mixed."""
        return self.c_size


#: The inputs and the output of every dtype, numbered as in native/native.h.
_ELEMENTS = {
    **{
        name: (name, name, name)
        for name in (
            "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
            "complex64", "complex128", "bool",
        )
    },
    "int8-int32": ("int8", "int8", "int32"),
    "uint8-int8-int32": ("uint8", "int8", "int32"),
    "uint8-int32": ("uint8", "uint8", "int32"),
    "uint8-uint32": ("uint8", "uint8", "uint32"),
    "int16-int32": ("int16", "int16", "int32"),
    "float16-float32": ("float16", "float16", "float32"),
    "bfloat16-float32": ("bfloat16", "bfloat16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16", "bfloat16"),
}  # fmt: skip

#: Every dtype that the native part knows. Which have kernels, and where, is for ``family.tiles`` to say.
DTYPES: dict[str, DType] = {name: DType(name, i, *abc) for i, (name, abc) in enumerate(_ELEMENTS.items())}
_DTYPE_NAMES = {d.native_id: d.name for d in DTYPES.values()}


@dataclass(frozen=True)
class Problem:
    """C (m x n) = A (m x k) . B (k x n), ``batch`` times, after canonicalisation.

    Layouts are ``"row"`` (unit column stride), ``"col"`` (unit row stride) or ``"strided"``; C is never ``"col"``:
    a column-major C is computed as C^T = B^T.A^T, which ``transposed`` records (A, B, m and n are already swapped). So are
    few rows times a large column-major B, with a ``"strided"`` C.
    ``symmetric``: A and B are one buffer and B = A^T. ``gemv``: m or n is 1 and the strides are such that NumPy has BLAS
    compute it, if BLAS knows the dtype; otherwise it runs a plain loop. ``small_gemm``: BLAS takes both operands
    as they are (neither is ``"strided"``), m and n are not 1, and m.n.k is so small that OpenBLAS may have other kernels
    for it (float32 and float64).
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
    gemv: bool = False
    small_gemm: bool = False

    @once
    def kind(self) -> tuple:
        """All but the sizes, and but ``transposed``, which makes no difference to the planner."""
        return (
            self.dtype, self.op, self.a_layout, self.b_layout, self.c_layout, self.symmetric, self.gemv, self.small_gemm
        )  # fmt: skip

    @once
    def mn(self) -> float:
        """Elements of C of one product, as a float, like ``work``."""
        return float(self.m) * float(self.n)

    @once
    def kn(self) -> float:
        """Elements of B of one product, as a float, like ``work``."""
        return float(self.k) * float(self.n)

    @once
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
            gemv=p.blas == GEMV,
            small_gemm=p.blas == SMALL_GEMM,
        )

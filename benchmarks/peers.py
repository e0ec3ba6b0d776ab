"""The libraries we are compared with, each used the way a Python program can use it.

A peer is what is importable here; nothing is installed. Each says its version and which kernels it runs,
because a BLAS that fell back to code for another CPU makes everybody else look fast.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np


class Peer(ABC):
    """One library. Creating it raises ImportError, with the reason, where it is not usable."""

    name: str
    #: What a reader of its numbers has to know.
    caveat: str = ""

    @abstractmethod
    def version(self) -> str:
        """Its version, and that of the BLAS inside it."""

    @abstractmethod
    def kernels(self) -> str:
        """Which CPU's kernels it chose."""

    @abstractmethod
    def function(
        self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None, dtype: np.dtype | None = None
    ) -> Callable[[], object] | None:
        """A call without arguments that computes a @ b, into ``out`` if given, with elements of ``dtype`` where
        np.matmul would give others (``elements.keywords``); None if it can't."""

    def set_threads(self, threads: int) -> None:
        """Beyond what threadpoolctl does for every library."""


class NumPy(Peer):
    """np.matmul, with the BLAS that NumPy comes with."""

    name = "numpy"

    def version(self) -> str:
        from tvmgemm.cli.info import numpy_blas

        blas = numpy_blas()
        return f"{np.__version__}, {blas['name']} {blas['version']}"

    def kernels(self) -> str:
        from tvmgemm.cli.info import numpy_blas

        return numpy_blas()["architecture"] or "unknown"

    def function(self, a, b, out, dtype=None):
        if dtype is not None and dtype.name == "bfloat16":  # it has no loop for that: it casts to float32 and back
            return lambda: np.matmul(a, b).astype(dtype)
        keywords = {} if dtype is None else {"dtype": dtype}
        return partial(np.matmul, a, b, *([] if out is None else [out]), **keywords)


class Mkl(Peer):
    """Intel's MKL: its gemm, for products of two matrices of one dtype."""

    name = "mkl"
    caveat = "called through ctypes, which costs it a few tenths of a microsecond per call"

    _ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112
    #: Symbol, and what makes a scalar argument of a number: complex ones are passed by pointer.
    _GEMMS = {
        "float32": ("cblas_sgemm", ctypes.c_float),
        "float64": ("cblas_dgemm", ctypes.c_double),
        "complex64": ("cblas_cgemm", lambda x: (ctypes.c_float * 2)(x, 0.0)),
        "complex128": ("cblas_zgemm", lambda x: (ctypes.c_double * 2)(x, 0.0)),
    }

    def __init__(self) -> None:
        try:
            files = importlib.metadata.files("mkl") or ()
        except importlib.metadata.PackageNotFoundError:
            raise ImportError("the package mkl is not installed") from None
        found = sorted(str(file.locate()) for file in files if "libmkl_rt" in file.name)
        if not found:
            raise ImportError("the package mkl has no libmkl_rt")
        try:
            self._library = ctypes.CDLL(found[0])
        except OSError as error:
            raise ImportError(f"libmkl_rt cannot be loaded: {error}") from error

    def version(self) -> str:
        return importlib.metadata.version("mkl")

    def kernels(self) -> str:
        a = np.ones((4, 4))
        self.function(a, a, None)()  # the first product loads the library with the kernels of this CPU
        try:
            with open("/proc/self/maps") as maps:
                loaded = {os.path.basename(line.split()[-1]) for line in maps if "libmkl_" in line}
        except OSError:
            return "unknown"
        common = ("rt", "core", "intel", "gnu", "sequential", "tbb", "vml")
        names = {name.split(".")[0].removeprefix("libmkl_") for name in loaded}
        return ", ".join(sorted(name for name in names if not name.startswith(common))) or "unknown"

    def function(self, a, b, out, dtype=None):
        operands = [_blas_operand(x) for x in (a, b)]
        if a.dtype.name not in self._GEMMS or a.dtype != b.dtype or dtype is not None or None in operands:
            return None
        if out is not None and not out.flags.c_contiguous:
            return None
        symbol, scalar = self._GEMMS[a.dtype.name]
        (a_column_major, lda), (b_column_major, ldb) = operands
        (m, k), n = a.shape, b.shape[1]
        c = np.empty((m, n), a.dtype) if out is None else out
        transposed = a_column_major, b_column_major
        transposes = [ctypes.c_int(self._TRANS if yes else self._NO_TRANS) for yes in transposed]
        sizes = [ctypes.c_int(size) for size in (m, n, k)]
        pa, pb, pc = (ctypes.c_void_p(x.ctypes.data) for x in (a, b, c))
        call = partial(
            getattr(self._library, symbol), ctypes.c_int(self._ROW_MAJOR), *transposes, *sizes, scalar(1.0),
            pa, ctypes.c_int(lda), pb, ctypes.c_int(ldb), scalar(0.0), pc, ctypes.c_int(n),
        )  # fmt: skip
        call.operands = (a, b, c)  # the pointers don't keep them alive
        return call


class Torch(Peer):
    """PyTorch on the CPU, which calls MKL and oneDNN."""

    name = "torch"

    #: Element types of A, B and C -> its function.
    _MULTIPLY = {
        **{(x, x, x): "matmul" for x in ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")},
        ("int8", "int8", "int32"): "_int_mm",
    }

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def version(self) -> str:
        inside = []
        for line in self._torch.__config__.show().splitlines():
            if "Math Kernel Library" in line or "MKL-DNN" in line:
                inside.append(line.strip(" -").partition("-Product")[0].partition(" (Git")[0])
        return ", ".join([self._torch.__version__, *inside])

    def kernels(self) -> str:
        return self._torch.backends.cpu.get_cpu_capability()

    def set_threads(self, threads: int) -> None:
        self._torch.set_num_threads(threads)

    def function(self, a, b, out, dtype=None):
        try:
            tensors = [self._tensor(x) for x in (a, b)]
            result = None if out is None else self._tensor(out)
        except (TypeError, ValueError):  # a dtype that it doesn't have, a negative stride
            return None
        name = self._MULTIPLY.get((a.dtype.name, b.dtype.name, a.dtype.name if dtype is None else dtype.name))
        if name is None:
            return None
        call = partial(getattr(self._torch, name), *tensors)
        return call if result is None else partial(call, out=result)

    def _tensor(self, x: np.ndarray):
        if x.dtype.name != "bfloat16":
            return self._torch.from_numpy(x)
        return self._torch.from_numpy(x.view(np.int16)).view(self._torch.bfloat16)  # from_numpy knows no bfloat16


#: In the order of a report. NumPy is always there: the target of every suite is stated against it.
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (NumPy, Mkl, Torch)}


def available(names: tuple[str, ...]) -> tuple[dict[str, Peer], dict[str, str]]:
    """The usable peers of ``names``, and why the others are not."""
    usable: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            usable[name] = PEERS[name]()
        except ImportError as error:
            missing[name] = str(error)
    return usable, missing


def _blas_operand(x: np.ndarray) -> tuple[bool, int] | None:
    """(column-major, leading dimension) of a matrix that BLAS can read; None for any other."""
    if x.ndim != 2:
        return None
    for column_major, (rows, columns) in ((False, x.strides), (True, x.strides[::-1])):
        extent = x.shape[0 if column_major else 1]
        leading = rows // x.itemsize
        if columns == x.itemsize and rows % x.itemsize == 0 and leading >= max(1, extent):
            return column_major, leading
    return None

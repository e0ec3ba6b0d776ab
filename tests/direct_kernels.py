"""Kernels called directly: compiled in worker processes, linked as builds do it, without the native part or a planner.

The workspace of a call has exactly the size that the kernel asks for, between two zones that must not change.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import platform
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from tvmgemm.build.link import find_linker, link
from tvmgemm.problem import DTYPES
from tvmgemm.spec import KernelSpec

_TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _TASK, ctypes.c_void_p, ctypes.c_int)


_MATH = ctypes.CDLL(ctypes.util.find_library("m"))

#: The flags that NumPy warns of, by their bits on this machine; inexact is raised by nearly everything.
FLAGS = (
    {"invalid": 1, "divide by zero": 4, "overflow": 8, "underflow": 16}
    if platform.machine() == "x86_64"
    else {"invalid": 1, "divide by zero": 2, "overflow": 4, "underflow": 8}
)


class _Environment(ctypes.Structure):
    """What a task gets: TVM's TVMParallelGroupEnv."""

    _fields_ = [("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32)]


def stored(name: str) -> str:
    """A NumPy dtype with the bits of elements of that name: those of bfloat16 for itself."""
    return "uint16" if name == "bfloat16" else name


def _compile(spec: KernelSpec, path: str) -> None:
    from tvmgemm.family import codegen

    codegen.compile_object(spec, path)


class Kernels:
    """Compiled two at a time from the moment on when they are announced."""

    ZONE = 4096

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ProcessPoolExecutor(2, get_context("spawn"))
        self._objects: dict = {}
        self._library = functools.cache(self._load)

    def announce(self, specs) -> None:
        """Start compiling what will be asked for."""
        for spec in specs:
            if spec not in self._objects:
                self._objects[spec] = self._pool.submit(_compile, spec, str(self._folder / f"{spec.name}.o"))

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(cancel_futures=True)

    def _load(self, spec: KernelSpec) -> ctypes.CDLL:
        linker = find_linker()
        if linker is None:
            pytest.skip("needs a linker")
        self.announce([spec])
        self._objects[spec].result(timeout=300)
        path = str(self._folder / spec.name)
        link(linker, path + ".o", path + ".so")
        return ctypes.CDLL(path + ".so")

    @staticmethod
    def _arguments(spec, a, b, c, blocks, tasks):
        strides = [s // x.itemsize for x in (a, b, c) for s in x.strides]
        (m, k), n = a.shape, b.shape[1]
        return (ctypes.c_int64 * 32)(m, n, k, *strides, *blocks, tasks, 1)  # a stack of one, where kernels know stacks

    def workspace(self, spec: KernelSpec, a, b, c, blocks: tuple[int, int, int], tasks: int) -> int:
        """Bytes that a call needs."""
        if not spec.blocked and spec.packing == "none":
            return 0
        size = ctypes.c_int64(-1)
        args = self._arguments(spec, a, b, c, blocks, tasks)
        assert self._library(spec)[spec.symbol + "_workspace"](args, ctypes.byref(size)) == 0
        assert 0 <= size.value < 1 << 31
        return size.value

    def multiply(
        self, spec: KernelSpec, a: np.ndarray, b: np.ndarray, c: np.ndarray, blocks: tuple[int, int, int], tasks: int = 1,
        scale: np.ndarray | None = None,
    ) -> set[str]:  # fmt: skip
        """C = A.B (or with alpha and beta in ``scale``), by blocks mc, nc, kc. Returns the floating-point flags that this
        raised: names of ``FLAGS``."""
        row = DTYPES[spec.dtype]
        for x, kind in zip((a, b, c), (row.a, row.b, row.c)):
            assert x.dtype == stored(kind)
        args, size = self._arguments(spec, a, b, c, blocks, tasks), self.workspace(spec, a, b, c, blocks, tasks)
        library = self._library(spec)
        room = np.full(size + 2 * self.ZONE + 64, 0xF5, "u1")
        at = room.__array_interface__["data"][0]
        start = self.ZONE + -(at + self.ZONE) % 64
        room[start : start + size // 8 * 8].view("u8")[...] = 0x7FF0_0000_7FA0_7C01  # signalling NaNs of every width
        if spec.parallel:
            launch = _LAUNCH(lambda task, closure, _: self._run(task, closure, tasks))
            pointer = ctypes.c_void_p.in_dll(library, "__TVMBackendParallelLaunch")
            pointer.value = ctypes.cast(launch, ctypes.c_void_p).value
        addresses = [ctypes.c_void_p(x.__array_interface__["data"][0]) for x in (a, b, c)]
        factors = ctypes.c_void_p(None if scale is None else scale.ctypes.data)
        kernel, every = library[spec.symbol], ctypes.c_int(sum(FLAGS.values()))
        _MATH.feclearexcept(every)
        status = kernel(*addresses, ctypes.c_void_p(at + start), factors, args)
        raised = _MATH.fetestexcept(every)
        assert status == 0
        outside = np.concatenate([room[:start], room[start + size :]])
        assert (outside == 0xF5).all(), "wrote outside its workspace"
        return {name for name, bit in FLAGS.items() if raised & bit}

    @staticmethod
    def _run(task, closure, tasks: int) -> int:
        """Tasks one by one, the last first: none may need what another did."""
        environment = _Environment(None, tasks)
        return max(task(i, ctypes.addressof(environment), closure) for i in reversed(range(tasks)))


@contextmanager
def announced(request, folder: Path):
    """``Kernels`` for the tests of the module that ``request`` is of; what their parameters name is being compiled."""
    built = Kernels(folder)
    items = [item for item in request.session.items if item.fspath == request.fspath and hasattr(item, "callspec")]
    built.announce(x for item in items for x in item.callspec.params.values() if isinstance(x, KernelSpec))
    yield built
    built.close()

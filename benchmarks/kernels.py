"""Kernels by their spec: built where the store has none, loaded, and put in charge of every product.

``Kernel.serve`` publishes a plan that holds every problem, so what is timed is ``tvmgemm.matmul`` as programs
call it: NumPy's machinery, the native inner loop, its scratch memory and its threads. Only the planner is
left out. That reaches kernels that no option can ask for too: the generator's earlier steps, and what is left
of a kernel without one of its fine-grain optimisations.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import tvmgemm
from tvmgemm import dispatch, settings
from tvmgemm._native import ffi, lib
from tvmgemm.blocking import BlockSizes
from tvmgemm.host import host
from tvmgemm.planner import blocks_of
from tvmgemm.problem import DTYPES, OPS
from tvmgemm.spec import KernelSpec

#: Seconds that one build process may take for all that is asked of it: a kernel takes 0.1 to 1 s.
BUILD_TIMEOUT = 900.0

_ANY = -1  # a plan for operands of any layout
_ALL_SIZES = (0, 2**62)


class BuildFailed(RuntimeError):
    """A kernel that the benchmark is about cannot be had."""


def usable_isa() -> str:
    """The instruction set that kernels are built for under the options in force; BuildFailed if there is none."""
    isa = host().isa(settings.current().max_isa)
    if isa is None:
        raise BuildFailed(f"no kernels exist for this CPU ({host().arch})")
    return isa.name


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded kernel with the block sizes and the number of tasks that it is called with."""

    spec: KernelSpec
    blocks: BlockSizes
    tasks: int
    handle: object

    def serve(self) -> None:
        """From here on this kernel, and nothing else, serves the products of its dtype and operation in
        ``tvmgemm.matmul``: until ``restore``, another kernel's ``serve`` or a change of options. The operands
        must be such that it can take them (``family.validity.unsuitable``)."""
        sides = {f"{side}_{end}": bound for side in ("m", "n", "k", "batch") for end, bound in zip(("lo", "hi"), _ALL_SIZES)}
        plan = {
            "dtype": DTYPES[self.spec.dtype].native_id, "op": OPS.index(self.spec.op),
            "a_layout": _ANY, "b_layout": _ANY, "c_layout": _ANY, "symmetric": _ANY,
            **sides, "work_lo": 0.0, "work_hi": float("inf"), "kernel": self.handle,
            "mc": self.blocks.mc, "nc": self.blocks.nc, "kc": self.blocks.kc, "tasks": self.tasks, "id": 0,
        }  # fmt: skip
        lib.tg_clear_plans()
        if lib.tg_publish(ffi.new("tg_plan *", plan)) != 0:
            raise MemoryError(f"the plan for {self.spec.name} could not be published")

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """a @ b by this kernel; plans are as before afterwards."""
        self.serve()
        try:
            return tvmgemm.matmul(a, b, out)
        finally:
            restore()


def restore() -> None:
    """The planner decides again."""
    lib.tg_clear_plans()


def load(
    specs: Sequence[KernelSpec], tasks: int = 1, progress: Callable[[str], None] | None = None
) -> dict[KernelSpec, Kernel]:
    """The kernels of ``specs``, with this host's block sizes; ``tasks`` for those that have a parallel loop.

    Those that the store lacks are built first, all in one process; ``progress`` is told how far that is.
    BuildFailed, with the reason, if one cannot be had.
    """
    from tvmgemm.build.parent import build
    from tvmgemm.store.key import kernel_key

    store = dispatch.store()
    paths = {spec: store.find(spec, kernel_key(spec)) for spec in dict.fromkeys(specs)}
    missing = [spec for spec, path in paths.items() if path is None]
    while missing:  # again for those that another process is building: their lock is waited for if they come first
        for result in build(missing, store, BUILD_TIMEOUT):
            if result.error is not None:
                raise BuildFailed(result.error)
            paths[result.spec] = result.path
            if progress is not None:
                done = sum(path is not None for path in paths.values())
                progress(f"{done} of {len(paths)} kernels: {result.spec.name}")
        missing = [spec for spec in missing if paths[spec] is None]
    return {
        spec: Kernel(spec, blocks_of(spec, host()), tasks if spec.parallel else 1, _handle(spec, path))
        for spec, path in paths.items()
    }


def _handle(spec: KernelSpec, path: str):
    error = ffi.new("char[]", 512)
    handle = lib.tg_kernel_load(os.fsencode(path), spec.symbol.encode(), spec.name.encode(), error, len(error))
    if not handle:
        raise BuildFailed(f"{spec.name} cannot be loaded: {ffi.string(error).decode('utf-8', 'replace')}")
    return handle


def progress_line(text: str) -> None:
    """Show ``text`` on stderr: on a terminal in place of the one before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

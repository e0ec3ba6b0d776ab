"""Kernels on trial: built where the store has none, loaded, put in charge of every product, and timed in turn.

``Kernel.serve`` publishes a plan that holds every problem, so what is timed is ``tvmgemm.matmul`` (or ``gemm``) as programs
call it: NumPy's machinery, the native inner loop, its scratch memory and its threads. Only the planner is
left out. That reaches kernels that no option can ask for too: the generator's earlier steps, and what is left
of a kernel without one of its fine-grain optimisations. The tuner and the benchmarks of the family use this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from . import settings, timing
from ._native import ffi, lib
from .blocking import BlockSizes, blocks_of
from .boxes import STACK, Box
from .frontend import matmul, numpys_matmul
from .host import host
from .kernels import open_library
from .kernels import store as current_store
from .problem import DTYPES, OPS
from .spec import KernelSpec

#: The competitor that is no kernel of ours.
NUMPY = "NumPy"

#: Rounds of a comparison at most; its seconds usually end it earlier.
ROUNDS = 101

#: Seconds that one build process may take for all that is asked of it: a kernel takes 0.1 to 1 s.
BUILD_TIMEOUT = 900.0

#: How ``name_of`` begins for a kernel of one shape alone.
OF_ONE_SHAPE = "specialised for"

_ANY = -1  # a plan for operands of any layout
_ALL_SIZES = (0, 2**62)


class BuildFailed(RuntimeError):
    """A kernel that is to be tried cannot be had."""


def usable_isa() -> str:
    """The instruction set that kernels are built for under the options in force; BuildFailed if there is none."""
    isa = host().isa(settings.current().max_isa)
    if isa is None:
        raise BuildFailed(f"no kernels exist for this CPU ({host().arch})")
    return isa.name


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded kernel with the block sizes and the number of tasks that it is called with; ``shares_stack``: they share
    out the products of a stack."""

    spec: KernelSpec
    blocks: BlockSizes
    tasks: int
    handle: object
    shares_stack: bool = False

    @property
    def name(self) -> str:
        """In the words of a report, see ``name_of``."""
        return name_of(self.spec, self.blocks, self.shares_stack)

    def serve(self) -> None:
        """From here on this kernel, and nothing else, serves the products of its dtype and operation in
        ``tvmgemm``: until ``restore``, another kernel's ``serve`` or a change of options. The operands
        must be such that it can take them (``family.validity.unsuitable``)."""
        sides = {f"{side}_{end}": bound for side in ("m", "n", "k", "batch") for end, bound in zip(("lo", "hi"), _ALL_SIZES)}
        products = {f"{side}_{end}": bound for side in Box.PRODUCTS for end, bound in (("lo", 0.0), ("hi", float("inf")))}
        plan = {
            "dtype": DTYPES[self.spec.dtype].native_id, "op": OPS.index(self.spec.op),
            "a_layout": _ANY, "b_layout": _ANY, "c_layout": _ANY, "symmetric": _ANY, "blas": _ANY,
            **sides, **products, "kernel": self.handle,
            "mc": self.blocks.mc, "nc": self.blocks.nc, "kc": self.blocks.kc, "id": 0,
            "tasks": 1 if self.shares_stack else self.tasks, "stack_tasks": self.tasks if self.shares_stack else 1,
        }  # fmt: skip
        lib.tg_clear_plans()
        if lib.tg_publish(ffi.new("tg_plan *", plan)) != 0:
            raise MemoryError(f"the plan for {self.spec.name} could not be published")

    def multiply(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """a @ b by this kernel; plans are as before afterwards."""
        return self.run(partial(matmul, a, b, out))

    def run(self, call: Callable[[], np.ndarray]) -> np.ndarray:
        """What ``call`` returns with this kernel in charge; plans are as before afterwards."""
        self.serve()
        try:
            return call()
        finally:
            restore()


def name_of(spec: KernelSpec, blocks: BlockSizes, shares_stack: bool = False) -> str:
    """In the words of a report: ``B3A2C0 8x48 ab ic mc=128 nc=2304``."""
    if spec.shape is not None:
        return f"{OF_ONE_SHAPE} {'x'.join(map(str, spec.shape))}"
    shared = STACK if shares_stack else spec.parallel
    if not spec.blocked:
        return " ".join(filter(None, (spec.variant, "without blocks", "b" * (spec.packing == "b"), shared)))
    parts = [spec.variant, spec.tile, spec.packing, shared, f"mc={blocks.mc}", f"nc={blocks.nc}"]
    return " ".join(filter(None, parts))


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
    from .build.parent import build
    from .store.key import kernel_key

    store = current_store()
    paths = {spec: store.find(spec, kernel_key(spec)) for spec in dict.fromkeys(specs)}
    missing = [spec for spec, path in paths.items() if path is None]
    if missing and settings.current().jit == "off":
        raise BuildFailed(f"{missing[0].name} is not in the store and TVMGEMM_JIT=off forbids building it")
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
    handle, error = open_library(spec, path)
    if error is not None:
        raise BuildFailed(f"{spec.name} cannot be loaded: {error}")
    return handle


def interleaved(
    kernels: Mapping[str, Kernel],
    ours: Callable[[], object],
    numpys: Callable[[], object] | None,
    seconds: float,
    threads: int,
) -> dict[str, list[float]]:
    """Seconds per call of every kernel and of NumPy, by name, one sample of each per round.

    ``ours``: a call of this package, which each kernel serves in turn, put in charge before its sample and outside of its
    time. ``numpys``: NumPy's call, None where it does not take part. With one thread the seconds are those that this
    process had a core: in a round of sixty members others take it away from some, and a wall clock would count that
    against them.
    """
    functions: dict[str, Callable[[], object]] = dict.fromkeys(kernels, ours)
    if numpys is not None:
        functions[NUMPY] = numpys

    def before(name: str) -> None:
        if name in kernels:
            kernels[name].serve()

    try:
        return timing.paired(
            functions,
            rounds=ROUNDS,
            min_seconds=timing.MIN_SECONDS if threads == 1 else timing.MIN_SECONDS_THREADED,
            budget=seconds,
            before=before,
            settle=threads > 1,
            clock=time.process_time if threads == 1 else time.perf_counter,
        )
    finally:
        restore()


def calls_of(a: np.ndarray, b: np.ndarray) -> tuple[Callable[[], object], Callable[[], object]]:
    """a @ b by this package and by NumPy, into an array that exists."""
    out = np.empty((a.shape[0], b.shape[1]), a.dtype)
    return partial(matmul, a, b, out), partial(numpys_matmul, a, b, out)


def ranked(samples: Mapping[str, Sequence[float]]) -> list[str]:
    """Names from the fastest to the slowest: by the median, over the rounds, of the time relative to the mean of the
    round. (Medians of seconds would rank what the machine did to some rounds.)"""
    logs = {name: np.log(seconds) for name, seconds in samples.items()}
    mean = np.mean(list(logs.values()), axis=0)
    return sorted(samples, key=lambda name: float(np.median(logs[name] - mean)))

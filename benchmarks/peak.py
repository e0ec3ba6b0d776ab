"""The measured peak of the cores: a loop of fused multiply-adds on registers, compiled by TVM.

A core's clock and what its neighbours leave of it change from second to second, and with the number of cores at work. So
a peak is measured next to what it judges, in turn with it, on as many cores at once.

Run as ``python -m benchmarks.peak FOLDER ISA DTYPE ...`` it builds the loops. ``build`` does that in a process of its own,
because compiling needs TVM and the process that measures kernels never imports it.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np

from tvmgemm.family.isa import ISAS, Isa

#: Elements that have a fused multiply-add of their own, and their bytes.
ITEMSIZES = {"float32": 4, "float64": 8}

#: Independent accumulators by number of registers: more than any core's FMA latency x throughput (5 x 2).
_ACCUMULATORS = {16: 12, 32: 24}

#: Of one loop: a quarter of a millisecond, so that calling it is nothing and an interrupt doesn't meet all of them.
_ROUNDS = 40_000

#: Loops of each thread that count towards one measurement, of which the fastest does.
_LOOPS = 4

_SYMBOL = "tvmgemm_peak"

#: When a loop began and when it ended, in seconds.
Span = tuple[float, float]


class Meter:
    """Loops of FMAs that say what the cores can do now, for each dtype of ``libraries`` (``_build``)."""

    def __init__(self, isa: Isa, libraries: Mapping[str, Path]) -> None:
        self._isa = isa
        self._functions = {dtype: ctypes.CDLL(str(library))[_SYMBOL] for dtype, library in libraries.items()}
        self._others: ThreadPoolExecutor | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Those it can measure."""
        return tuple(self._functions)

    def gflops(self, dtype: str, threads: int = 1) -> float:
        """GFLOP/s of so many cores at once: of each thread the fastest of a few short loops, all of which ran while all
        threads did. Whatever disturbs a loop can only make it slower. RuntimeError if the loops compute something else."""
        if threads > 1 and (self._others is None or self._others._max_workers < threads - 1):
            self._others = ThreadPoolExecutor(threads - 1, "peak")
        work = [self._work(dtype) for _ in range(threads)]
        spans: list[list[Span]] = [[] for _ in work]

        def loops(call: Callable[[], object], mine: list[Span]) -> None:
            while min(map(len, spans)) < _LOOPS:
                start = perf_counter()
                call()
                mine.append((start, perf_counter()))

        waiting = [self._others.submit(loops, call, mine) for (call, _), mine in zip(work[1:], spans[1:])]
        loops(work[0][0], spans[0])
        for each in waiting:
            each.result()
        for _, out in work:
            if not np.allclose(out, 2.0):
                raise RuntimeError(f"the loop that measures the peak computed {out.ravel()[:3]} instead of 2")
        lanes, accumulators = work[0][1].shape[::-1]
        return 2.0 * lanes * accumulators * _ROUNDS / 1e9 * sum(1 / seconds for seconds in fastest(spans))

    def highest(self, dtype: str, threads: int, samples: int = 50) -> float:
        """The highest of many measurements."""
        return max(self.gflops(dtype, threads) for _ in range(samples))

    def _work(self, dtype: str) -> tuple[Callable[[], object], np.ndarray]:
        """A call of the loop on memory of its own, and the array that it brings its accumulators to."""
        lanes, accumulators = self._isa.lanes(ITEMSIZES[dtype]), _ACCUMULATORS[self._isa.vector_registers]
        x, y = np.full(lanes, 0.5, dtype), np.ones(lanes, dtype)  # accumulators go to 2: no slow denormals
        out = np.arange(accumulators * lanes).astype(dtype).reshape(accumulators, lanes)

        def call() -> None:
            self._functions[dtype](*(ctypes.c_void_p(array.ctypes.data) for array in (x, y, out)), ctypes.c_int64(_ROUNDS))

        return call, out


def fastest(spans: Sequence[Sequence[Span]]) -> list[float]:
    """Seconds of the fastest loop of each thread, of those that ran while all threads did (of all if none did)."""
    start, end = max(mine[0][0] for mine in spans), min(mine[-1][1] for mine in spans)
    together = [[span for span in mine if span[0] >= start and span[1] <= end] or mine for mine in spans]
    return [min(stop - begin for begin, stop in mine) for mine in together]


class Beside:
    """The peak beside timings: ``take(name)`` measures it before each sample of a function ``name`` (``before`` of
    ``timing.paired``). ``peak``: measures GFLOP/s, or None where it is not known."""

    def __init__(self, peak: Callable[[], float] | None) -> None:
        self._peak = peak
        self._taken: dict[str, list[float]] = {}

    def take(self, name: str) -> None:
        """Measure."""
        if self._peak is not None:
            self._taken.setdefault(name, []).append(self._peak())

    def fraction(self, name: str, seconds: Sequence[float], flops: float) -> float | None:
        """The part of the peak that samples of ``seconds`` per call reach, each that of its own round: the median."""
        if self._peak is None:
            return None
        peaks = self._taken[name][-len(seconds) :]  # before them, those of calls that were not timed
        return float(np.median(flops / 1e9 / np.array(seconds) / np.array(peaks)))


def build(isa: str, dtypes: Sequence[str], timeout: float = 120.0) -> Meter:
    """A Meter, whose loops a child process compiles; RuntimeError says why that failed."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.peak", folder, isa, *dtypes]
        child = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout)
        if child.returncode:
            last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
            raise RuntimeError(f"the peak could not be measured: {last}")
        return Meter(ISAS[isa], {dtype: _library(Path(folder), dtype) for dtype in dtypes})


def _library(folder: Path, dtype: str) -> Path:
    return folder / f"{dtype}.so"


def _build(isa: Isa, dtype: str, folder: Path) -> None:
    """A library with ``tvmgemm_peak(x, y, out, rounds)``: each round is one FMA per accumulator."""
    import tvm
    from tvm.script import tirx as T

    from tvmgemm.build.link import NO_LINKER, find_linker, link

    size = ITEMSIZES[dtype]
    lanes, accumulators = isa.lanes(size), _ACCUMULATORS[isa.vector_registers]

    @T.prim_func(s_tir=True)
    def peak(px: T.handle(dtype), py: T.handle(dtype), pout: T.handle(dtype), rounds: T.int64) -> T.int32:
        T.func_attr({"global_symbol": _SYMBOL, "calling_conv": 2, "tirx.noalias": True})
        x = T.decl_buffer((lanes,), dtype, data=px, align=size)
        y = T.decl_buffer((lanes,), dtype, data=py, align=size)
        out = T.decl_buffer((accumulators, lanes), dtype, data=pout, align=size)
        tile = T.alloc_buffer(
            (accumulators, lanes), dtype, scope="local", annotations={"disable_lower_builtin": True}
        )
        for i in T.unroll(accumulators):
            for j in T.vectorized(lanes):
                tile[i, j] = out[i, j]
        for _ in T.serial(rounds):
            for i in T.unroll(accumulators):
                for j in T.vectorized(lanes):
                    tile[i, j] = tile[i, j] * x[j] + y[j]
        for i in T.unroll(accumulators):
            for j in T.vectorized(lanes):
                out[i, j] = tile[i, j]
        return T.int32(0)

    target = {"kind": "llvm", **{key: list(v) if isinstance(v, tuple) else v for key, v in isa.target}}
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_storage_rewrite": True}):
        module = tvm.compile(tvm.IRModule({_SYMBOL: peak}), tvm.target.Target(target)).mod
    compiled, library = folder / f"{dtype}.o", _library(folder, dtype)
    module.write_to_file(str(compiled), "o")
    linker = find_linker()
    if linker is None:
        raise RuntimeError(NO_LINKER)
    link(linker, str(compiled), str(library))


def main(argv: list[str]) -> int:
    """Build the loops for ``argv`` = FOLDER ISA DTYPE ..."""
    folder, isa, *dtypes = argv
    for dtype in dtypes:
        _build(ISAS[isa], dtype, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

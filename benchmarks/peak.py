"""The measured peak of one core: a loop of fused multiply-adds on registers, compiled by TVM.

Run as ``python -m benchmarks.peak ISA DTYPE ...`` it prints GFLOP/s per dtype as JSON. The runner does that
in a process of its own, because compiling needs TVM and the process that measures kernels never imports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tvmgemm.family.isa import ISAS, Isa

#: Elements that have a fused multiply-add of their own, and their bytes.
ITEMSIZES = {"float32": 4, "float64": 8}

#: Independent accumulators by number of registers: more than any core's FMA latency x throughput (5 x 2).
_ACCUMULATORS = {16: 12, 32: 24}

_ROUNDS = 20_000
_SAMPLES = 200
_SYMBOL = "tvmgemm_peak"


def measure(isa: str, dtypes: tuple[str, ...], timeout: float = 120.0) -> dict[str, float]:
    """GFLOP/s of one core per dtype, measured in a child process; RuntimeError says why it failed."""
    command = [sys.executable, "-m", "benchmarks.peak", isa, *dtypes]
    root = Path(__file__).resolve().parent.parent
    child = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=timeout)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise RuntimeError(f"the peak of a core could not be measured: {last}")
    return json.loads(child.stdout)


def _build(isa: Isa, dtype: str, folder: Path) -> Path:
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
    compiled, library = folder / f"{dtype}.o", folder / f"{dtype}.so"
    module.write_to_file(str(compiled), "o")
    linker = find_linker()
    if linker is None:
        raise RuntimeError(NO_LINKER)
    link(linker, str(compiled), str(library))
    return library


def _time(library: Path, isa: Isa, dtype: str) -> float:
    """GFLOP/s of the best of many short samples: whatever disturbs a sample can only make it slower."""
    import ctypes
    from functools import partial

    import numpy as np

    from tvmgemm.timing import sample

    lanes, accumulators = isa.lanes(ITEMSIZES[dtype]), _ACCUMULATORS[isa.vector_registers]
    x, y = np.full(lanes, 0.5, dtype), np.ones(lanes, dtype)  # accumulators go to 2: no slow denormals
    out = np.arange(accumulators * lanes).astype(dtype)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (x, y, out)]
    function = ctypes.CDLL(str(library))[_SYMBOL]
    call = partial(function, *pointers, ctypes.c_int64(_ROUNDS))
    seconds = min(sample(call, 1) for _ in range(_SAMPLES))
    if not np.allclose(out, 2.0):
        raise RuntimeError(f"the loop that measures the peak computed {out.ravel()[:3]} instead of 2")
    return 2.0 * lanes * accumulators * _ROUNDS / seconds / 1e9


def main(argv: list[str]) -> int:
    """Print ``{dtype: GFLOP/s}`` for ``argv`` = ISA DTYPE ..."""
    isa, dtypes = ISAS[argv[0]], argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        libraries = {dtype: _build(isa, dtype, Path(folder)) for dtype in dtypes}
        print(json.dumps({dtype: _time(library, isa, dtype) for dtype, library in libraries.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``stats()``: what was served, declined and built in this process; and the scratch memory of the calling thread."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ._native import lib
from .forks import importing
from .problem import DTYPES


@dataclass(frozen=True)
class Statistics:
    """Counts since the process began or ``reset_stats()`` was called.

    ``served`` and ``declined``: inner-loop calls by dtype (a stack of matrices is one call, or a few), through
    ``matmul``, ``gemm`` and patched NumPy; declined calls were computed by NumPy's own loop. ``kernels``: inner-loop
    calls by name of the kernel. ``builds``: kernels compiled; ``failed_builds``; ``store_hits``: kernels found on
    disk; ``build_seconds``: time that building took, in seconds.
    """

    served: dict[str, int] = field(default_factory=dict)
    declined: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)
    builds: int = 0
    failed_builds: int = 0
    store_hits: int = 0
    build_seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{dtype}: {served} calls served, {self.declined[dtype]} declined"
            for dtype, served in self.served.items()
            if served or self.declined[dtype]
        ]
        lines += [f"{calls:>12} {name}" for name, calls in sorted(self.kernels.items())]
        lines.append(
            f"{self.builds} kernels built in {self.build_seconds:.2f} s, {self.failed_builds} failed, "
            f"{self.store_hits} found on disk"
        )
        return "\n".join(lines)


def stats() -> Statistics:
    """The Statistics of this process.

    Examples
    --------
    >>> import numpy as np, tvmgemm
    >>> a = np.ones((40, 40), np.float32)
    >>> tvmgemm.reset_stats()
    >>> c = tvmgemm.matmul(a, a)
    >>> tvmgemm.stats().served["float32"]
    1
    """
    served = {name: lib.tg_served(d.native_id) for name, d in DTYPES.items()}
    declined = {name: lib.tg_declined(d.native_id) for name, d in DTYPES.items()}
    kernels = _kernels()
    if kernels is None:
        return Statistics(served, declined)
    calls = {kernel.spec.name: kernel.calls for kernel in list(kernels.loaded.values()) if kernel.calls}
    b = kernels.builds
    return Statistics(served, declined, calls, b.built, b.failed, b.store_hits, b.seconds)


def reset_stats() -> None:
    """Set every count back to zero. Kernels and plans stay."""
    lib.tg_reset_counters()
    kernels = _kernels()
    if kernels is not None:
        kernels.builds = kernels.Builds()


def _kernels():
    """The module, or None before the first miss: then there is nothing to tell of."""
    with importing:  # another thread may be in its first miss
        return sys.modules.get("tvmgemm.kernels")


def release_scratch() -> int:
    """Free the packing buffers of the calling thread; returns how many bytes they had. The next call makes new ones."""
    size = lib.tg_scratch_bytes()
    lib.tg_release_scratch()
    return size

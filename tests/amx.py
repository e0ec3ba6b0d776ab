"""AMX and AVX-VNNI for tests: the CPU's, or ``amx_emulator.c`` on x86-64 CPUs with the rest of what those kernels use.

The emulator handles SIGILL, which nothing else in a process of tests raises; without it kernels with AMX die there.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from plain_kernels import compiler

from tvmgemm.family.isa import ISAS
from tvmgemm.host import Host, host

LEVEL, VNNI = "x86-64-v4-amx", "x86-64-v3-vnni"

#: What the emulator adds to a CPU, by level.
EMULATED = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_ADDED = {LEVEL: EMULATED, VNNI: frozenset({"avx_vnni"})}

SOURCE = Path(__file__).with_name("amx_emulator.c")


def skip_if_impossible(level: str = LEVEL) -> None:
    """Skip the test where kernels of that level cannot run."""
    if host().arch != "x86_64" or not ISAS[level].requires <= host().features | _ADDED[level]:
        pytest.skip(f"needs {', '.join(sorted(ISAS[level].requires - _ADDED[level] - host().features)) or 'x86-64'}")


def host_with(level: str) -> Host:
    """This machine, as it would be with what a level adds."""
    here = host()
    return Host(here.arch, here.features | _ADDED[level], here.caches, here.cores, here.model)


def host_with_amx() -> Host:
    """This machine, as it would be with AMX."""
    return host_with(LEVEL)


class Unit:
    """The unit of this process."""

    def __init__(self, emulator: ctypes.CDLL | None) -> None:
        self._emulator = emulator
        self._emulated = emulator and emulator.amx_emulated
        if self._emulated:
            self._emulated.restype = ctypes.c_long

    def instructions(self) -> int | None:
        """How many were emulated so far; None where the CPU executes them."""
        return self._emulated and self._emulated()

    def released(self) -> bool:
        """Whether this thread's registers are in their initial state, as far as one can know."""
        return self._emulator is None or not self._emulator.amx_configured()


@contextmanager
def unit(folder: Path, level: str = LEVEL) -> Iterator[Unit]:
    """Makes kernels of the level run in this process; ``folder`` takes the emulator."""
    skip_if_impossible(level)
    if _ADDED[level] <= host().features:
        yield Unit(None)
        return
    library = folder / "amx_emulator.so"
    options = ["-std=gnu11", "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler(), *options, "-o", library, SOURCE], check=True, timeout=120)
    emulator = ctypes.CDLL(str(library))
    assert emulator.amx_begin() == 0
    try:
        yield Unit(emulator)
    finally:
        assert emulator.amx_end() == 0

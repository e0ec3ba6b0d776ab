"""Machines that code can be emitted for: the levels that kernels are built for here, and other CPUs, as one
table.

What is emitted for a CPU is scheduled for it and may use more of its instructions than the level's kernels,
which have to run on every CPU of the level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .arithmetic import WAYS
from .isa import EMITTED_ISAS, ISAS, Isa, isa_of


@dataclass(frozen=True)
class Target:
    """``isa``: the instruction set (a name of either table of ``isa``) whose lanes and tiles the kernel has.

    ``wider``: further ones of this CPU, narrow to wide, for the dtypes that they have kernels for.
    ``options``: what LLVM is told instead of the instruction set's own ``target``. ``system``: what follows
    the architecture in the target triple; it decides the format of the object file and the dialect of the
    assembly. ``note``: what to know about the code, for people.
    """

    name: str
    isa: str
    options: tuple[tuple[str, object], ...]
    note: str = ""
    system: str = "unknown-linux-gnu"
    wider: tuple[str, ...] = ()

    def for_dtype(self, dtype: str) -> Target:
        """The target with the widest instruction set that has kernels for ``dtype``; itself if no wider one has."""
        return replace(self, isa=next((isa for isa in reversed(self.wider) if dtype in WAYS[isa]), self.isa))

    @property
    def triple(self) -> str:
        """LLVM's name of the platform."""
        return f"{isa_of(self.isa).arch}-{self.system}"


def _level(isa: Isa, note: str = "") -> Target:
    return Target(isa.name, isa.name, isa.target, note)


def _cpu(name: str, isa: str, note: str = "", **rest: Any) -> Target:
    return Target(name, isa, (("mcpu", name),), note, **rest)


_ZEN = "LLVM unrolls some of its inner loops twice"
_DOTPROD = ("armv8-dotprod",)
_NEON = "128-bit NEON code: SVE is not used"
_APPLE = (
    "NEON code: AMX is not used; with the tile for a narrow C, the inner loop has one address on the stack"
)
_UNTRIED = "emitted only: the project has not run this code; "
_NOTES = {
    "riscv64-v": _UNTRIED
    + "128 bits of each register are used, whatever VLEN is; no prefetches, which take Zicbop",
    "power9": _UNTRIED + "no masked stores, so the edges of C are written element by element",
}

# fmt: off
TARGETS: dict[str, Target] = {target.name: target for target in (
    *(_level(isa) for isa in ISAS.values()),
    _cpu("haswell",        "x86-64-v3"),
    _cpu("znver3",         "x86-64-v3", _ZEN),
    _cpu("skylake-avx512", "x86-64-v4"),
    _cpu("sapphirerapids", "x86-64-v4", "AVX-512 and AMX: FP16 is not used", wider=("x86-64-v4-vnni", "x86-64-v4-bf16", "x86-64-v4-amx")),
    _cpu("znver4",         "x86-64-v4", _ZEN, wider=("x86-64-v4-vnni", "x86-64-v4-bf16")),
    _cpu("cortex-a72",     "armv8-neon"),
    _cpu("neoverse-n1",    "armv8-neon", wider=_DOTPROD),
    _cpu("neoverse-v1",    "armv8-neon", _NEON, wider=_DOTPROD),
    _cpu("apple-m1",       "armv8-neon", _APPLE, system="apple-darwin", wider=_DOTPROD),
    *(_level(isa, _NOTES[isa.name]) for isa in EMITTED_ISAS.values()),
)}
# fmt: on

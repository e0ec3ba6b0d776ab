"""Instruction sets a kernel can be generated for, narrow to wide, as tables.

A kernel is keyed by the *level*, not by the model of the CPU it was built on: two machines of one level share it, and
a CPU that lost a feature (a hypervisor, an older node of a cluster) never loads code that it cannot execute.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Isa:
    """One instruction-set level.

    ``requires`` uses the names of Linux's cpuinfo. ``vector_bytes`` is the width of one register of the file of
    ``vector_registers``; ``masks`` says whether masked loads and stores are single instructions (elsewhere LLVM
    expands them, so they stay on the edges); ``target`` is what TVM's LLVM back end is told beyond the triple.
    """

    name: str
    arch: str
    requires: frozenset[str]
    vector_bytes: int
    vector_registers: int
    fma: bool
    masks: bool
    target: tuple[tuple[str, object], ...]

    def lanes(self, itemsize: int) -> int:
        """Elements of ``itemsize`` bytes in one vector register."""
        return self.vector_bytes // itemsize


_V2 = frozenset({"sse4_2", "popcnt", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI3 = (("mcpu", "x86-64-v3"), ("mattr", ("+avxvnni",)))
_VNNI4 = (("mcpu", "x86-64-v4"), ("mattr", ("+avx512vnni",)))
_BF16 = (("mcpu", "x86-64-v4"), ("mattr", ("+avx512bf16",)))
_AMX = _V4 | {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"}
_DOTPROD = frozenset({"asimd", "asimddp"})
_AMX4 = (("mcpu", "x86-64-v4"), ("mattr", ("+avx512vnni", "+amx-tile", "+amx-int8", "+amx-bf16")))

# fmt: off
#: Narrow to wide. A dtype uses the widest one of the host that has kernels for it (``tiles.TILES``): what VNNI or AMX
#: add is of no use to float32, so it shares the kernels of the level below.
ISAS: dict[str, Isa] = {isa.name: isa for isa in (
    #   name               arch       requires                bytes regs fma    masks  target
    Isa("x86-64-v2",       "x86_64",  _V2,                       16,  16, False, False, (("mcpu", "x86-64-v2"),)),
    Isa("x86-64-v3",       "x86_64",  _V3,                       32,  16, True,  False, (("mcpu", "x86-64-v3"),)),
    Isa("x86-64-v3-vnni",  "x86_64",  _V3 | {"avx_vnni"},        32,  16, True,  False, _VNNI3),
    Isa("x86-64-v4",       "x86_64",  _V4,                       64,  32, True,  True,  (("mcpu", "x86-64-v4"),)),
    Isa("x86-64-v4-vnni",  "x86_64",  _V4 | {"avx512_vnni"},     64,  32, True,  True,  _VNNI4),
    Isa("x86-64-v4-bf16",  "x86_64",  _V4 | {"avx512_bf16"},     64,  32, True,  True,  _BF16),
    Isa("x86-64-v4-amx",   "x86_64",  _AMX,                      64,  32, True,  True,  _AMX4),
    Isa("armv8-neon",      "aarch64", frozenset({"asimd"}),      16,  32, True,  False, (("mattr", ("+neon",)),)),
    Isa("armv8-dotprod",   "aarch64", _DOTPROD,                  16,  32, True,  False, (("mattr", ("+neon", "+dotprod")),)),
)}
# fmt: on

# fmt: off
#: Instruction sets that code is only emitted for, to be read or built elsewhere: no host has them, no kernel is stored.
EMITTED_ISAS: dict[str, Isa] = {isa.name: isa for isa in (
    #   name         arch           requires     bytes regs  fma   masks  target
    # Alignment is always that of an element, which plain +v allows; but LLVM has to be told of each masked access.
    Isa("riscv64-v", "riscv64",     frozenset(),    16,  32, True, True,
        (("mattr", ("+m", "+a", "+f", "+d", "+c", "+v", "+unaligned-vector-mem")), ("mabi", "lp64d"))),
    Isa("power9",    "powerpc64le", frozenset(),    16,  64, True, False, (("mcpu", "pwr9"), ("vector-width", 128))),
)}
# fmt: on


def isa_of(name: str) -> Isa:
    """The instruction set of that name, from either table."""
    return ISAS[name] if name in ISAS else EMITTED_ISAS[name]

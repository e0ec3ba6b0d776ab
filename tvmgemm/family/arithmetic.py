"""How the sum of products is computed, per instruction set and dtype, as tables.

An element of a packed panel is as wide as an accumulator's lane (but for ``split64``). It holds a *group*: ``group``
elements of the operand, consecutive along k, which one instruction multiplies with those of the other operand and adds
up: four bytes (``dot8``), two 16-bit integers (``madd16``), or just one.

Integers wrap modulo 2**n. What lies above a dtype's own width (the sign of a byte that is multiplied modulo 2**8, the
upper half of a 32-bit sum of 16-bit products) nobody sees, so it need not be right, and the arithmetic is chosen for
speed.

A matrix unit (x86's AMX) has registers of its own, each a tile of 16 rows of 64 bytes, and multiplies a tile of 16 rows
of A and as many groups along k with one of 16 groups and columns of B (``matrix_unit``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import DTYPES
from .isa import Isa, isa_of


@dataclass(frozen=True)
class Arithmetic:
    """``sum``: type of the accumulators' lanes. ``element``: type that an operand's elements are converted to.
    ``group``: how many of them make up an element of a panel, which is as wide as a sum.

    ``parts``: 2 for complex numbers. Their real and imaginary parts are two rows of A and two columns of B and C; the
    sums of products of parts are put together on the way to C.

    ``matrix``: whether a matrix unit multiplies. ``planes``: how many bytes or bfloat16 numbers an element is split
    into, each packed by itself; products of planes of bytes are added up by their weight (``matrix_unit``).

    ``fused``: names of instruction sets (``fma``: those with ``Isa.fma``) on which the step is one instruction;
    elsewhere a product takes a register before it is added.
    """

    name: str
    sum: str
    element: str
    group: int
    fused: tuple[str, ...]
    parts: int = 1
    matrix: bool = False
    planes: int = 1

    @property
    def size(self) -> int:
        """Bytes of an accumulator's lane."""
        return bits(self.sum) // 8

    @property
    def panel_size(self) -> int:
        """Bytes of an element of a panel: of all its parts, of a group in all its planes."""
        return 4 * self.planes if self.group > 1 else self.size * self.parts

    @property
    def panel(self) -> str:
        """Type of an element of a panel."""
        return self.sum if self.element == self.sum else "int32"

    @property
    def halves(self) -> bool:
        """Whether a float16 number is multiplied as the two bfloat16 ones that it is the exact sum of (``halves``)."""
        return self.floating and (self.planes > 1 or self.element == "uint32")

    @property
    def products(self) -> int:
        """Floating-point products that one of two elements takes."""
        return 4 if self.halves else 1

    @property
    def floating(self) -> bool:
        """Whether sums are floating-point numbers."""
        return self.sum.startswith("float")

    @property
    def saturates(self) -> bool:
        """Whether a sum that is true stays so, whatever comes."""
        return self.name.startswith("and")

    @property
    def any_order(self) -> bool:
        """Whether the terms of a sum may be added up in any order and by vectors along k: those of integers and bits,
        and of what multiplies groups of floating-point numbers, which has an order of its own."""
        return not (self.matrix or self.halves or self.parts > 1) and (not self.floating or self.group > 1)

    def is_fused(self, isa: Isa) -> bool:
        """Whether a step is one instruction."""
        return isa.name in self.fused or ("fma" in self.fused and isa.fma)

    def lanes(self, isa: Isa) -> int:
        """Accumulators in a vector register."""
        return isa.lanes(self.size)

    def columns(self, isa: Isa) -> int:
        """Columns of C in a vector."""
        return self.lanes(isa) // self.parts

    def at_once(self, isa: Isa) -> int:
        """Elements of C whose sums one instruction adds to."""
        return MATRIX_ROWS**2 if self.matrix else self.columns(isa)


def bits(name: str) -> int:
    """Bits of a type by its name: ``int16`` -> 16."""
    return int("".join(c for c in name if c.isdigit()))


#: Rows of a matrix unit's register, and groups along k in each; there are so many registers.
MATRIX_ROWS, MATRIX_REGISTERS = 16, 8

_VNNI = ("x86-64-v3-vnni", "x86-64-v4-vnni")
_BF16 = ("x86-64-v4-bf16",)
_AMX = ("x86-64-v4-amx",)
_NEONS = ("armv8-neon", "armv8-dotprod")

# fmt: off
ARITHMETICS: dict[str, Arithmetic] = {row.name: row for row in (
    #           name      sum        element   group  one instruction on
    Arithmetic("fma32",  "float32", "float32", 1,    ("fma",)),
    Arithmetic("fma64",  "float64", "float64", 1,    ("fma",)),
    Arithmetic("cfma32", "float32", "float32", 1,    ("fma",), parts=2),
    Arithmetic("cfma64", "float64", "float64", 1,    ("fma",), parts=2),
    Arithmetic("mul8",   "int8",    "int8",    1,    _NEONS),
    Arithmetic("mul16",  "int16",   "int16",   1,    _NEONS),
    Arithmetic("mul32",  "int32",   "int32",   1,    _NEONS),
    Arithmetic("mul64",  "int64",   "int64",   1,    ()),
    Arithmetic("madd16", "int32",   "int16",   2,    _VNNI),              # pmaddwd and paddd, or vpdpwssd
    Arithmetic("dot8",   "int32",   "uint8",   4,    (*_VNNI, "armv8-dotprod")),   # vpdpbusd; sdot, udot
    Arithmetic("dot16",  "float32", "uint16",  2,    _BF16),              # vdpbf16ps, of bfloat16 numbers
    Arithmetic("dot16x2", "float32", "uint32", 1,    ()),                 # the same, of numbers split into pairs of such
    Arithmetic("tile8",  "int32",   "uint8",   4,    _AMX, matrix=True),   # tdpbssd and its kin
    Arithmetic("tile16", "float32", "uint16",  2,    _AMX, matrix=True),   # tdpbf16ps
    Arithmetic("tile16x2", "float32", "uint16", 2,   _AMX, matrix=True, planes=2),
    Arithmetic("split16", "int32",  "uint8",   4,    _AMX, matrix=True, planes=2),
    Arithmetic("split32", "int32",  "uint8",   4,    _AMX, matrix=True, planes=4),
    Arithmetic("split64", "int64",  "uint8",   4,    _AMX, matrix=True, planes=8),
    Arithmetic("and8",   "uint8",   "uint8",   1,    ("x86-64-v4",)),     # or of ands: vpternlogd
    Arithmetic("and16",  "int16",   "int16",   1,    ("x86-64-v4",)),
    Arithmetic("and32",  "int32",   "uint8",   4,    ("x86-64-v4",)),
)}

#: dtype -> (arithmetic of kernels that pack both operands, of kernels that read one in place; others).
Ways = dict[str, tuple[str, ...]]

# Narrow levels first: a later table overrides an earlier one.
_X86: Ways = {
    "float32": ("fma32",), "float64": ("fma64",), "complex64": ("cfma32",), "complex128": ("cfma64",),
    "int8":    ("madd16", "mul16"), "uint8":  ("madd16", "mul16"),
    "int16":   ("madd16", "mul16"), "uint16": ("madd16", "mul16"),
    "int32":   ("mul32",), "uint32": ("mul32",), "int64": ("mul64",), "uint64": ("mul64",),
    "bool":    ("and32", "and16"),
    **dict.fromkeys(("int8-int32", "uint8-int8-int32", "uint8-int32", "uint8-uint32", "int16-int32"), ("madd16", "mul32")),
    **dict.fromkeys(("bfloat16-float32", "bfloat16"), ("fma32",)),
}
_F16C: Ways = dict.fromkeys(("float16", "float16-float32"), ("fma32",))
_DOT: Ways = {
    **dict.fromkeys(("int8", "uint8"), ("dot8", "mul16", "madd16")),
    **dict.fromkeys(("int16", "uint16"), ("madd16", "mul16")),
    **dict.fromkeys(("int8-int32", "uint8-int8-int32", "uint8-int32", "uint8-uint32"), ("dot8", "mul32", "madd16")),
    "int16-int32": ("madd16", "mul32"),
}
_TILE: Ways = dict.fromkeys(("int8", "uint8"), ("tile8", "mul16"))
_TILE |= dict.fromkeys(("int8-int32", "uint8-int8-int32", "uint8-int32", "uint8-uint32"), ("tile8", "mul32"))
_TILE |= dict.fromkeys(("int16", "uint16"), ("split16", "mul16")) | {"int16-int32": ("split16", "mul32")}
_TILE |= dict.fromkeys(("int32", "uint32"), ("split32", "mul32")) | dict.fromkeys(("int64", "uint64"), ("split64", "mul64"))
_TILE |= dict.fromkeys(("bfloat16-float32", "bfloat16"), ("tile16", "fma32"))
_TILE |= dict.fromkeys(("float16", "float16-float32"), ("tile16x2", "fma32"))
_PAIRS: Ways = dict.fromkeys(("bfloat16-float32", "bfloat16"), ("dot16", "fma32"))
_PAIRS |= dict.fromkeys(("float16", "float16-float32"), ("fma32", "fma32", "dot16x2"))   # four products at twice the rate
_NEON: Ways = {
    "float32": ("fma32",), "float64": ("fma64",), "complex64": ("cfma32",), "complex128": ("cfma64",),
    "int8":    ("mul8",), "uint8":  ("mul8",), "int16": ("mul16",), "uint16": ("mul16",),
    "int32":   ("mul32",), "uint32": ("mul32",), "int64": ("mul64",), "uint64": ("mul64",),
    "bool":    ("and8",),
    **dict.fromkeys(("int8-int32", "uint8-int8-int32", "uint8-int32", "uint8-uint32", "int16-int32"), ("mul32",)),
    **dict.fromkeys(("float16", "float16-float32", "bfloat16-float32", "bfloat16"), ("fma32",)),
}
_SDOT: Ways = dict.fromkeys(("int8", "uint8"), ("dot8", "mul8"))
_SDOT |= dict.fromkeys(("int8-int32", "uint8-int8-int32", "uint8-int32", "uint8-uint32"), ("dot8", "mul32"))

#: Instruction set -> dtype -> names of arithmetics. Levels that add nothing for a dtype have no row for it.
WAYS: dict[str, Ways] = {
    "x86-64-v2":      _X86,
    "x86-64-v3":      _X86 | _F16C,
    "x86-64-v3-vnni": _DOT,
    "x86-64-v4":      _X86 | _F16C,
    "x86-64-v4-vnni": _DOT,
    "x86-64-v4-bf16": _PAIRS,
    "x86-64-v4-amx":  _TILE,
    "armv8-neon":     _NEON,
    "armv8-dotprod":  _SDOT,
    "riscv64-v":      {"float32": ("fma32",), "float64": ("fma64",)},
    "power9":         {"float32": ("fma32",), "float64": ("fma64",)},
}
# fmt: on


def arithmetic_of(isa: str, dtype: str, packing: str, forced: str = "") -> Arithmetic:
    """The arithmetic of a kernel. Groups are made while both operands are packed: what reads one in place has no
    groups.

    ValueError for a dtype that the instruction set has no kernels for, and for a ``forced`` one that it does not have.
    """
    ways = WAYS[isa].get(dtype)
    if ways is None:
        raise ValueError(f"no kernels for {dtype} on {isa}; there are some for {', '.join(WAYS[isa])}")
    if forced and forced not in ways:
        raise ValueError(f"arithmetic {forced!r}: {dtype} on {isa} has {', '.join(ways)}")
    packed, in_place = ways[0], ways[min(1, len(ways) - 1)]
    return ARITHMETICS[forced or (packed if packing == "ab" else in_place)]


def adds_nothing(below: Isa, isa: Isa, dtype: str) -> bool:
    """Whether a level has the kernels of the one below for a dtype, but for what has to be forced."""

    def kernels(level: Isa) -> list:
        ways = [arithmetic_of(level.name, dtype, packing) for packing in ("ab", "none")]
        return [level.vector_bytes, *((how, how.is_fused(level)) for how in ways)]

    return kernels(below) == kernels(isa)


def rounds_once(dtype: str) -> bool:
    """Whether sums are wider floating-point numbers than C's: they must be complete before they are rounded to it."""
    return DTYPES[dtype].c in ("float16", "bfloat16")


def lanes_of(isa: str, dtype: str, packing: str, forced: str = "") -> int:
    """Columns of C in a vector register of that kernel."""
    return arithmetic_of(isa, dtype, packing, forced).columns(isa_of(isa))

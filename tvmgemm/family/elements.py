"""What becomes of an element on its way from memory into a panel or a register, through the multiply-add, and back to
C.

Values are vectors of ``lanes`` elements, or scalars for ``lanes`` 1. Memory is read and written as the integers or
numbers of ``stored``: the half-precision types as their bits, booleans as the bytes that they are.
"""

from __future__ import annotations

import functools
from copy import copy

from tvm import tirx
from tvm.tirx.script import builder as T

from ..problem import DTYPES
from ..spec import KernelSpec
from .arithmetic import MATRIX_ROWS, arithmetic_of, bits, rounds_once
from .isa import isa_of
from .llvm_functions import DOT16, HALVES
from .vectors import Vectors, cast, lanes_of, reinterpret, splat, word

#: How elements lie in memory, where that is not a type that arithmetic is done in.
_STORED = {"float16": "uint16", "bfloat16": "uint16", "bool": "uint8"}

#: The type of the two parts of a complex number, which are numbers of their own here.
_PART = {"complex64": "float32", "complex128": "float64"}

#: Quiet NaNs of what is stored as integers.
_NAN = {"float16": 0x7E00, "bfloat16": 0x7FC0}

#: The bits of a float32 number that are all ones in NaNs and infinities.
_EXPONENT = 0x7F800000

#: Width of a vector in bits -> LLVM's name of the instruction.
_MADD16 = {128: "llvm.x86.sse2.pmadd.wd", 256: "llvm.x86.avx2.pmadd.wd", 512: "llvm.x86.avx512.pmaddw.d.512"}
_DOT8 = {width: f"llvm.x86.avx512.vpdpbusd.{width}" for width in (128, 256, 512)}
_DOT8_ARM = "llvm.aarch64.neon.{}dot.v4i32.v16i8"


def _not_finite(bits, lanes: int):
    """Whether these are the bits of a NaN or an infinity. (A comparison of numbers would raise flags.)"""
    return (bits & word(_EXPONENT, lanes)) == word(_EXPONENT, lanes)


class Elements:
    """The elements of one kernel's operands.

    ``sums`` and ``panels`` are the accumulators and the elements of packed panels, of the same width; ``c`` is C in
    vectors of as many lanes. ``group``: elements of A or B in one of a panel. ``parts``: 2 for complex numbers, whose
    real and imaginary parts count as two rows of A and as two columns of B and C, the latter side by side.
    """

    def __init__(self, spec: KernelSpec) -> None:
        row, isa = DTYPES[spec.dtype], isa_of(spec.isa)
        self.arithmetic = how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
        self.group = how.group
        self.parts = how.parts
        self.kinds = {operand: _PART.get(kind, kind) for operand, kind in (("A", row.a), ("B", row.b), ("C", row.c))}
        self.stored = {operand: _STORED.get(kind, kind) for operand, kind in self.kinds.items()}
        self._set_lanes(how.lanes(isa))
        self.rounds_once = rounds_once(spec.dtype)
        # x86 converts a single element in a vector, whose other lanes LLVM leaves as they are: their flags would be
        # raised.
        self._quiet_scalars = isa.arch == "x86_64"
        #: Bytes of an element of A, B and C.
        self.sizes = {"A": row.a_size, "B": row.b_size, "C": row.c_size}
        self._plane = None
        #: What alpha and beta of a gemm are given in.
        self.scale = how.sum if how.floating else self.stored["C"]
        # x86 multiplies bytes of two signs, Arm of one: where the sum's upper bits count, A moves by 128 into the other
        # kind.
        signed = [kind.startswith("int") for kind in (row.a, row.b)]
        self._one_sign = isa.arch == "aarch64"
        self.shifted = how.name == "dot8" and row.c_size == 4 and (signed[0] == signed[1]) != self._one_sign
        self._unsigned = "B" if self.shifted and not signed[1] else "A"
        self._signed = signed[1]

    @property
    def definitions(self) -> str:
        """Functions in LLVM's language that these conversions call."""
        halves = self._quiet_scalars and "float16" in self.kinds.values()
        return DOT16 * self.arithmetic.name.startswith("dot16") + HALVES * halves

    def _set_lanes(self, lanes: int) -> None:
        how, self.lanes = self.arithmetic, lanes
        self.sums = Vectors(how.sum, lanes)
        self.panels = Vectors(how.panel, lanes)
        self.c = Vectors(self.stored["C"], lanes)

    def in_lanes(self, lanes: int) -> Elements:
        """The same in vectors of another width."""
        other = copy(self)
        other._set_lanes(lanes)
        return other

    # ---- for a matrix unit --------------------------------------------------------------------------------------------

    def plane(self, index) -> Elements:
        """The same for packing that plane of bytes, in vectors of panels."""
        other = self.in_lanes(MATRIX_ROWS)
        other._plane = index if self.arithmetic.planes > 1 else None
        return other

    def matrix_instruction(self, i: int, j: int) -> str:
        """What multiplies two tiles of a matrix unit. The upper byte of a signed number is signed where C is wider;
        modulo C's own width it need not be."""
        if self.arithmetic.floating:
            return "tdpbf16ps"

        def sign(operand: str, plane: int) -> str:
            top = self.kinds[operand].startswith("int") and plane == self.arithmetic.planes - 1
            return "s" if top and self.sizes[operand] < self.sizes["C"] else "u"

        return f"tdpb{sign('A', i)}{sign('B', j)}d"

    # ---- on the way in ----------------------------------------------------------------------------------------------

    def outside(self, operand: str) -> int | float:
        """What lanes outside of the matrix are loaded as: a quiet NaN, or 0 of an integer, and where NaNs are looked
        for."""
        kind = self.kinds[operand]
        if self.arithmetic.halves:
            return 0
        if kind == "bool":
            return 255  # so that it does not keep a tile from being true
        return _NAN.get(kind, float("nan") if kind.startswith("float") else 0)

    def memory(self, operand: str) -> Vectors:
        """Vectors of an operand as it lies in memory."""
        return Vectors(self.stored[operand], self.lanes)

    def element(self, operand: str, value, lanes: int):
        """What was loaded, as what is multiplied."""
        kind, element = self.kinds[operand], self.arithmetic.element
        if kind == "bool":  # any bits but none are true: A's then are all ones, so whatever B has of them stays
            if operand == "B":
                return value if element == "uint8" else cast(value, element, lanes)
            none = splat(tirx.const(0, "uint8"), lanes)
            all_bits, no_bits = (splat(tirx.const(x, element), lanes) for x in (255, 0))
            return tirx.Select(value != none, all_bits, no_bits)
        if kind == "bfloat16":
            return value if element == "uint16" else self._widened(value, lanes)
        if kind == "float16":
            return self._half(value, lanes) if self.arithmetic.halves else self.number(operand, value, lanes)
        if self._plane is not None:
            value = value >> splat(tirx.Cast(kind, self._plane * 8), lanes)
        value = value if kind == element else cast(value, element, lanes)
        if self.shifted and operand == "A":
            value = value ^ splat(tirx.const(128, element), lanes)
        return value

    def number(self, operand: str, value, lanes: int):
        """A stored floating-point number as a float32 one."""
        if self.kinds[operand] == "bfloat16":
            return self._widened(value, lanes)
        if lanes == 1 and self._quiet_scalars:
            return T.call_extern("float32", "tvmgemm_widened", value)
        return cast(reinterpret(value, "float16", lanes), "float32", lanes)

    def _half(self, value, lanes: int):
        """A float16 number as a pair of bfloat16 ones, or that of the plane in hand: its first 8 significant bits,
        which the upper half of a float32 number has room for, and the other 3. What is not finite has no second part:
        inf - inf would raise *invalid*."""
        whole = T.bind(reinterpret(self.number("A", value, lanes), "uint32", lanes))
        first = whole & word(0xFFFF0000, lanes)
        finite = tirx.Select(_not_finite(whole, lanes), word(0, lanes), whole)
        second = reinterpret(finite, "float32", lanes) - reinterpret(finite & word(0xFFFF0000, lanes), "float32", lanes)
        second = reinterpret(second, "uint32", lanes)
        if self._plane is None:
            return cast((first >> word(16, lanes)) | second, "int32", lanes)
        return cast(tirx.Select(self._plane == tirx.const(0, "int64"), first, second) >> word(16, lanes), "uint16", lanes)

    @staticmethod
    def not_finite(x, lanes: int):
        """Which of the float32 sums are NaNs or infinities, as uint32 numbers 1 or 0."""
        return tirx.Select(_not_finite(reinterpret(x, "uint32", lanes), lanes), word(1, lanes), word(0, lanes))

    @staticmethod
    def _widened(value, lanes: int):
        """bfloat16 numbers as float32 ones, of which they are the upper halves."""
        return reinterpret(cast(value, "uint32", lanes) << word(16, lanes), "float32", lanes)

    def repeated(self, operand: str, value):
        """A stored element as what is multiplied by a vector: one, or already in every lane."""
        if self.kinds[operand] == "float16":  # one conversion, which is one of vectors anyway
            return self.element(operand, T.broadcast(value, self.lanes), self.lanes)
        return self.element(operand, value, 1)

    def grouped(self, parts: list, lanes: int):
        """An element of a panel from the ``group`` elements that it holds, the first in its lowest bits."""
        if self.group == 1:
            return parts[0]
        width = bits(self.arithmetic.element)
        total = None
        for q, part in enumerate(parts):
            part = cast(cast(part, f"uint{width}", lanes), "uint32", lanes)
            part = part << word(width * q, lanes) if q else part
            total = part if total is None else total | part
        return cast(total, "int32", lanes)

    def consecutive(self, operand: str, view, *indices):
        """``lanes`` elements of a panel from a row of memory along k."""
        return self.in_groups(operand, view.get_vector(self.lanes * self.group, *indices))

    def in_groups(self, operand: str, value):
        """``lanes`` elements of a panel from as many groups of elements as they lie along k."""
        value = self.element(operand, value, self.lanes * self.group)
        return value if self.group == 1 else reinterpret(value, "int32", self.lanes)

    # ---- the step -----------------------------------------------------------------------------------------------------

    def multiply_add(self, a, b, c):
        """c + a.b for vectors of panel elements and sums."""
        name, width = self.arithmetic.name, 8 * self.lanes * self.arithmetic.size
        if name == "dot16":
            return T.call_extern(self.sums.type, "tvmgemm_dot16", c, a, b)
        if name == "dot16x2":  # each part of the one by both of the other
            c = T.call_extern(self.sums.type, "tvmgemm_dot16", c, a, self._turned(b))
            return T.call_extern(self.sums.type, "tvmgemm_dot16", c, a, b)
        if self.arithmetic.floating:
            return self.sums.multiply_add(a, b, c)
        if name.startswith("mul"):
            return c + a * b
        if name.startswith("and"):
            return c | (a & b)
        if name == "madd16":
            a, b = (reinterpret(x, "int16", 2 * self.lanes) for x in (a, b))
            return c + T.call_llvm_intrin(self.sums.type, _MADD16[width], a, b)
        a, b = (reinterpret(x, "int8", 4 * self.lanes) for x in (a, b))
        if self._one_sign:
            return T.call_llvm_intrin(self.sums.type, _DOT8_ARM.format("s" if self._signed else "u"), c, a, b)
        unsigned, signed = (a, b) if self._unsigned == "A" else (b, a)
        return T.call_llvm_intrin(self.sums.type, _DOT8[width], c, unsigned, signed)

    def _turned(self, x):
        """The two halves of each lane, exchanged."""
        return T.call_llvm_intrin(self.panels.type, f"llvm.fshl.v{self.lanes}i32", x, x, self.panels.splat(16))

    def some_false(self, sums: list):
        """Condition: a sum of bools in one of these vectors is false yet."""
        unsigned = f"uint{bits(self.sums.dtype)}"
        least = functools.reduce(T.min, [reinterpret(x, unsigned, self.lanes) for x in sums])
        none = T.bind(least) == splat(tirx.const(0, unsigned), self.lanes)
        return T.call_llvm_intrin("bool", f"llvm.vector.reduce.or.v{self.lanes}i1", none)

    def shift_of(self, b, c):
        """c + 128 b or c - 128 b: what A's move by 128 has added to the sums of these columns of B."""
        return self.multiply_add(self.panels.splat(tirx.const(-0x7F7F7F80, "int32")), b, c)

    # ---- complex numbers: vectors of pairs ------------------------------------------------------------------------------

    def complex_sum(self, re, im):
        """A row of C from the products of the real parts of A's with both parts of B's, and of its imaginary parts."""
        return self.sums.multiply_add(self._exchanged(im), self._signs(self.lanes), re)

    def complex_product(self, alpha: tuple, x):
        """(alpha[0] + alpha[1].i).x for splats of the parts; a real alpha is not one with an imaginary part of 0, which
        would make a NaN of an infinity."""
        lanes = lanes_of(x)
        real, none = alpha[0] * x, splat(self.sums.scalar(0.0), lanes)
        both = self.sums.multiply_add(self._exchanged(x) * alpha[1], self._signs(lanes), real)
        return tirx.Select(alpha[1] == none, real, both)

    def _exchanged(self, x):
        """Real and imaginary parts, exchanged."""
        x = T.bind(x)
        return tirx.Shuffle([x], [lane ^ 1 for lane in range(lanes_of(x))])

    def _signs(self, lanes: int):
        """-1 in the real parts, 1 in the imaginary ones: i.i = -1. (A product with it is exact and raises no flag.)"""
        signs = [splat(self.sums.scalar(sign), lanes) for sign in (-1.0, 1.0)]
        return tirx.Shuffle(signs, [lane if lane % 2 == 0 else lanes + lane for lane in range(lanes)])

    # ---- on the way out -------------------------------------------------------------------------------------------------

    def result(self, x, lanes: int):
        """A finished sum, as it is stored in C."""
        kind = self.kinds["C"]
        if kind == "bool":
            one, none = (splat(tirx.const(v, "uint8"), lanes) for v in (1, 0))
            return tirx.Select(x != splat(tirx.const(0, self.sums.dtype), lanes), one, none)
        if kind == "float16":
            if lanes == 1 and self._quiet_scalars:
                return T.call_extern("uint16", "tvmgemm_narrowed", x)
            return reinterpret(cast(x, "float16", lanes), "uint16", lanes)
        if kind == "bfloat16":
            return self._bfloat16(x, lanes)
        return x if kind == self.sums.dtype else cast(x, kind, lanes)

    def _bfloat16(self, x, lanes: int):
        """Rounded to nearest, ties to even; a NaN stays one, quiet, with its sign."""
        whole = T.bind(reinterpret(x, "uint32", lanes))
        upper = whole >> word(16, lanes)
        rounded = (whole + word(0x7FFF, lanes) + (upper & word(1, lanes))) >> word(16, lanes)
        nan = (whole & word(0x7FFFFFFF, lanes)) > word(_EXPONENT, lanes)
        return cast(tirx.Select(nan, upper | word(0x40, lanes), rounded), "uint16", lanes)

    def joined(self, old, x, lanes: int):
        """C after a later block of k: ``old`` is stored, ``x`` the block's sum."""
        if self.kinds["C"] == "bool":
            return old | self.result(x, lanes)
        return old + self.result(x, lanes)

    def wide(self, old, lanes: int):
        """A stored element of C as alpha and beta are: in the type of the sums, but integers as they are."""
        if not self.arithmetic.floating or self.kinds["C"] == self.sums.dtype:
            return old
        return self.number("C", old, lanes)

    def scaled(self, alpha, x, kept, lanes: int):
        """alpha.x + ``kept`` (nothing for None) as it is stored; ``kept`` is ``wide``. Floating-point: rounded once."""
        if not self.arithmetic.floating:
            total = alpha * self.result(x, lanes)
            return total if kept is None else total + kept
        return self.result(alpha * x if kept is None else self.sums.multiply_add(alpha, x, kept), lanes)

"""The micro-kernel on a matrix unit, x86's AMX: eight registers, each a tile of 16 rows of 64 bytes.

One instruction multiplies 16 rows of A by 16 columns of B over 16 groups along k (64 bytes, 32 bfloat16 numbers) and
adds to 16 x 16 sums. An mr x nr tile of C takes (mr/16).(nr/16) registers; a chunk of 16 steps takes mr/16 + nr/16
loads. Vector instructions cannot read these registers, so the sums go to memory, and from there, as vectors, to C like
those of every other kernel.

A register of A holds rows of A as they are, so A is packed like that: ``panels(panel, chunk, row, group)``. What is
left of the last chunk is 0 in both operands.

Wider integers are sums of bytes times powers of 256, and their product modulo 2**n is the sum of the products of those
bytes whose weights together are below n: 3 for 16 bits, 10 for 32, 36 for 64. Each byte is a plane of the panels by
itself. So are the two bfloat16 numbers that a float16 one is the sum of; all four of their products add to the same
sums (``halves``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import emit
from .arithmetic import MATRIX_REGISTERS, MATRIX_ROWS
from .elements import Elements
from .emit import T, const, let, loop
from .vectors import Vectors
from .views import View

if TYPE_CHECKING:
    from .generator import Generator
    from .microkernel import Tile
    from .packing import Operand

#: Bytes of a row of a register.
ROW_BYTES = 64

#: The 64 bytes that LDTILECFG reads, as eight integers: palette 1, all registers of 16 rows of 64 bytes.
_CONFIGURATION = (1, 0, ROW_BYTES * 0x0001_0001_0001_0001, ROW_BYTES * 0x0001_0001_0001_0001, 0, 0, MATRIX_ROWS * 0x0101_0101_0101_0101, 0)


@dataclass(frozen=True)
class StoredVector:
    """A vector of a tile of sums in memory; takes the place of a register."""

    sums: View
    lanes: int
    row: int
    column: int

    def get(self):
        """Its value."""
        return self.sums.get_vector(self.lanes, const(self.row), const(self.column))

    def set(self, value) -> None:
        """Assign ``value``."""
        self.sums.set_vector(value, self.lanes, const(self.row), const(self.column))


def stored_sums(vectors: Vectors, sums: View, mr: int, nr: int) -> dict[tuple[int, int], StoredVector]:
    """What stands for the registers of a tile: (row, first column) -> vector of ``sums``."""
    return {(i, c): StoredVector(sums, vectors.lanes, i, c) for i in range(mr) for c in range(0, nr, vectors.lanes)}


def _issue(name: str, *operands) -> None:
    """An instruction of the unit; numbers are registers."""
    given = [emit.tirx.const(x, "uint8") if isinstance(x, int) else x for x in operands]
    T.evaluate(T.call_llvm_intrin("void", f"llvm.x86.{name}", *given))


def configure() -> None:
    """Before the first tile of a block of C. Nothing of it stays behind: ``release`` ends the block, in the same
    thread."""
    memory = View.on_stack("configuration", "int64", (1, len(_CONFIGURATION)))
    for i, value in enumerate(_CONFIGURATION):
        memory.set(const(value), const(0), const(i))
    _issue("ldtilecfg", memory.address(const(0), const(0)))


def release() -> None:
    """The registers back to their initial state, which the system need not save."""
    _issue("tilerelease")


def longest_block(elements: Elements) -> int | None:
    """The largest kc, where sums of one block of k must not overflow before they are widened."""
    if elements.sums.itemsize == 4:
        return None
    return (1 << 32) // (255 * 255 * elements.arithmetic.planes)


def multiply(g: Generator, tile: Tile, at: dict[str, Any], steps, place: Callable[[int, int], Any], row_bytes) -> None:
    """A panel . B panel, of planes all products, stored as sums to rows ``row_bytes`` apart: element (i, j) of the tile
    to the address ``place(i, j)``. Registers of which no row is in C are left out (but in sums that wait for other
    blocks of k they are zeros: all of those are added up); the others are stored as they are."""
    instruction, planes = g.elements.matrix_instruction(0, 0), g.elements.arithmetic.planes

    def pairs(each: Callable) -> None:
        for p in range(planes):
            for q in range(planes)[:: -1 if p % 2 else 1]:  # of two products in turn, one operand stays
                each(p, q, instruction)

    _by_height(tile, lambda high: _multiply(g, tile, at, steps, pairs, place, row_bytes, high))


def multiply_planes(g: Generator, tile: Tile, at: dict[str, Any], steps, sums: View, part: View) -> None:
    """``sums`` = A panel . B panel where elements are split into planes of bytes: the products of one weight after the
    other, each by way of ``part``. A weight's sum is one modulo 2**32, or of one block of k, which it holds
    (``longest_block``)."""
    elements, planes = g.elements, g.elements.arithmetic.planes
    lanes, row = elements.lanes, const(g.tile["n"] * elements.panels.itemsize)

    def weight(w: int) -> None:
        def pairs(each: Callable) -> None:
            for p in range(max(0, w - planes + 1), min(w + 1, planes)):
                each(p, w - p, elements.matrix_instruction(p, w - p))

        _by_height(tile, lambda high: _multiply(
            g, tile, at, steps, pairs, lambda i, j: part.address(const(i), const(j)), row, high
        ))  # fmt: skip
        with loop("i", emit.minimum(tile.rows, const(tile.mr))) as i:
            for c in tile.chunks():
                value = emit.tirx.Cast(f"uint32x{lanes}", part.get_vector(lanes, i, const(c)))
                value = emit.tirx.Cast(elements.sums.type, value)
                if w > 0:
                    value = sums.get_vector(lanes, i, const(c)) + (value << elements.sums.splat(8 * w))
                sums.set_vector(value, lanes, i, const(c))

    for w in range(min(2 * planes - 1, elements.sizes["C"])):  # what is heavier is nothing modulo C's width
        weight(w)


def _by_height(tile: Tile, product: Callable[[int], None]) -> None:
    """``product`` with as many rows of registers as have rows of C."""

    def at_most(high: int) -> None:
        if high == 1:
            product(1)
            return
        emit.branch(tile.rows > const((high - 1) * MATRIX_ROWS), lambda: product(high), lambda: at_most(high - 1))

    at_most(tile.mr // MATRIX_ROWS)


def _multiply(
    g: Generator, tile: Tile, at: dict[str, Any], steps, pairs: Callable, place: Callable[[int, int], Any], row_bytes, high: int,
) -> None:  # fmt: skip
    """The products of pairs of planes, in ``high`` rows of registers: ``pairs(each)`` calls ``each(plane of A, of B,
    instruction)``."""
    wide = tile.nr // MATRIX_ROWS
    c = {(i, j): i * wide + j for i in range(high) for j in range(wide)}
    a = [len(c) + i for i in range(high)]
    b = [len(c) + high + j for j in range(wide)]
    assert len(c) + high + wide <= MATRIX_REGISTERS
    panel_row = const(g.tile["n"] * g.elements.arithmetic.planes * g.elements.panels.itemsize)
    for register in c.values():
        _issue("tilezero", register)

    def each(p: int, q: int, instruction: str) -> None:
        for i in range(high):
            if p != loaded["A"]:
                _issue("tileloadd64", a[i], panel["A"].address(const(p), chunk, const(i * MATRIX_ROWS), const(0)), const(ROW_BYTES))
            for j in range(wide):
                if i == 0 and q != loaded["B"]:
                    start = panel["B"].address(const(q), chunk * const(MATRIX_ROWS), const(j * MATRIX_ROWS))
                    _issue("tileloadd64", b[j], start, panel_row)
                _issue(instruction, c[i, j], a[i], b[j])
        loaded.update(A=p, B=q)

    panel = {x: g.panels[x].sliced(0, at[along]) for x, along in (("A", "ir"), ("B", "jr"))}
    if not g.elements.arithmetic.halves:  # their loop has registers for the parts of an address, but not for two more
        panel = {x: view.started(f"{x.lower()}_panel") for x, view in panel.items()}
    chunks = emit.opaque("chunks", emit.tirx.truncdiv(steps, const(MATRIX_ROWS)))  # or LLVM leaves it on the stack
    with loop("chunk", chunks) as chunk:
        loaded: dict[str, int | None] = {"A": None, "B": None}
        pairs(each)
    for (i, j), register in c.items():
        _issue("tilestored64", register, place(i * MATRIX_ROWS, j * MATRIX_ROWS), row_bytes)
    left_out = range(high, tile.mr // MATRIX_ROWS) if g.elements.rounds_once else ()
    if left_out:
        _issue("tilezero", 0)
    for i, j in itertools.product(left_out, range(wide)):
        _issue("tilestored64", 0, place(i * MATRIX_ROWS, j * MATRIX_ROWS), row_bytes)


# ---- packing -----------------------------------------------------------------------------------------------------------


def pack_rows(
    elements: Elements, panels: View, operand: Operand, *, width: int, first, e0, extent, count, p0, kb, vectorised: bool
) -> None:
    """Pack ``count`` panels of A, from panel ``first`` of the block on, which starts at row ``e0`` and index ``p0``
    along k and has ``extent`` rows and ``kb`` along k. Rows past the edge repeat the last one."""
    span = MATRIX_ROWS * elements.group
    with loop("panel", count, first) as panel:
        base, valid = let("base", e0 + panel * const(width)), let("valid", extent - panel * const(width))
        with loop("chunk", emit.ceil_div(kb, const(span))) as chunk:
            passed = let("passed", chunk * const(span))
            rows = _Rows(elements, panels, operand, width, panel, chunk, base, valid, p0 + passed, let("left", kb - passed))
            whole = emit.both(operand.stride_e == const(1), rows.left >= const(span)) if vectorised else False
            unit = operand.stride_k == const(1) if vectorised else False
            emit.branch(unit, rows.copy, lambda: emit.branch(whole, rows.transpose, rows.gather))


@dataclass(frozen=True)
class _Rows:
    """One chunk of a panel and the three ways to fill it."""

    elements: Elements
    panels: View
    operand: Operand
    width: int
    panel: Any
    chunk: Any
    base: Any
    valid: Any
    p0: Any
    left: Any

    def copy(self) -> None:
        """k has unit stride: 64 bytes of each row."""
        elements, count = self.elements, MATRIX_ROWS * self.elements.group
        memory = Vectors(elements.stored["A"], count)
        mask = memory.mask("inside", self.left)
        with loop("e", const(self.width)) as e:
            row = self.base + emit.minimum(e, self.valid - const(1))
            value = memory.masked_load(self.operand.unit_k.address(row, self.p0), mask, 0)
            value = emit.tirx.reinterpret(elements.panels.type, elements.element("A", value, count))
            self.panels.set_vector(value, elements.lanes, self.panel, self.chunk, e, const(0))

    def transpose(self) -> None:
        """Rows have unit stride: groups of 16 rows at a time, transposed in registers."""
        elements, lanes = self.elements, self.elements.lanes
        memory = elements.memory("A")
        with loop("block", const(self.width // lanes)) as block:
            start = let("start", block * const(lanes))
            mask = memory.mask("inside", self.valid - start)

            def group(step: int):
                members = []
                for q in range(elements.group):
                    address = self.operand.unit_e.address(self.p0 + const(step * elements.group + q), self.base + start)
                    members.append(elements.element("A", memory.masked_load(address, mask, 0), lanes))
                return T.bind(elements.grouped(members, lanes))

            rows = elements.panels.transpose([group(step) for step in range(MATRIX_ROWS)])
            for r, row in enumerate(rows):
                self.panels.set_vector(row, lanes, self.panel, self.chunk, start + const(r), const(0))

    def gather(self) -> None:
        """Element by element; 0 past the end of k."""
        elements = self.elements
        with loop("e", const(self.width)) as e, loop("step", const(MATRIX_ROWS)) as step:
            row = let("row", self.base + emit.minimum(e, self.valid - const(1)))
            members = []
            for q in range(elements.group):
                p = step * const(elements.group) + const(q)
                value = self.operand.any.get(row, self.p0 + emit.minimum(p, self.left - const(1)))
                none = emit.tirx.const(0, elements.arithmetic.element)
                members.append(emit.tirx.Select(p < self.left, elements.element("A", value, 1), none))
            self.panels.set(elements.grouped(members, 1), self.panel, self.chunk, e, step)


def fill_chunks(elements: Elements, panels: View, width: int, first, count, packed, steps) -> None:
    """Zeros in panels of B from step ``packed`` to ``steps``, the end of the last chunk."""
    with loop("panel", count, first) as panel, loop("p", steps - packed, packed) as p:
        for c in range(0, width, elements.lanes):
            panels.set_vector(elements.panels.splat(0), elements.lanes, panel, p, const(c))

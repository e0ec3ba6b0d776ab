"""Few rows of C and a long k: several blocks of k side by side.

A row of C no wider than a vector is one chain of FMAs, each of which waits for the one before. But the sums of a block of k
start from +0 and are added to those before when they are complete. So the chains of several blocks do not wait for each
other, and how many run at once changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit, microkernel
from .elements import Elements
from .emit import const, let, loop, opaque
from .update import update_c
from .views import View

if TYPE_CHECKING:
    from .generator import Generator

#: Chains that leave the units for FMAs no pause: as many as are in flight at once, on most CPUs.
CHAINS = 8

#: Blocks at once, at most: each has addresses of its own.
AT_ONCE = 4


def applies(g: Generator, rows, columns, count):
    """Condition: these are so few rows, no wider than a vector, that ``count`` blocks of k are better computed so."""
    if g.elements.rounds_once or g.elements.parts > 1:
        return False
    small = emit.both(emit.both(rows > const(0), rows <= const(CHAINS // 2)), columns <= const(g.elements.lanes))
    return emit.both(count > const(1), small)


def product(g: Generator, i0, rows, j0, columns, count) -> None:
    """All ``count`` blocks of k of ``rows`` x ``columns`` of C."""
    elements, masks = g.elements, g.isa.masks

    def tile(elements: Elements, masked: bool) -> None:
        emit.by_size(rows, 1, CHAINS // 2, lambda height: _Part(g, elements, masked, height, i0, j0, columns).blocks(count))

    if masks:
        half = elements.lanes // 2
        emit.branch(columns > const(half), lambda: tile(elements, True), lambda: tile(elements.in_lanes(half), True))
    else:
        emit.branch(columns >= const(elements.lanes), lambda: tile(elements, False), lambda: tile(elements, True))


@dataclass(frozen=True)
class _Part:
    """``height`` rows of C of one vector each; ``masked``: it may be wider than C."""

    g: Generator
    elements: Elements
    masked: bool
    height: int
    i0: Any
    j0: Any
    columns: Any

    def blocks(self, count) -> None:
        """The blocks of k, as many at once as make enough chains; the rest of them one by one."""
        number = min(AT_ONCE, CHAINS // self.height)
        groups = let("groups", tirx.truncdiv(count, const(number)))
        with loop("pc", groups) as index:
            self._at_once(index * const(number), number)
        with loop("pc", count - groups * const(number), groups * const(number)) as index:
            self._at_once(index, 1)

    def _at_once(self, first, number: int) -> None:
        """``number`` blocks of k from block ``first`` on, of which the last may be shorter."""
        g, v, lanes = self.g, self.g.values, self.elements.lanes
        p0 = let("p0", first * v["kc"])
        shorter = let("kb", emit.minimum(v["kc"], v["k"] - p0 - const(number - 1) * v["kc"]))

        def tile() -> microkernel.Tile:
            registers = microkernel.registers(self.elements.sums, self.height, lanes)
            return microkernel.Tile(
                self.elements, self.height, lanes, self.i0, self.j0, const(self.height), self.columns, registers
            )

        tiles = [tile() for _ in range(number)]
        for each in tiles:
            microkernel.clear(each)
        self._steps(tiles, p0, shorter)
        self._steps(tiles[:-1], p0 + shorter, v["kc"] - shorter)

        def write(each: microkernel.Tile, update) -> None:
            to = g.c_rows.moved(self.i0, self.j0)
            for i in range(self.height):
                value = update(each.sum(i, 0), lambda: self._load("C", to, const(i), const(0)), self.elements.sums.splat)
                if self.masked:
                    self.elements.c.masked_store(value, to.address(const(i), const(0)), self._mask())
                else:
                    to.set_vector(value, lanes, const(i), const(0))

        for block, each in enumerate(tiles):
            update_c(g, p0 == const(0) if block == 0 else False, lambda update: write(each, update))

    def _steps(self, tiles: list[microkernel.Tile], p0, steps) -> None:
        """``steps`` of each tile, the first one's from p0 on, a step of each in turn."""
        if len(tiles) < 2:
            for tile in tiles:
                a, b = self.g.sources["A"].any.moved(self.i0, p0), self.g.rows_of_b.moved(p0, self.j0)
                microkernel.multiply_add(
                    tile,
                    steps,
                    lambda i, p: self.elements.repeated("A", a.get(const(i), p)),
                    lambda c, p: self.elements.element("B", self._load("B", b, p, const(c)), self.elements.lanes),
                    rolled=True,
                )
            return
        v, rows_of_b = self.g.values, self.g.rows_of_b
        a = View("A_flat", self.g.pointers["A"], self.g.elements.stored["A"], (1,)).moved(self.i0 * v["rsa"] + p0 * v["csa"])
        b = rows_of_b.sliced(0, p0).moved(self.j0)
        stride = {"A": opaque("a_step", v["csa"]), "B": opaque("b_step", rows_of_b.stride(0))}
        block = {x: opaque("block", stride[x] * v["kc"]) for x in stride}
        to_row = opaque("to_row", v["rsa"])
        with loop("p", steps) as p:
            emit.rolled()
            # One address made from the other: LLVM would keep that of each row in each block in a register of its own.
            at = {x: p * stride[x] for x in stride}
            for number, each in enumerate(tiles):
                if number:
                    at = {x: opaque("at", at[x] + block[x]) for x in at}
                rows = [at["A"]]
                while len(rows) < self.height:
                    rows.append(opaque("row", rows[-1] + to_row))
                microkernel.outer_product(
                    each,
                    p,
                    lambda i, p: self.elements.repeated("A", a.get(rows[i])),
                    lambda c, p: self.elements.element("B", self._load("B", b, at["B"]), self.elements.lanes),
                )

    def _load(self, operand: str, view: View, *at):
        """The vector of a row."""
        if not self.masked:
            return view.get_vector(self.elements.lanes, *at)
        return self.elements.memory(operand).masked_load(view.address(*at), self._mask(), self.elements.outside(operand))

    def _mask(self):
        return self.elements.sums.mask("inside", self.columns)

"""float16 numbers as sums of two bfloat16 ones, for units that multiply those.

A float16 number has 11 significant bits and bfloat16 has 8, with the exponents of float32: the first 8 and the other 3
are normal bfloat16 numbers (of 2**-24 at least, so the units flush none of them, nor of their products), and the
product of two float16 numbers is the sum of four that are exact in float32. No sum of such products overflows.

The exception are operands that are infinite or NaN: parts of a finite number can be 0, and infinity times 0 is a NaN
that the number's own product is not. But a sum is finite exactly if all of its operands are. So the sums that are not
finite, and only those, are computed again, one by one, in float32 from the operands themselves. The order of their
terms does not matter: the result is an infinity or a NaN in any. Only this raises floating-point flags, for the units
raise none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import emit
from .emit import T, const, let, loop
from .vectors import Vectors, word
from .views import View

if TYPE_CHECKING:
    from .generator import Generator
    from .microkernel import Tile
    from .outer_loops import Block


def compute_again(g: Generator, tile: Tile, along: Block, task) -> None:
    """The sums of a tile over a block of k that are not finite, by way of memory."""
    elements, lanes, matrix = g.elements, tile.vectors.lanes, g.elements.arithmetic.matrix
    sums = g.memory.panels("T", task)
    vectors = [(i, c) for i in range(tile.mr) for c in tile.chunks()]
    found = Vectors("uint32", lanes).register("found")

    def look_at(x) -> None:
        found.set(found.get() | elements.not_finite(x, lanes))

    found.set(word(0, lanes))
    if matrix:  # of rows that are not there some are not computed
        with loop("i", emit.minimum(tile.rows, const(tile.mr))) as i:
            for c in tile.chunks():
                look_at(sums.get_vector(lanes, i, const(c)))
    else:
        for at in vectors:
            look_at(tile.registers[at].get())
    found_any = T.call_llvm_intrin("uint32", f"llvm.vector.reduce.or.v{lanes}i32", found.get())

    def repair() -> None:
        if not matrix:
            for i, c in vectors:
                sums.set_vector(tile.registers[i, c].get(), lanes, const(i), const(c))
        with (
            loop("i", emit.minimum(tile.rows, const(tile.mr))) as i,
            loop("j", emit.minimum(tile.columns, const(tile.nr))) as j,
        ):
            emit.branch(elements.not_finite(sums.get(i, j), 1) == word(1, 1), lambda: _sum(g, tile, along, sums, i, j))
        if not matrix:
            for i, c in vectors:
                tile.registers[i, c].set(sums.get_vector(lanes, const(i), const(c)))

    emit.branch(found_any != word(0, 1), repair)


def _sum(g: Generator, tile: Tile, along: Block, sums: View, i, j) -> None:
    """One sum, from the operands as they lie in memory."""
    elements = g.elements
    row, column = let("row", tile.i0 + i), let("column", tile.j0 + j)
    sums.set(elements.sums.scalar(0.0), i, j)
    with loop("p", along.size, along.start) as p:
        a, b = (elements.number(name, g.sources[name].any.get(at, p), 1) for name, at in (("A", row), ("B", column)))
        sums.set(elements.sums.multiply_add(a, b, sums.get(i, j)), i, j)

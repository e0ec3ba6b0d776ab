"""The generator's earlier steps, without registers or vectors of their own, and the product that has no terms.

The paper builds its generator in five steps. ``triple_loop`` is the first (over the whole problem) and, inside the
loops over cache blocks, the second; ``packed_loops`` is the third and, with a tile that collects the outer products,
the fourth. They exist to be measured against each other; C = A.B is right in all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import emit
from .emit import const, loop
from .variants import PANELS
from .views import View

if TYPE_CHECKING:
    from .generator import Generator
    from .outer_loops import Block


def empty(g: Generator) -> None:
    """k == 0: the sum of no terms is +0, and C = beta.C for gemm (0 where beta is 0: C is not read)."""
    _begin(g, g.values["m"], const(0), g.values["n"], const(0))


def _begin(g: Generator, rows, i0, columns, j0) -> None:
    """C = 0, or beta.C for gemm, in a block."""
    if g.elements.parts > 1:
        _begin_pairs(g, rows, i0, columns, j0)
        return

    def fill(value) -> None:
        with loop("i", rows, i0) as i, loop("j", columns, j0) as j:
            g.c_any.set(value(i, j), i, j)

    elements = g.elements
    zero = elements.c.scalar(0.0)
    if g.spec.op == "matmul":
        fill(lambda i, j: zero)
        return
    beta = g.scale.get(const(1))

    def scaled(i, j):
        value = beta * elements.wide(g.c_any.get(i, j), 1)
        return elements.result(value, 1) if elements.arithmetic.floating else value

    none = emit.tirx.const(0, elements.scale)
    emit.branch(beta == none, lambda: fill(lambda i, j: zero), lambda: fill(scaled))


def _begin_pairs(g: Generator, rows, i0, columns, j0) -> None:
    """The same for complex numbers, whose parts rows and columns count."""
    i0, rows, j0, columns = (emit.tirx.truncdiv(x, const(2)) for x in (i0, rows, j0, columns))

    zero, elements = emit.T.broadcast(g.elements.c.scalar(0.0), 2), g.elements

    def fill(value) -> None:
        with loop("i", rows, i0) as i, loop("j", columns, j0) as j:
            at = (2, i, j, const(0))
            g.c_any.set_vector(value(g.c_any.get_vector(*at)), *at)

    if g.spec.op == "matmul":
        fill(lambda old: zero)
        return
    beta = [g.scale.get(const(q)) for q in (2, 3)]
    none = emit.both(*(x == emit.tirx.const(0, elements.scale) for x in beta))
    pair = tuple(emit.T.broadcast(x, 2) for x in beta)
    emit.branch(none, lambda: fill(lambda old: zero), lambda: fill(lambda old: elements.complex_product(pair, old)))


def triple_loop(g: Generator, blocks: dict[str, Block]) -> None:
    """for i, for j, for p: C[i, j] += A[i, p] . B[p, j], over one block of each dimension."""
    m, n, k = (blocks[d] for d in "mnk")
    emit.branch(k.start == const(0), lambda: _begin(g, m.size, m.start, n.size, n.start))
    with loop("i", m.size, m.start) as i, loop("j", n.size, n.start) as j, loop("p", k.size, k.start) as p:
        _add_product(g, i, j, _element(g, "A", i, p), _element(g, "B", j, p))


def _collect(g: Generator, tile: View, at: dict[str, Any], kb) -> None:
    """tile = A.B of one micro-tile, by vectors; what stays in registers is LLVM's choice."""
    mr, lanes = g.tile["m"], g.vectors.lanes
    vectors = const(g.tile["n"] // lanes)
    with loop("it", const(mr)) as it, loop("jt", vectors) as jt:
        tile.set_vector(g.vectors.splat(0.0), lanes, it, jt * const(lanes))
    with loop("p", kb) as p, loop("it", const(mr)) as it, loop("jt", vectors) as jt:
        a, column = g.vectors.splat(g.panels["A"].get(at["ir"], p, it)), jt * const(lanes)
        b = g.panels["B"].get_vector(lanes, at["jr"], p, column)
        tile.set_vector(g.vectors.multiply_add(a, b, tile.get_vector(lanes, it, column)), lanes, it, column)


def _element(g: Generator, operand: str, own, p):
    """A[i, p] or B[p, j]: ``own`` is the index that is not along k."""
    across, _ = PANELS[g.variant.resident][operand]
    indices = (p, own) if across == "k" else (own, p)
    return g.sources[operand].any.get(*indices)


def _add_product(g: Generator, i, j, a, b) -> None:
    a = a if g.spec.op == "matmul" else g.scale.get(const(0)) * a
    g.c_any.set(g.vectors.multiply_add(a, b, g.c_any.get(i, j)), i, j)


def packed_loops(g: Generator, blocks: dict[str, Block], task, in_tile: bool) -> None:
    """The loops over micro-tiles, on packed operands. ``in_tile``: the outer products of a tile are collected in a
    small buffer (step 4), otherwise each product goes to C (step 3)."""
    m, n, k = (blocks[d] for d in "mnk")
    mr, nr = g.tile["m"], g.tile["n"]
    emit.branch(k.start == const(0), lambda: _begin(g, m.size, m.start, n.size, n.start))
    outer, inner = g.variant.inner
    counts = {"ir": emit.ceil_div(m.size, const(mr)), "jr": emit.ceil_div(n.size, const(nr))}
    with loop(outer, counts[outer]) as x, loop(inner, counts[inner]) as y:
        at = {outer: x, inner: y}
        i0, j0 = at["ir"] * const(mr), at["jr"] * const(nr)
        rows, columns = emit.minimum(m.size - i0, const(mr)), emit.minimum(n.size - j0, const(nr))
        # Not in ``work``: there LLVM could not know that writing to it leaves the panels as they are.
        tile = View.on_stack("T", g.spec.dtype, (mr, nr)) if in_tile else None
        if tile is None:
            with loop("p", k.size) as p, loop("it", rows) as it, loop("jt", columns) as jt:
                a, b = g.panels["A"].get(at["ir"], p, it), g.panels["B"].get(at["jr"], p, jt)
                _add_product(g, m.start + i0 + it, n.start + j0 + jt, a, b)
        else:
            _collect(g, tile, at, k.size)
            with loop("it", rows) as it, loop("jt", columns) as jt:
                _add_product(g, m.start + i0 + it, n.start + j0 + jt, tile.get(it, jt), g.vectors.scalar(1.0))

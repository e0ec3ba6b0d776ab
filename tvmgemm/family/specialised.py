"""Kernels for one small shape: m, n and k are constants of the code, and the only loop is the one over the stack.

Nothing is decided and no address is computed at run time where the matrices are dense: every row of C is a vector (or a
few), every multiply-add takes its element of A straight from memory. Matrices with gaps, and an A in any layout, go
through a loop over k with the strides that the call gives. Columns that do not fill a vector take a narrower one, under
a mask where masks cost nothing; elsewhere single elements. k is one block: the order of summation is that of all
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..problem import DTYPES
from . import emit
from .emit import const, let, loop
from .isa import Isa
from .vectors import Vectors
from .views import View, pointer

if TYPE_CHECKING:
    from .generator import Generator

#: Multiply-adds of a tile of C up to which its loop over k is unrolled.
UNROLLED = 256


def _shape(g: Generator) -> tuple[int, int, int]:
    """m, n and k, which are constants of the code."""
    assert g.spec.shape is not None
    return g.spec.shape


def products(g: Generator, pointers: dict[str, Any]) -> None:
    """All products of the stack: C = A.B, with unit column strides of B and C."""
    (m, n, k), v = _shape(g), g.values
    unit, dense = const(1), (("rsa", k), ("csa", 1), ("rsb", n), ("rsc", n))
    # The stride along a dimension of size 1 may be anything, and is not used.
    used = [(name, size) for name, size in dense if {"rsa": m, "csa": k, "rsb": k, "rsc": m}[name] > 1]
    condition: Any = True
    for name, size in used:
        condition = emit.both(condition, v[name] == unit * const(size))
    constant = {name: size for name, size in dense}
    emit.branch(
        condition,
        lambda: _stack(g, pointers, constant, rolled=False),
        lambda: _stack(g, pointers, {name: v[name] for name, _ in dense}, rolled=True),
    )


def _stack(g: Generator, pointers: dict[str, Any], strides: dict[str, Any], rolled: bool) -> None:
    tiles = _tiles(g)
    # The limit of a mask is hidden from LLVM: it would find that nobody needs the lanes outside, and put zeros there.
    masks = {
        x: Vectors(g.spec.dtype, x.width).mask("inside", emit.opaque("inside", const(x.inside)))
        for _, columns in tiles
        for x in columns
        if x.inside < x.width
    }
    with loop("q", g.values["batch"]) as q:
        at = {
            x: pointer(f"{x}_q", pointers[x], g.spec.dtype, q * g.values[f"s{x.lower()}"]) for x in ("A", "B", "C")
        }
        a = View("A", at["A"], g.spec.dtype, (strides["rsa"], strides["csa"]))
        b = View("B", at["B"], g.spec.dtype, (strides["rsb"], 1))
        c = View("C", at["C"], g.spec.dtype, (strides["rsc"], 1))
        for rows, columns in tiles:
            _tile(g, a, b, c, rows, columns, masks, rolled, len(tiles) > 1)


@dataclass(frozen=True)
class _Columns:
    """A vector of a row: its first column, how many lanes it has and how many of them are columns of C. One lane: no
    vector."""

    first: int
    width: int
    inside: int


def columns_of(n: int, isa: Isa, itemsize: int) -> list[_Columns]:
    """A row of n elements cut into vectors of the instruction set, the last as narrow as can be, and single
    elements."""
    lanes, least = isa.lanes(itemsize), 16 // itemsize
    found, first = [], 0
    while first < n:
        left, width = n - first, lanes
        while width > least and (width // 2 >= left if isa.masks else width > left):
            width //= 2
        width = 1 if left == 1 or (width > left and not isa.masks) else width
        found.append(_Columns(first, width, min(left, width)))
        first += found[-1].inside
    return found


def _tiles(g: Generator) -> list[tuple[range, list[_Columns]]]:
    """Rows and vectors of the tiles of C, whose sums the registers hold beside a row of B and an element of A."""
    m, n, _ = _shape(g)
    spare = 1 if g.isa.fma and g.vectors.floating else 2
    columns, registers = columns_of(n, g.isa, DTYPES[g.spec.dtype].itemsize), g.isa.vector_registers - spare
    found = []
    for first in range(0, len(columns), 4):
        group = columns[first : first + 4]
        blocks = -(-m // min(m, registers // len(group) - 1))
        height = -(-m // blocks)
        found += [(range(i, min(m, i + height)), group) for i in range(0, m, height)]
    return found


def _tile(
    g: Generator, a: View, b: View, c: View, rows: range, columns: list[_Columns],
    masks: dict[_Columns, Any], rolled: bool, several: bool,
) -> None:  # fmt: skip
    """One tile of C, of ``several`` or the only one: sums start from +0, and take up k in order."""
    _, _, k = _shape(g)
    vectors = {x: Vectors(g.spec.dtype, x.width) for x in columns}

    def add(p) -> None:
        row = {x: let("b", _load(vectors[x], x, b, p, masks)) for x in columns}
        for i in rows:
            element = let("a", a.get(const(i), p))
            for x in columns:
                value = element if x.width == 1 else vectors[x].splat(element)
                sums[i, x].set(_multiply_add(vectors[x], value, row[x], sums[i, x].get()))

    if several:  # LLVM would keep B in registers from tile to tile, and the sums on the stack
        b = b.moved(const(0), const(0))
    sums = {(i, x): vectors[x].register(f"c{i}_{x.first}") for i in rows for x in columns}
    for (_, x), register in sums.items():
        register.set(vectors[x].scalar(0.0) if x.width == 1 else vectors[x].splat(0.0))
    if rolled or len(sums) * k > UNROLLED:
        with loop("p", const(k)) as p:
            add(p)
    else:
        for p in range(k):
            add(const(p))
    for (i, x), register in sums.items():
        _store(vectors[x], x, c, i, register.get(), masks)


def _multiply_add(vectors: Vectors, a, b, c):
    return vectors.multiply_add(a, b, c) if vectors.floating else c + a * b


def _load(vectors: Vectors, x: _Columns, view: View, row, masks: dict[_Columns, Any]):
    if x.width == 1:
        return view.get(row, const(x.first))
    if x.inside == x.width:
        return view.get_vector(x.width, row, const(x.first))
    return vectors.masked_load(view.address(row, const(x.first)), masks[x])


def _store(vectors: Vectors, x: _Columns, view: View, i: int, value, masks: dict[_Columns, Any]) -> None:
    at = (const(i), const(x.first))
    if x.width == 1:
        view.set(value, *at)
    elif x.inside == x.width:
        view.set_vector(value, x.width, *at)
    else:
        vectors.masked_store(value, view.address(*at), masks[x])

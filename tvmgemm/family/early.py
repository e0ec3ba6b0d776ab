"""Sums of bools that end early: a sum that is true stays so, whatever the terms to come.

NumPy stops at the first true term of each sum. Tiles that read operands in place look now and then whether all of their sums
are true, loops over blocks of k whether all of C is. Where a product has few rows or few columns, a list of the true elements
of one of them says where the other operand's elements count, and each sum goes through it to its first true term.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .emit import T, const, let, loop
from .vectors import variable
from .views import View

#: Rows or columns up to which lists are made: packing would take longer than as many sums that end soon.
FEW = 16

#: Elements along k in a list: as many are looked at for each sum, whether it ends sooner or not.
LISTED = 128

#: Steps of a tile after which it looks.
UNDECIDED = 16

#: Sums of C that are looked at before anything is packed, and their first terms that are: if each is true by then, nearly all
#: of C is with the first so many, and those are the first block of k. Each block after it is so many times as long.
SAMPLES, SAMPLED, GROWTH = 4, 32, 4

if TYPE_CHECKING:
    from .generator import Generator
    from .microkernel import Tile
    from .outer_loops import Block


def leave_if_true(tile: Tile, done) -> None:
    """Leave the loop that this is in if all sums of the tile are true, and ``done`` steps are worth finding out."""
    sums = [register.get() for register in tile.registers.values()]
    emit.branch(done >= const(UNDECIDED), lambda: emit.branch(tirx.Not(tile.elements.some_false(sums)), emit.leave))


def all_true(g: Generator, i0, rows, j0, columns):
    """Condition: every element of this part of C is true."""
    found = variable("all_true", const(1))

    def false() -> None:
        found.set(const(0))
        emit.leave()

    with loop("i", rows, i0) as i:
        with loop("j", columns, j0) as j:
            emit.branch(g.c_any.get(i, j) == tirx.const(0, "uint8"), false)
        emit.branch(found.get() == const(0), emit.leave)
    return found.get() != const(0)


def first_block(g: Generator, m: Block, n: Block, extent, step):
    """Length of the first block of k: short if sums spread over this part of C end soon, else ``step``."""
    length = variable("first_length", const(SAMPLED))
    a, b, none = g.sources["A"].any, g.sources["B"].any, tirx.const(0, "uint8")
    with loop("sample", const(SAMPLES)) as t:
        i = let("i", m.start + tirx.truncdiv((m.size - const(1)) * t, const(SAMPLES - 1)))
        j = let("j", n.start + tirx.truncdiv((n.size - const(1)) * (const(SAMPLES - 1) - t), const(SAMPLES - 1)))
        found = variable("found", const(0))
        with loop("p", emit.minimum(extent, const(SAMPLED))) as p:
            emit.branch(emit.both(a.get(i, p) != none, b.get(j, p) != none), lambda: _stop(found))

        def late() -> None:
            length.set(step)
            emit.leave()

        emit.branch(found.get() == const(0), late)
    return length.get()


def few(g: Generator) -> None:
    """The product by lists of the true elements of its rows or its columns, whichever are fewer; any strides."""
    v = g.values
    columns = v["n"] <= v["m"]

    def of(name: str, if_columns: str, if_rows: str):
        return let(name, tirx.Select(columns, v[if_columns], v[if_rows]))

    one = _Side(of("count", "n", "m"), of("c_step", "csc", "rsc"), of("step", "csb", "rsa"), of("k_step", "rsb", "csa"))
    other = _Side(of("count", "m", "n"), of("c_step", "rsc", "csc"), of("step", "rsa", "csb"), of("k_step", "csa", "rsb"))
    a, b = (emit.address(g.pointers[x], const(0)) for x in "AB")
    listed, searched = (_bytes(name, let("base", tirx.Select(columns, x, y))) for name, x, y in (("listed", b, a), ("searched", a, b)))

    def part(first, number) -> None:
        with loop("one", one.count) as f:
            _sums(g, listed.moved(f * one.step), searched, one, other, f, first, number)

    if g.spec.parallel:
        with emit.parallel("task", v["tasks"]) as task:
            part(*g.share(other.count, task))
    else:
        part(const(0), other.count)


@dataclass(frozen=True)
class _Side:
    """Rows of A or columns of B: how many, and from one to the next in C, to the next in the operand, and to the next element."""

    count: Any
    in_c: Any
    step: Any
    k_step: Any


def _bytes(name: str, start) -> View:
    """Memory from an address on."""
    return View(name, T.reinterpret("handle", start), "uint8", (1,))


def _sums(g: Generator, listed: View, searched: View, one: _Side, other: _Side, f, first, number) -> None:
    """``number`` sums from ``first`` on, of one row or column whose elements are ``listed``."""
    places, k, none = View.on_stack("places", emit.INDEX, (1, LISTED)).sliced(0, const(0)), g.values["k"], tirx.const(0, "uint8")
    c = View("C_bytes", g.pointers["C"], "uint8", (1,), f * one.in_c).kept()
    with loop("block", emit.ceil_div(k, const(LISTED))) as block:
        start = let("start", block * const(LISTED))
        count, left = variable("places_used", const(0)), variable("undecided", const(0))
        with loop("p", emit.minimum(k - start, const(LISTED)), start) as p:
            places.set(p * other.k_step, count.get())
            count.set(count.get() + tirx.Cast(emit.INDEX, listed.get(p * one.k_step) != none))
        used = let("used", count.get())

        def search(r) -> None:
            found = variable("found", const(0))
            with loop("place", used) as place:
                emit.branch(searched.get(r * other.step + places.get(place)) != none, lambda: _stop(found))  # noqa: B023
            c.set(tirx.Cast("uint8", found.get()), r * other.in_c)
            left.set(left.get() + const(1) - found.get())  # noqa: B023

        with loop("r", number, first) as r:
            undecided = emit.either(start == const(0), c.get(r * other.in_c) == none)
            emit.branch(undecided, lambda: search(r))  # noqa: B023
        emit.branch(left.get() == const(0), emit.leave)


def _stop(found) -> None:
    found.set(const(1))
    emit.leave()

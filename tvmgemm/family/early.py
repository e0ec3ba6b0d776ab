"""Sums of bools that end early: a sum that is true stays so, whatever the terms to come.

NumPy stops at the first true term of each sum. Tiles that read operands in place look now and then whether all of their sums
are true, loops over blocks of k whether all of C is. Where nearly all sums seem to end within a few terms, those are computed
before anything is packed, and the sums that are left are searched. Where a product has few rows or few columns, a list of the
true elements of one of them says where the other operand's elements count, and each sum goes through it to its first true term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .emit import T, const, let, loop
from .vectors import Vectors, variable
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

#: Terms of each sum that are looked at in vectors across columns, before anything is packed, and how many at a time, until all
#: sums of a vector are true; rows and columns from which.
LOOKED, AT_A_TIME, LOOKED_FROM = 24, 8, 8

#: What may be spent on searching the sums that are false after those: so much to begin with, and one term for so many sums that
#: were looked at, a part of what NumPy takes for them. To begin a search costs as much as so many terms.
SEARCHED, SEARCHED_PART, SEARCH = 256, 4, 8

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
    return tirx.Select(_soon(g, (m.start, m.size), (n.start, n.size), extent), const(SAMPLED), step)


def _soon(g: Generator, m: tuple[Any, Any], n: tuple[Any, Any], extent):
    """Condition: sums spread over this part of C, (start, size) of rows and columns, end soon."""
    soon = variable("soon", const(1))
    a, b, none = g.sources["A"].any, g.sources["B"].any, tirx.const(0, "uint8")
    with loop("sample", const(SAMPLES)) as t:
        i = let("i", m[0] + tirx.truncdiv((m[1] - const(1)) * t, const(SAMPLES - 1)))
        j = let("j", n[0] + tirx.truncdiv((n[1] - const(1)) * (const(SAMPLES - 1) - t), const(SAMPLES - 1)))
        found = variable("found", const(0))
        with loop("p", emit.minimum(extent, const(SAMPLED))) as p:
            emit.branch(emit.both(a.get(i, p) != none, b.get(j, p) != none), lambda: _stop(found))

        def late() -> None:
            soon.set(const(0))
            emit.leave()

        emit.branch(found.get() == const(0), late)
    return soon.get() != const(0)


def unless_soon(g: Generator, otherwise: Callable[[], None]) -> None:
    """The product by the first terms of its sums, if nearly all end there; ``otherwise()`` multiplies all others."""
    v, done = g.values, variable("looked", const(0))
    large = emit.minimum(v["m"], v["n"]) >= const(LOOKED_FROM)

    def look() -> None:
        soon = _soon(g, (const(0), v["m"]), (const(0), v["n"]), v["k"])
        emit.branch(soon, lambda: _look(g, done))

    emit.branch(emit.both(large, g.unit_columns), look)
    emit.branch(done.get() == const(0), otherwise)


def _look(g: Generator, done) -> None:
    """C by the first terms of its sums, and those that are false then by single terms; ``done`` is 0 if too many are."""
    v, bytes_, none = g.values, Vectors("uint8", g.isa.vector_bytes), tirx.const(0, "uint8")
    lanes, a, b = const(bytes_.lanes), g.sources["A"].any, g.sources["B"].any
    rows = View.on_stack("B_first", "uint8", (LOOKED, bytes_.lanes))
    steps = let("looked_at", emit.minimum(v["k"], const(LOOKED)))
    most = let("searched_most", emit.minimum(v["k"] - steps, const(SEARCHED)))
    allowed = variable("allowed", const(SEARCHED))
    done.set(const(1))

    def give_up() -> None:
        done.set(const(0))
        emit.leave()

    def search(i, j) -> None:
        found, passed = variable("found", const(0)), variable("passed", const(0))
        with loop("p", most, steps) as p:
            passed.set(passed.get() + const(1))
            emit.branch(emit.both(a.get(i, p) != none, b.get(j, p) != none), lambda: _stop(found))
        allowed.set(allowed.get() - passed.get() - const(SEARCH))
        emit.branch(found.get() != const(0), lambda: g.c_rows.set(tirx.const(1, "uint8"), i, j))
        unknown = emit.both(found.get() == const(0), v["k"] - steps > most)
        emit.branch(emit.either(unknown, allowed.get() < const(0)), give_up)

    with loop("block", emit.ceil_div(v["n"], lanes)) as block:
        j0 = let("j0", block * lanes)
        columns = let("columns", emit.minimum(lanes, v["n"] - j0))
        mask, copied = bytes_.mask("inside", columns), variable("copied", const(0))

        def copy(p0, number, j0=j0, columns=columns) -> None:
            with loop("p", number, p0) as p, loop("j", lanes) as j:
                # All ones, for elements of A may be any byte; columns past the edge repeat the last one.
                some = b.get(j0 + emit.minimum(j, columns - const(1)), p) != none
                rows.set(tirx.Select(some, tirx.const(255, "uint8"), none), p, j)

        with loop("i", v["m"]) as i:
            row, sums = a.moved(i, const(0)), bytes_.register("first")
            sums.set(bytes_.splat(0))
            false = T.call_llvm_intrin("bool", f"llvm.vector.reduce.or.v{bytes_.lanes}i1", sums.get() == bytes_.splat(0))
            with loop("terms", emit.ceil_div(steps, const(AT_A_TIME))) as terms:
                p0 = let("p0", terms * const(AT_A_TIME))
                number = let("number", emit.minimum(const(AT_A_TIME), steps - p0))

                def more(p0=p0, number=number) -> None:
                    copy(p0, number)  # noqa: B023
                    copied.set(p0 + number)  # noqa: B023

                emit.branch(copied.get() <= p0, more)
                with loop("p", number, p0) as p:
                    sums.set(sums.get() | (bytes_.splat(row.get(const(0), p)) & rows.get_vector(bytes_.lanes, p, const(0))))
                emit.branch(tirx.Not(false), emit.leave)
            _store(g, bytes_, T.bind(T.min(sums.get(), bytes_.splat(1))), i, j0, columns, mask)
            allowed.set(allowed.get() + tirx.truncdiv(columns, const(SEARCHED_PART)))

            def single(i=i, j0=j0, columns=columns) -> None:
                with loop("j", columns, j0) as j:
                    emit.branch(g.c_rows.get(i, j) == none, lambda: search(i, j))

            emit.branch(emit.both(most > const(0), false), single)
            emit.branch(done.get() == const(0), emit.leave)
        emit.branch(done.get() == const(0), emit.leave)


def _store(g: Generator, bytes_: Vectors, value, i, j0, columns, mask) -> None:
    """A vector of C, ``columns`` of it."""
    if g.isa.masks:
        bytes_.masked_store(value, g.c_rows.address(i, j0), mask)
        return

    def singly() -> None:
        row = View.on_stack("C_last", "uint8", (1, bytes_.lanes))
        row.set_vector(value, bytes_.lanes, const(0), const(0))
        with loop("j", columns) as j:
            g.c_rows.set(row.get(const(0), j), i, j0 + j)

    emit.branch(columns < const(bytes_.lanes), singly, lambda: g.c_rows.set_vector(value, bytes_.lanes, i, j0))


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

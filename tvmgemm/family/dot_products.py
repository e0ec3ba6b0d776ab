"""Elements of C as dot products by vectors along k, of a row of A and a column of B.

A row of A that is contiguous in memory holds groups of elements as they lie; so does a column of B, or a copy of it. Lanes are
added up at the end, in an order that is theirs: this is for sums whose order does not count. Where elements of A's rows are two
apart, or go backwards, so is the copy of B, with zeros in between: gaps of A are multiplied by 0. A sum of bools ends with the
vector that has the first true term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import tirx

from . import emit
from .arithmetic import bits
from .emit import T, const, let, loop
from .update import update_c
from .vectors import Register, Vectors, cast, lanes_of
from .views import View

if TYPE_CHECKING:
    from .generator import Generator

#: Columns of C up to which packed panels have more empty lanes.
COLUMNS = 8

#: Rows of A that share the vectors of B, and vectors of each that are added up side by side: sums of one wait for each other.
#: (The same for fewer rows, so that equal rows have equal sums.)
ROWS, AT_ONCE = 4, 2

#: Bytes of the copy of B, and of one that holds all of it.
COPIED, COPIED_WHOLE = 16 << 10, 32 << 10


def room(g: Generator) -> int:
    """Elements of the copy of B."""
    size = COPIED_WHOLE if g.elements.arithmetic.floating else COPIED
    return size // (bits(g.elements.stored["B"]) // 8)


def _groups(rows, most: int, then: Callable[[Any, int], None]) -> None:
    """``then(first, number)`` for groups of ``most`` rows and for what they leave over."""
    with loop("group", tirx.truncdiv(rows, const(most))) as group:
        then(let("row", group * const(most)), most)
    if most == 1:
        return
    done = let("done", rows - tirx.truncmod(rows, const(most)))
    left = let("left", rows - done)
    emit.branch(left > const(0), lambda: emit.by_size(left, 1, most - 1, lambda number: then(done, number)))


def is_bool(g: Generator) -> bool:
    """Whether sums are ors."""
    return g.elements.kinds["C"] == "bool"


def finish(g: Generator, first, i, j, total) -> None:
    """A sum over a block of k to C."""
    update_c(g, first, lambda update: g.c_any.set(update(total, lambda: g.c_any.get(i, j), lambda x: x), i, j))


def scalar_step(g: Generator, a, b, c):
    """c + a.b of single elements as they are stored, in the type of the sums; of bools or of ands."""
    elements, dtype = g.elements, g.elements.sums.dtype
    if is_bool(g):
        return c | (elements.element("A", a, 1) & elements.element("B", b, 1))
    return c + cast(a, dtype, 1) * cast(b, dtype, 1)


def scalar_sum(g: Generator, name: str) -> Register:
    """A sum of single elements, 0 to begin with."""
    dtype = "uint8" if is_bool(g) else g.elements.sums.dtype
    buffer = T.alloc_buffer((1,), dtype, scope="local", annotations=emit.ON_STACK)
    register = Register(buffer, 1)
    register.set(tirx.const(0, dtype))
    return register


@dataclass(frozen=True)
class DotProducts:
    """Rows of A by vectors along k. ``direct``: so are columns of B (of floating-point numbers, or those of a copy of all of B);
    otherwise those of a copy, as A lies in memory, are."""

    g: Generator
    direct: bool

    def rows(self, first, number) -> None:
        """C[first : first + number]."""
        g, v = self.g, self.g.values
        if self.direct:
            self._block(first, number, const(0), v["k"], *(self._columns() if g.elements.arithmetic.floating else self._in_place()))
            return
        # A task has a copy of its own.
        column = View.on_stack("B_columns", g.elements.stored["B"], (1, room(g)))
        apart = let("apart", emit.maximum(v["csa"], -v["csa"]))
        length = let("length", tirx.truncdiv(const(room(g)), v["n"]))
        kb = let("copied", tirx.truncdiv(length, apart))
        with loop("pc", emit.ceil_div(v["k"], kb)) as pc:
            p0 = let("p0", pc * kb)
            size = let("kb", emit.minimum(kb, v["k"] - p0))
            copies = self._copy(column.sliced(0, const(0)), length, apart, p0, size)
            self._block(first, number, p0, let("span", (size - const(1)) * apart + const(1)), copies, length)

    def _in_place(self) -> tuple[View, Any]:
        """Columns of B, and from one to the next."""
        return View("B_column", self.g.pointers["B"], self.g.elements.stored["B"], (1,)), self.g.values["csb"]

    def _columns(self) -> tuple[View, Any]:
        """Columns of B where they are contiguous, or of a copy (a task has one of its own), and from one to the next."""
        g, v = self.g, self.g.values
        dtype, contiguous = g.elements.stored["B"], v["rsb"] == const(1)
        copy, source = View.on_stack("B_columns", dtype, (1, room(g))), g.sources["B"].any

        def fill() -> None:
            with loop("p", v["k"]) as p, loop("j", v["n"]) as j:
                copy.set(source.get(j, p), const(0), j * v["k"] + p)

        emit.branch(tirx.Not(contiguous), fill)
        places = (emit.address(base, const(0)) for base in (g.pointers["B"], copy.address(const(0), const(0))))
        start = let("columns", tirx.Select(contiguous, *places))
        column = View("B_column", T.reinterpret("handle", start), dtype, (1,))
        return column, let("column_step", tirx.Select(contiguous, v["csb"], v["k"]))

    def _copy(self, to: View, length, apart, p0, size) -> View:
        """Columns of B, a ``length`` from each other, as A's rows lie in memory."""
        g, v = self.g, self.g.values
        dtype = g.elements.stored["B"]
        backwards = v["csa"] < const(0)
        start = let("start", tirx.Select(backwards, (size - const(1)) * apart, const(0)))
        source = g.sources["B"].any

        def clear() -> None:
            with loop("z", v["n"] * length) as z:
                to.set(tirx.const(0, dtype), z)

        emit.branch(emit.both(apart > const(1), p0 == const(0)), clear)
        with loop("j", v["n"]) as j, loop("p", size) as p:
            to.set(source.get(j, p0 + p), j * length + start + p * v["csa"])
        return to

    def _block(self, first, number, p0, span, b: View, length) -> None:
        """Rows of C from a block of k: ``span`` elements of each row of A and of the columns ``b``, which lie a ``length`` apart."""
        g, v = self.g, self.g.values
        backwards = v["csa"] < const(0)
        last = const(0) if self.direct else let("kb_last", self._last(span))
        start = let("a_start", tirx.Select(backwards, p0 + last, p0) * v["csa"])
        a = View("A_rows", g.pointers["A"], g.elements.stored["A"], (v["rsa"], 1), start)
        block = _Block(g, a.kept(), b, span, p0 == const(0))
        starts = block.shifts(length)

        def some(row, count: int) -> None:
            with loop("j", v["n"]) as j:
                block.dot_products(let("i0", first + row), count, j, let("column", j * length), starts)

        _groups(number, 1 if is_bool(g) else ROWS, some)

    def _last(self, span):
        """Index of the last of the elements of A's rows that lie in a ``span``."""
        apart = emit.maximum(self.g.values["csa"], -self.g.values["csa"])
        return tirx.truncdiv(span - const(1), apart)


@dataclass(frozen=True)
class _Block:
    """The dot products of one block of k."""

    g: Generator
    a: View
    b: View
    span: Any
    first: Any

    @property
    def _step(self) -> int:
        """Elements in a vector."""
        return self.g.elements.lanes * self.g.elements.group

    def _whole(self):
        """Vectors that are full."""
        return let("whole", tirx.truncdiv(self.span, const(self._step)))

    def _vector(self, operand: str, view: View, *at):
        return self.g.elements.in_groups(operand, view.get_vector(self._step, *at))

    def _masked(self, operand: str, view: View, *at):
        """The last vector, zeros behind its end."""
        elements = self.g.elements
        memory = Vectors(elements.stored[operand], self._step)
        inside = memory.mask("inside", self.span - tirx.truncdiv(self.span, const(self._step)) * const(self._step))
        return elements.in_groups(operand, memory.masked_load(view.address(*at), inside, 0))

    def shifts(self, length) -> View | None:
        """What the sums of each column start from, where A is moved by 128."""
        g = self.g
        elements = g.elements
        if not elements.shifted:
            return None
        starts = View.on_stack("starts", elements.sums.dtype, (COLUMNS, elements.lanes))
        with loop("j", g.values["n"]) as j:
            register = elements.sums.register("shift")
            register.set(elements.sums.splat(0.0))
            whole = self._whole()
            with loop("s", whole) as s:
                register.set(elements.shift_of(self._vector("B", self.b, j * length + s * const(self._step)), register.get()))
            if g.isa.masks:
                rest = let("rest", whole * const(self._step))
                emit.branch(
                    rest < self.span,
                    lambda: register.set(elements.shift_of(self._masked("B", self.b, j * length + rest), register.get())),
                )
            starts.set_vector(elements.sums.splat(0.0) - register.get(), elements.lanes, j, const(0))
        return starts

    def dot_products(self, i0, rows: int, j, column, starts: View | None) -> None:
        """C[i0 : i0 + rows, j]; ``column``: where that of B begins."""
        if is_bool(self.g):
            self._bool(i0, j, column)
        else:
            self._sums(i0, rows, j, column, starts)

    def _sums(self, i0, rows: int, j, column, starts: View | None) -> None:
        g, step = self.g, const(self._step)
        elements = g.elements
        registers = [[elements.sums.register(f"c{i}_{u}") for u in range(AT_ONCE)] for i in range(rows)]
        for row in registers:
            for u, register in enumerate(row):
                register.set(elements.sums.splat(0.0) if starts is None or u else starts.get_vector(elements.lanes, j, const(0)))
        a, b = self.a.moved(i0, const(0)), self.b.moved(column)

        def multiply_add(at, u: int, load) -> None:
            y = let("y", load("B", b, at))
            for i, row in enumerate(registers):
                row[u].set(elements.multiply_add(load("A", a, const(i), at), y, row[u].get()))

        whole = self._whole()
        groups = let("groups", tirx.truncdiv(whole, const(AT_ONCE)))
        with loop("s", groups) as s:
            emit.rolled()
            for u in range(AT_ONCE):
                multiply_add((s * const(AT_ONCE) + const(u)) * step, u, self._vector)
        with loop("s", whole - groups * const(AT_ONCE), groups * const(AT_ONCE)) as s:
            emit.rolled()
            multiply_add(s * step, 0, self._vector)
        rest = let("rest", whole * step)
        singles = None
        if g.isa.masks:
            emit.branch(rest < self.span, lambda: multiply_add(rest, 0, self._masked))
        else:
            singles = [scalar_sum(g, f"s{i}") for i in range(rows)]
            with loop("p", self.span - rest, rest) as p:
                y = let("b", b.get(p))
                for i, register in enumerate(singles):
                    register.set(scalar_step(g, a.get(const(i), p), y, register.get()))
        for i, row in enumerate(registers):
            total = _added_up([register.get() for register in row])
            finish(g, self.first, i0 + const(i), j, total if singles is None else total + singles[i].get())

    def _bool(self, i0, j, column) -> None:
        """One element of C: true with the first vector that has a true term."""
        g, step = self.g, const(self._step)
        elements, dtype = g.elements, g.elements.sums.dtype
        found = scalar_sum(g, "found")
        a, b = self.a.moved(i0, const(0)), self.b.moved(column)
        any_of = f"llvm.vector.reduce.or.v{elements.lanes}i{bits(dtype)}"

        def look(at, load) -> None:
            met = load("A", a, const(0), at) & load("B", b, at)
            some = T.call_llvm_intrin(dtype, any_of, met) != tirx.const(0, dtype)

            def stop() -> None:
                found.set(tirx.const(1, "uint8"))
                emit.leave()

            emit.branch(some, stop)

        whole = self._whole()
        rest = let("rest", whole * step)
        with loop("s", whole) as s:
            look(s * step, self._vector)
        none = found.get() == tirx.const(0, "uint8")
        if g.isa.masks:
            with loop("last", tirx.Select(emit.both(none, rest < self.span), const(1), const(0))):
                look(rest, self._masked)
        else:
            with loop("p", tirx.Select(none, self.span - rest, const(0)), rest) as p:
                found.set(scalar_step(g, a.get(const(0), p), b.get(p), found.get()))
        finish(g, True, i0, j, cast(found.get(), dtype, 1))


def _added_up(vectors: list):
    """The sum of all lanes of all vectors."""
    while len(vectors) > 1:
        vectors = [x + y for x, y in zip(vectors[::2], vectors[1::2])]
    total = T.bind(vectors[0])
    while (lanes := lanes_of(total)) > 2:
        halves = [tirx.Shuffle([total], list(range(start, start + lanes // 2))) for start in (0, lanes // 2)]
        total = T.bind(halves[0] + halves[1])
    return tirx.Shuffle([total], [0]) + tirx.Shuffle([total], [1])

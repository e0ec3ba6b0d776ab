"""Packing: a block of an operand copied into micro-panels that the micro-kernel reads with unit stride.

A micro-panel is ``width`` elements of the operand's own dimension (rows of A, columns of B) by kc, stored k after k:
``panel(p, e)``. A in panels of mr rows and B in panels of nr columns are the same routine with strides exchanged.
Elements are converted on the way, and where the arithmetic has groups an element of a panel holds as many of the
operand, consecutive along k; p counts those. The last group may have less to hold: the rest of it is 0.

The last panel may be wider than what is left of the operand. Panels cut up m or n: then its surplus lanes hold a copy
of the last real element or a quiet NaN, neither of which can set a floating-point flag that the real lanes do not set,
and nobody reads what becomes of them. Panels cut up k: then they are part of every sum and hold zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import emit, gapped
from .elements import Elements
from .emit import const, let, loop
from .isa import Isa
from .views import View

#: Of the steps that a transpose in registers is for, the part from which it is worth while for those that are left over.
LEAST_TURNED = 4


@dataclass(frozen=True)
class Operand:
    """The source of a packing: ``any(e, p)`` for element e of its own dimension and index p along k, of operand
    ``name``.

    ``unit_e(p, e)`` and ``unit_k(e, p)`` view the same memory with that stride known to be 1; which of them holds is
    decided at run time by ``stride_e`` and ``stride_k``.
    """

    name: str
    any: View
    unit_e: View
    unit_k: View
    stride_e: Any
    stride_k: Any


def slack(width: int, lanes: int) -> int:
    """Elements behind each panel that a full-width store of its last row may write."""
    return 0 if width % lanes == 0 else lanes


def pack_panels(
    elements: Elements,
    isa: Isa,
    panels: View,
    operand: Operand,
    *,
    width: int,
    first,
    e0,
    extent,
    count,
    p0,
    kb,
    zero_padded: bool = False,
    vectorised: bool = True,
    surplus: bool = True,
) -> None:
    """Pack ``count`` micro-panels, starting with panel ``first`` of the block.

    ``panels(panel, p, e)`` is the destination; the block starts at element ``e0`` and index ``p0`` of the operand,
    has ``extent`` elements and ``kb`` along the panels. ``zero_padded``: surplus lanes hold 0. ``surplus``: somebody may read
    them; if not, what goes element by element leaves them out.
    """
    with loop("panel", count, first) as panel:
        base = let("base", e0 + panel * const(width))
        valid = let("valid", extent - panel * const(width))
        job = _Panel(elements, isa, panels, operand, width, panel, base, valid, p0, kb, zero_padded, surplus)
        if vectorised:
            job.fill()
        else:
            job.gather()


@dataclass(frozen=True)
class _Panel:
    """One micro-panel and the ways to fill it."""

    elements: Elements
    isa: Isa
    panels: View
    operand: Operand
    width: int
    panel: Any
    base: Any
    valid: Any
    p0: Any
    kb: Any
    zero_padded: bool
    surplus: bool

    @property
    def lanes(self) -> int:
        """Elements of a panel in a vector."""
        return self.elements.lanes

    def _at(self, e):
        """Index of element e of this panel; past the edge, that of the last real element. (``base`` and ``valid`` count
        parts.)"""
        base, valid = (x if self.parts == 1 else emit.tirx.truncdiv(x, const(self.parts)) for x in (self.base, self.valid))
        return base + emit.minimum(const(e) if isinstance(e, int) else e, valid - const(1))

    @property
    def parts(self) -> int:
        """Numbers that an element is."""
        return self.elements.parts

    def fill(self) -> None:
        """By vectors, if a stride is one of those that vectors are made for."""
        ways = [(self.operand.stride_e == const(1), self.copy), (self.operand.stride_k == const(1), self.transpose)]
        if self.elements.group == 1:
            ways += [(self.operand.stride_e == const(step), partial(self.copy, step)) for step in gapped.STEPS]
        self._first_of(ways)

    def _first_of(self, ways: list) -> None:
        if ways:
            condition, fill = ways[0]
            emit.branch(condition, fill, lambda: self._first_of(ways[1:]))
        else:
            self.gather()

    def gather(self, start=None) -> None:
        """Element by element, for operands with no unit stride and for the rest of the other ways: from step
        ``start``."""
        start = const(0) if start is None else start
        steps = emit.ceil_div(self.kb, const(self.elements.group))
        width = const(self.width // self.parts)
        if not self.surplus:
            valid = self.valid if self.parts == 1 else emit.tirx.truncdiv(self.valid, const(self.parts))
            width = let("width", emit.minimum(width, valid))
        with loop("p", steps - start, start) as p, loop("e", width) as e:
            if self.parts > 1:
                for part in range(self.parts):
                    value = self.operand.any.get(self._at(e), self.p0 + p, const(part))
                    self.panels.set(value, self.panel, p, e * const(self.parts) + const(part))
                return
            group = [self._single(e, p * const(self.elements.group) + const(q), q) for q in range(self.elements.group)]
            self.panels.set(self._padded(e, self.elements.grouped(group, 1)), self.panel, p, e)

    def _single(self, e, p, q: int):
        """One element; 0 past the end of k, where only the last members of a group can be."""
        inside = p if q == 0 else emit.minimum(p, self.kb - const(1))
        value = self.operand.any.get(self._at(e), self.p0 + inside)
        value = self.elements.element(self.operand.name, value, 1)
        none = emit.tirx.const(0, self.elements.arithmetic.element)
        return value if q == 0 else emit.tirx.Select(p < self.kb, value, none)

    def _padded(self, e, value, splat=lambda x: x):
        """``value``, or 0 past the edge if that is what surplus lanes must hold."""
        if not self.zero_padded:
            return value
        return emit.tirx.Select(e < self.valid, value, splat(self.elements.panels.scalar(0.0)))

    def copy(self, step: int = 1) -> None:
        """The operand's own dimension has this stride: rows of the panel lie close together in the source."""
        rest = partial(self._copy_masked, step) if self.isa.masks else self.gather
        if self.width % self.lanes and self.isa.masks:
            rest()
        else:
            emit.branch(self.valid >= const(self.width), lambda: self._copy_full(step), rest)

    @contextmanager
    def _whole_steps(self):
        """A loop over the steps that have all of their group, and the rest after it; yields (step, first index along
        k)."""
        group = self.elements.group
        steps = self.kb if group == 1 else let("steps", emit.tirx.truncdiv(self.kb, const(group)))
        with loop("p", steps) as p:
            yield p, self.p0 + p * const(group) if group > 1 else self.p0 + p
        if group > 1:
            self.gather(steps)

    def _joined(self, lanes: int, load):
        """An element of a panel (a vector of them) from the elements ``load(q)`` of a group."""
        name, group = self.operand.name, self.elements.group
        return self.elements.grouped([self.elements.element(name, load(q), lanes) for q in range(group)], lanes)

    def _copy_full(self, step: int) -> None:
        lanes, source = self.lanes, self.operand.unit_e
        whole = self.width // lanes * lanes

        def vector(k, c: int):
            if step == 1:
                return source.get_vector(lanes, k, self.base + const(c))
            return gapped.load(lambda offset, count: self._line(k, c, offset, count), lanes, step, self.parts)

        def single(k, e: int):
            return source.get(k, self.base + const(e)) if step == 1 else self._line(k, e, 0, 1)

        with self._whole_steps() as (p, k):
            for c in range(0, whole, lanes):
                self.panels.set_vector(self._joined(lanes, lambda q: vector(k + const(q), c)), lanes, self.panel, p, const(c))
            for e in range(whole, self.width):
                self.panels.set(self._joined(1, lambda q: single(k + const(q), e)), self.panel, p, const(e))

    def _line(self, k, number: int, offset: int, count: int):
        """``count`` numbers as they lie in memory, from ``offset`` behind that number of the panel at index k on."""
        line, at = self._in_line(k, number, offset)
        return line.get_vector(count, *at) if count > 1 else line.get(*at)

    def _in_line(self, k, number: int, offset: int) -> tuple[View, tuple]:
        """Where ``_line`` begins: a view of consecutive numbers, and indices in it."""
        element, part = divmod(number, self.parts)
        line = self.operand.any if self.parts > 1 else self.operand.any.in_line()
        return line, (emit.tirx.truncdiv(self.base, const(self.parts)) + const(element), k, const(part + offset))

    def _copy_masked(self, step: int) -> None:
        lanes, source = self.lanes, self.operand.unit_e
        limit = emit.minimum(self.valid, const(self.width))
        chunks = range(0, self.width, lanes)
        memory = self.elements.memory(self.operand.name)
        outside = 0 if self.zero_padded else self.elements.outside(self.operand.name)
        if step == 1:
            masks = [{0: memory.mask(f"inside{c}", limit - const(c))} for c in chunks]
        else:
            masks = [gapped.inside(memory, limit - const(c), step, self.parts) for c in chunks]

        def vector(k, c: int, inside: dict):
            if step == 1:
                return memory.masked_load(source.address(k, self.base + const(c)), inside[0], outside)

            def line(offset: int, _count: int):
                view, at = self._in_line(k, c, offset)
                return memory.masked_load(view.address(*at), inside[offset], outside)

            return gapped.load(line, lanes, step, self.parts)

        with self._whole_steps() as (p, k):
            for c, inside in zip(chunks, masks):
                value = self._joined(lanes, lambda q: vector(k + const(q), c, inside))  # noqa: B023
                # Past the panel's own width this writes the next row, which is packed after this one.
                self.panels.set_vector(value, lanes, self.panel, p, const(c))

    def transpose(self) -> None:
        """k has unit stride: load a vector of steps of each element, transpose in registers, store row by row."""
        group, steps = self.elements.group, self._steps
        blocks = let("blocks", emit.tirx.truncdiv(self.kb, const(steps * group)))
        with loop("block", blocks) as block:
            p = let("p", block * const(steps))
            self._turn_round(p, lambda e: self._row(e, p * const(group) if group > 1 else p), lambda _step, store: store())
        done = blocks * const(steps)
        if not self.isa.masks or group > 1:
            self.gather(done)
            return
        rest = let("rest", self.kb - done)
        emit.branch(rest >= const(max(steps // LEAST_TURNED, 1)), lambda: self._transpose_rest(done, rest), lambda: self.gather(done))

    def _transpose_rest(self, p, rest) -> None:
        """The last ``rest`` steps, from step ``p`` on, which do not fill a vector."""
        memory, outside = self.elements.memory(self.operand.name), self.elements.outside(self.operand.name)
        inside = memory.mask("inside", rest * const(self.parts))

        def load(at: tuple):
            return self.elements.in_groups(self.operand.name, memory.masked_load(self.operand.unit_k.address(*at), inside, outside))

        self._turn_round(p, lambda e: self._row(e, p, load), lambda step, store: emit.branch(rest > const(step), store))

    def _turn_round(self, p, row: Callable, store_if: Callable) -> None:
        """As many steps of the panel, from step ``p`` on, as a vector along k has: ``row(e)`` of each element, transposed, to
        memory. ``store_if(step, store)`` stores a step if it is there."""
        lanes, steps = self.lanes, self._steps
        # A store of a chunk that is wider than what is left of the panel spills into the next row, so rows are
        # stored in ascending order with every chunk of a row before the next row.
        pending = []
        for c in range(0, self.width, lanes):
            columns = self.elements.panels.transpose([row(c // self.parts + r) for r in range(steps)], self.parts)
            pending.append((c, columns))
            if self.width % lanes == 0:
                self._store_rows(p, pending, store_if)
                pending = []
        if pending:
            self._store_rows(p, pending, store_if)

    @property
    def _steps(self) -> int:
        """Steps in a vector that runs along k, and elements in one that runs across."""
        return self.lanes // self.parts

    def _row(self, e: int, k, load: Callable | None = None):
        """A vector of steps of element e, from index k of the block on; ``load(indices)``: of a view of the operand by its own
        dimension, what it has from there on."""
        e = min(e, self.width // self.parts - 1)
        part = () if self.parts == 1 else (const(0),)
        at = (self._at(e), self.p0 + k, *part)
        value = load(at) if load else self.elements.consecutive(self.operand.name, self.operand.unit_k, *at)
        return emit.T.bind(self._padded(const(e), value, self.elements.panels.splat))

    def _store_rows(self, p, chunks, store_if: Callable) -> None:
        def store(step: int) -> None:
            for c, columns in chunks:
                self.panels.set_vector(columns[step], self.lanes, self.panel, p + const(step), const(c))

        for step in range(self._steps):
            store_if(step, partial(store, step))


def append_shift(elements: Elements, panels: View, width: int, first, count, steps) -> None:
    """Behind the last step of each panel of B, what takes back A's move by 128 (``Elements.shift_of``) from the
    sums."""
    lanes = elements.lanes
    chunks = range(0, width, lanes)
    with loop("panel", count, first) as panel:
        totals = {c: elements.sums.register(f"shift{c}") for c in chunks}
        for c in chunks:
            totals[c].set(elements.sums.splat(0))
        with loop("p", steps) as p:
            for c in chunks:
                totals[c].set(elements.shift_of(panels.get_vector(lanes, panel, p, const(c)), totals[c].get()))
        for c in chunks:
            panels.set_vector(elements.sums.splat(0) - totals[c].get(), lanes, panel, steps, const(c))

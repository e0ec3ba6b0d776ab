"""Packing: a block of an operand copied into micro-panels that the micro-kernel reads with unit stride.

A micro-panel is ``width`` elements of the operand's own dimension (rows of A, columns of B) by kc, stored k after k:
``panel(p, e)``. A in panels of mr rows and B in panels of nr columns are the same routine with strides exchanged.

The last panel may be wider than what is left of the operand. Panels cut up m or n: then its surplus lanes hold a copy
of the last real element or a quiet NaN, neither of which can set a floating-point flag that the real lanes do not set,
and nobody reads what becomes of them. Panels cut up k: then they are part of every sum and hold zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import emit
from .emit import const, let, loop
from .isa import Isa


@dataclass(frozen=True)
class Operand:
    """The source of a packing: ``any(e, p)`` for element e of its own dimension and index p along k.

    ``unit_e(p, e)`` and ``unit_k(e, p)`` view the same memory with that stride known to be 1; which of them holds is
    decided at run time by ``stride_e`` and ``stride_k``.
    """

    any: emit.View
    unit_e: emit.View
    unit_k: emit.View
    stride_e: Any
    stride_k: Any


def slack(width: int, lanes: int) -> int:
    """Elements behind each panel that a full-width store of its last row may write."""
    return 0 if width % lanes == 0 else lanes


def pack_panels(
    vectors: emit.Vectors,
    isa: Isa,
    panels: emit.View,
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
) -> None:
    """Pack ``count`` micro-panels, starting with panel ``first`` of the block.

    ``panels(panel, p, e)`` is the destination; the block starts at element ``e0`` and index ``p0`` of the operand,
    has ``extent`` elements and ``kb`` steps along the panels. ``zero_padded``: surplus lanes hold 0.
    """
    with loop("panel", count, first) as panel:
        base = let("base", e0 + panel * const(width))
        valid = let("valid", extent - panel * const(width))
        job = _Panel(vectors, isa, panels, operand, width, panel, base, valid, p0, kb, zero_padded)
        if not vectorised:
            job.gather()
        else:
            emit.branch(
                operand.stride_e == const(1),
                job.copy,
                lambda: emit.branch(operand.stride_k == const(1), job.transpose, job.gather),
            )


@dataclass(frozen=True)
class _Panel:
    """One micro-panel and the three ways to fill it."""

    vectors: emit.Vectors
    isa: Isa
    panels: emit.View
    operand: Operand
    width: int
    panel: Any
    base: Any
    valid: Any
    p0: Any
    kb: Any
    zero_padded: bool

    def _at(self, e):
        """Index of element e of this panel; past the edge, that of the last real element."""
        return self.base + emit.minimum(const(e) if isinstance(e, int) else e, self.valid - const(1))

    def gather(self, start=None) -> None:
        """Element by element, for operands with no unit stride and for the rest of ``transpose``."""
        start = const(0) if start is None else start
        with loop("p", self.kb - start, start) as p, loop("e", const(self.width)) as e:
            self.panels.set(self._padded(e, self.operand.any.get(self._at(e), self.p0 + p)), self.panel, p, e)

    def _padded(self, e, value, splat=lambda x: x):
        """``value``, or 0 past the edge if that is what surplus lanes must hold."""
        if not self.zero_padded:
            return value
        return emit.tirx.Select(e < self.valid, value, splat(self.vectors.scalar(0.0)))

    def copy(self) -> None:
        """The operand's own dimension has unit stride: rows of the panel are contiguous in the source."""
        partial = self._copy_masked if self.isa.masks else self.gather
        if self.width % self.vectors.lanes and self.isa.masks:
            partial()
        else:
            emit.branch(self.valid >= const(self.width), self._copy_full, partial)

    def _copy_full(self) -> None:
        lanes = self.vectors.lanes
        whole = self.width // lanes * lanes
        with loop("p", self.kb) as p:
            for c in range(0, whole, lanes):
                value = self.operand.unit_e.get_vector(lanes, self.p0 + p, self.base + const(c))
                self.panels.set_vector(value, lanes, self.panel, p, const(c))
            for e in range(whole, self.width):
                value = self.operand.unit_e.get(self.p0 + p, self.base + const(e))
                self.panels.set(value, self.panel, p, const(e))

    def _copy_masked(self) -> None:
        lanes = self.vectors.lanes
        limit = emit.minimum(self.valid, const(self.width))
        chunks = range(0, self.width, lanes)
        masks = [self.vectors.mask(f"inside{c}", limit - const(c)) for c in chunks]
        with loop("p", self.kb) as p:
            for c, mask in zip(chunks, masks):
                source = self.operand.unit_e.address(self.p0 + p, self.base + const(c))
                value = self.vectors.masked_load(source, mask, 0.0 if self.zero_padded else float("nan"))
                # Past the panel's own width this writes the next row, which is packed after this one.
                self.panels.set_vector(value, lanes, self.panel, p, const(c))

    def transpose(self) -> None:
        """k has unit stride: load ``lanes`` steps of each element, transpose in registers, store row by row."""
        lanes = self.vectors.lanes
        groups = range(0, self.width, lanes)
        blocks = let("blocks", emit.tirx.truncdiv(self.kb, const(lanes)))
        with loop("block", blocks) as block:
            p = let("p", block * const(lanes))
            # A store of a group that is wider than what is left of the panel spills into the next row, so rows are
            # stored in ascending order with every group of a row before the next row.
            pending = []
            for g in groups:
                rows = [self._row(g + r, p) for r in range(lanes)]
                columns = self.vectors.transpose(rows)
                if self.width % lanes == 0:
                    self._store_rows(p, [(g, columns)])
                else:
                    pending.append((g, columns))
            if pending:
                self._store_rows(p, pending)
        self.gather(blocks * const(lanes))

    def _row(self, e: int, p):
        e = min(e, self.width - 1)
        value = self.operand.unit_k.get_vector(self.vectors.lanes, self._at(e), self.p0 + p)
        return emit.T.bind(self._padded(const(e), value, self.vectors.splat))

    def _store_rows(self, p, groups) -> None:
        for step in range(self.vectors.lanes):
            for g, columns in groups:
                self.panels.set_vector(columns[step], self.vectors.lanes, self.panel, p + const(step), const(g))

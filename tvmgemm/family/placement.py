"""Where a kernel packs its operands, and for whom. The generator and the outline ask the same."""

from __future__ import annotations

from ..spec import KernelSpec
from .variants import VARIANTS


def packed(spec: KernelSpec) -> dict[str, str]:
    """Operand -> the outer loop in which its blocks are packed, in the order in which that happens."""
    packing = "" if spec.packing == "none" or spec.step in ("basic", "blocked") else spec.packing
    return {operand: loop for operand, loop in VARIANTS[spec.variant].packed if operand.lower() in packing}


def private(spec: KernelSpec, loop: str) -> bool:
    """A buffer that is packed inside the parallel loop belongs to one task; one packed outside is shared."""
    outer = VARIANTS[spec.variant].outer
    return bool(spec.parallel) and outer.index(loop) >= outer.index(spec.parallel)


def collects(spec: KernelSpec) -> bool:
    """Whether the packed C collects all blocks of k: it is packed outside the loop over them."""
    outer, loop = VARIANTS[spec.variant].outer, packed(spec).get("C")
    return loop is not None and outer.index(loop) < outer.index("pc")

"""Which specs describe a kernel, and which operands a kernel can take: the same answers for planner and generator."""

from __future__ import annotations

from ..problem import DTYPES, Problem
from ..spec import STEPS, SWITCHES, KernelSpec
from .tiles import check_tile
from .variants import VARIANTS


def check(spec: KernelSpec) -> None:
    """Raise ValueError, saying what would be accepted, for a spec that describes no kernel."""
    variant = VARIANTS[spec.variant]
    check_tile(*spec.tile_sizes, spec.isa, DTYPES[spec.dtype].itemsize, variant.resident)
    packings = variant.packings if spec.step not in ("packed", "microkernel") else (variant.packable,)
    if spec.packing not in packings:
        raise ValueError(f"packing {spec.packing!r}: {spec.variant} takes {', '.join(packings)}")
    if spec.parallel and spec.parallel not in variant.parallel_loops:
        raise ValueError(
            f"parallel loop {spec.parallel!r}: {spec.variant} can share out {', '.join(variant.parallel_loops)}"
        )
    # The paper builds its steps for resident C; packed loops without a micro-kernel exist for those variants only.
    steps = STEPS if variant.resident == "C" else ("basic", "blocked", "optimised")
    if spec.step not in steps:
        raise ValueError(f"step {spec.step!r}: {spec.variant} has {', '.join(steps)}")
    if unknown := set(spec.without) - set(SWITCHES):
        raise ValueError(f"without {', '.join(sorted(unknown))}: the switches are {', '.join(SWITCHES)}")


def unsuitable(spec: KernelSpec, problem: Problem) -> str | None:
    """Why a kernel of ``spec`` cannot take operands with the problem's layouts, or None if it can."""
    if spec.step in ("basic", "blocked"):
        return None
    variant = VARIANTS[spec.variant]
    if variant.resident == "C" and "b" not in spec.packing and problem.b_layout != "row":
        return f"packing {spec.packing!r} reads B in place, which needs unit column stride, and B is {problem.b_layout}"
    if "c" in variant.packable and "c" not in spec.packing and problem.c_layout != "row":
        return f"packing {spec.packing!r} updates C in place, which needs unit column stride, and C is {problem.c_layout}"
    return None

"""Which specs describe a kernel, and which operands a kernel can take: the same answers for planner and generator."""

from __future__ import annotations

from ..problem import Problem
from ..spec import STEPS, SWITCHES, KernelSpec
from .arithmetic import arithmetic_of, rounds_once
from .members import shape_member
from .tiles import UNBLOCKED_TILES, check_shape, check_tile
from .variants import VARIANTS

#: The dtypes that every variant and every step of the paper exists for.
STUDIED = ("float32", "float64")


def check(spec: KernelSpec) -> None:
    """Raise ValueError, saying what would be accepted, for a spec that describes no kernel."""
    variant = VARIANTS[spec.variant]
    if spec.shape is not None:
        check_shape(spec.shape, spec.dtype)
        if spec != shape_member(spec.dtype, spec.isa, spec.shape):
            raise ValueError(f"shape {spec.shape}: specialised kernels compute C = A.B and have no other choices")
        return
    how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
    if not (spec.dtype in STUDIED or (variant.resident == "C" and spec.step == STEPS[-1])):
        raise ValueError(
            f"{spec.variant}, step {spec.step!r}, {spec.dtype}: dtypes other than {', '.join(STUDIED)} have the last step of "
            f"{' and '.join(v.name for v in VARIANTS.values() if v.resident == 'C')}"
        )
    if spec.op == "gemm" and spec.dtype == "bool":
        raise ValueError("gemm of bool: its products are not numbers that alpha and beta could scale")
    check_tile(*spec.tile_sizes, spec.isa, how, variant.resident)
    packings = variant.packings if spec.step not in ("packed", "microkernel") else (variant.packable,)
    if spec.packing not in packings:
        raise ValueError(f"packing {spec.packing!r}: {spec.variant} takes {', '.join(packings)}")
    if (how.group > 1 or how.halves) and spec.packing != "ab":
        what = "parts of an element" if how.halves else f"{how.group} elements of k"
        raise ValueError(
            f"packing {spec.packing!r}: {how.name} takes {what} at a time, which are put together while both operands are packed"
        )
    if spec.parallel:
        _check_parallel(spec)
    # The paper builds its steps for resident C; packed loops without a micro-kernel exist for those variants only.
    steps = STEPS if variant.resident == "C" else ("basic", "blocked", "optimised")
    if spec.step not in steps:
        raise ValueError(f"step {spec.step!r}: {spec.variant} has {', '.join(steps)}")
    if not spec.blocked:
        _check_unblocked(spec)
    if unknown := set(spec.without) - set(SWITCHES):
        raise ValueError(f"without {', '.join(sorted(unknown))}: the switches are {', '.join(SWITCHES)}")
    if spec.symmetric:
        _check_symmetric(spec)
    if "register-loads" in spec.without and variant.resident != "C":
        raise ValueError(f"without register-loads: {spec.variant} is the loads to registers, it has a tile of {variant.resident} there")


def _check_unblocked(spec: KernelSpec) -> None:
    """Raise ValueError if the kernel cannot do without loops over cache blocks."""
    if (spec.isa, spec.dtype) not in UNBLOCKED_TILES:
        raise ValueError(f"blocked=False: no kernels without loops over cache blocks for {spec.dtype} on {spec.isa}")
    packings = ("none", "b") if spec.dtype in STUDIED else ("none",)
    takes = VARIANTS[spec.variant].resident == "C" and spec.packing in packings
    if not takes or spec.step != STEPS[-1] or spec.without:
        raise ValueError(
            f"blocked=False: without loops over cache blocks there are kernels with C in registers that pack {' or '.join(packings)}, "
            f"not {spec.variant} with packing {spec.packing!r}, step {spec.step!r}, without {spec.without}"
        )


def _check_symmetric(spec: KernelSpec) -> None:
    """Raise ValueError if the kernel cannot compute half of a symmetric product."""
    takes = {"variant": "B3A2C0", "op": "matmul", "step": STEPS[-1]}
    wrong = [] if spec.dtype in (*STUDIED, "complex64", "complex128") else [f"dtype {spec.dtype}"]
    wrong += [f"{name} {getattr(spec, name)}" for name, value in takes.items() if getattr(spec, name) != value]
    wrong += ["unblocked ones"] if not spec.blocked else []
    wrong += [f"parallel loop {spec.parallel}"] if spec.parallel not in ("", "ic") else []
    wrong += [f"micro-kernel {spec.tile}, whose columns are no multiple of its rows"] if spec.nr % (spec.mr or 1) else []
    if wrong:
        raise ValueError(f"symmetric: half of C is computed by optimised kernels of B3A2C0 for matmul, not by {', '.join(wrong)}")


def _check_parallel(spec: KernelSpec) -> None:
    """Raise ValueError if tasks cannot share out the loop that the spec names."""
    variant, asked = VARIANTS[spec.variant], f"parallel loop {spec.parallel!r}"
    loops = variant.parallel_loops(spec.packing)
    if spec.parallel not in loops:
        why = ""
        if spec.parallel in variant.outer:
            why = f" with packing {spec.packing!r}, which adds to C in one chain through all of k"
        raise ValueError(f"{asked}: {spec.variant} can share out {', '.join(loops)}{why}")
    if not spec.blocked and spec.parallel == "pc":
        raise ValueError(f"{asked}: without loops over cache blocks tasks can share out ic, jc")
    if spec.parallel == "pc" and rounds_once(spec.dtype):
        raise ValueError(f"{asked}: sums of {spec.dtype} have to be complete before they are rounded to C")
    if spec.step == "basic":
        raise ValueError(f"{asked}: step 'basic' has no loops over blocks")
    if spec.parallel == "pc" and spec.step != STEPS[-1]:
        raise ValueError(f"{asked}: step {spec.step!r} adds each product to C, it has no sums of one block of k")


def unsuitable(spec: KernelSpec, problem: Problem) -> str | None:
    """Why a kernel of ``spec`` cannot take operands with the problem's layouts, or None if it can."""
    if spec.step in ("basic", "blocked"):
        return None
    variant = VARIANTS[spec.variant]
    if spec.shape is not None and spec.shape != (problem.m, problem.n, problem.k):
        return f"the kernel is for {'x'.join(map(str, spec.shape))} alone"
    if variant.resident == "C" and "b" not in spec.packing and problem.b_layout != "row":
        return f"packing {spec.packing!r} reads B in place, which needs unit column stride, and B is {problem.b_layout}"
    if not spec.blocked and problem.c_layout != "row":
        return f"a kernel without loops over cache blocks needs a C with unit column stride, and C is {problem.c_layout}"
    if "c" in variant.packable and "c" not in spec.packing and problem.c_layout != "row":
        return f"packing {spec.packing!r} updates C in place, which needs unit column stride, and C is {problem.c_layout}"
    return None

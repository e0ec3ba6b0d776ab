"""``explain(a, b)``: what a call would do, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import dispatch, kernels
from .family.arithmetic import arithmetic_of
from .family.tiles import KERNEL_DTYPES
from .frontend import matmul
from .planner import Plan
from .probe import problem_of
from .problem import DTYPES, Problem


@dataclass(frozen=True)
class Explanation:
    """What ``tvmgemm.matmul(a, b)`` does with these operands under the options in force.

    ``served``: one of our kernels computes; else NumPy's own loop does, and the fields about the kernel are None.
    ``reason`` says why, in words. ``mc``, ``nc``, ``kc`` are block sizes in elements, before they are clipped to the
    problem. ``threads`` is the number of tasks that the parallel loop is shared out to. ``source``: ``"memory"`` if
    the kernel was loaded already, ``"disk"`` or ``"built"`` if it came from the store or a build for this call.
    ``inner_calls``: how often NumPy calls the inner loop for the whole product (stacks may need several). ``tuned``: a
    measurement of ``python -m tvmgemm tune`` decided. ``shape``: the m, n, k that the kernel is specialised for.
    ``blocked``: it has loops over cache blocks (else only those over micro-tiles, or none).
    ``arithmetic``: how products are summed, a name of ``family.arithmetic.ARITHMETICS``; None of a specialised kernel.
    """

    served: bool
    reason: str
    dtype: str
    problem: Problem | None = None
    inner_calls: int = 0
    variant: str | None = None
    micro_kernel: str | None = None
    isa: str | None = None
    packing: str | None = None
    parallel_loop: str | None = None
    threads: int = 1
    mc: int | None = None
    nc: int | None = None
    kc: int | None = None
    kernel: str | None = None
    source: str | None = None
    path: str | None = None
    tuned: bool = False
    shape: tuple[int, int, int] | None = None
    arithmetic: str | None = None
    blocked: bool | None = None

    @property
    def _what(self) -> str | None:
        return f"specialised for {'x'.join(map(str, self.shape))}" if self.shape else self.variant

    def __str__(self) -> str:
        who = f"tvmgemm, {self._what}" if self.served else "NumPy's own loop"
        lines: list[tuple[str, str | None]] = [("served by", who), ("because", self.reason)]
        p = self.problem
        if p is not None:
            stack = f"{p.batch} x " if p.batch != 1 else ""
            swapped = ", as C^T = B^T.A^T" if p.transposed else ""
            lines.append(("problem", f"{self.dtype} {stack}{p.m}x{p.k} ({p.a_layout}) . {p.k}x{p.n} ({p.b_layout}){swapped}"))
        if self.served:
            parallel = f"{self.parallel_loop}, {self.threads} tasks" if self.parallel_loop else "none, 1 thread"
            lines += [
                ("micro-kernel", f"{self.micro_kernel} on {self.isa}" + (f", {self.arithmetic}" if self.arithmetic else "")),
                ("packing", self.packing),
                ("block sizes", f"mc={self.mc} nc={self.nc} kc={self.kc}"),
                ("parallel loop", parallel),
                ("kernel", f"{self.kernel} (from {self.source})"),
            ]
        return "\n".join(f"{name:>13}: {text}" for name, text in lines)


def explain(a: ArrayLike, b: ArrayLike, dtype: DTypeLike | None = None) -> Explanation:
    """What ``tvmgemm.matmul(a, b, dtype=dtype)`` (and, patched, ``a @ b``) does, without computing the product.

    Takes what matmul takes and raises what it raises. A kernel that the call needs is fetched or built, as by the call.

    Examples
    --------
    >>> import numpy as np, tvmgemm
    >>> a = np.ones((40, 40), np.float32)
    >>> told = tvmgemm.explain(a, a)  # print it to see everything
    >>> told.served, told.variant, told.dtype
    (True, 'B3A2C0', 'float32')
    """
    a, b = np.asanyarray(a), np.asanyarray(b)
    output = None if dtype is None else np.dtype(dtype)
    elements = matmul.resolve_dtypes((a.dtype, b.dtype, None), signature=(None, None, output))
    name = next((d.name for d in DTYPES.values() if (d.a, d.b, d.c) == tuple(x.name for x in elements)), None)
    if name is None:
        kind = elements[2].name
        return Explanation(False, f"no kernels for {kind}; served: {', '.join(KERNEL_DTYPES)}", kind)
    problem, calls = problem_of(partial(matmul, a, b, dtype=dtype))
    if problem is None:
        why = "strides that are not multiples of the item size" if calls else "the stack is empty: nothing is computed"
        return Explanation(False, why, name, inner_calls=calls)
    return _decided(problem, calls)


def _decided(problem: Problem, calls: int) -> Explanation:
    loaded = set(kernels.loaded)
    told = _explanation(*dispatch.decide(problem), problem, calls, loaded)
    output = DTYPES[problem.dtype].c.replace("bfloat16", "float32")
    if told.served or output == problem.dtype:
        return told
    # The native loop converts A and B to matrices without gaps, and goes on in the loop of a dtype that NumPy has.
    layout = "col" if problem.transposed else "row"
    converted = replace(problem, dtype=output, batch=1, a_layout=layout, b_layout=layout, symmetric=False)
    then = _decided(converted, calls)
    return replace(then, reason=f"{told.reason}: A and B are converted to {output}; {then.reason}")


def _explanation(decided: Plan, kernel, problem: Problem, calls: int, loaded: set) -> Explanation:
    spec, blocks = decided.spec, decided.blocks
    if kernel is None or spec is None or blocks is None:
        missing = kernels.why_missing(spec) if spec is not None else None
        reason = f"{decided.reason}; but {missing}" if missing else decided.reason
        return Explanation(False, reason, problem.dtype, problem, calls, tuned=decided.tuned)
    return Explanation(
        True,
        decided.reason,
        problem.dtype,
        problem,
        calls,
        variant=spec.variant,
        micro_kernel=spec.tile,
        isa=spec.isa,
        packing=spec.packing,
        parallel_loop=decided.parallel_loop,
        threads=decided.tasks,
        mc=blocks.mc,
        nc=blocks.nc,
        kc=blocks.kc,
        kernel=spec.name,
        shape=spec.shape,
        arithmetic=None if spec.shape else arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic).name,
        blocked=spec.blocked,
        source="memory" if spec in loaded else kernel.origin,
        path=kernel.path,
        tuned=decided.tuned,
    )

"""From a call to its problem: a dry run of the call, whose inner loops say what they were given and compute nothing.

Promotion, broadcasting, copies and what the inner loop makes of the strides are then what they are in the call. Elements
are not looked at: operands of ``np.empty`` will do.
"""

from __future__ import annotations

from collections.abc import Callable

from ._native import ffi, lib
from .problem import Problem


def problem_of(call: Callable[[], object]) -> tuple[Problem | None, int]:
    """The problem of the first inner loop that ``call``, of ``matmul`` or ``gemm``, runs in this thread, and the number of
    inner loops. None where nothing is computed (of no inner loop), or if no kernel can take the strides.

    What the call raises is raised.
    """
    first = ffi.new("tg_problem *")
    lib.tg_probe_begin()
    try:
        call()
    finally:
        calls = lib.tg_probe_end(first)
    return (Problem.from_native(first) if calls and first.dtype >= 0 else None), calls

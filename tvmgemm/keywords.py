"""What ``tvmgemm.options`` accepts, for type checkers: nothing imports this when a program runs."""

from __future__ import annotations

import os
from typing import SupportsIndex, TypedDict


class Keywords(TypedDict, total=False):
    """None puts a keyword back to its environment variable, or else to its default."""

    variant: str | None
    max_isa: str | None
    num_threads: SupportsIndex | None
    jit: str | None
    specialise: str | None
    cache_dir: str | bytes | os.PathLike[str] | os.PathLike[bytes] | None
    microkernel: str | None
    packing: str | None
    parallel_loop: str | None
    arithmetic: str | None
    tuned: str | None
    log: str | None

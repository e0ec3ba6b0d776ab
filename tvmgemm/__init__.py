"""NumPy's ``a @ b``, served by matrix-multiplication kernels that Apache TVM generates for this machine.

    >>> import numpy as np, tvmgemm
    >>> a, b = np.ones((2, 3)), np.ones((3, 2))
    >>> tvmgemm.matmul(a, b)          # np.matmul's signature, keywords and results
    array([[3., 3.],
           [3., 3.]])
    >>> with tvmgemm.patched():       # a @ b in anybody's code; patch_numpy() does it for good
    ...     c = a @ b

Kernels are built when first needed and kept on disk; importing this package neither builds nor patches anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .frontend import gemm, matmul
from .patching import is_patched, patch_numpy, patched, unpatch_numpy
from .settings import options

__version__ = "0.1.0"

#: Names that only people ask for: their modules are imported then.
_LAZY = {"explain": ".explanation", "stats": ".statistics", "reset_stats": ".statistics", "release_scratch": ".statistics"}

__all__ = [
    "explain",
    "gemm",
    "is_patched",
    "matmul",
    "options",
    "patch_numpy",
    "patched",
    "release_scratch",
    "reset_stats",
    "stats",
    "unpatch_numpy",
]

if TYPE_CHECKING:
    from .explanation import explain
    from .statistics import release_scratch, reset_stats, stats
else:

    def __getattr__(name: str) -> object:
        if name in _LAZY:
            from importlib import import_module

            from .forks import importing

            with importing:
                value = getattr(import_module(_LAZY[name], __name__), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Serving ``a @ b`` in anybody's code: our inner loops inside ``np.matmul`` itself, for as long as wanted.

NumPy is patched while ``patch_numpy()`` holds (until ``unpatch_numpy()``) or at least one ``with patched():``
is open, in any thread: the loops belong to the process, not to a thread. Importing tvmgemm never patches.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tvmgemm._native import lib
from tvmgemm.frontend import numpys_matmul

_lock = threading.Lock()
_explicit = False  # patch_numpy() was called
_open = 0  # number of `with patched():` blocks that are being executed

# A fork while another thread holds the lock must not leave the child with it.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def patch_numpy() -> None:
    """Let ``np.matmul`` and ``@`` run tvmgemm's kernels, in the whole process.

    Results keep NumPy's dtypes, shapes and errors. ``np.dot``, ``inner`` and ``tensordot`` are not affected.
    Calling it again changes nothing.

    Raises
    ------
    RuntimeError
        If np.matmul's loops are not NumPy's own: another package has replaced them.
    """
    _change(explicit=True)


def unpatch_numpy() -> None:
    """Put NumPy's own loops back. Without an earlier ``patch_numpy()`` this does nothing.

    Inside a ``with patched():``, NumPy stays patched until the last such block ends.
    """
    _change(explicit=False)


def is_patched() -> bool:
    """Whether ``np.matmul`` and ``@`` run tvmgemm's kernels now."""
    return _explicit or _open > 0


@contextmanager
def patched() -> Iterator[None]:
    """``with patched():`` patches NumPy for the block; blocks may nest and may overlap between threads.

    Also a decorator: ``@patched()``.

    Examples
    --------
    >>> import tvmgemm
    >>> with tvmgemm.patched():
    ...     tvmgemm.is_patched()
    True
    """
    _change(blocks=+1)
    try:
        yield
    finally:
        _change(blocks=-1)


def _change(explicit: bool | None = None, blocks: int = 0) -> None:
    global _explicit, _open
    with _lock:
        before = _explicit, _open
        _explicit, _open = _explicit if explicit is None else explicit, _open + blocks
        now = is_patched()
        if now != (before[0] or before[1] > 0):
            try:
                _replace_loops(now)
            except RuntimeError:
                if now:  # if not: another package took the loops over, they are no longer ours to put back
                    _explicit, _open = before
                raise


def _replace_loops(ours: bool) -> None:
    if lib.tg_patch(id(numpys_matmul), ours) != 0:
        raise RuntimeError(
            f"np.matmul's loops are neither NumPy's nor tvmgemm's: another package has replaced them, and "
            f"they stay as they are. Undo that package's patch before "
            f"{'patching' if ours else 'unpatching'} with tvmgemm"
        )

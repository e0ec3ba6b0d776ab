"""The lock of a key, which saves building a kernel twice. Nothing else depends on it: where files can't be locked, everybody
builds."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable

from .. import log


class KernelLock:
    """A lock of one key, or the finding that another process has it (``held`` False). Use it in ``with``.

    It belongs to an open file, so that it ends with the process that holds it, however that ends.
    """

    def __init__(self, descriptor: int | None, held: bool) -> None:
        self._descriptor = descriptor
        self.held = held

    def release(self) -> None:
        """Give the lock back; more than once does no harm."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if self.held:  # closing is not enough: a forked child may have the open file, and so the lock
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def __enter__(self) -> KernelLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def taken(path: str, timeout: float, until: Callable[[], object] | None) -> KernelLock:
    """Take the lock that is the file at ``path``, waiting up to ``timeout`` seconds or until ``until()`` is true."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return unlocked(error)
    deadline, pause = time.monotonic() + timeout, 0.005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(descriptor)
            return KernelLock(descriptor, held=True)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR):
                return unlocked(error, descriptor)
        if (until is not None and until()) or time.monotonic() >= deadline:
            return KernelLock(descriptor, held=False)
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(2 * pause, 0.1)


def unlocked(error: OSError, descriptor: int | None = None) -> KernelLock:
    """What goes on without a lock, because of ``error``, as if it had one."""
    log.debug("going on without a lock: %s", error)
    return KernelLock(descriptor, held=True)

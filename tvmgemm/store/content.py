"""Single files of the store: read only if nobody else can have written them, and written whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import time

from .. import log

#: How the names of files begin that are being written, and of those that were set aside.
TEMPORARY, BAD = ".tmp-", ".bad-"

#: No kernel is near this size; a larger file is not one of ours and is not read.
MAX_BYTES = 64 << 20

_TOUCH_AFTER = 3600.0  # seconds; recency is kept this coarse so that a hit seldom writes


def rename_as_bad(path: str) -> None:
    """Leave the file for somebody to look at, under a name that nobody uses, for a week. Never raises."""
    folder, name = os.path.split(path)
    try:
        os.replace(path, os.path.join(folder, BAD + name))
    except OSError as error:
        log.debug("cannot set %s aside: %s", path, error)


def write_whole(path: str, content: bytes) -> None:
    """Put ``content`` at ``path`` (mode 600): readers see the old file or the new one, never a part. OSError."""
    temporary = temporary_path(os.path.dirname(path))
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        try_removing(temporary)
        raise


def temporary_path(folder: str) -> str:
    """A new path in ``folder`` to write an entry to before ``Store.put``. Nothing is created."""
    return os.path.join(folder, f"{TEMPORARY}{os.getpid()}-{os.urandom(8).hex()}")


class Unsound(Exception):
    """A file that this store must not use; the text says why."""


def sound_content(path: str, limit: int = MAX_BYTES) -> bytes:
    """The content of the regular file at ``path`` that only we (or root) can write, and mark it as used.

    Raises Unsound, or OSError when it cannot be read.
    """
    try:  # without O_NONBLOCK, opening a pipe that somebody put there would wait for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unsound("it is a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unsound("it is not a regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise Unsound(f"it belongs to user {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unsound(f"others may write it (mode {stat.S_IMODE(status.st_mode):o})")
        if not 0 < status.st_size <= limit:
            raise Unsound(f"it has {status.st_size} bytes")
        content = read(descriptor)
        if time.time() - status.st_mtime > _TOUCH_AFTER:
            try:
                os.utime(descriptor)
            except OSError:
                pass  # a read-only folder: nothing is removed there either
    finally:
        os.close(descriptor)
    return content


def read(descriptor: int) -> bytes:
    """All that the open file holds."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    chunks = []
    while chunk := os.read(descriptor, 1 << 20):
        chunks.append(chunk)
    return b"".join(chunks)


def try_removing(path: str) -> bool:
    """Remove the file; whether that could be done."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True

"""The store: find, publish, verify, set aside, trim the files that are its entries.

One file is one entry, and the digest of its content is part of its name. So a rename publishes an entry
whole, no index can disagree with the files, and a reader needs no lock. Nothing that happens to the files
raises out of ``find``: an entry that vanished or is not what its name says is a miss.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import log
from ..spec import KernelSpec
from .content import BAD, TEMPORARY, Unsound, read, rename_as_bad, sound_content, try_removing
from .folder import distrust, made, private_folder, report_unusable, try_writing
from .key import DIGITS, KernelKey, digest

if TYPE_CHECKING:
    from .lock import KernelLock

#: The least recently used entries beyond this many bytes are removed when one is written.
DEFAULT_LIMIT = 256 << 20

#: How the names of locks begin.
LOCK = ".lock-"

_ENTRY = re.compile(rf"(?P<name>.+)-(?P<key>[0-9a-f]{{{DIGITS}}})-(?P<content>[0-9a-f]{{{DIGITS}}})\.so")

#: Seconds until what was left behind is removed.
_LIFETIME = {TEMPORARY: 3600.0, LOCK: 86400.0, BAD: 7 * 86400.0}
_VANISHED = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR)  # says nothing about the file
_MODE = 0o700


@dataclass(frozen=True)
class Entry:
    """A file of the store: ``name`` of the KernelSpec, digests of key and content, size, last use
    (seconds)."""

    path: str
    name: str
    key: str
    content: str
    bytes: int
    used: float


class Store:
    """The entries of ``folder``, and of this process's private folder when ``folder`` cannot be written.

    ``folder`` None: only the private folder. Use ``open_store``, which checks that ``folder`` can be trusted.
    """

    def __init__(self, folder: str | None, limit: int = DEFAULT_LIMIT) -> None:
        self.folder = folder
        self.limit = limit
        self._private: str | None = None
        self._writable = False

    @property
    def folders(self) -> tuple[str, ...]:
        """Where entries are looked for, in order."""
        return tuple(folder for folder in (self.folder, self._private) if folder is not None)

    def build_folder(self) -> str:
        """The folder to build into: ``folder`` if a file can really be written there, else a private one.

        The failure is reported once, and only here: a folder that holds all that is needed may well be
        read-only. Raises OSError when no private folder can be made either.
        """
        if self.folder is not None and not (self._writable and os.path.isdir(self.folder)):
            problem = _refusal(self.folder)
            self._writable = problem is None
            if problem is not None:
                report_unusable(self.folder, problem)
        if self.folder is not None and self._writable:
            return self.folder
        self._private = private_folder()
        return self._private

    def find(self, spec: KernelSpec, key: KernelKey) -> str | None:
        """The path of a verified library for ``spec`` and ``key``, or None. Never raises."""
        start = f"{spec.name}-{key.digest}-"
        for folder in self.folders:
            try:
                names = os.listdir(folder)
            except OSError as error:
                log.debug("cannot list %s: %s", folder, error)
                continue
            for name in sorted(names):
                if name.startswith(start) and self.verified(path := os.path.join(folder, name)):
                    return path
        if log.enabled():
            log.debug("no entry for %s with the key\n%s", spec.name, key.explain())
        return None

    def verified(self, path: str) -> bool:
        """Whether ``path`` is an entry of this store, ours, whole and unchanged. Nothing is raised.

        A bad entry is set aside. A path elsewhere, or of another name, is not an entry and is not touched.
        """
        if not self._has(path):
            return False
        try:
            if path.endswith(f"-{digest(sound_content(path))}.so"):
                return True
            problem = "its content is not what its name says"
        except Unsound as error:
            problem = str(error)
        except OSError as error:
            if error.errno in _VANISHED + _PASSING:
                return False
            problem = f"it cannot be read ({error.strerror})"
        self.set_aside(path, problem)
        return False

    def set_aside(self, path: str, problem: str) -> None:
        """Take the entry at ``path`` out of use because of ``problem``, and log that: it will be built again.

        Also for one that is whole but cannot be loaded. Its file is renamed, for somebody to look at. Nothing
        is raised, and what is not an entry of this store is not touched.
        """
        if not self._has(path):
            return
        log.warn_once(path, f"the kernel {path} is set aside: {problem}; it will be built again")
        rename_as_bad(path)

    def put(self, spec: KernelSpec, key: KernelKey, temporary: str) -> str:
        """Publish the file at ``temporary`` (see ``temporary_path``) in its folder; returns the entry's path.

        Readers see the whole entry or none. OSError when it cannot be written, ValueError when it is empty.
        """
        descriptor = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            content = read(descriptor)
            os.fchmod(descriptor, _MODE)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not content:
            raise ValueError(f"{temporary} is empty")
        folder = os.path.dirname(temporary)
        path = os.path.join(folder, f"{spec.name}-{key.digest}-{digest(content)}.so")
        os.replace(temporary, path)
        self._trim(folder, keep=path)
        return path

    def lock(
        self, key: KernelKey, timeout: float = 0.0, until: Callable[[], object] | None = None
    ) -> KernelLock:
        """Take the lock of ``key``, waiting up to ``timeout`` seconds or until ``until()`` is true.

        Where files cannot be locked the result says ``held``: everybody builds.
        """
        from .lock import taken, unlocked  # only who builds needs it

        try:
            path = os.path.join(self.build_folder(), LOCK + key.digest)
        except OSError as error:
            return unlocked(error)
        return taken(path, timeout, until)

    def entries(self) -> list[Entry]:
        """All entries, unverified, in the order of their names."""
        return [entry for folder in self.folders for entry in _entries(folder)]

    def names(self, part: str) -> list[tuple[str, str]]:
        """Kernel names and digests of keys of the entries whose kernel's name contains ``part``, unverified."""
        listed = [name for folder in self.folders for name in _listed(folder) if part in name]
        return [(found["name"], found["key"]) for found in map(_ENTRY.fullmatch, listed) if found]

    def verify(self) -> list[str]:
        """Check every entry; set the bad ones aside and return their paths."""
        return [entry.path for entry in self.entries() if not self.verified(entry.path)]

    def clear(self) -> int:
        """Remove every file that the store made, and nothing else; returns how many entries went.

        A program that has loaded a kernel keeps it: only its name goes.
        """
        removed = 0
        for folder in self.folders:
            for name in _listed(folder):
                is_entry = _ENTRY.fullmatch(name) is not None
                if is_entry or name.startswith((TEMPORARY, LOCK, BAD)):
                    removed += try_removing(os.path.join(folder, name)) and is_entry
        return removed

    def _has(self, path: str) -> bool:
        """Whether ``path`` is a place and a name of this store's."""
        folder, name = os.path.split(path)
        return folder in self.folders and _ENTRY.fullmatch(name) is not None

    def _trim(self, folder: str, keep: str) -> None:
        """Remove what was left behind long ago, then the least recently used entries beyond ``limit``
        bytes."""
        now = time.time()
        for name in _listed(folder):
            lifetime = next((seconds for start, seconds in _LIFETIME.items() if name.startswith(start)), None)
            if lifetime is not None:
                path = os.path.join(folder, name)
                try:
                    if now - os.lstat(path).st_mtime > lifetime:
                        try_removing(path)
                except OSError:
                    pass  # another process was faster
        entries = sorted(_entries(folder), key=lambda entry: entry.used)
        excess = sum(entry.bytes for entry in entries) - self.limit
        for entry in entries:
            if excess > 0 and entry.path != keep and try_removing(entry.path):
                log.info("removed %s: the store is limited to %d bytes", entry.path, self.limit)
                excess -= entry.bytes


def _refusal(folder: str) -> str | None:
    """Why nothing can be built into ``folder``, which is made again if it has been removed meanwhile; or None."""
    problem = made(folder) or distrust(folder)
    if problem is None:
        try:
            try_writing(folder)
        except OSError as error:
            problem = f"it cannot be written ({error.strerror})"
    return problem


def _listed(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _entries(folder: str) -> Iterator[Entry]:
    for name in _listed(folder):
        parsed = _ENTRY.fullmatch(name)
        if parsed is None:
            continue
        path = os.path.join(folder, name)
        try:
            status = os.lstat(path)
        except OSError:
            continue  # another process removed it
        yield Entry(path, parsed["name"], parsed["key"], parsed["content"], status.st_size, status.st_mtime)

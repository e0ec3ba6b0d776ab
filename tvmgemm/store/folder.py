"""Which folder the store uses, and whether it can be trusted.

Whoever can write the folder can run code in every process that loads from it. So the folder must be a real
folder of ours (or root's) that nobody else can write; any other is reported once and not read. A shared
temporary folder is never used: a process without a usable folder makes one of its own and removes it at its
end.
"""

from __future__ import annotations

import atexit
import os
import stat
import sys
from typing import TYPE_CHECKING

from .. import log

if TYPE_CHECKING:
    from .files import Store

_private: str | None = None


def open_store(cache_dir: str | None = None) -> Store:
    """The store in ``cache_dir``, else in the folder of the settings, else in the user's cache folder.

    The folder is made (mode 700) when it does not exist. One that cannot be made or trusted is reported once,
    and kernels are built into a private folder of this process. Never raises.
    """
    from ..settings import current
    from .files import Store

    folder = cache_dir or current().cache_dir or user_folder()
    problem = made(folder) or distrust(folder)
    if problem is not None:
        report_unusable(folder, problem)
        return Store(None)
    return Store(folder)


def user_folder() -> str:
    """The user's cache folder for this package, as platformdirs names it."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "").strip()
    if sys.platform == "linux" and (not cache_home or os.path.isabs(cache_home)):
        # what platformdirs answers here, without the 15 ms that importing it takes from a program's first
        # product
        return os.path.join(cache_home or os.path.expanduser("~/.cache"), "tvmgemm")
    import platformdirs

    return platformdirs.user_cache_dir("tvmgemm", appauthor=False)


def distrust(folder: str) -> str | None:
    """Why libraries must not be loaded from ``folder``, or None. Never raises."""
    try:
        status = os.lstat(folder)
        if stat.S_ISLNK(status.st_mode):
            return "it is a symbolic link"
        if not stat.S_ISDIR(status.st_mode):
            return "it is not a folder"
        if status.st_uid not in (os.geteuid(), 0):
            return f"it belongs to user {status.st_uid}, not to you"
        if status.st_mode & stat.S_IWOTH:
            return "everybody may write it"
        if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
            return f"its group {status.st_gid} may write it"
        if _forbids_loading(folder):
            return "its file system is mounted noexec, so no library can be loaded from it"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def try_writing(folder: str) -> None:
    """Write a file in ``folder`` and remove it; OSError tells why that does not work. Permissions alone tell
    little: file systems are mounted read-only, full, or over quota."""
    path = os.path.join(folder, f".tmp-{os.getpid()}-{os.urandom(8).hex()}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, b"tvmgemm")
    finally:
        os.close(descriptor)
        os.unlink(path)


def private_folder() -> str:
    """This process's own folder (mode 700), made at the first call and removed when the process ends.

    Raises OSError when none can be made from which libraries can be loaded.
    """
    global _private
    if _private is not None and os.path.isdir(_private):
        return _private  # a forked child goes on with its parent's until the parent removes it
    tried = []
    for place in dict.fromkeys([os.environ.get("TMPDIR") or "/tmp", "/tmp", "/var/tmp", "/dev/shm"]):
        folder = os.path.join(os.path.abspath(place), f"tvmgemm-{os.urandom(8).hex()}")
        try:
            os.mkdir(folder, 0o700)  # as tempfile does it, but that imports random: see build/parent.py
            loadable = not _forbids_loading(folder)
        except OSError as error:
            tried.append(f"{place} ({error.strerror})")
            continue
        atexit.register(_remove, folder, os.getpid())
        if loadable:
            _private = folder
            return folder
        tried.append(f"{place} (mounted noexec)")
    raise OSError(
        f"no private folder can be made for kernels; tried {', '.join(tried)}."
        " Set TVMGEMM_CACHE_DIR or TMPDIR"
    )


def report_unusable(folder: str, problem: str) -> None:
    """Say once per process that ``folder`` is not used, why, and what to do."""
    log.warn_once(
        f"store {folder}",
        f"the kernel cache folder {folder!r} is not used: {problem}. Kernels are built"
        " into a private folder, for this process only. Set TVMGEMM_CACHE_DIR to a folder of yours that"
        " nobody else can write.",
    )


def made(folder: str) -> str | None:
    """Make the folder (mode 700) if it does not exist; None, or why it cannot be one."""
    if not os.path.isabs(folder):
        return "it is not an absolute path (is HOME set?)"
    try:
        os.makedirs(folder, mode=0o700)
    except FileExistsError:
        pass
    except OSError as error:
        if not os.path.isdir(folder):  # read-only file systems refuse existing folders with other errors
            return f"it cannot be made ({error.strerror})"
    return None


def _is_own_group(group: int) -> bool:
    """Whether ``group`` is the user's private group (many systems give each user one, and the umask 002 with
    it)."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return members.gr_name == user and set(members.gr_mem) <= {user}


def _forbids_loading(folder: str) -> bool:
    return bool(os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0))


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which the parent may outlive
        import shutil

        shutil.rmtree(folder, ignore_errors=True)

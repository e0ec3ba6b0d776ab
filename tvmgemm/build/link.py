"""From an object file to a shared library, with whatever linker the system has."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

#: Programs tried after $CC, in order. A compiler driver knows its linker; a bare linker is enough, because
#: kernels need no library.
DRIVERS = ("cc", "gcc", "clang")
LINKERS = ("ld", "ld.lld")

NO_LINKER = (
    f"no linker was found: neither $CC nor {', '.join(DRIVERS + LINKERS)} is on PATH."
    " Install a C compiler or binutils, or set CC"
)

_TIMEOUT = 60.0  # seconds; linking a kernel takes 10 ms
_TAIL_LINES = 5


class LinkError(Exception):
    """Linking failed; the text names the command and quotes the linker's last lines."""


@dataclass(frozen=True)
class Linker:
    """``command``: a program's full path and its first arguments. ``driver``: it is a compiler driver."""

    command: tuple[str, ...]
    driver: bool


def find_linker(environ: Mapping[str, str] = os.environ) -> Linker | None:
    """The first program of $CC, ``DRIVERS`` and ``LINKERS`` that is on the PATH of ``environ``; None if none
    is.

    $CC may carry arguments (``ccache gcc -m64``). One that does not exist is passed over.
    """
    path = environ.get("PATH", os.defpath)
    try:
        chosen = shlex.split(environ.get("CC", ""))
    except ValueError:  # an unbalanced quote
        chosen = []
    for command in ([chosen] if chosen else []) + [[name] for name in DRIVERS + LINKERS]:
        program = shutil.which(command[0], path=path)
        if program is not None:
            return Linker((os.path.abspath(program), *command[1:]), driver=command[0] not in LINKERS)
    return None


def link(linker: Linker, object_path: str, library_path: str) -> None:
    """Link one object file into a shared library. LinkError when it fails; then there is no library."""
    for arguments in _attempts(linker.driver, sys.platform):
        error = _run([*linker.command, *arguments, "-o", library_path, object_path])
        if error is None and _size(library_path) == 0:
            error = f"{linker.command[0]} succeeded but wrote no library"
        if error is None:
            return
        if os.path.exists(library_path):
            os.unlink(library_path)
    raise LinkError(error)


def _attempts(driver: bool, platform: str) -> list[list[str]]:
    """Arguments to try in turn.

    A kernel calls at most memset, which the process has; a library without dependencies loads whatever C
    library the process uses. Objects may lack the note that says their stack is not executable, and such a
    library would be refused, so it is said here. -Bsymbolic binds the launcher pointer of parallel kernels to
    the library's own: another library's of that name must not take its place.
    """
    if platform == "darwin":
        if driver:
            return [["-dynamiclib", "-Wl,-undefined,dynamic_lookup"]]
        return [["-dylib", "-undefined", "dynamic_lookup"]]
    if driver:
        shared = ["-shared", "-Wl,-z,noexecstack", "-Wl,-Bsymbolic"]
        return [[*shared, "-nostdlib"], shared]  # some drivers insist on their own start files
    return [["-shared", "-z", "noexecstack", "-Bsymbolic"]]


def _run(command: list[str]) -> str | None:
    """None, or why the command failed."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"{shlex.join(command)} did not finish in {_TIMEOUT:.0f} s"
    except OSError as error:
        return f"{shlex.join(command)} cannot be run: {error.strerror}"
    if done.returncode == 0:
        return None
    said = "\n".join(done.stdout.decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:])
    return f"{shlex.join(command)} failed with exit status {done.returncode}: {said or 'it printed nothing'}"


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0

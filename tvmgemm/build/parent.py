"""The user's side of a build: ask a child process for kernels, and take what it answers into the store's account.

What goes wrong is not raised here: it becomes the text of ``BuildResult.error``, and NumPy computes.

This runs in the user's process, where a file ``json.py`` or ``random.py`` beside the program stands in for
Python's own. So the two sides talk in Python literals, and neither module, nor any that needs one of them, is
imported.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from .. import log
from ..spec import KernelSpec
from ..store.files import Store
from ..store.key import INSTALL, PINS, kernel_key
from ..store.lock import KernelLock
from .link import NO_LINKER, find_linker
from .process import PACKAGE, Child, import_path, is_exiting

#: Seconds for everything one child does. TVM loads in 1 to 2 s, a kernel takes 0.1 to 0.5 s.
TIMEOUT = 120.0

#: Seconds to wait for another process that is building the same kernel; then it is built twice.
LOCK_TIMEOUT = 10.0

COMPILE = "tvmgemm.family.codegen:compile_object"


@dataclass(frozen=True)
class BuildResult:
    """What became of one spec: the ``path`` of its library, or what failed and what to do, as ``error``.

    ``seconds`` is the time that the build took; the first of a build includes loading the compiler. ``built``
    is False for a library that another process had put into the store in the meantime.
    """

    spec: KernelSpec
    path: str | None
    error: str | None
    seconds: float
    built: bool = True


def build(
    specs: Sequence[KernelSpec],
    store: Store,
    timeout: float = TIMEOUT,
    compile: str = COMPILE,
    pins: Mapping[str, str] = PINS,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[BuildResult]:
    """Build ``specs`` into ``store`` in one child process; yields each result as soon as it is there.

    The first spec is the one that somebody waits for. If another process is building it, its result is
    awaited, for a while; others that are being built elsewhere are left out of the results. The
    build itself takes at most ``timeout`` seconds: then the child is killed and what it has not finished is
    an error. Closing the iterator kills the child too. Results may be taken from several threads, one at a
    time.

    ``compile`` names the function ``(spec, object path)`` that the child calls, as ``module:function``, and
    ``pins`` the versions that it must find. Tests pass others.
    """
    locks: dict[KernelSpec, KernelLock] = {}
    try:
        pending = []
        for spec in dict.fromkeys(specs):
            key = kernel_key(spec)
            wait = min(timeout, LOCK_TIMEOUT) if spec == specs[0] else 0.0
            locks[spec] = store.lock(key, wait, until=partial(store.find, spec, key))
            path = store.find(spec, key)
            if path is not None:
                locks.pop(spec).release()
                yield BuildResult(spec, path, None, 0.0, built=False)
            elif locks[spec].held or spec == specs[0]:
                pending.append(spec)
        for result in _build_all(pending, store, timeout, compile, pins, cancelled):
            locks.pop(result.spec).release()
            if result.error is None:
                log.info("built %s in %.2f s: %s", result.spec.name, result.seconds, result.path)
            else:
                log.warning("%s", result.error)
            yield result
    finally:
        for lock in locks.values():
            lock.release()


def _build_all(
    specs: list[KernelSpec],
    store: Store,
    timeout: float,
    compile: str,
    pins: Mapping[str, str],
    cancelled: Callable[[], bool],
) -> Iterator[BuildResult]:
    """Yield a result for every spec. A crash costs the kernel that the child was at; the rest get another."""
    pending, deadline = list(specs), time.monotonic() + timeout
    while pending:
        request, problem = _request(pending, store, max(1.0, deadline - time.monotonic()), compile, pins)
        if problem is None:
            child = Child(deadline, cancelled)
            began = None
            try:
                for event in child.events(request):
                    began = event.get("begin", began)
                    spec = next((spec for spec in pending if spec.name == event.get("name")), None)
                    if spec is not None:
                        pending.remove(spec)
                        yield _result(spec, event, store)
            finally:
                child.close()
            if not pending or is_exiting() or cancelled():
                return
            problem = child.ending(timeout)
            if began == pending[0].name and not child.timed_out:
                yield _failure(pending.pop(0), problem)
                continue
        for spec in pending:
            yield _failure(spec, problem)
        return


def _request(
    specs: list[KernelSpec], store: Store, timeout: float, compile: str, pins: Mapping[str, str]
) -> tuple[dict, str | None]:
    """What to ask of the child, or why nothing can be built."""
    if not sys.executable or getattr(sys, "frozen", False):
        return {}, "this program has no Python interpreter of its own to build kernels with"
    if pins and not _is_installed("tvm"):
        return {}, f"TVM is not installed for {sys.executable}; {INSTALL}"
    linker = find_linker()
    if linker is None:
        return {}, NO_LINKER
    try:
        folder = store.build_folder()
    except OSError as error:
        return {}, str(error)
    return {
        "package": PACKAGE,
        "sys_path": import_path(),
        "compile": compile,
        "pins": dict(pins),
        "linker": (linker.command, linker.driver),
        "store": folder,
        "limit": store.limit,
        "specs": [spec.to_dict() for spec in specs],
        "timeout": timeout,
    }, None


def _is_installed(module: str) -> bool:
    """Whether ``module`` can be found, without importing it: saves starting a process that cannot succeed."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _result(spec: KernelSpec, event: dict, store: Store) -> BuildResult:
    path, error, seconds = event.get("path"), event.get("error"), event.get("seconds")
    seconds = seconds if isinstance(seconds, float) else 0.0
    if error is None and (not isinstance(path, str) or not store.verified(path)):
        error = f"the build process reported {path!r}, which is not a sound library"
    if error is not None:
        return _failure(spec, error, seconds)
    return BuildResult(spec, path, None, seconds)


def _failure(spec: KernelSpec, text: str, seconds: float = 0.0) -> BuildResult:
    return BuildResult(spec, None, f"{spec.name} was not built, NumPy computes in its place: {text}", seconds)

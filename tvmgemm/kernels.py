"""The kernels of this process, and how it comes by one: from memory, from the store, or by a build.

All of it is under ``lock``, which waiting for a build releases.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from . import log, settings
from ._native import ffi, lib
from .forks import importing
from .spec import KernelSpec


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded kernel: the native handle, the file it came from, and whether this process built it or found it."""

    spec: KernelSpec
    handle: object
    path: str
    origin: str  # "built" or "disk"
    seconds: float

    @property
    def calls(self) -> int:
        """Inner-loop calls that it has served."""
        return lib.tg_kernel_calls(self.handle)


@dataclass(eq=False)
class _Build:
    """A build that a thread of ours attends to. The first spec is the one that somebody needs. ``waiting`` callers give the
    ``warnings``, which then name their line; where there are none, that thread does in the end."""

    specs: list[KernelSpec]
    cancelled: bool = False
    waiting: int = 0
    warnings: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Builds:
    """What building and loading has come to in this process."""

    built: int = 0
    failed: int = 0
    store_hits: int = 0
    seconds: float = 0.0


#: Loaded kernels. Never unloaded: a call in flight may be inside one.
loaded: dict[KernelSpec, Kernel] = {}
builds = Builds()

#: Called under ``lock`` with specs whose builds are over, however they ended; ``dispatch`` sets it.
on_settled: Callable[[list[KernelSpec]], None] | None = None

lock = threading.RLock()
_changed = threading.Condition(lock)  # a build has come to something
_failures: dict[KernelSpec, str] = {}
_under_way: dict[KernelSpec, _Build] = {}


@lru_cache(maxsize=None)
def store_in(cache_dir: str | None):
    """The store in ``cache_dir``, or in the folder of the settings: opened, and its folder made, at the first call."""
    with importing:
        from .store import open_store

    return open_store(cache_dir)


def store():
    """The store of the options in force."""
    return store_in(settings.current().cache_dir)


def get(spec: KernelSpec, jit: str, companions: Callable[[], list[KernelSpec]]) -> tuple[Kernel | None, str | None]:
    """The kernel of ``spec``, or None and why not. A build, if ``jit`` allows one, takes ``companions()`` along."""
    while spec not in loaded and spec not in _failures:
        if spec not in _under_way and not load_from_store(spec):
            if jit == "off":
                break
            start_build([spec, *missing(companions())])
        if spec in _under_way:
            if jit != "sync":
                break
            build = _under_way[spec]
            build.waiting += 1
            try:
                _changed.wait()
            except BaseException:  # Ctrl-C: nobody waits for this build any more, and the next call begins another
                _cancel(_under_way.get(spec))
                raise
            finally:
                build.waiting -= 1
            log.give(build.warnings)
    return loaded.get(spec), why_missing(spec)


def why_missing(spec: KernelSpec) -> str | None:
    """Why a planned kernel is not there, or None if it is."""
    if spec in loaded:
        return None
    if spec in _failures:
        return _failures[spec]
    if spec in _under_way:
        return "its kernel is being built in the background"
    return "its kernel is not in the store and TVMGEMM_JIT=off forbids building it"


def missing(specs: list[KernelSpec]) -> list[KernelSpec]:
    """Those of ``specs`` that are neither loaded, nor failed, nor under way, nor in the store."""
    from .store.key import kernel_key

    return [s for s in specs if s not in loaded and not is_settled_or_under_way(s) and store().find(s, kernel_key(s)) is None]


def is_settled_or_under_way(spec: KernelSpec) -> bool:
    """Whether a build of ``spec`` has failed or is under way, so that there is none to begin."""
    return spec in _failures or spec in _under_way


def load_from_store(spec: KernelSpec) -> bool:
    """Load the kernel if the store has it; whether it had."""
    from .store.key import kernel_key

    path = store().find(spec, kernel_key(spec))
    if path is None:
        return False
    error = _load(spec, path, "disk", 0.0)
    if error is not None:  # sound, but not for this process: it goes, and is built again
        store().set_aside(path, error)
        return False
    builds.store_hits += 1
    return True


def _load(spec: KernelSpec, path: str, origin: str, seconds: float) -> str | None:
    """Load the library of ``spec``; None, or why it cannot be loaded."""
    handle, error = open_library(spec, path)
    if error is None:
        loaded[spec] = Kernel(spec, handle, path, origin, seconds)
    return error


def open_library(spec: KernelSpec, path: str) -> tuple[object, str | None]:
    """The native handle of the kernel in a library; or why there is none."""
    error = ffi.new("char[]", 512)
    handle = lib.tg_kernel_load(os.fsencode(path), spec.symbol.encode(), spec.name.encode(), error, len(error))
    return handle, None if handle else ffi.string(error).decode("utf-8", "replace")


def start_build(specs: list[KernelSpec]) -> None:
    """Build ``specs``, the first of which somebody needs, in one process that a thread of ours attends to."""
    build = _Build(specs)
    _under_way.update(dict.fromkeys(specs, build))
    try:
        threading.Thread(target=_attend, args=(build,), name="tvmgemm-build", daemon=True).start()
    except RuntimeError as error:  # the system has no thread for us
        _failures[specs[0]] = f"building it needs a thread: {error}"
        _settle(build, specs)


def _attend(build: _Build) -> None:
    """Take the results of a build as they come."""
    with log.held_back(build.warnings):
        _take_all(build)
    with lock:
        if not build.waiting:
            log.give(build.warnings)


def _take_all(build: _Build) -> None:
    problem = "the build ended without an answer"
    try:
        with importing:
            from .build import parent

        for result in parent.build(build.specs, store(), cancelled=lambda: build.cancelled):
            with lock:
                if build.cancelled:
                    return
                _take(result)
                _settle(build, [result.spec])
    except Exception as error:  # nobody else would report what happens in a thread of ours
        problem = f"building failed: {error!r}"
        log.warning("%s", problem)
    with lock:
        if _under_way.get(build.specs[0]) is build:
            _failures[build.specs[0]] = problem
        _settle(build, build.specs)


def _take(result) -> None:
    """Account for one result of a build, and load it."""
    builds.seconds += result.seconds
    if result.spec in loaded:
        return
    error = result.error or _load(result.spec, result.path, "built" if result.built else "disk", result.seconds)
    if error is not None:
        builds.failed += 1
        _failures[result.spec] = error
        text = error if result.error else f"{result.spec.name} cannot be loaded, NumPy computes in its place: {error}"
        log.warn_once("build", text)
    else:
        builds.built += result.built
        builds.store_hits += not result.built


def _cancel(build: _Build | None) -> None:
    if build is not None:
        build.cancelled = True
        _settle(build, build.specs)


def _settle(build: _Build, specs: list[KernelSpec]) -> None:
    """These of its builds are over: let those that wait look again."""
    over = [spec for spec in specs if _under_way.get(spec) is build]
    for spec in over:
        del _under_way[spec]
    if on_settled is not None:
        on_settled(over)
    _changed.notify_all()


def forget_failures() -> None:
    """Let what could not be built be tried again."""
    _failures.clear()


def after_fork() -> None:
    """The child has no builder threads and may have been forked while another thread held the lock."""
    global lock, _changed
    lock = threading.RLock()
    _changed = threading.Condition(lock)
    _under_way.clear()

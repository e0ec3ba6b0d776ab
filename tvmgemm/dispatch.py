"""The slow path of a call: a problem that no published plan serves gets one. It runs once per box of problems.

plan (pure) -> kernel (from memory, the store, or a build) -> publish to the native table, or publish that NumPy serves.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import lru_cache

from . import log, settings
from ._native import ffi, lib
from .host import host
from .planner import Plan, companions, plan
from .problem import DTYPES, LAYOUT_NAMES, OPS, Problem
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


@dataclass
class Builds:
    """What building and loading has come to in this process."""

    built: int = 0
    failed: int = 0
    store_hits: int = 0
    seconds: float = 0.0


#: Loaded kernels. Never unloaded: a call in flight may be inside one.
kernels: dict[KernelSpec, Kernel] = {}
builds = Builds()

_failures: dict[KernelSpec, str] = {}
_in_background: set[KernelSpec] = set()
_published: dict[int, Plan] = {}
_ids: dict[tuple, int] = {}
_lock = threading.RLock()
_owner: int | None = None  # the thread that is planning: a product computed meanwhile on it is NumPy's


@lru_cache(maxsize=None)
def _store(cache_dir: str | None):
    from .store import open_store

    return open_store(cache_dir)


def store():
    """The store of the options in force."""
    return _store(settings.current().cache_dir)


def on_miss(native_problem) -> bool:
    """Publish a plan for the problem of a native ``tg_problem``; False if the call is to be declined without one."""
    global _owner
    if _owner == threading.get_ident():
        return False
    with _lock:
        if lib.tg_lookup(native_problem) >= 0:  # another thread was faster
            return True
        _owner = threading.get_ident()
        try:
            decide(Problem.from_native(native_problem))
        finally:
            _owner = None
    return True


def decide(problem: Problem) -> tuple[Plan, Kernel | None]:
    """Plan for ``problem``, get the kernel, publish both. A kernel that cannot be had leaves the problem to NumPy."""
    with _lock:
        options = settings.current()
        wanted = plan(problem, host(), options)
        kernel, missing = (_kernel(wanted.spec, options) if wanted.served else (None, None))
        _publish(problem, wanted, kernel)
    if log.enabled():
        serves = wanted.spec.name if kernel else "NumPy"
        log.info("%s: %s serves (%s)", _described(problem), serves, missing or wanted.reason)
    return wanted, kernel


def why_missing(spec: KernelSpec) -> str | None:
    """Why a planned kernel is not there, or None if it is."""
    if spec in kernels:
        return None
    if spec in _failures:
        return _failures[spec]
    if spec in _in_background:
        return "its kernel is being built in the background"
    return "its kernel is not in the store and TVMGEMM_JIT=off forbids building it"


def _kernel(spec: KernelSpec, options: settings.Options) -> tuple[Kernel | None, str | None]:
    """The kernel of ``spec`` from memory, the store or a build; or None and why not."""
    if spec not in kernels and spec not in _failures and not _load_from_store(spec):
        if options.jit == "sync":
            _build(spec, options)
        elif options.jit == "background":
            _build_in_background(spec, options)
    return kernels.get(spec), why_missing(spec)


def _load_from_store(spec: KernelSpec) -> bool:
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
    error = ffi.new("char[]", 512)
    handle = lib.tg_kernel_load(os.fsencode(path), spec.symbol.encode(), spec.name.encode(), error, len(error))
    if not handle:
        return ffi.string(error).decode("utf-8", "replace")
    kernels[spec] = Kernel(spec, handle, path, origin, seconds)
    return None


def _take(result) -> None:
    """Account for one result of a build, and load it."""
    builds.seconds += result.seconds
    if result.spec in kernels:
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


def _build(spec: KernelSpec, options: settings.Options) -> None:
    """Build ``spec`` and wait for it; its companions follow in the same process while the program goes on."""
    from .build.parent import build

    results = build([spec, *_missing(companions(spec, options))], store())
    _consume(results, until=spec)
    threading.Thread(target=_consume, args=(results,), name="tvmgemm-build", daemon=True).start()


def _consume(results, until: KernelSpec | None = None) -> None:
    try:
        for result in results:
            with _lock:
                _take(result)
            if result.spec == until:
                return
    except Exception as error:  # in a thread of ours nobody else would report it
        log.warning("building kernels failed: %s", error)


def _build_in_background(spec: KernelSpec, options: settings.Options) -> None:
    """Build ``spec`` in a thread; then the plans that leave its problems to NumPy are withdrawn."""
    if spec in _in_background:
        return
    specs = [spec, *_missing(companions(spec, options))]
    _in_background.update(specs)

    def work() -> None:
        from .build.parent import build

        _consume(build(specs, store()))
        with _lock:
            _in_background.difference_update(specs)
            for id, waiting in list(_published.items()):
                if waiting.spec in specs:
                    lib.tg_unpublish(id)
                    del _published[id]

    threading.Thread(target=work, name="tvmgemm-build", daemon=True).start()


def _missing(specs: list[KernelSpec]) -> list[KernelSpec]:
    """Those of ``specs`` that are neither loaded, nor failed, nor under way, nor in the store."""
    from .store.key import kernel_key

    skip = (kernels, _failures, _in_background)
    return [
        s for s in specs if not any(s in known for known in skip) and store().find(s, kernel_key(s)) is None
    ]


def _publish(problem: Problem, decided: Plan, kernel: Kernel | None) -> None:
    # Equal decisions keep their id, so that the native side keeps one copy of each however often options change.
    statics = (problem.dtype, problem.op, problem.a_layout, problem.b_layout, problem.c_layout, problem.symmetric)
    id = _ids.setdefault((statics, decided, kernel), len(_ids) + 1)
    _published[id] = decided
    box, blocks = decided.box, decided.blocks
    layouts = {f"{x}_layout": LAYOUT_NAMES.index(getattr(problem, f"{x}_layout")) for x in "abc"}
    bounds = {
        f"{side}_{end}": (float if side == "work" else int)(bound)
        for side in box.SIDES
        for end, bound in zip(("lo", "hi"), getattr(box, side))
    }
    native = {
        "dtype": DTYPES[problem.dtype].native_id, "op": OPS.index(problem.op), "symmetric": problem.symmetric,
        "kernel": kernel.handle if kernel else ffi.NULL, "tasks": decided.tasks, "id": id,
        "mc": blocks.mc if blocks else 0, "nc": blocks.nc if blocks else 0, "kc": blocks.kc if blocks else 0,
    }  # fmt: skip
    if lib.tg_publish(ffi.new("tg_plan *", {**layouts, **bounds, **native})) != 0:
        log.warning("a plan for %s could not be published", _described(problem))


def _described(p: Problem) -> str:
    batch = f"{p.batch} x " if p.batch != 1 else ""
    return f"{p.op} {p.dtype} {batch}{p.m}x{p.k} ({p.a_layout}) by {p.k}x{p.n} ({p.b_layout})"


def _on_change(options: settings.Options) -> None:
    """New options: earlier plans no longer hold. Loaded kernels stay; which are used is the planner's choice."""
    with _lock:
        lib.tg_clear_plans()
        _published.clear()
        _failures.clear()
    lib.tg_pool_set_threads(options.threads)


def _after_fork() -> None:
    """The child has no builder threads and may have been forked while another thread held the lock."""
    global _lock, _owner
    _lock, _owner = threading.RLock(), None
    _in_background.clear()


os.register_at_fork(after_in_child=_after_fork)
settings.on_change(_on_change)
lib.tg_pool_set_threads(settings.current().threads)

"""The slow path of a call: a problem that no published plan serves gets one. It runs once per box of problems.

plan (pure) -> kernel (from memory, the store, or a build) -> publish to the native table, or publish that NumPy serves.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache

from . import frontend, kernels, log, settings
from ._native import ffi, lib
from .forks import importing
from .host import host
from .kernels import Kernel
from .planner import HOT_PRODUCTS, Plan, companions, hot_at, plan, shape_spec
from .problem import DTYPES, GEMV, LAYOUT_NAMES, OPS, ROW, SMALL_GEMM, Problem
from .spec import KernelSpec

#: Most kernels for single shapes that one process has built: their number must not follow that of the shapes it meets.
MOST_SHAPES_BUILT = 16

_hot: dict[KernelSpec, Problem] = {}  # shapes whose kernels are being built, and a problem of each
_shapes_built = 0
_announced = False  # shapes that have kernels are counted as if they were just about to become hot
_published: dict[int, Plan] = {}
_ids: dict[tuple, int] = {}


@lru_cache(maxsize=None)
def _tuned(cache_dir: str | None) -> tuple:
    with importing:
        from .store import user_folder

    try:  # most processes have no such file: they are spared the rest, and no folder is made for them
        if not any(name.startswith("tuned-") for name in os.listdir(cache_dir or user_folder())):
            return ()
    except OSError:
        return ()
    with importing:
        from .tuned import load

    return load(kernels.store_in(cache_dir), host())


def tuned(options: settings.Options) -> tuple:
    """What was measured on this machine (``tuned.Tuned``), read once per process and folder; () if it is to be ignored."""
    return _tuned(options.cache_dir) if options.tuned == "on" else ()


def look_again() -> None:
    """Have the next miss look again at what the cache folders hold: this process has tuned."""
    _tuned.cache_clear()
    _shapes.cache_clear()
    _on_change(settings.current())


@lru_cache(maxsize=None)
def _shapes(cache_dir: str | None) -> set[KernelSpec]:
    """The kernels for single shapes that can be had without building: those that this folder had, and those built since."""
    with importing:
        from .shapes import stored

    return stored(kernels.store_in(cache_dir), host().arch)


def _announce(options: settings.Options) -> None:
    """Have the next product of each shape with a kernel ask for it."""
    global _announced
    _announced = True
    for spec in _shapes(options.cache_dir):
        assert spec.shape is not None
        m, n, k = spec.shape
        if shape_spec(Problem(spec.dtype, m, n, k), host(), options) == spec:
            lib.tg_set_served(DTYPES[spec.dtype].native_id, m, n, k, HOT_PRODUCTS - 1)


def on_hot(native_problem) -> bool:
    """Many products have had this small shape: publish the plan of a kernel for it alone, or have one built, in the
    background. True: the loop is to look again."""
    global _shapes_built
    problem = Problem.from_native(native_problem)
    with kernels.lock:
        options = settings.current()
        spec = shape_spec(problem, host(), options)
        if spec in _shapes(options.cache_dir):
            if not _announced:
                _announce(options)
            return decide(problem)[0].spec == spec
        if spec is None or kernels.is_settled_or_under_way(spec):
            return False
        if options.jit != "off" and _shapes_built < MOST_SHAPES_BUILT:
            _shapes_built += 1
            _hot[spec] = problem
            log.info("%s is hot: %s is being built in the background", _described(problem), spec.name)
            kernels.start_build([spec])
    return False


def _serve_shape(spec: KernelSpec) -> None:
    """The kernel of a hot shape is there: have it serve, unless the options have changed meanwhile."""
    options, problem = settings.current(), _hot.pop(spec, None)
    _shapes(options.cache_dir).add(spec)
    if problem is not None and shape_spec(problem, host(), options) == spec:
        decide(problem)


def on_miss(native_problem) -> bool:
    """Publish a plan for the problem of a native ``tg_problem``, on any thread; True: the loop is to look again."""
    with kernels.lock:
        if lib.tg_lookup(native_problem) < 0:  # else another thread was faster
            decide(Problem.from_native(native_problem))
    return True


def decide(problem: Problem) -> tuple[Plan, Kernel | None]:
    """Plan for ``problem``, get the kernel, publish both. A kernel that cannot be had leaves the problem to NumPy."""
    with kernels.lock:
        options = settings.current()
        shapes = _shapes(options.cache_dir) if _announced else set()
        wanted = plan(problem, host(), options, tuned(options), shapes)
        if wanted.served and not _announced:  # the store is opened, and its folder made, for those only who want a kernel
            _announce(options)
            shapes = _shapes(options.cache_dir)
            wanted = plan(problem, host(), options, tuned(options), shapes)
        spec = wanted.spec
        if spec is not None and spec.shape and spec not in kernels.loaded and not kernels.load_from_store(spec):
            shapes.discard(spec)  # nobody waits for such a kernel
            wanted = plan(problem, host(), options, tuned(options), shapes)
        kernel, missing = _kernel(wanted.spec, options) if wanted.spec is not None else (None, None)
        _publish(problem, wanted, kernel)
    if wanted.refused:
        log.warn_once(wanted.reason, f"{_described(problem)}: {wanted.reason}")
    if log.enabled():
        serves = kernel.spec.name if kernel else "NumPy"
        log.info("%s: %s serves (%s)", _described(problem), serves, missing or wanted.reason)
    return wanted, kernel


def _kernel(spec: KernelSpec, options: settings.Options) -> tuple[Kernel | None, str | None]:
    return kernels.get(spec, options.jit, lambda: companions(spec, host(), options))


def _on_settled(specs: list[KernelSpec]) -> None:
    """Builds are over: ask for plans anew where NumPy served meanwhile."""
    for id, waiting in list(_published.items()):
        if waiting.spec in specs:
            lib.tg_unpublish(id)
            del _published[id]
    for spec in specs:
        if spec.shape is not None and spec in kernels.loaded:
            _serve_shape(spec)


def _publish(problem: Problem, decided: Plan, kernel: Kernel | None) -> None:
    options = settings.current()
    if not (kernel and kernel.spec.shape):
        layouts = {f"{x}_layout": LAYOUT_NAMES.index(getattr(problem, f"{x}_layout")) for x in "abc"}
        hot = hot_at(decided, problem, host(), options)
        blas = GEMV if problem.gemv else SMALL_GEMM if problem.small_gemm else 0
        _publish_one(problem, decided, kernel, {**layouts, "symmetric": problem.symmetric, "blas": blas, "hot_at": hot})
        return
    # A kernel for one shape takes every A. Its plans for short and for long stacks come together: where one is
    # missing a more general plan would serve, and nobody would ask.
    for batch in (1, 1 << 40):
        other = plan(replace(problem, batch=batch), host(), options, (), (kernel.spec,))
        layouts = {"a_layout": -1, "b_layout": ROW, "c_layout": ROW, "symmetric": -1, "blas": -1}
        _publish_one(problem, other, kernel, {**layouts, "exact": 1})


def _publish_one(problem: Problem, decided: Plan, kernel: Kernel | None, statics: dict[str, int]) -> None:
    # Equal decisions keep their id, so that the native side keeps one copy of each however often options change.
    id = _ids.setdefault((problem.dtype, problem.op, *statics.values(), decided, kernel), len(_ids) + 1)
    _published[id] = decided
    box, blocks = decided.box, decided.blocks
    bounds = {
        f"{side}_{end}": (float if side in box.PRODUCTS else int)(bound)
        for side in box.SIDES
        for end, bound in zip(("lo", "hi"), getattr(box, side))
    }
    native = {
        "dtype": DTYPES[problem.dtype].native_id, "op": OPS.index(problem.op),
        "kernel": kernel.handle if kernel else ffi.NULL, "id": id,
        "tasks": 1 if decided.shares_stack else decided.tasks, "stack_tasks": decided.tasks if decided.shares_stack else 1,
        "mc": blocks.mc if blocks else 0, "nc": blocks.nc if blocks else 0, "kc": blocks.kc if blocks else 0,
    }  # fmt: skip
    if lib.tg_publish(ffi.new("tg_plan *", {**statics, **bounds, **native})) != 0:
        log.warning("a plan for %s could not be published", _described(problem))


def _described(p: Problem) -> str:
    batch = f"{p.batch} x " if p.batch != 1 else ""
    return f"{p.op} {p.dtype} {batch}{p.m}x{p.k} ({p.a_layout}) by {p.k}x{p.n} ({p.b_layout})"


def _on_change(options: settings.Options) -> None:
    """New options: earlier plans no longer hold. Loaded kernels stay; which are used is the planner's choice."""
    global _announced
    with kernels.lock:
        lib.tg_clear_plans()
        _announced = False
        _published.clear()
        kernels.forget_failures()
    lib.tg_pool_set_threads(options.threads)


def _after_fork() -> None:
    kernels.after_fork()
    for p in _hot.values():  # they are built in the parent: count again
        lib.tg_set_served(DTYPES[p.dtype].native_id, p.m, p.n, p.k, 0)
    _hot.clear()


os.register_at_fork(after_in_child=_after_fork)
kernels.on_settled = _on_settled
settings.on_change(_on_change)
frontend.on_hot = on_hot
lib.tg_pool_set_threads(settings.current().threads)

"""The user's side of a build: start the child, wait for what it answers, stop it when it takes too long.

What goes wrong is not raised here: it becomes the text of ``BuildResult.error``, and NumPy computes.

This runs in the user's process, where a file ``json.py`` or ``random.py`` beside the program stands in for
Python's own. So the two sides talk in Python literals, and neither module, nor any that needs one of them, is
imported.
"""

from __future__ import annotations

import ast
import atexit
import importlib.util
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import log
from ..spec import KernelSpec
from ..store.files import KernelLock, Store
from ..store.key import INSTALL, PINS, kernel_key
from .link import NO_LINKER, find_linker

#: Seconds for everything one child does. TVM loads in 1 to 2 s, a kernel takes 0.1 to 0.5 s.
TIMEOUT = 120.0

#: Seconds to wait for another process that is building the same kernel; then it is built twice.
LOCK_TIMEOUT = 10.0

COMPILE = "tvmgemm.family.codegen:compile_object"

#: What the child may see of the environment. Anything else could change what it imports, loads or prints.
_PASSED_ON = (
    "PATH", "HOME", "TMPDIR", "CC", "SDKROOT", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
)  # fmt: skip
_ONE_THREAD = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TAIL_BYTES, _TAIL_LINES = 4096, 5
_REMEDY = "a narrower TVMGEMM_MAX_ISA may build, TVMGEMM_JIT=off avoids building"


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
            locks[spec] = store.lock(key, wait, until=lambda spec=spec, key=key: store.find(spec, key))
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
            child = _Child(deadline, cancelled)
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
            if not pending or _exiting or cancelled():
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
        "package": _PACKAGE,
        "sys_path": _import_path(),
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


def _import_path() -> list[str]:
    """Where the child may look for modules after its own places: our path without the folders that hold the
    user's program, whose files are not meant to be anybody's ``json`` or ``random``."""
    try:
        users = {os.getcwd()}
    except OSError:  # the current folder was removed
        users = set()
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script:
        users.add(os.path.dirname(os.path.abspath(script)))
    users |= {os.path.realpath(folder) for folder in users}
    return [entry for entry in sys.path if os.path.isabs(entry) and os.path.realpath(entry) not in users]


def _environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    passed_on = {name: environ[name] for name in _PASSED_ON if name in environ}
    return {**passed_on, **dict.fromkeys(_ONE_THREAD, "1"), "LC_ALL": "C.UTF-8"}


def _result(spec: KernelSpec, event: dict, store: Store) -> BuildResult:
    seconds = event.get("seconds") if isinstance(event.get("seconds"), float) else 0.0
    path, error = event.get("path"), event.get("error")
    if error is None and (not isinstance(path, str) or not store.verified(path)):
        error = f"the build process reported {path!r}, which is not a sound library"
    if error is not None:
        return _failure(spec, error, seconds)
    return BuildResult(spec, path, None, seconds)


def _failure(spec: KernelSpec, text: str, seconds: float = 0.0) -> BuildResult:
    return BuildResult(spec, None, f"{spec.name} was not built, NumPy computes in its place: {text}", seconds)


class _Child:
    """One build process: its answers until ``deadline`` (monotonic seconds), then how it ended."""

    def __init__(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        self.timed_out = False
        self._cancelled = cancelled
        self._deadline = deadline
        self._owner = os.getpid()
        self._process: subprocess.Popen | None = None
        self._start_error: OSError | None = None
        self._stderr = b""

    def events(self, request: dict) -> Iterator[dict]:
        """Start the process with ``request``; yield its answers until it ends or the deadline passes."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", os.path.join(_PACKAGE, "build", "child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(),
                cwd="/",
                start_new_session=True,  # the linker it starts ends with it, and Ctrl-C is ours to handle
            )
        except OSError as error:
            self._start_error = error
            return
        _running.add(self)
        process = self._process
        try:
            process.stdin.write(repr(request).encode() + b"\n")
            process.stdin.close()
        except OSError:
            pass  # it ended already; how, is read below
        buffer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            selector.register(process.stderr, selectors.EVENT_READ)
            while selector.get_map():
                remaining = self._deadline - time.monotonic()
                if remaining <= 0:
                    self.timed_out = True
                    return
                if self._cancelled():
                    return
                ready = selector.select(min(remaining, 0.25))
                if not ready and process.poll() is not None:
                    return  # something it started keeps the pipes open
                for key, _ in ready:
                    chunk = os.read(key.fd, 1 << 16)
                    if not chunk:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        self._stderr = (self._stderr + chunk)[-_TAIL_BYTES:]
                    else:
                        *lines, buffer = (buffer + chunk).split(b"\n")
                        yield from filter(None, map(_parsed, lines))
            try:
                process.wait(max(0.0, self._deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.timed_out = True

    def end(self) -> None:
        """Kill the process and all it started. Harmless when it has ended, and in a forked child of ours."""
        process = self._process
        if process is not None and os.getpid() == self._owner and process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass
            process.wait()

    def close(self) -> None:
        """``end``, and close the pipes."""
        self.end()
        _running.discard(self)
        if self._process is not None:
            self._process.stdout.close()
            self._process.stderr.close()

    def ending(self, timeout: float) -> str:
        """How the process ended, with the last that it printed."""
        if self._start_error is not None:
            return f"the build process {sys.executable} cannot be started: {self._start_error.strerror}"
        status = self._process.returncode
        if self.timed_out:
            how = f"was stopped because it had not finished within {timeout:g} s"
        elif status < 0:
            how = f"was killed by signal {-status} ({signal.strsignal(-status)})"
        else:
            how = f"ended with exit status {status} and no answer"
        said = " / ".join(self._stderr.decode("utf-8", "replace").strip().splitlines()[-_TAIL_LINES:])
        return f"the build process {how} ({_REMEDY}); it printed: {said or 'nothing'}"


def _parsed(line: bytes) -> dict | None:
    """The event of a line, None for anything that is not one."""
    try:
        event = ast.literal_eval(line.decode()) if line.startswith(b"{") else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        event = None
    if isinstance(event, dict):
        return event
    log.debug("the build process printed %r", line[:200])
    return None


_running: set[_Child] = set()
_exiting = False


def _end_all() -> None:
    """A build that nobody waits for must not outlive the program."""
    global _exiting
    _exiting = True
    for child in tuple(_running):
        child.end()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_running.clear)

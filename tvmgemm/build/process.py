"""The build process as its parent sees it: started with little of the user's environment, read until it ends or time is
up, killed with all that it started.
"""

from __future__ import annotations

import ast
import atexit
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from .. import log

#: What the child may see of the environment. Anything else could change what it imports, loads or prints.
_PASSED_ON = (
    "PATH", "HOME", "TMPDIR", "CC", "SDKROOT", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
)  # fmt: skip
_ONE_THREAD = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

#: The end of what a child prints that goes into a report.
_TAIL_BYTES, _TAIL_LINES = 4096, 5
_REMEDY = "a narrower TVMGEMM_MAX_ISA may build, TVMGEMM_JIT=off avoids building"


def import_path() -> list[str]:
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


def _environment() -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return {**passed_on, **dict.fromkeys(_ONE_THREAD, "1"), "LC_ALL": "C.UTF-8"}


class Child:
    """One build process: its answers until ``deadline`` (monotonic seconds), then how it ended."""

    def __init__(self, deadline: float, cancelled: Callable[[], bool]) -> None:
        self.timed_out = False
        self._cancelled = cancelled
        self._deadline = deadline
        self._owner = os.getpid()
        self._process: subprocess.Popen | None = None
        self._start_error: str | None = None
        self._stderr = b""

    def events(self, request: dict) -> Iterator[dict]:
        """Start the process with ``request``; yield its answers until it ends or the deadline passes."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", os.path.join(PACKAGE, "build", "child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(),
                cwd="/",
                start_new_session=True,  # the linker it starts ends with it, and Ctrl-C is ours to handle
            )
        except OSError as error:
            self._start_error = error.strerror
            return
        running.add(self)
        process = self._process
        assert process.stdin and process.stdout and process.stderr  # they are pipes
        try:
            process.stdin.write(repr(request).encode() + b"\n")
            process.stdin.close()
        except OSError:
            pass  # it ended already; how, is read below
        buffer, ended = b"", False
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
                ready = selector.select(0 if ended else min(remaining, 0.25))
                if not ready and ended:
                    return  # something it started keeps the pipes open
                # Nothing to read does not mean that the pipes are empty when it has ended: it may have answered between the
                # two, and a wait that Ctrl-Z interrupts finds nothing either. Look once more.
                ended = process.poll() is not None
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
        running.discard(self)
        if self._process is not None:
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()

    def ending(self, timeout: float) -> str:
        """How the process ended, with the last that it printed."""
        if self._process is None:
            return f"the build process {sys.executable} cannot be started: {self._start_error}"
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


#: The processes that have not been closed.
running: set[Child] = set()
_exiting = False


def is_exiting() -> bool:
    """Whether the program ends, and builds with it."""
    return _exiting


def _end_all() -> None:
    """A build that nobody waits for must not outlive the program."""
    global _exiting
    _exiting = True
    for child in tuple(running):
        child.end()


atexit.register(_end_all)
os.register_at_fork(after_in_child=running.clear)

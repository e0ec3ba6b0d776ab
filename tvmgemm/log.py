"""The package's one logger, ``logging.getLogger("tvmgemm")``, and warnings that are given once.

``TVMGEMM_LOG`` (or ``options(log=...)``) sends records of that level and above to stderr. Without it, records
go where the program's own logging configuration sends them. The ``logging`` module is imported only when
somebody can see a record: it costs milliseconds, and a process that merely finds its kernels in the store has
none to spare.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

LEVELS = ("debug", "info", "warning", "error")

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_handler = None
_warned: set[str] = set()
_thread = threading.local()


def logger():
    """The logger, made quiet: without a handler of its own, Python would print its warnings to stderr."""
    import logging

    tvmgemm = logging.getLogger("tvmgemm")
    if not tvmgemm.handlers:
        tvmgemm.addHandler(logging.NullHandler())
    return tvmgemm


def set_level(level: str | None) -> None:
    """Print records of ``level`` (one of ``LEVELS``) and above on stderr; None stops that."""
    global _handler
    if _handler is not None:
        logger().removeHandler(_handler)
        logger().setLevel("NOTSET")
        _handler = None
    if level is not None:
        import logging

        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter("tvmgemm[%(process)d] %(levelname)s: %(message)s"))
        logger().addHandler(_handler)
        logger().setLevel(level.upper())


def enabled() -> bool:
    """Whether anybody can see a record: our handler is on, or the program has imported ``logging`` itself."""
    return _handler is not None or "logging" in sys.modules


def debug(message: str, *args) -> None:
    """Log a detail of a decision. ``args`` go into ``message`` by ``%``, if anybody reads it."""
    _log("debug", message, args)


def info(message: str, *args) -> None:
    """Log an event that happens a few times per process: a kernel built, a kernel found in the store."""
    _log("info", message, args)


def warning(message: str, *args) -> None:
    """Log what went wrong and was worked around."""
    _log("warning", message, args)


def warn_once(key: str, message: str) -> None:
    """Give ``message`` as a RuntimeWarning once per process and ``key``, and log it. Never raises.

    The warning names the caller's line, not ours. Under ``-W error`` it would become an exception in the
    middle of a product that NumPy can still compute: it is logged instead.
    """
    held = getattr(_thread, "held", None)
    if held is not None:
        held.append((key, message))
        return
    if key in _warned:
        return
    _warned.add(key)
    _log("warning", message, ())
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=_callers_depth())
    except Exception as error:
        _log("error", "warning raised as an exception: %s", (error,))


@contextmanager
def held_back(held: list[tuple[str, str]]) -> Iterator[None]:
    """For a thread of ours, which no line of the program called: ``warn_once`` adds to ``held`` what is to be given elsewhere."""
    _thread.held = held
    try:
        yield
    finally:
        _thread.held = None


def give(held: list[tuple[str, str]]) -> None:
    """Give the warnings that were held back, and empty the list."""
    while held:
        warn_once(*held.pop(0))


def _log(level: str, message: str, args: tuple) -> None:
    if enabled():
        getattr(logger(), level)(message, *args)


def _callers_depth() -> int:
    """The ``stacklevel``, as seen from ``warn_once``, of the innermost frame outside this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            depth += 1
        elif not file.startswith("<frozen importlib"):  # which warnings.warn does not count either
            break
        frame = frame.f_back
    return depth

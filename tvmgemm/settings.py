"""What a user can set, as environment variables and as keywords of ``tvmgemm.options``.

The fields of ``Options`` are the table: one row gives a setting's name, its environment variable
(``TVMGEMM_`` and the name in capitals), its default, its check and its meaning. A value given in code wins
over the environment, which is read once, when the package is imported. Settings hold for the whole process,
all threads.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import WeakSet

from . import log
from .forks import importing

if TYPE_CHECKING:
    from typing_extensions import Unpack  # that of typing from Python 3.11 on

    from .keywords import Keywords

ENVIRONMENT_PREFIX = "TVMGEMM_"
MAX_THREADS = 1024


@dataclass(frozen=True)
class Kind:
    """What values a setting takes. ``check`` returns the value to keep, or raises ValueError or TypeError
    whose text continues the sentence ``name=value ...``; ``read`` turns the text of an environment variable
    into such a value."""

    check: Callable[[object], Any]
    read: Callable[[str], Any] = str


def one_of(names: Callable[[], Iterable[str]]) -> Kind:
    """One of a set of names. ``names`` is called when a value is checked: the table may load late."""

    def check(value: object) -> str:
        accepted = tuple(names())
        if not isinstance(value, str):
            raise TypeError(f"is of type {type(value).__name__}; accepted: {', '.join(map(repr, accepted))}")
        if value not in accepted:
            raise ValueError(f"is not one of {', '.join(accepted)}")
        return value

    return Kind(check)


def whole_number(low: int, high: int) -> Kind:
    """A whole number from ``low`` to ``high``, both included."""
    accepted = f"a whole number from {low} to {high}"

    def read(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"is not {accepted}") from None

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, SupportsIndex):
            raise TypeError(f"is of type {type(value).__name__}; accepted: {accepted}")
        number = operator.index(value)
        if not low <= number <= high:
            raise ValueError(f"is not {accepted}")
        return number

    return Kind(check, read)


def _check_folder(value: object) -> str:
    accepted = "the path of a folder (it is made when it does not exist)"
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"is of type {type(value).__name__}; accepted: {accepted}")
    path = os.fsdecode(value)
    if not path or "\0" in path:
        raise ValueError(f"is not {accepted}")
    try:
        return os.path.abspath(os.path.expanduser(path))
    except OSError:  # a relative path, and the current folder was removed
        raise ValueError("is not an absolute path, and there is no current folder") from None


FOLDER = Kind(_check_folder)


def _check_tile(value: object) -> str:
    accepted = "rows x columns of a micro-tile, as in 14x32"
    if not isinstance(value, str):
        raise TypeError(f"is of type {type(value).__name__}; accepted: {accepted}")
    rows, _, columns = value.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise ValueError(f"is not {accepted}")
    return f"{int(rows)}x{int(columns)}"


TILE = Kind(_check_tile)


def _variant_names() -> tuple[str, ...]:
    from .family.variants import VARIANTS

    return ("auto", "numpy", *VARIANTS)


def _isa_names() -> tuple[str, ...]:
    from .family.isa import ISAS

    return tuple(ISAS)


def _arithmetic_names() -> tuple[str, ...]:
    from .family.arithmetic import ARITHMETICS

    return tuple(ARITHMETICS)


def _setting(default: str | int | None, kind: Kind, help: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help})


@dataclass(frozen=True)
class Options:
    """The settings in force, immutable. ``None`` means what the row's text says."""

    variant: str = _setting(
        "auto",
        one_of(_variant_names),
        "the variant that computes; 'auto': the planner chooses, 'numpy': NumPy computes",
    )
    max_isa: str | None = _setting(
        None, one_of(_isa_names), "the widest instruction set for kernels; None: the widest that the CPU has"
    )
    num_threads: int | None = _setting(
        None, whole_number(1, MAX_THREADS), "threads of one product; None: the cores this process may use"
    )
    jit: str = _setting(
        "sync",
        one_of(lambda: ("sync", "background", "off")),
        "'sync' builds a missing kernel and waits, 'background' builds it while NumPy computes, 'off'"
        " builds none",
    )
    specialise: str = _setting(
        "on",
        one_of(lambda: ("on", "off")),
        "'on' builds kernels for single small shapes in the background once a shape is hot, and uses those that there are",
    )
    cache_dir: str | None = _setting(None, FOLDER, "folder of built kernels; None: the user's cache folder")
    microkernel: str | None = _setting(
        None, TILE, "the micro-tile, rows x columns of the variant's resident operand, as in 14x32; None: the planner's"
    )
    packing: str | None = _setting(
        None,
        one_of(lambda: ("ab", "ac", "bc", "a", "b", "c", "none")),
        "which operands are packed: of those that the variant packs; None: the planner's choice",
    )
    parallel_loop: str | None = _setting(
        None,
        one_of(lambda: ("ic", "jc", "pc", "stack", "none")),
        "the loop that threads share out, 'stack' among them, or 'none' for one thread; None: the planner's choice",
    )
    arithmetic: str | None = _setting(
        None,
        one_of(_arithmetic_names),
        "how products are summed, of the ways that dtype and instruction set have (docs/family.md); None: the planner's",
    )
    tuned: str = _setting(
        "on",
        one_of(lambda: ("on", "off")),
        "whether the planner uses what python -m tvmgemm tune has measured on this machine",
    )
    log: str | None = _setting(
        None, one_of(lambda: log.LEVELS), "print log records from this level on to stderr; None: print none"
    )

    @property
    def threads(self) -> int:
        """``num_threads``, or the cores this process may use."""
        if self.num_threads is not None:
            return self.num_threads
        with importing:
            from .host import host

        return host().cores


SETTINGS = {row.name: row for row in fields(Options)}


def environment_name(name: str) -> str:
    """The environment variable of a setting: ``num_threads`` -> ``TVMGEMM_NUM_THREADS``."""
    return ENVIRONMENT_PREFIX + name.upper()


def read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings that ``environ`` gives. A bad one is warned about once and ignored; "" is unset."""
    values = {}
    for name, row in SETTINGS.items():
        variable, kind = environment_name(name), row.metadata["kind"]
        text = environ.get(variable, "").strip()
        if not text:
            continue
        try:
            values[name] = kind.check(kind.read(text))
        except (TypeError, ValueError) as error:
            ignored = f"It is ignored: {name} stays {row.default!r}."
            log.warn_once(variable, f"{variable}={text!r} {error}. {ignored}")
    return values


_lock = threading.RLock()
_serials = itertools.count()
_environment: dict[str, Any] = {}
_in_code: dict[str, Any] = {}
_entered: list[options] = []
_made: WeakSet[options] = WeakSet()  # they hold and are not entered yet, or never will be
_callbacks: list[Callable[[Options], None]] = []
_current = Options()


def current() -> Options:
    """The settings in force now: defaults, over them the environment, over it what was set in code."""
    return _current


def sources() -> dict[str, str]:
    """Where each setting comes from: ``code``, the name of its environment variable, or ``default``."""
    with _lock:
        variables = {name: environment_name(name) for name in _environment}
        return {**dict.fromkeys(SETTINGS, "default"), **variables, **dict.fromkeys(_in_code, "code")}


def on_change(callback: Callable[[Options], None]) -> None:
    """Call ``callback(new options)`` after every change, in the thread that makes it, one at a time."""
    with _lock:
        _callbacks.append(callback)


class options:
    """Change settings: ``options(num_threads=2)`` for good, ``with options(num_threads=2): ...`` for a block.

    The keywords take effect when the object is made. At the end of a ``with`` block, the keywords that this
    object set, and no others, go back to what they were. ``None`` puts a keyword back to its environment
    variable, or else to its default. Settings belong to the process: another thread sees them too. Printing
    ``options()`` shows all of them, with where each comes from.

    Raises TypeError for an unknown keyword or a value of the wrong type, ValueError for a value that is not
    accepted; then nothing is changed.

    Examples
    --------
    >>> import numpy as np, tvmgemm
    >>> a = np.ones((40, 40), np.float32)
    >>> with tvmgemm.options(variant="numpy"):
    ...     tvmgemm.explain(a, a).served
    False
    >>> with tvmgemm.options(variant="C3A2B0", num_threads=1):
    ...     tvmgemm.explain(a, a).variant
    'C3A2B0'
    """

    def __init__(self, **keywords: Unpack[Keywords]) -> None:
        self._values = {name: _checked(name, value) for name, value in keywords.items()}
        self._apply()

    def _apply(self) -> None:
        with _lock:
            self._serial = next(_serials)
            self._earlier = {name: _in_code.get(name) for name in self._values}
            self._applied = True
            self._thread = threading.get_ident()
            _made.add(self)
            _change(self._values)

    def __enter__(self) -> options:
        with _lock:
            if self in _entered:
                raise RuntimeError("these options are already entered; make new ones for a nested block")
            if not self._applied:
                self._apply()
            _made.discard(self)
            _entered.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _entered.remove(self)
            self._applied = False
            restored = {}
            blocks = [*_entered, *(o for o in _made if o._thread != threading.get_ident())]  # others are about to enter theirs
            for name, earlier in self._earlier.items():
                later = [o for o in blocks if o._serial > self._serial and name in o._earlier]
                if later:  # blocks of two threads end in any order: hand what we found to the survivor
                    min(later, key=lambda o: o._serial)._earlier[name] = earlier
                else:
                    restored[name] = earlier
            _change(restored)

    def __repr__(self) -> str:
        with _lock:
            now, origins = _current, sources()
        return "\n".join(
            f"{name}={getattr(now, name)!r}  # {source}; {SETTINGS[name].metadata['help']}"
            for name, source in origins.items()
        )


def _checked(name: str, value: object) -> object:
    row = SETTINGS.get(name)
    if row is None:
        raise TypeError(f"options() has no keyword {name!r}; accepted: {', '.join(SETTINGS)}")
    if value is None:
        return None
    try:
        with importing:  # names of variants and such
            return row.metadata["kind"].check(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}={value!r} {error}") from None


def _change(values: Mapping[str, object]) -> None:
    """Merge ``values`` into what was set in code (None removes); tell those who asked. The lock is held."""
    global _current
    for name, value in values.items():
        if value is None:
            _in_code.pop(name, None)
        else:
            _in_code[name] = value
    earlier, _current = _current, Options(**{**_environment, **_in_code})
    if _current.log != earlier.log:
        log.set_level(_current.log)
    if _current != earlier:
        for callback in tuple(_callbacks):
            callback(_current)


def _after_fork_in_child() -> None:
    """Another thread may have held the lock when the process forked, and that thread is not in the child."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)
_environment.update(read_environment(os.environ))
_change({})

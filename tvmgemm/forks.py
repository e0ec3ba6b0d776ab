"""What would hold one of Python's own locks when another thread forks: the child would wait for it for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_Value = TypeVar("_Value")

#: Held while modules are imported that a call turned out to need, for Python locks each of them meanwhile. Forks wait for it.
importing = threading.RLock()

os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release)


class once(Generic[_Value]):  # in lower case like functools.cached_property, and used like it
    """``functools.cached_property`` without the lock that Python before 3.12 holds while it computes. Two threads may
    compute a value twice."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> once[_Value]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _Value: ...

    def __get__(self, instance: object, owner: type | None = None) -> once[_Value] | _Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)  # which is found before this is asked again
        return value

"""Forks: what a forked process may still use of the process that it was forked from.

A fork copies the memory and one thread. A pool without its threads, a lock that another thread held, or a connection
that both processes use would block the child for ever, or damage what it is connected to.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvrag.errors import SettingError

T = TypeVar("T")

_living: weakref.WeakSet[OfProcess] = weakref.WeakSet()


def refuse(what: str) -> SettingError:
    """Return the error for the use of something in a forked process."""
    return SettingError(
        f"{what} was in use when this process was forked: create the engine after the fork only, or close it before; "
        'or start processes with multiprocessing\'s "spawn"'
    )


def check_process(process: int, what: str) -> None:
    """Raise SettingError if this is not the process with that id."""
    if process != os.getpid():
        raise refuse(what)


def per_process(create: Callable[[], T]) -> Callable[[], T]:
    """Return a function that returns what `create` has returned, which is called again in every forked process."""
    value = create()

    def renew() -> None:
        nonlocal value
        value = create()

    os.register_at_fork(after_in_child=renew)
    return lambda: value


class OfProcess:
    """Base of what only the process that created it can use. In a forked process, every use raises SettingError."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Create it, and notice forks."""
        created = super().__new__(cls)
        _living.add(created)
        return created

    def _after_fork(self) -> None:
        """Give up the content, in the child."""
        _living.discard(self)
        keep_for_ever(content := dict(vars(self)))
        vars(self).clear()
        vars(self)["_given_up"] = content

    if not TYPE_CHECKING:  # with it, every attribute would exist for type checkers

        def __getattr__(self, name: str) -> Any:
            if "_given_up" in vars(self):
                raise refuse(f"this {type(self).__name__}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class HeldBriefly(OfProcess):
    """A lock. A forked process can use it, and what it guards, unless another thread held it at that time."""

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _after_fork(self) -> None:
        if self._lock.locked():
            super()._after_fork()


def keep_for_ever(thing: object) -> None:
    """Never free an object, not even at the end of the process: that would close files or connections of another."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _after_fork() -> None:
    for thing in list(_living):
        thing._after_fork()


os.register_at_fork(after_in_child=_after_fork)

"""What belongs to a process: what a forked one may still use, its OpenMP threads, and running out of memory.

A fork copies the memory and one thread. A pool without its threads, a lock that another thread held, or a connection
that both processes use would block the child for ever, or damage what it is connected to.

Every thread that runs a parallel operation of torch on the CPU gets a team of OpenMP threads, and keeps it. As soon as
a process has more of them than processors, libgomp no longer lets them spin between two operations: they sleep, and
waking them takes as long as many operations of a small model. Blending in one thread took 1.8 times as long because
another thread had loaded the model.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from kvrag.errors import OutOfMemoryError, SettingError, first_line, out_of_memory

T = TypeVar("T")

_living: weakref.WeakSet[OfProcess] = weakref.WeakSet()


def refuse(what: str) -> SettingError:
    """Return the error for the use of something in a forked process."""
    return SettingError(
        f"{what} was in use when this process was forked: create the engine after the fork only, or close it before; "
        'or start processes with multiprocessing\'s "spawn"'
    )


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


class Shared(OfProcess, Generic[T]):
    """Instances by key, shared while in use. Threads that need the same one at the same time create it once.

    A forked process has none.
    """

    def __init__(self) -> None:
        self._instances: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._locks: dict[str, Lock] = {}

    def _after_fork(self) -> None:
        self.__init__()  # type: ignore[misc]

    def find(self, key: str) -> T | None:
        """Return the instance of a key, if there is one."""
        return self._instances.get(key)

    def get(self, key: str, create: Callable[[], T], is_usable: Callable[[T], bool] = lambda instance: True) -> T:
        """Return the instance of a key; create one if there is none that is usable."""
        with self._locks.setdefault(key, Lock()):
            instance = self._instances.get(key)
            if instance is None or not is_usable(instance):
                instance = self._instances[key] = create()
        return instance


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


_SOFT = 1  # omp_pause_soft


@contextmanager
def own_team() -> Iterator[None]:
    """Release the calling thread's OpenMP threads at the end; also a decorator."""
    try:
        yield
    finally:
        if not sys.is_finalizing():
            release_team()


def release_team() -> None:
    """End the OpenMP threads of the calling thread; its next parallel operation starts new ones."""
    if (release := _release()) is not None:
        release()


def _before_fork() -> None:
    if "torch" in sys.modules:
        release_team()  # the child would wait for them for ever


os.register_at_fork(before=_before_fork)


@functools.cache
def _release() -> Callable[[], object] | None:
    """Return a function that ends the calling thread's team; None without libgomp, which alone needs it."""
    import torch

    no_load = getattr(os, "RTLD_NOLOAD", None)
    if no_load is None:
        return None
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with suppress(OSError, AttributeError):  # a library that is not loaded, or older than OpenMP 5.0
            library = ctypes.CDLL(str(path), mode=no_load)
            return functools.partial(library.omp_pause_resource, _SOFT, library.omp_get_initial_device())
    return None


@contextmanager
def reporting_memory() -> Iterator[None]:
    """Raise OutOfMemoryError if memory runs out within."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        reason = (first_line(error) or type(error).__name__)[:160]
        error.__traceback__ = None  # its frames would keep the tensors of the failed pass
        raise OutOfMemoryError(
            "memory ran out: use a shorter prompt, fewer or shorter chunks, a smaller dtype or a smaller "
            f"conversation_bytes or ram_bytes ({reason})"
        ) from error

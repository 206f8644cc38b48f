"""Sharing between threads: a fair lock, so that concurrent answers advance together, and instances made only once."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from kvrag.openmp import release_team

T = TypeVar("T")

_SHARE = 2.0  # of all other threads together, relative to those in `FairLock.first`


class FairLock:
    """A mutex that serves waiting threads in order of arrival, with a share for those that enter by `first`."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._first: deque[threading.Event] = deque()
        self._first_at = 0.0
        self._held = False
        self._own = threading.local()

    @property
    def waits(self) -> int:
        """Number of waits of the calling thread: durations measured meanwhile include other threads' work."""
        return getattr(self._own, "waits", 0)

    @property
    def held(self) -> bool:
        """True if the calling thread holds the lock."""
        return getattr(self._own, "held", False)

    @property
    def is_wanted_first(self) -> bool:
        """True if it is the turn of a thread that waits in `first`."""
        return bool(self._first) and time.perf_counter() >= self._first_at

    @contextmanager
    def first(self) -> Iterator[None]:
        """Hold the lock, before all other threads that wait once these had it for `_SHARE` times as long as this."""
        self._acquire(self._first)
        self._own.held, started = True, time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._first_at = now + _SHARE * (now - started)
            self.__exit__()

    @contextmanager
    def released(self, goes_on: bool = False) -> Iterator[None]:
        """Release the lock temporarily while holding it, so that other threads can run.

        Args:
            goes_on: Get it back before the threads that wait in order of arrival.
        """
        self.__exit__()
        try:
            yield
        finally:
            self._acquire(self._waiting, at_front=goes_on)
            self._own.held = True

    def __enter__(self) -> None:
        self._acquire(self._waiting)
        self._own.held = True

    def __exit__(self, *_: object) -> None:
        if self.held:  # not held after an interrupt within `released`
            self._own.held = False
            self._release()

    def _acquire(self, line: deque[threading.Event], at_front: bool = False) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            line.insert(0 if at_front else len(line), turn)
        self._own.waits = self.waits + 1
        try:
            turn.wait()
        except BaseException:  # Ctrl-C: otherwise the lock would be handed to a thread that no longer waits
            with self._mutex:
                if not turn.is_set():
                    line.remove(turn)
                    raise
            self._release()
            raise

    def _release(self) -> None:
        with self._mutex:
            if line := self._first if self.is_wanted_first else self._waiting or self._first:
                release_team()
                line.popleft().set()  # handed over: stays held
            else:
                self._held = False


class Shared(Generic[T]):
    """Instances by key; each is made once, also by several threads at the same time, and shared while it is in use."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._making: dict[str, threading.Lock] = {}

    def made(self, key: str) -> T | None:
        """Return the instance of a key, if there is one."""
        return self._made.get(key)

    def get(self, key: str, make: Callable[[], T], is_usable: Callable[[T], bool] = lambda made: True) -> T:
        """Return the instance of a key; make one if there is none that is usable."""
        with self._making.setdefault(key, threading.Lock()):
            made = self._made.get(key)
            if made is None or not is_usable(made):
                made = self._made[key] = make()
        return made

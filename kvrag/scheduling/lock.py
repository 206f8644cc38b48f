"""Sharing between threads: a fair lock, with which concurrent answers advance together, and shared instances."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

from kvrag.errors import AbandonedError
from kvrag.forking import OfProcess
from kvrag.openmp import release_team

T = TypeVar("T")

is_left: ContextVar[Callable[[], bool]] = ContextVar("is_left", default=lambda: False)
"""Function that returns whether the consumer of this context has left: work on its answer ends then."""

POLL_S = 0.1  # between two calls of `check_left`, since leaving wakes nobody
_SHARE = 2.0  # of all other threads together, relative to those in `FairLock.first`


def check_left() -> None:
    """Raise AbandonedError if the consumer of this context has left."""
    if is_left.get()():
        raise AbandonedError("the work was abandoned, because its consumer has left")


class FairLock(OfProcess):
    """A mutex that serves waiting threads in order of arrival, with a share for those that enter by `first`.

    A forked process can use it, unless it was held at that time.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._first: deque[threading.Event] = deque()
        self._first_at = 0.0
        self._held = False
        self._of_thread = threading.local()

    def _after_fork(self) -> None:
        super()._after_fork() if self._held else self.__init__()  # type: ignore[misc]

    @property
    def waits(self) -> int:
        """Number of waits of the calling thread: durations measured meanwhile include other threads' work."""
        return getattr(self._of_thread, "waits", 0)

    @property
    def held(self) -> bool:
        """True if the calling thread holds the lock."""
        return getattr(self._of_thread, "held", False)

    @property
    def is_wanted_first(self) -> bool:
        """True if it is the turn of a thread that waits in `first`."""
        return bool(self._first) and time.perf_counter() >= self._first_at

    @contextmanager
    def first(self) -> Iterator[None]:
        """Hold the lock; takes precedence once the others had it for `_SHARE` times as long as it was last held so."""
        self._acquire(self._first)
        started = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            self._first_at = now + _SHARE * (now - started)
            self.__exit__()

    @contextmanager
    def released(self, at_front: bool = False) -> Iterator[None]:
        """Let other threads run while this one holds the lock; `at_front`: all but those in `first` wait longer."""
        self.__exit__()
        try:
            yield
        finally:
            self._acquire(self._waiting, at_front)

    def __enter__(self) -> None:
        self._acquire(self._waiting, may_leave=True)  # not within a pass, nor for a step of several answers

    def __exit__(self, *_: object) -> None:
        if self.held:  # not held after an interrupt within `released`
            self._of_thread.held = False
            self._release()

    def _acquire(self, queue: deque[threading.Event], at_front: bool = False, may_leave: bool = False) -> None:
        turn = threading.Event()
        with self._mutex:
            is_free, self._held = not self._held, True
            if not is_free:
                queue.insert(0 if at_front else len(queue), turn)
        if not is_free:
            self._of_thread.waits = self.waits + 1
            self._wait(turn, queue, may_leave)
        self._of_thread.held = True

    def _wait(self, turn: threading.Event, queue: deque[threading.Event], may_leave: bool) -> None:
        try:
            while not turn.wait(POLL_S if may_leave else None):
                check_left()
        except BaseException:  # or Ctrl-C: otherwise the lock would be handed to a thread that no longer waits
            with self._mutex:
                if not turn.is_set():
                    queue.remove(turn)
                    raise
            self._release()
            raise

    def _release(self) -> None:
        with self._mutex:
            if queue := self._first if self.is_wanted_first else self._waiting or self._first:
                release_team()
                queue.popleft().set()  # handed over: stays held
            else:
                self._held = False


class Shared(OfProcess, Generic[T]):
    """Instances by key, shared while in use. Threads that need the same one at the same time create it once.

    A forked process has none.
    """

    def __init__(self) -> None:
        self._instances: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()
        self._locks: dict[str, threading.Lock] = {}

    def _after_fork(self) -> None:
        self.__init__()  # type: ignore[misc]

    def find(self, key: str) -> T | None:
        """Return the instance of a key, if there is one."""
        return self._instances.get(key)

    def get(self, key: str, create: Callable[[], T], is_usable: Callable[[T], bool] = lambda instance: True) -> T:
        """Return the instance of a key; create one if there is none that is usable."""
        with self._locks.setdefault(key, threading.Lock()):
            instance = self._instances.get(key)
            if instance is None or not is_usable(instance):
                instance = self._instances[key] = create()
        return instance

"""Waiting for the model: a fair lock, the byte budget of answers in progress, and work that waits for idle time.

An answer begins when its KV fits into the budget (`Admission`). Prefills and decode steps take turns (`FairLock`). Work
on answered requests is done while no answer is in progress (`Idle`).
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvrag.errors import AbandonedError, AnswerTimeoutError
from kvrag.process import Background, check_process, release_team, releasing_threads
from kvrag.types import Delta

logger = logging.getLogger("kvrag")

T = TypeVar("T")

is_cancelled: ContextVar[Callable[[], bool]] = ContextVar("is_cancelled", default=lambda: False)
"""Function that returns whether the consumer of this context has left: work on its answer ends then."""

POLL_S = 0.1  # between two calls of `check_cancelled`, since leaving wakes nobody
_SHARE = 2.0  # of all other threads together, relative to those in `FairLock.first`
_WAITING = 8  # of a kind of work in idle time; the oldest is dropped for more
_ATTEMPTS = 3  # of work that answers interrupt


def check_cancelled() -> None:
    """Raise AbandonedError if the consumer of this context has left."""
    if is_cancelled.get()():
        raise AbandonedError("the work was abandoned, because its consumer has left")


def within(deltas: Generator[Delta, None, None], timeout: float) -> Generator[Delta, None, None]:
    """Yield the deltas; raise AnswerTimeoutError once the work on them has taken longer than `timeout` seconds."""
    late = AnswerTimeoutError(
        f"the answer took longer than its timeout of {timeout:g} s: raise timeout=, or lower max_tokens"
    )
    spent, started, caller_cancelled = 0.0, 0.0, is_cancelled.get()

    def is_late() -> bool:
        return caller_cancelled() or spent + time.perf_counter() - started > timeout

    with releasing_threads(), closing(deltas):
        while True:
            started = time.perf_counter()
            token = is_cancelled.set(is_late)  # the consumer's own work has no limit
            try:
                delta = next(deltas, None)
            except AbandonedError:
                if caller_cancelled():
                    raise
                raise late from None
            finally:
                is_cancelled.reset(token)
            spent += time.perf_counter() - started  # a slow consumer is not slow work
            started = math.inf  # other answers' steps may ask meanwhile
            if delta is None:
                return
            if spent > timeout and delta.finish_reason is None:
                raise late
            yield delta


class FairLock:
    """A mutex that serves waiting threads in order of arrival, with a share for those that enter by `first`.

    A forked process can use it, unless it was held at that time.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._first: deque[threading.Event] = deque()
        self._first_at = 0.0
        self._held = 0  # process of the thread that holds it, 0 = none
        self._of_thread = threading.local()

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

    def pause(self, suspended: Callable[[], AbstractContextManager[None]]) -> None:
        """Between two layers of a pass, end it if nobody waits for it, or let another thread's decode step run.

        Args:
            suspended: Returns the context in which another thread uses the model.
        """
        check_cancelled()
        if self.is_wanted_first:
            with suspended(), self.released(at_front=True):
                pass

    def __enter__(self) -> None:
        self._acquire(self._waiting, may_leave=True)  # not within a pass, nor for a step of several answers

    def __exit__(self, *_: object) -> None:
        if self.held:  # not held after an interrupt within `released`
            self._of_thread.held = False
            self._release()

    def _acquire(self, queue: deque[threading.Event], at_front: bool = False, may_leave: bool = False) -> None:
        turn = threading.Event()
        with self._mutex:
            if is_free := not self._held:
                self._held = os.getpid()
            else:
                check_process(self._held, "this model")
                queue.insert(0 if at_front else len(queue), turn)
        if not is_free:
            self._of_thread.waits = self.waits + 1
            self._wait(turn, queue, may_leave)
        self._of_thread.held = True

    def _wait(self, turn: threading.Event, queue: deque[threading.Event], may_leave: bool) -> None:
        try:
            while not turn.wait(POLL_S if may_leave else None):
                check_cancelled()
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
                self._held = 0


held: ContextVar[frozenset[Admitted]] = ContextVar("held", default=frozenset())
"""Answers of which this context, or the one that it is a copy of, has taken a delta."""


class Admitted:
    """An admitted answer.

    Attributes:
        is_working: Whether it goes on without its consumer, at least to its next delta.
    """

    def __init__(self, num_bytes: int, changed: threading.Condition) -> None:
        self.num_bytes, self._changed = num_bytes, changed
        self.is_working, self.is_over = True, False

    def pausing(self, deltas: Iterable[T]) -> Iterator[T]:
        """Yield its deltas; it pauses while its consumer has one."""
        for delta in deltas:
            self.pause()
            yield delta
            self.is_working = True

    def pause(self) -> None:
        """Note that it waits for its consumer, in whose context this is called."""
        self.is_working = False
        held.set(frozenset(other for other in held.get() if not other.is_over) | {self})
        with self._changed:
            self._changed.notify_all()


class Admission:
    """Admits answers in order of arrival while their KV fits into `max_bytes`, and always one. Thread-safe.

    A consumer that asks for an answer while it reads another one would wait for itself. For such a consumer, only the
    answers that are working count, and it does not wait in line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._admitted: dict[Admitted, None] = {}  # garbage collection may close an answer anywhere, even in here
        self._waiting: deque[Admitted] = deque()
        self._changed = threading.Condition()

    def is_busy(self) -> bool:
        """Return whether answers are in progress or wait."""
        return bool(self._admitted or self._waiting)

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[Admitted]:
        """Hold a place for an answer with KV of this size at full length. Raises AbandonedError if it is cancelled."""
        answer = Admitted(num_bytes, self._changed)
        with self._changed:
            self._waiting.append(answer)
            try:
                while not self._may_begin(answer):
                    check_cancelled()
                    self._changed.wait(POLL_S)
                self._admitted[answer] = None
            finally:
                self._waiting.remove(answer)
                self._changed.notify_all()
        try:
            yield answer
        finally:
            answer.is_over = True
            if not sys.is_finalizing():  # a thread that has ended may hold the lock
                with self._changed:
                    self._admitted.pop(answer)
                    self._changed.notify_all()

    def _may_begin(self, answer: Admitted) -> bool:
        others = tuple(self._admitted)
        if any(not (other.is_working or other.is_over) for other in held.get()):
            others = tuple(other for other in others if other.is_working)
        elif self._waiting[0] is not answer:
            return False
        return not others or sum(other.num_bytes for other in others) + answer.num_bytes <= self._max_bytes


class Forgettable(Protocol):
    """An answered request."""

    is_forgotten: bool  # a text in it was deleted


@dataclass(eq=False)
class _Task:
    request: Forgettable
    work: Callable[[], object]
    kind: str
    attempts: int = _ATTEMPTS


class Idle(Background):
    """Works on answered requests, one after the other, while no answer is in progress. Thread-safe.

    Work ends at its next `check_cancelled` once an answer begins, and is tried again later; or once a text of its
    request is deleted, or at the end.
    """

    def __init__(self, is_busy: Callable[[], bool], notice: Callable[[], None]) -> None:
        """Start without work.

        Args:
            is_busy: Returns whether answers are in progress.
            notice: Marks requests of which texts were removed from the store.
        """
        super().__init__("kvrag-idle", 2)  # one may just be ending, and would not see what is added
        self._is_busy, self._notice = is_busy, notice
        self._waiting: deque[_Task] = deque()
        self._lock = threading.Lock()

    def add(self, request: Forgettable, work: Callable[[], object], kind: str = "", most: int = _WAITING) -> bool:
        """Do this later; return whether nothing was dropped for it: of a kind, only the last `most` wait."""
        with self._lock:
            if self.is_over or request.is_forgotten:
                return True
            same = [task for task in self._waiting if task.kind == kind]
            if len(same) >= most:
                self._waiting.remove(same[0])
            self._waiting.append(_Task(request, work, kind))
            self.later(self._work_off)
            return len(same) < most

    def drop_forgotten(self) -> None:
        """Drop the work on requests with a text that has been deleted."""
        with self._lock:
            self._waiting = deque(task for task in self._waiting if not task.request.is_forgotten)

    def close(self, finish: bool = False) -> None:
        """End, also within what is being computed."""
        super().close(finish)
        with self._lock:
            self._waiting.clear()

    def _work_off(self) -> None:
        while self._waiting and not self.is_over:
            self.pause()
            with self._lock:
                task = self._waiting.popleft() if self._waiting and not self.is_over else None
            if task:
                self._do(task)
            del task  # the loop waits

    def pause(self) -> None:
        """Wait while answers are in progress, until the end at most; for work between two of its parts."""
        while self._is_busy() and not self.is_over:
            self.closed.wait(POLL_S)

    def _do(self, task: _Task) -> None:
        request = task.request
        is_cancelled.set(lambda: self.is_over or request.is_forgotten or self._is_busy())
        try:
            self._notice()
            if not request.is_forgotten:
                with releasing_threads():
                    task.work()
        except AbandonedError:
            task.attempts -= 1
            with self._lock:
                if task.attempts and not (self.is_over or request.is_forgotten):
                    self._waiting.appendleft(task)
        except Exception as error:  # no answer depends on it
            if not self.is_over:
                logger.info("work in idle time failed: %s", error)
        finally:
            is_cancelled.set(lambda: False)  # it holds the request

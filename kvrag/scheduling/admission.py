"""The byte budget of answers in progress, which bounds their KV."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvrag.config import check_bytes
from kvrag.forking import OfProcess
from kvrag.scheduling.lock import POLL_S, check_left

held: ContextVar[frozenset[Admitted]] = ContextVar("held", default=frozenset())
"""Answers of which this context, or the one that it is a copy of, has taken a delta."""


class Admitted:
    """An admitted answer. Its generator sets `is_working` to False while its consumer has a delta."""

    def __init__(self, num_bytes: int, changed: threading.Condition) -> None:
        self.num_bytes, self._changed = num_bytes, changed
        self._is_working, self.is_over = True, False

    @property
    def is_working(self) -> bool:
        """Whether it goes on without its consumer, at least to its next delta."""
        return self._is_working

    @is_working.setter
    def is_working(self, is_working: bool) -> None:
        self._is_working = is_working
        if not is_working:
            held.set(frozenset(other for other in held.get() if not other.is_over) | {self})
            with self._changed:
                self._changed.notify_all()


class Admission(OfProcess):
    """Admits answers in order of arrival while their KV fits into `max_bytes`, and always one. Thread-safe.

    A consumer that asks for an answer while it reads another one would wait for itself. For such a consumer, only the
    answers that are working count, and it does not wait in line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = check_bytes("batch_bytes", max_bytes)
        self._admitted: dict[Admitted, None] = {}  # garbage collection may close an answer anywhere, even in here
        self._waiting: deque[Admitted] = deque()
        self._changed = threading.Condition()

    def is_busy(self) -> bool:
        """Return whether answers are in progress or wait."""
        return bool(self._admitted or self._waiting)

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[Admitted]:
        """Hold a place for an answer with KV of this size at full length. Raises AbandonedError, see `check_left`."""
        answer = Admitted(num_bytes, self._changed)
        with self._changed:
            self._waiting.append(answer)
            try:
                while not self._may_begin(answer):
                    check_left()
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

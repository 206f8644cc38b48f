"""Admission of answers: bounds the KV of those in progress."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvrag.config import check_bytes
from kvrag.forking import OfProcess
from kvrag.scheduling.lock import check_left

_POLL_S = 0.1
_QUIET = 10  # polls without work on any admitted answer until the next one is admitted in any case


@dataclass(eq=False)
class Admitted:
    """An admitted answer. `is_working` is False while its consumer has a delta."""

    num_bytes: int
    is_working: bool = True


class Admission(OfProcess):
    """Admits answers in order of arrival while their KV fits into `max_bytes`, and always one. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = check_bytes("batch_bytes", max_bytes)
        self._admitted: dict[Admitted, None] = {}  # garbage collection may close an answer anywhere, even in here
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    def is_busy(self) -> bool:
        """Return whether answers are in progress or wait."""
        return bool(self._admitted or self._waiting)

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[Admitted]:
        """Hold a place for an answer with KV of this size at full length. Raises AbandonedError, see `check_left`.

        Waits at most until all admitted answers have waited for their consumers for a second: one of these consumers
        may be waiting here.
        """
        turn, answer = object(), Admitted(num_bytes)
        with self._changed:
            self._waiting.append(turn)
            try:
                quiet = 0
                while self._waiting[0] is not turn or not (self._fits(num_bytes) or quiet >= _QUIET):
                    check_left()
                    self._changed.wait(_POLL_S)
                    quiet = 0 if any(other.is_working for other in tuple(self._admitted)) else quiet + 1
                self._admitted[answer] = None
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        try:
            yield answer
        finally:
            if not sys.is_finalizing():  # a thread that has ended may hold the lock
                with self._changed:
                    self._admitted.pop(answer)
                    self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        total = sum(answer.num_bytes for answer in tuple(self._admitted))
        return not self._admitted or total + num_bytes <= self._max_bytes

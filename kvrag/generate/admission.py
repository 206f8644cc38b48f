"""Admission of answers: the KV of those in progress is bounded."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvrag.config import check_bytes
from kvrag.errors import KvragError

_POLL_S = 0.1
_QUIET = 10  # polls without work on any admitted answer, after which the next one is admitted in any case

is_left: ContextVar[Callable[[], bool]] = ContextVar("is_left", default=lambda: False)
"""Returns whether the consumer of this context has left, so that its answer need not begin."""


class Admitted:
    """An admitted answer.

    Attributes:
        is_working: The engine works on it; False while its consumer has a delta.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.is_working = num_bytes, True


class Admission:
    """Admits answers in order of arrival while their KV fits into a number of bytes; one always fits. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Create one without answers.

        Args:
            max_bytes: Maximum total size of the KV.
        """
        self._max_bytes = check_bytes("batch_bytes", max_bytes)
        self._admitted: dict[Admitted, None] = {}  # garbage collection may close an answer anywhere, even in here
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def admit(self, num_bytes: int) -> Iterator[Admitted]:
        """Wait until an answer with KV of this size at its full length fits, and hold its place.

        The wait ends in any case after a second in which all admitted answers only wait for their consumers: one of
        these may be the consumer that waits here.

        Raises:
            KvragError: `is_left` returned True.
        """
        turn, answer = object(), Admitted(num_bytes)
        with self._changed:
            self._waiting.append(turn)
            try:
                quiet = 0
                while self._waiting[0] is not turn or not (self._fits(num_bytes) or quiet >= _QUIET):
                    if is_left.get()():
                        raise KvragError("the answer was abandoned before it began")
                    self._changed.wait(_POLL_S)
                    quiet = 0 if any(each.is_working for each in tuple(self._admitted)) else quiet + 1
                self._admitted[answer] = None
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()
        try:
            yield answer
        finally:
            with self._changed:
                self._admitted.pop(answer)
                self._changed.notify_all()

    def _fits(self, num_bytes: int) -> bool:
        total = sum(each.num_bytes for each in tuple(self._admitted))
        return not self._admitted or total + num_bytes <= self._max_bytes

"""Idle time: work on answered requests while no answer is in progress."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvrag.errors import AbandonedError
from kvrag.process import Background, releasing_threads
from kvrag.scheduling.waiting import POLL_S, is_cancelled

logger = logging.getLogger("kvrag")

_WAITING = 8  # of a kind; the oldest is dropped for more
_ATTEMPTS = 3  # of work that answers interrupt


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
        super().__init__("kvrag-idle", 2)  # one may just be ending
        self._is_busy, self._notice = is_busy, notice
        self._waiting: deque[_Task] = deque()
        self._lock = threading.Lock()
        self._is_working = False

    def add(self, request: Forgettable, work: Callable[[], object], kind: str = "", most: int = _WAITING) -> bool:
        """Do this later; return whether nothing was dropped for it: of a kind, only the last `most` wait."""
        with self._lock:
            if self.is_over or request.is_forgotten:
                return True
            same = [task for task in self._waiting if task.kind == kind]
            if len(same) >= most:
                self._waiting.remove(same[0])
            self._waiting.append(_Task(request, work, kind))
            if not self._is_working:
                self._is_working = self.later(self._work_off)
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
        while task := self._next():
            self._do(task)
            del task  # the loop waits

    def _next(self) -> _Task | None:
        """Wait until no answer is in progress; return the next task, None without any."""
        if self._waiting:
            self.pause()
        with self._lock:
            if self.is_over or not self._waiting:
                self._is_working = False
                return None
            return self._waiting.popleft()

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

"""A lock that is fair, because answers generated side by side should advance side by side."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A mutex that serves waiting threads in order of arrival."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._held = False
        self._own = threading.local()

    @property
    def waits(self) -> int:
        """How often the calling thread had to wait: what it timed meanwhile is not its own."""
        return getattr(self._own, "waits", 0)

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        self._own.waits = self.waits + 1
        try:
            turn.wait()
        except BaseException:  # Ctrl-C: nobody would ever take this turn
            with self._mutex:
                if not turn.is_set():
                    self._waiting.remove(turn)
                    raise
            self._release()
            raise

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().set()  # handed over: stays held
            else:
                self._held = False

"""Thread that follows the log of a shared store, so that prompts are answered from a current copy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvrag.errors import StoreError

logger = logging.getLogger("kvrag")

_POLL_S = 0.5  # between looks at the log while there are prompts ...
_RETRY_S = 2.0  # ... and after a failure
_IDLE_S = 30.0  # without prompts until the thread pauses
_FRESH_S = 1.0  # prompts do not wait for a copy of at most this age
_WAIT_S = 1.0  # longest wait of a prompt for a current copy


class Follower:
    """Follows the log in a thread while there are prompts; or always, and then no prompt waits."""

    def __init__(self, pull: Callable[[], None], always: bool = False) -> None:
        self._pull, self._always = pull, always
        self._changed = threading.Condition()
        self._asked = self._current = self._waited = self._tried = float("-inf")
        self.is_failing = False
        self._closed, self._wanted = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvrag-follow", daemon=True)
        self._thread.start()

    def age(self) -> float:
        """Return the seconds since the copy was last known to be current."""
        return time.monotonic() - self._current

    def glance(self) -> None:
        """Ask for a current copy and wait briefly for it: not if it is fresh, and at most once a second."""
        if self._always:
            return
        now = time.monotonic()
        self._asked = now
        self._wanted.set()
        if now - self._current <= _FRESH_S or now - self._waited < _WAIT_S:
            return
        if self.is_failing and now - self._tried < 2 * _RETRY_S:
            return
        self._waited = now
        with self._changed:
            self._changed.wait_for(lambda: self._tried >= now or self._closed.is_set(), _WAIT_S)
        self._waited = time.monotonic()

    def pull_now(self) -> None:
        """Bring the copy up to date; raises StoreError."""
        started = time.monotonic()
        self._pull()
        self.confirm(started)

    def confirm(self, since: float) -> None:
        """Record that the copy was current at that time."""
        with self._changed:
            self._current = max(self._current, since)
            self._tried, self.is_failing = time.monotonic(), False
            self._changed.notify_all()

    def fail(self, error: StoreError) -> None:
        """Record that the remote cannot be reached."""
        with self._changed:
            if not self.is_failing:
                logger.warning("%s; prompts are answered from this machine's copy", error)
            self._tried, self.is_failing = time.monotonic(), True
            self._changed.notify_all()

    def _work(self) -> None:
        while not self._closed.is_set():
            if not self._always:
                self._wanted.wait()
                if time.monotonic() - self._asked > _IDLE_S:
                    self._wanted.clear()
                    continue
            try:
                self.pull_now()
            except StoreError as error:
                if not self._closed.is_set():
                    self.fail(error)
            self._closed.wait(_RETRY_S if self.is_failing else _POLL_S)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._wanted.set()
        self._thread.join()

"""Thread that follows the log of a shared store, so that prompts are answered from a current copy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvrag.errors import StoreError

logger = logging.getLogger("kvrag")

_POLL_S = 0.5  # between looks at the log ...
_RETRY_S = 2.0  # ... and after a failure


class Follower:
    """Follows the log in a thread. No prompt waits for it."""

    def __init__(self, pull: Callable[[], None]) -> None:
        self._pull, self._current = pull, float("-inf")
        self.is_failing = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kvrag-follow", daemon=True)
        self._thread.start()

    def age(self) -> float:
        """Return the seconds since the copy was last known to be current."""
        return time.monotonic() - self._current

    def pull_now(self) -> None:
        """Bring the copy up to date; raises StoreError."""
        started = time.monotonic()
        self._pull()
        self.confirm(started)

    def confirm(self, since: float) -> None:
        """Record that the copy was current at that time."""
        self._current = max(self._current, since)
        self.is_failing = False

    def fail(self, error: StoreError) -> None:
        """Record that the remote cannot be reached."""
        if not self.is_failing:
            logger.warning("%s; prompts are answered from this machine's copy", error)
        self.is_failing = True

    def _work(self) -> None:
        while not self._closed.wait(_RETRY_S if self.is_failing else _POLL_S):
            try:
                self.pull_now()
            except StoreError as error:
                if not self._closed.is_set():
                    self.fail(error)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

"""Shared decode steps: who runs the next one, and who waits for it. `kvrag.generate.decode` computes them.

There is no thread for it. A consumer that needs a token runs the next step for all rows, unless another consumer is
doing so already. Nothing is computed while no consumer waits.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Generic, Protocol, TypeVar

from kvrag.forking import OfProcess
from kvrag.openmp import release_team


class Member(Protocol):
    """An answer that takes part in steps."""

    @property
    def is_ready(self) -> bool:
        """True if its consumer need not wait for a step."""


R = TypeVar("R", bound=Member)


class Batch(OfProcess, ABC, Generic[R]):
    """The rows of one model that are decoded together. Thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[R, None] = {}  # in order of arrival; changed by single operations, which need no lock
        self._is_led = False
        self._changed = threading.Condition()

    @abstractmethod
    def step(self, leader: R) -> None:
        """Compute a step of all rows, for the consumer of one. Only one thread does so at a time."""

    def wait(self, row: R) -> None:
        """Return when the row is ready; run steps until it is, while no other consumer does."""
        self._rows[row] = None
        while not row.is_ready:
            leads = False
            try:
                with self._changed:
                    self._changed.wait_for(lambda: row.is_ready or not self._is_led)
                    if not row.is_ready:
                        leads = self._is_led = True
                if leads:
                    self.step(row)
            finally:
                if leads:
                    if len(self._rows) > 1:
                        release_team()  # another thread may run the next step
                    with self._changed:
                        self._is_led = False
                        self._changed.notify_all()

    def leave(self, row: R) -> None:
        """Remove a row. Takes no lock: garbage collection may close an abandoned answer in any thread."""
        self._rows.pop(row, None)

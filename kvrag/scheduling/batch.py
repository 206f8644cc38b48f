"""Shared decode steps: who runs the next one, and who waits for it. `kvrag.generate.decode` computes them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvrag.forking import OfProcess


class SharedSteps(OfProcess):
    """Steps that advance the answers of several consumers at once. Thread-safe.

    There is no thread for them. A consumer that needs a step runs it for all, unless another one is doing so already.
    Nothing is computed while no consumer waits.
    """

    def __init__(self) -> None:
        self._is_led = False
        self._changed = threading.Condition()

    def run_until(self, is_ready: Callable[[], bool], step: Callable[[], None]) -> None:
        """Return when the consumer's answer is ready; run steps until it is, while no other consumer does."""
        while not is_ready():
            leads = False
            try:
                with self._changed:
                    self._changed.wait_for(lambda: is_ready() or not self._is_led)
                    if not is_ready():
                        leads = self._is_led = True
                if leads:
                    step()
            finally:
                if leads:
                    with self._changed:
                        self._is_led = False
                        self._changed.notify_all()

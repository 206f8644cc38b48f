"""Trace: duration of each step of a request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvrag.backend.protocol import Backend


class Trace:
    """Seconds per step of one request: `seconds` with nested steps, `own_seconds` without.

    Steps: `match`, `select`, `blend` in this order; within `select` and `blend`, as layers are loaded while others are
    computed, `load_stall` (waiting for chunks) and `stitch` (rotation, and layout where the reading threads did not do
    it); `load` while at least one thread was reading chunks, mostly beside the others. `times` are the first start and
    the last end of each step that has run, on the clock of `time.perf_counter`. `cpu_seconds` = processor time of this
    thread, without nested steps.
    """

    def __init__(self, backend: Backend) -> None:
        self.seconds = dict.fromkeys(("match", "load", "load_stall", "stitch", "select", "blend"), 0.0)
        self.own_seconds, self.cpu_seconds = dict(self.seconds), dict(self.seconds)
        self.times: dict[str, tuple[float, float]] = {}
        self._inside = 0.0, 0.0  # seconds and processor time of the steps inside of the current one
        self._backend, self._waits = backend, backend.waits
        self._mutex = threading.Lock()
        self._readers, self._reading_since = 0, 0.0

    @contextmanager
    def step(self, name: str, synchronise: bool = True) -> Iterator[None]:
        """Add the duration of the block, including the device's work, to a step."""
        before, self._inside = self._inside, (0.0, 0.0)
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            if synchronise and self._backend.device.type == "cuda":
                torch.cuda.synchronize(self._backend.device)
            duration, cpu = self._add(name, started), time.thread_time() - cpu_started
            self.own_seconds[name] += duration - self._inside[0]
            self.cpu_seconds[name] += cpu - self._inside[1]
            self._inside = before[0] + duration, before[1] + cpu

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the block as reading; overlapping blocks of several threads count once. Thread-safe."""
        with self._mutex:
            if not self._readers:
                self._reading_since = time.perf_counter()
            self._readers += 1
        try:
            yield
        finally:
            with self._mutex:
                self._readers -= 1
                if not self._readers:
                    self._add("load", self._reading_since)

    def _add(self, name: str, started: float) -> float:
        stopped = time.perf_counter()
        self.seconds[name] += stopped - started
        self.times[name] = self.times.get(name, (started, stopped))[0], stopped
        return stopped - started

    @property
    def is_contended(self) -> bool:
        """True if this thread waited for other threads' forward passes, which its durations then include."""
        return self._backend.waits > self._waits

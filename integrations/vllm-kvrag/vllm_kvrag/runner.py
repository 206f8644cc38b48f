"""JobRunner: executes operations of concurrent jobs between the engine's own batches.

A job (one prompt to blend, or texts to encode) runs in its own thread, which plans and reads files. Everything that
uses the model or its pages is an operation that the worker's main thread executes in an engine step, oldest job first,
up to a number of rows per step. So a slow disk does not stall other requests, and a long prompt delays their decoding
no more than a step of chunked prefill.

With tensor parallelism, the job runs in every process. An operation is executed when it is due in all processes, so
that its collectives match.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger("vllm.kvrag")  # below vLLM's own logger, which has the handlers

T = TypeVar("T")

_THREADS = 8  # jobs that read and plan at the same time
_NEXT_WAIT_S = 0.002  # time that a step waits for the next operation of the job that it executed last
_IDLE_WAIT_S = 0.005  # time that a step without a batch waits for an operation
_CONTENDED_S = 0.01  # an operation that waited longer shared the model with other requests


class CancelledError(Exception):
    """The job's request was aborted, or the job failed in another process."""


@dataclass
class _Operation:
    work: Callable[[], Any]
    rows: int
    since: float = field(default_factory=time.perf_counter)
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except BaseException as error:
            self.error = error
            if not isinstance(error, Exception):  # such as KeyboardInterrupt: ends the process and the job
                raise
        finally:
            self.done.set()

    def refuse(self, error: BaseException) -> None:
        self.error = error
        self.done.set()


class Job:
    """One job. Its thread submits operations with `call`; the main thread executes them.

    Attributes:
        name: Id of the request.
        aborted: Whether the request was aborted.
        result: Return value of `work`.
        error: Exception that `work` raised.
        waits: Number of operations that waited for other requests.
    """

    def __init__(self, name: str, work: Callable[[Job], Any], runner: JobRunner) -> None:
        self.name = name
        self.result: Any = None
        self.error: BaseException | None = None
        self.waits = 0
        self._work, self._runner = work, runner
        self.pending: _Operation | None = None
        self.state = "busy"
        self.cancelled = False
        self.aborted = False

    def call(self, work: Callable[[], T], rows: int = 0) -> T:
        """Execute a function on the main thread, in one of the next steps.

        Args:
            rows: Number of rows that it computes.

        Raises:
            CancelledError: The job is over.
        """
        if self._runner.is_main():
            return work()
        operation = _Operation(work, rows)
        with self._runner.changed:
            if self._runner.is_closed:
                raise CancelledError("the engine stops")
            self.pending, self.state = operation, "ready"
            self._runner.changed.notify_all()
        operation.done.wait()
        if operation.error is not None:
            raise operation.error
        return operation.result

    def run(self) -> None:
        """Run the job, in its thread."""
        try:
            if self.cancelled:
                raise CancelledError(self.name)
            self.result = self._work(self)
        except BaseException as error:
            self.error = error
            if not isinstance(error, CancelledError):
                logger.exception("request %s could not be blended or encoded", self.name)
        with self._runner.changed:
            self.state = "failed" if self.error is not None else "done"
            self._runner.changed.notify_all()


class JobRunner:
    """Jobs of one worker, and their operations. The main thread calls `run` in every step."""

    def __init__(self, exchange: Callable[[Any], Sequence[Any]] | None = None) -> None:
        """Start without jobs.

        Args:
            exchange: Returns the values of all processes, in order of rank; None = there is one process.
        """
        self.changed = threading.Condition()
        self._exchange = exchange
        self._jobs: dict[str, Job] = {}  # oldest first
        self._main: int | None = None
        self.is_closed = False
        # a queue for the jobs that run alone, in the same order in all processes
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._single_queue: SimpleQueue[Job | None] = SimpleQueue()
        for number in range(_THREADS + 1):
            queue = self._queue if number else self._single_queue
            # daemons: a waiting job must not keep a dying process alive
            threading.Thread(target=_run_jobs, args=(queue,), name=f"kvrag-job-{number}", daemon=True).start()

    def start(self, name: str, work: Callable[[Job], Any], alone: bool = False) -> None:
        """Start a job.

        Args:
            alone: Only one such job runs at a time.
        """
        job = self._jobs[name] = Job(name, work, self)
        (self._single_queue if alone else self._queue).put(job)

    def cancel(self, name: str) -> None:
        """End the job of an aborted request at its next operation."""
        if job := self._jobs.get(name):
            job.cancelled = job.aborted = True

    def is_main(self) -> bool:
        """Return whether this thread is executing an operation now."""
        return threading.get_ident() == self._main

    def run(self, rows: int, is_idle: bool) -> list[Job]:
        """Execute due operations until a job is over or `rows` rows are computed; one operation always fits.

        A job that is over ends the step: its first token comes from vLLM's next batch.

        Args:
            is_idle: The engine has no batch in this step.

        Returns:
            The jobs that are over in all processes.
        """
        over: list[Job] = []
        if not self._jobs:
            return over
        self._main = threading.get_ident()
        try:
            num_rows, wait, job = 0, _IDLE_WAIT_S if is_idle else 0.0, None
            while (job := self._next(rows - num_rows, job, wait, over)) is not None:
                operation, job.pending, job.state = job.pending, None, "busy"
                assert operation is not None
                if time.perf_counter() - operation.since > _CONTENDED_S:
                    job.waits += 1
                operation.run()
                num_rows += operation.rows
                wait = _NEXT_WAIT_S
        finally:
            self._main = None
        return over

    def close(self) -> None:
        """End all jobs."""
        for job in self._jobs.values():
            job.cancelled = True
        with self.changed:
            self.is_closed = True
            pending = [job.pending for job in self._jobs.values() if job.pending is not None]
        for operation in pending:
            operation.refuse(CancelledError("the engine stops"))
        self._single_queue.put(None)
        for _ in range(_THREADS):
            self._queue.put(None)

    def _next(self, rows: int, last: Job | None, wait: float, over: list[Job]) -> Job | None:
        """Return the oldest job whose operation is due in all processes and fits; wait up to `wait` seconds for one.

        Waits for the step's last job even if others are due, because it may be over. All processes decide alike,
        because they decide on the exchanged states.
        """
        until = time.perf_counter() + wait
        while self._jobs:
            with self.changed:
                left = until - time.perf_counter()
                local = {job.name: (job.state, job.pending.rows if job.pending else 0) for job in self._jobs.values()}
            everywhere = self._exchange((local, left <= 0)) if self._exchange else ((local, left <= 0),)
            states = {name: [process[name] for process, _ in everywhere] for name in local}
            over += self._remove_over(states)
            if over:
                return None
            is_late = any(late for _, late in everywhere)
            if last is not None and last.name in self._jobs and "busy" in states[last.name] and not is_late:
                with self.changed:
                    if last.state == "busy":
                        self.changed.wait(max(left, 0))
                continue
            for name, job in self._jobs.items():
                if job.cancelled or any(state != "ready" for state, _ in states[name]):
                    continue
                fits = last is None or max(num_rows for _, num_rows in states[name]) <= rows
                return job if fits else None  # a younger job must not overtake it
            if is_late:
                return None
            with self.changed:
                if not any(job.state == "ready" for job in self._jobs.values()):
                    self.changed.wait(max(left, 0))
        return None

    def _remove_over(self, states: dict[str, list[tuple[str, int]]]) -> list[Job]:
        """Remove and return the jobs that are over in all processes; end those cancelled or over in one process."""
        over = []
        for name, job in list(self._jobs.items()):
            if all(state in ("done", "failed") for state, _ in states[name]):
                over.append(self._jobs.pop(name))
            elif job.cancelled or any(state in ("done", "failed") for state, _ in states[name]):
                job.cancelled = True  # if it is over in another process, its collectives have no counterpart there
                with self.changed:
                    operation, job.pending = job.pending, None
                    if operation is not None:
                        job.state = "busy"
                        operation.refuse(CancelledError(job.name))
        return over


def _run_jobs(jobs: SimpleQueue[Job | None]) -> None:
    """Run the jobs of a queue in order, until None."""
    while (job := jobs.get()) is not None:
        job.run()

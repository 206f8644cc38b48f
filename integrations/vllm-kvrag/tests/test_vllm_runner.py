"""JobRunner: order, budget, cancellation, failures, and two processes that make the same decisions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm_kvrag.runner import CancelledError, Job, JobRunner


class Pair:
    """An exchange between two threads in place of two processes."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(2, timeout=120)
        self._values: list[Any] = [None, None]

    def of(self, rank: int) -> Callable[[Any], list[Any]]:
        def exchange(value: Any) -> list[Any]:
            self._values[rank] = value
            self._meeting.wait()
            both = list(self._values)
            self._meeting.wait()
            return both

        return exchange


@pytest.fixture
def runner() -> Iterator[JobRunner]:
    each = JobRunner()
    yield each
    each.close()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def finish(runner: JobRunner, rows: int = 100, number: int = 1, steps: int = 3000) -> list[Job]:
    """Run steps until as many jobs are over."""
    over: list[Job] = []
    for _ in range(steps):
        over += runner.run(rows, is_idle=True)
        if len(over) >= number:
            return over
    raise AssertionError("a job does not end")


def is_ready(runner: JobRunner, *names: str) -> bool:
    return all(runner._jobs[name].state == "ready" for name in names)


def test_operations_run_on_the_main_thread_and_return_their_result(runner: JobRunner) -> None:
    runner.start("a", lambda job: [job.call(threading.get_ident), threading.get_ident()])
    (job,) = finish(runner)
    assert job.result[0] == threading.get_ident() != job.result[1]
    assert job.error is None


def test_an_operation_may_contain_another(runner: JobRunner) -> None:
    runner.start("a", lambda job: job.call(lambda: job.call(lambda: 7) + 1))
    assert finish(runner)[0].result == 8


def test_the_oldest_job_comes_first(runner: JobRunner) -> None:
    order: list[str] = []
    for name in "abc":
        runner.start(name, lambda job: job.call(lambda: order.append(job.name)))
    until(lambda: is_ready(runner, *"abc"))
    finish(runner, number=3)
    assert order == ["a", "b", "c"]


def test_a_step_computes_no_more_than_its_rows_but_at_least_one_operation(runner: JobRunner) -> None:
    done: list[str] = []
    for name in "abc":
        runner.start(name, lambda job: job.call(lambda: done.append(job.name), rows=60))
    until(lambda: is_ready(runner, *"abc"))
    runner.run(100, is_idle=False)
    assert done == ["a"]
    runner.run(10, is_idle=False)
    assert done == ["a", "b"]
    runner.run(0, is_idle=False)
    assert done == ["a", "b", "c"]


def test_a_job_that_reads_stalls_no_other_and_no_step(runner: JobRunner) -> None:
    disk = threading.Event()
    runner.start("slow", lambda job: disk.wait(120))
    runner.start("quick", lambda job: job.call(lambda: 1))
    assert [job.name for job in finish(runner)] == ["quick"]
    assert runner.run(100, is_idle=False) == []
    disk.set()
    assert [job.name for job in finish(runner)] == ["slow"]


def test_only_one_job_of_those_runs_at_a_time(runner: JobRunner) -> None:
    running: list[int] = []

    def work(job: Job) -> int:
        running.append(1)
        most = job.call(lambda: len(running))
        running.pop()
        return most

    for name in "abcd":
        runner.start(name, work, alone=True)
    assert [job.result for job in finish(runner, number=4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), OSError(28, "no space"), SystemExit(1)])
def test_a_job_that_fails_is_over_with_its_error(runner: JobRunner, error: BaseException) -> None:
    def work(job: Job) -> None:
        raise error

    runner.start("a", work)
    assert finish(runner)[0].error is error


def test_an_operation_that_fails_raises_in_the_job(runner: JobRunner) -> None:
    def work(job: Job) -> str:
        with pytest.raises(ZeroDivisionError):
            job.call(lambda: 1 / 0)
        return "went on"

    runner.start("a", work)
    assert finish(runner)[0].result == "went on"


def test_an_operation_that_ends_the_process_leaves_no_thread_behind(runner: JobRunner) -> None:
    """vLLM's workers raise SystemExit in the main thread when they get a signal."""

    def signal() -> None:
        raise SystemExit(15)

    runner.start("a", lambda job: job.call(signal))
    until(lambda: is_ready(runner, "a"))
    job = runner._jobs["a"]
    with pytest.raises(SystemExit):
        runner.run(100, is_idle=True)
    until(lambda: job.state == "failed")


@pytest.mark.parametrize("when", ["queued", "reading", "ready"])
def test_a_cancelled_job_ends_at_its_next_operation(runner: JobRunner, when: str) -> None:
    disk, done = threading.Event(), []

    def work(job: Job) -> None:
        if when == "reading":
            disk.wait(120)
        job.call(lambda: done.append(job.name))

    if when == "queued":
        runner.start("first", lambda job: disk.wait(120), alone=True)
    runner.start("a", work, alone=when == "queued")
    if when == "ready":
        until(lambda: is_ready(runner, "a"))
    runner.cancel("a")
    runner.run(100, is_idle=False)
    disk.set()
    over = {job.name: job for job in finish(runner, number=2 if when == "queued" else 1)}
    assert isinstance(over["a"].error, CancelledError)
    assert not done


def test_a_cancelled_job_can_clean_up(runner: JobRunner) -> None:
    def work(job: Job) -> None:
        try:
            job.call(lambda: None)
        finally:
            with pytest.raises(CancelledError):
                job.call(lambda: None)

    runner.start("a", work)
    until(lambda: is_ready(runner, "a"))
    runner.cancel("a")
    assert isinstance(finish(runner)[0].error, CancelledError)


def test_cancelling_an_unknown_job_does_nothing(runner: JobRunner) -> None:
    runner.cancel("nobody")
    assert runner.run(100, is_idle=True) == []


@pytest.mark.parametrize("when", ["queued", "reading", "ready"])
def test_no_thread_outlives_the_engine(when: str) -> None:
    before = set(threading.enumerate())
    runner = JobRunner()
    disk, began, ended = threading.Event(), threading.Event(), threading.Event()

    def work(job: Job) -> None:
        began.set()
        try:
            if when == "reading":
                disk.wait(120)
            job.call(lambda: None)
        finally:
            ended.set()

    if when == "queued":
        runner.start("first", lambda job: disk.wait(120), alone=True)
    runner.start("a", work, alone=when == "queued")
    if when == "ready":
        until(lambda: is_ready(runner, "a"))
    if when == "reading":
        until(began.is_set)
    runner.close()
    disk.set()
    until(lambda: set(threading.enumerate()) <= before)
    assert began.is_set() == ended.is_set() == (when != "queued"), "a queued job no longer begins"


class Two:
    """Two processes with the same jobs."""

    def __init__(self) -> None:
        pair = Pair()
        self.runner = [JobRunner(pair.of(0)), JobRunner(pair.of(1))]
        self.over: list[list[Job]] = [[], []]

    def start(self, name: str, *works: Callable[[Job], Any], alone: bool = False) -> None:
        for runner, work in zip(self.runner, works * (3 - len(works)), strict=True):
            runner.start(name, work, alone)

    def finish(self, rows: int = 100, number: int = 1, cancelled: str = "") -> list[list[Job]]:
        """Run the same steps in both."""
        steps = threading.Barrier(2, timeout=120)
        failures: list[BaseException] = []

        def main(rank: int) -> None:
            try:
                for step in range(2000):
                    if cancelled and step == 3:
                        self.runner[rank].cancel(cancelled)
                    self.over[rank] += self.runner[rank].run(rows, is_idle=True)
                    steps.wait()
                    if len(self.over[rank]) >= number:
                        return
                raise AssertionError("a job does not end")
            except BaseException as error:
                failures.append(error)
                steps.abort()

        threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for runner in self.runner:
            runner.close()
        assert not failures, failures
        assert [job.name for job in self.over[0]] == [job.name for job in self.over[1]]
        return self.over


def test_two_processes_execute_the_same_operations_in_the_same_order() -> None:
    two = Two()
    log: list[list[tuple[str, int]]] = [[], []]

    def work(rank: int) -> Callable[[Job], None]:
        def each(job: Job) -> None:
            for number in range(20):
                time.sleep(0.0007 * ((number * 7 + rank * 3 + ord(job.name)) % 5))  # they never read equally fast
                job.call(lambda number=number: log[rank].append((job.name, number)), rows=30)  # type: ignore[misc]

        return each

    for name in "abcdefghij":  # more than lanes
        two.start(name, work(0), work(1))
    two.finish(number=10)
    assert log[0] == log[1]
    assert len(log[0]) == 200


def test_a_job_that_fails_in_one_process_ends_in_the_other() -> None:
    def fails(job: Job) -> None:
        raise MemoryError

    two = Two()
    two.start("a", fails, lambda job: job.call(lambda: 1))
    (one,), (other,) = two.finish()
    assert isinstance(one.error, MemoryError)
    assert isinstance(other.error, CancelledError)


def test_a_job_that_ends_early_in_one_process_ends_in_the_other() -> None:
    """The other process refused the task: operations of this one have no counterpart there, and would wait forever."""
    two = Two()
    two.start("a", lambda job: {"error": "refused"}, lambda job: job.call(lambda: 1), alone=True)
    two.start("b", lambda job: job.call(lambda: 2), alone=True)
    over = two.finish(number=2)
    assert isinstance(over[1][0].error, CancelledError)
    assert over[0][1].result == over[1][1].result == 2


def test_a_job_is_cancelled_in_both_processes() -> None:
    def endless(job: Job) -> None:
        while True:
            job.call(lambda: time.sleep(0.001), rows=100)

    two = Two()
    two.start("a", endless)
    for jobs in two.finish(cancelled="a"):
        assert isinstance(jobs[0].error, CancelledError)

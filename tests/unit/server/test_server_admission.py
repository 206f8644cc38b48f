"""The admission queue: order, limits, disconnects, stopping."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing

import pytest
from fastapi.routing import APIRoute

from kvrag.scheduling.waiting import check_cancelled
from kvrag.server import app
from kvrag.server.api_errors import ApiError, describe
from kvrag.server.queue import AdmissionQueue


class Work:
    """Yields numbers on request, without end."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.made = 0
        self.again = threading.Event()  # set when a second piece has been asked for
        self.closed = threading.Event()

    def __call__(self) -> Generator[int, None, None]:
        try:
            while True:
                if self.made:
                    self.again.set()
                self.go.acquire()
                self.made += 1
                yield self.made
        finally:
            self.closed.set()


def three() -> Generator[int, None, None]:
    yield from (1, 2, 3)


def run(
    queue: AdmissionQueue, work: Callable[[], Generator[int, None, None]], limit: float, namespace: str = ""
) -> AsyncGenerator[int, None]:
    return queue.run(work, limit, namespace)


async def all_of(queue: AdmissionQueue, limit: float = 60) -> list[int]:
    return [piece async for piece in run(queue, three, limit)]


async def settled(queue: AdmissionQueue, running: int, waiting: int) -> None:
    for _ in range(6000):
        if (queue.running(""), queue.waiting("")) == (running, waiting):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{queue.running('')} admitted, {queue.waiting('')} waiting")


async def receive(received: list[int], queue: AdmissionQueue, work: Callable[[], Generator[int, None, None]]) -> None:
    async for piece in run(queue, work, 60):
        received.append(piece)


async def test_pieces_come_in_order_and_places_become_free() -> None:
    queue = AdmissionQueue(2, 8, "test")
    assert await asyncio.gather(*(all_of(queue) for _ in range(10))) == [[1, 2, 3]] * 10
    await settled(queue, 0, 0)


async def test_the_longest_waiting_comes_first_and_one_too_many_is_rejected() -> None:
    queue, work, order = AdmissionQueue(1, 2, "test"), Work(), []

    async def wait(name: str) -> None:
        await all_of(queue)
        order.append(name)

    async with aclosing(run(queue, work, 60)) as running:
        work.go.release()
        assert await anext(running) == 1
        waiting = []
        for number, name in enumerate("ab"):
            waiting.append(asyncio.create_task(wait(name)))
            await settled(queue, 1, number + 1)
        with pytest.raises(ApiError) as refused:
            await all_of(queue)
        assert describe(refused.value)[0] == 429
    work.go.release()
    await asyncio.gather(*waiting)
    assert order == ["a", "b"]


async def test_the_place_is_taken_until_the_current_step_is_over() -> None:
    queue, work = AdmissionQueue(1, 2, "test"), Work()
    running = run(queue, work, 60)
    work.go.release()
    assert await anext(running) == 1
    assert await asyncio.to_thread(work.again.wait, 30)
    await running.aclose()
    other = asyncio.create_task(all_of(queue))
    await settled(queue, 1, 1)  # the thread is still in its step
    assert not work.closed.is_set()
    work.go.release()
    assert await other == [1, 2, 3]
    assert work.closed.is_set()
    assert work.made == 2


async def test_closing_ends_a_long_step_at_its_next_check() -> None:
    queue, entered, ended = AdmissionQueue(1, 2, "test"), threading.Event(), threading.Event()

    def work() -> Generator[int, None, None]:
        entered.set()
        try:
            while not ended.wait(0.01):
                check_cancelled()
            yield 1
        finally:
            ended.set()

    step = asyncio.ensure_future(anext(running := run(queue, work, 60)))
    assert await asyncio.to_thread(entered.wait, 30)
    step.cancel()
    await asyncio.wait([step])
    await running.aclose()
    try:
        await settled(queue, 0, 0)
    finally:
        ended.set()


async def test_a_cancelled_request_leaves_no_trace() -> None:
    queue, work = AdmissionQueue(1, 2, "test"), Work()
    async with aclosing(run(queue, work, 60)) as running:
        work.go.release()
        await anext(running)
        waiting = asyncio.create_task(all_of(queue))
        await settled(queue, 1, 1)
        waiting.cancel()
        await settled(queue, 1, 0)
        with pytest.raises(ApiError) as late:
            await all_of(queue, limit=0.02)
        assert describe(late.value)[0] == 504
        assert (queue.running(""), queue.waiting("")) == (1, 0)
    work.go.release()
    await settled(queue, 0, 0)
    assert await all_of(queue) == [1, 2, 3]


async def test_work_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, work = AdmissionQueue(1, 0, "test"), Work()
    work.go.release()
    running = run(queue, work, 60)
    assert await anext(running) == 1
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + 61)
    with pytest.raises(ApiError) as late:
        await anext(running)
    assert describe(late.value)[0] == 504
    work.go.release()
    await settled(queue, 0, 0)
    assert work.closed.is_set()


async def test_an_error_of_the_work_is_raised_and_the_place_is_free() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise ValueError("broken")

    queue = AdmissionQueue(1, 0, "test")
    received: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        await receive(received, queue, broken)
    assert received == [1]
    await settled(queue, 0, 0)


async def test_stopping_finishes_running_work_and_starts_none() -> None:
    queue, work = AdmissionQueue(1, 4, "test"), Work()
    async with aclosing(run(queue, work, 60)) as running:
        work.go.release()
        await anext(running)
        waiting = asyncio.create_task(all_of(queue))
        await settled(queue, 1, 1)
        stopping = asyncio.create_task(queue.stop())
        with pytest.raises(ApiError) as rejected:
            await waiting
        assert describe(rejected.value)[0] == 503
        with pytest.raises(ApiError, match="stopping"):
            await all_of(queue)
        work.go.release()
        assert await anext(running) == 2
        assert not stopping.done()
    work.go.release()
    await stopping
    assert queue.running("") == 0


async def test_the_place_of_a_cancelled_request_is_passed_on() -> None:
    queue = AdmissionQueue(1, 2, "test")
    await queue._admit("")
    leaving, staying = asyncio.create_task(all_of(queue)), asyncio.create_task(all_of(queue))
    await settled(queue, 1, 2)
    queue._release("")
    leaving.cancel()
    assert await staying == [1, 2, 3]
    await settled(queue, 0, 0)


async def test_namespaces_have_their_own_queues_and_are_admitted_in_rotation() -> None:
    queue, work, order = AdmissionQueue(1, 2, "test"), Work(), []

    async def wait(namespace: str) -> None:
        assert [piece async for piece in run(queue, three, 60, namespace)] == [1, 2, 3]
        order.append(namespace)

    async with aclosing(run(queue, work, 60)) as running:
        work.go.release()
        await anext(running)
        waiting = []
        for namespace, count in (("a", 1), ("a", 2), ("b", 1), ("c", 1)):
            waiting.append(asyncio.create_task(wait(namespace)))
            while queue.waiting(namespace) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(ApiError) as full:
            await wait("a")
        assert describe(full.value)[0] == 429, "its own queue is full, which does not affect other namespaces"
        assert [queue.waiting(namespace) for namespace in "abc"] == [2, 1, 1]
        assert [queue.running(namespace) for namespace in ("", "a")] == [1, 0]
    work.go.release()
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "c", "a"]
    assert queue._waiting == []


def _held(queue: AdmissionQueue, namespaces: str) -> str:
    """Let the namespaces ask for places in this order, without an end; return those that are admitted at once."""

    async def ask() -> str:
        asked = [(name, asyncio.ensure_future(queue._admit(name))) for name in namespaces]
        await asyncio.sleep(0)
        admitted = "".join(name for name, task in asked if task.done())
        for _, task in asked:
            task.cancel()
        await asyncio.gather(*(task for _, task in asked), return_exceptions=True)
        return admitted

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("places", "namespaces", "asking", "admitted"),
    [
        (4, 1, "aaaaa", "aaaa"),
        (4, 2, "aaaaab", "aaab"),
        (4, 2, "abaaa", "abaa"),  # both have one: the rest is free for all
        (4, 3, "aaaabbc", "aabc"),
        (4, 9, "aaaabbc", "aabc"),  # more namespaces than places: half of them are reserved
        (2, 9, "aabbc", "ab"),
        (1, 2, "aab", "a"),  # one place cannot be shared
    ],
)
def test_a_place_stays_free_for_each_namespace_that_has_none(
    places: int, namespaces: int, asking: str, admitted: str
) -> None:
    assert _held(AdmissionQueue(places, 9, "test", namespaces), asking) == admitted


async def test_a_freed_place_goes_to_a_waiting_request_that_may_have_it() -> None:
    queue = AdmissionQueue(3, 9, "test", 2)
    for _ in range(2):
        await queue._admit("a")
    waiting = asyncio.ensure_future(queue._admit("a"))
    await asyncio.wait_for(queue._admit("b"), 30)
    assert (queue.running("a"), queue.running("b"), queue.waiting("a")) == (2, 1, 1)
    queue._release("b")
    assert queue.waiting("a") == 1, "the place of b stays free"
    queue._release("a")
    await asyncio.wait_for(waiting, 30)
    assert (queue.running("a"), queue.waiting("a")) == (2, 0)


def test_no_endpoint_and_no_dependency_takes_one_of_the_shared_threads() -> None:
    """FastAPI runs plain functions in 40 threads, which slow requests of one namespace could fill for all others."""
    for route in app.router.routes:
        assert isinstance(route, APIRoute)
        assert inspect.iscoroutinefunction(route.endpoint), route.path
        for dependency in route.dependant.dependencies:
            assert inspect.iscoroutinefunction(dependency.call), route.path

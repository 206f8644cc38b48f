"""Who may work when: turns, the queue, leaving, stopping."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import aclosing

import pytest

from kvrag.server.errors import ApiError
from kvrag.server.turns import Turns


class Work:
    """Yields numbers as it is told, for ever."""

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


async def all_of(turns: Turns, limit: float = 60) -> list[int]:
    return [piece async for piece in turns.run(three, limit)]


async def settled(turns: Turns, running: int, waiting: int) -> None:
    for _ in range(6000):
        if (turns.running, turns.waiting) == (running, waiting):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{turns.running} at work, {turns.waiting} waiting")


async def hear(heard: list[int], turns: Turns, work: Callable[[], Generator[int, None, None]], limit: float) -> None:
    async for piece in turns.run(work, limit):
        heard.append(piece)


async def test_pieces_come_in_order_and_places_become_free() -> None:
    turns = Turns(2, 8, "test")
    assert await asyncio.gather(*(all_of(turns) for _ in range(10))) == [[1, 2, 3]] * 10
    await settled(turns, 0, 0)


async def test_who_waits_longest_comes_first_and_one_too_many_is_sent_away() -> None:
    turns, work, order = Turns(1, 2, "test"), Work(), []

    async def wait(name: str) -> None:
        await all_of(turns)
        order.append(name)

    async with aclosing(turns.run(work, 60)) as running:
        work.go.release()
        assert await anext(running) == 1
        waiting = []
        for number, name in enumerate("ab"):
            waiting.append(asyncio.create_task(wait(name)))
            await settled(turns, 1, number + 1)
        with pytest.raises(ApiError) as refused:
            await all_of(turns)
        assert refused.value.status == 429
    work.go.release()
    await asyncio.gather(*waiting)
    assert order == ["a", "b"]


async def test_the_place_is_taken_until_the_step_under_way_is_over() -> None:
    turns, work = Turns(1, 2, "test"), Work()
    running = turns.run(work, 60)
    work.go.release()
    assert await anext(running) == 1
    assert await asyncio.to_thread(work.again.wait, 30)
    await running.aclose()
    other = asyncio.create_task(all_of(turns))
    await settled(turns, 1, 1)  # the thread is still in its step
    assert not work.closed.is_set()
    work.go.release()
    assert await other == [1, 2, 3]
    assert work.closed.is_set()
    assert work.made == 2


async def test_who_stops_waiting_leaves_no_trace() -> None:
    turns, work = Turns(1, 2, "test"), Work()
    async with aclosing(turns.run(work, 60)) as running:
        work.go.release()
        await anext(running)
        waiting = asyncio.create_task(all_of(turns))
        await settled(turns, 1, 1)
        waiting.cancel()
        await settled(turns, 1, 0)
        with pytest.raises(ApiError) as late:
            await all_of(turns, limit=0.02)
        assert late.value.status == 504
        assert (turns.running, turns.waiting) == (1, 0)
    work.go.release()
    await settled(turns, 0, 0)
    assert await all_of(turns) == [1, 2, 3]


async def test_work_that_takes_too_long_ends() -> None:
    turns, work = Turns(1, 0, "test"), Work()
    work.go.release()
    heard: list[int] = []
    with pytest.raises(ApiError) as late:
        await hear(heard, turns, work, 0.5)
    assert (late.value.status, heard) == (504, [1])
    work.go.release()
    await settled(turns, 0, 0)
    assert work.closed.is_set()


async def test_what_work_raises_is_raised_and_the_place_is_free() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise ValueError("broken")

    turns = Turns(1, 0, "test")
    heard: list[int] = []
    with pytest.raises(ValueError, match="broken"):
        await hear(heard, turns, broken, 60)
    assert heard == [1]
    await settled(turns, 0, 0)


async def test_stopping_lets_work_finish_and_nobody_begin() -> None:
    turns, work = Turns(1, 4, "test"), Work()
    async with aclosing(turns.run(work, 60)) as running:
        work.go.release()
        await anext(running)
        waiting = asyncio.create_task(all_of(turns))
        await settled(turns, 1, 1)
        stopping = asyncio.create_task(turns.stop())
        with pytest.raises(ApiError) as turned_away:
            await waiting
        assert turned_away.value.status == 503
        with pytest.raises(ApiError, match="stopping"):
            await all_of(turns)
        work.go.release()
        assert await anext(running) == 2
        assert not stopping.done()
    work.go.release()
    await stopping
    assert turns.running == 0


async def test_a_turn_that_comes_to_one_who_has_just_left_is_passed_on() -> None:
    turns = Turns(1, 2, "test")
    await turns._take()
    leaving, staying = asyncio.create_task(all_of(turns)), asyncio.create_task(all_of(turns))
    await settled(turns, 1, 2)
    turns._release()
    leaving.cancel()
    assert await staying == [1, 2, 3]
    await settled(turns, 0, 0)

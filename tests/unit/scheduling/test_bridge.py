"""Generators in threads of their own, read by an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import aclosing
from contextvars import ContextVar

import pytest

from kvrag.errors import AbandonedError
from kvrag.scheduling.bridge import off_loop, once
from kvrag.scheduling.waiting import check_cancelled

name: ContextVar[str] = ContextVar("name")


class Work:
    """Yields the numbers below 3, and notes in which threads."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.made = 0
        self.closed = threading.Event()

    def __call__(self) -> Generator[int, None, None]:
        try:
            for number in range(3):
                self.threads.append(threading.current_thread())
                self.made += 1
                yield number
        finally:
            self.threads.append(threading.current_thread())
            self.closed.set()


async def test_work_is_done_in_one_other_thread_when_it_is_asked_for() -> None:
    work, other = Work(), Work()
    assert [item async for item in off_loop(work())] == [0, 1, 2]
    async with aclosing(off_loop(other())) as items:
        assert await anext(items) == 0
        await asyncio.sleep(0.05)
        assert other.made == 1
    assert other.closed.is_set()
    assert len(work.threads) == 4
    assert {thread.name for thread in work.threads + other.threads} == {"kvrag-async_0"}, "closed there, too"


async def test_closing_returns_when_the_step_has_ended() -> None:
    entered, let, ended = threading.Event(), threading.Event(), list[type]()

    def work() -> Generator[int, None, None]:
        try:
            entered.set()
            assert let.wait(60)
            check_cancelled()
            yield 1
        except BaseException as error:
            ended.append(type(error))
            raise

    step = asyncio.ensure_future(anext(items := off_loop(work())))
    assert await asyncio.to_thread(entered.wait, 60)
    step.cancel()
    asyncio.get_running_loop().call_soon(let.set)
    with pytest.raises(asyncio.CancelledError):
        await step
    assert ended == [AbandonedError]
    await items.aclose()


async def test_an_error_and_the_context_come_through() -> None:
    def fail() -> None:
        raise ValueError(name.get())

    name.set("mine")
    with pytest.raises(ValueError, match="mine"):
        await anext(off_loop(once(fail)))
    assert await anext(off_loop(once(lambda: None))) == (None,)

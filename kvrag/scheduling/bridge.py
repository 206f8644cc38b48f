"""Generators that run in threads of their own: for an event loop, or several that are read as one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from kvrag.process import check_process
from kvrag.scheduling.waiting import check_cancelled, held, is_cancelled

T = TypeVar("T")

_THREADS = 64  # of one call of `together`: more generators wait for these


async def off_loop(items: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Run a generator in a thread, in a copy of this context; yield its items, which are never None.

    It goes on only when the consumer asks for the next item. Closing or cancelling this ends it at the next check of
    `is_cancelled`, at the latest after its current step, and then returns.
    """
    loop, left, context = asyncio.get_running_loop(), threading.Event(), copy_context()
    context.run(is_cancelled.set, left.is_set)
    thread = ThreadPoolExecutor(1, "kvrag-async")  # not shared, see `kvrag.process`
    try:
        while (item := await loop.run_in_executor(thread, context.run, partial(next, items, None))) is not None:
            held.set(frozenset({*held.get(), *context.get(held, frozenset())}))
            yield item
    finally:
        left.set()
        ending = loop.run_in_executor(thread, context.run, items.close)  # after the current step
        thread.shutdown(wait=False)
        await asyncio.shield(ending)


def once(work: Callable[[], T]) -> Generator[tuple[T], None, None]:
    """Yield the result of `work`: for `off_loop`."""
    yield (work(),)


def together(generators: Sequence[Generator[T, None, None]]) -> Generator[tuple[int, T], None, None]:
    """Run generators at the same time; yield their items, which are never None, in order of arrival with their number.

    Closing this generator, or an exception in one of them, ends all of them, at the next check of `is_cancelled`.
    """
    if len(generators) == 1:  # usual for a server: needs no thread
        with closing(generators[0]) as generator:
            yield from ((0, item) for item in generator)
        return
    made: SimpleQueue[tuple[int, T | BaseException | None]] = SimpleQueue()
    left, caller_cancelled, process = threading.Event(), is_cancelled.get(), os.getpid()

    def run(number: int) -> None:
        is_cancelled.set(lambda: left.is_set() or caller_cancelled())
        try:
            put_all(generators[number], lambda item: made.put((number, item)))
            made.put((number, None))
        except BaseException as error:
            made.put((number, error))

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvrag-batch")  # starts as many threads as it needs
    try:
        for number in range(len(generators)):
            pool.submit(copy_context().run, run, number)
        num_running = len(generators)
        while num_running:
            check_process(process, "this stream")
            number, item = made.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield number, item
    finally:
        left.set()
        pool.shutdown(wait=False, cancel_futures=True)


def put_all(items: Generator[T, None, None], put: Callable[[T], object]) -> None:
    """Put the items of a generator until the consumer of this context leaves; then, or at the end, close it."""
    with closing(items):
        for item in items:
            put(item)
            check_cancelled()

"""Several generators, each in its own thread, read as one."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import TypeVar

from kvrag.forking import check_process
from kvrag.scheduling.lock import is_left

T = TypeVar("T")

_THREADS = 64  # more generators of one call wait for these


def together(generators: Sequence[Generator[T, None, None]]) -> Generator[tuple[int, T], None, None]:
    """Run generators at the same time; yield their items, which are never None, in order of arrival with their number.

    Closing this generator, or an exception in one of them, ends all of them, at the next check of `is_left`.
    """
    if len(generators) == 1:  # usual for a server: needs no thread
        with closing(generators[0]) as generator:
            yield from ((0, item) for item in generator)
        return
    items: SimpleQueue[tuple[int, T | BaseException | None]] = SimpleQueue()  # None: the generator has ended
    left, has_left, process = threading.Event(), is_left.get(), os.getpid()

    def pump(number: int) -> None:
        end: BaseException | None = None
        try:
            is_left.set(lambda: left.is_set() or has_left())
            with closing(generators[number]) as generator:
                for item in generator:
                    items.put((number, item))
                    if left.is_set():
                        break
        except BaseException as error:
            end = error
        items.put((number, end))

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvrag-batch")  # starts as many threads as it needs
    try:
        for number in range(len(generators)):
            pool.submit(pump, number)
        num_running = len(generators)
        while num_running:
            check_process(process, "this stream")
            number, item = items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield number, item
    finally:
        left.set()
        pool.shutdown(wait=False, cancel_futures=True)

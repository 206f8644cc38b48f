"""Several generators in threads of their own, read as one."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import TypeVar

from kvrag.generate.admission import is_left

T = TypeVar("T")

_THREADS = 64  # more generators of one call wait for these


class _End:
    """Marks the end of a generator."""


def together(
    generators: Sequence[Generator[T, None, None]],
) -> Generator[tuple[int, T], None, None]:
    """Run generators at the same time; yield the number of one and its next item, as they come.

    Closing this, or an exception in one of them, ends all of them after their current step.
    """
    if len(generators) == 1:  # no thread for what is the usual case of a server
        with closing(generators[0]) as only:
            yield from ((0, first) for first in only)
        return
    items: SimpleQueue[tuple[int, T | _End | BaseException]] = SimpleQueue()
    left = threading.Event()

    def pump(number: int) -> None:
        end: _End | BaseException = _End()
        try:
            is_left.set(left.is_set)
            with closing(generators[number]) as own:
                for item in own:
                    items.put((number, item))
                    if left.is_set():
                        break
        except BaseException as error:
            end = error
        items.put((number, end))

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvrag-batch")  # starts as many as it needs
    try:
        for number in range(len(generators)):
            pool.submit(pump, number)
        going = len(generators)
        while going:
            number, item = items.get()
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, _End):
                going -= 1
            else:
                yield number, item
    finally:
        left.set()
        pool.shutdown(wait=False, cancel_futures=True)

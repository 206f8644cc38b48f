"""Several generators in threads of their own, read as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_THREADS = 64  # more answers of one call wait for these


class _End:
    """Marks the end of a generator."""


def together(
    starts: Sequence[Callable[[Callable[[], bool]], Generator[T, None, None]]], return_exceptions: bool = False
) -> Generator[tuple[int, T | Exception], None, None]:
    """Run generators at the same time; yield the number of one and its next item, as they come.

    Closing this closes all of them after their current step.

    Args:
        starts: Each returns a generator from a function that returns whether the consumer has left.
        return_exceptions: Yield an exception in place of the remaining items, instead of raising it.
    """
    items: SimpleQueue[tuple[int, T | _End | BaseException]] = SimpleQueue()
    is_left = threading.Event()

    def pump(number: int) -> None:
        end: _End | BaseException = _End()
        try:
            with closing(starts[number](is_left.is_set)) as own:
                while not is_left.is_set() and (item := next(own, end)) is not end:
                    items.put((number, item))
        except BaseException as error:
            end = error
        items.put((number, end))

    if not starts:
        return
    pool = ThreadPoolExecutor(min(len(starts), _THREADS), thread_name_prefix="kvrag-batch")
    try:
        for number in range(len(starts)):
            pool.submit(pump, number)
        left = len(starts)
        while left:
            number, item = items.get()
            if isinstance(item, _End):
                left -= 1
            elif isinstance(item, BaseException):
                if not return_exceptions or not isinstance(item, Exception):
                    raise item
                left -= 1
                yield number, item
            else:
                yield number, item
    finally:
        is_left.set()
        pool.shutdown(wait=False, cancel_futures=True)

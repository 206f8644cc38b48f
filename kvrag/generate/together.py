"""Several generators in threads of their own, read as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

_THREADS = 64  # more generators of one call wait for these


class _End:
    """Marks the end of a generator."""


def together(
    starts: Sequence[Callable[[Callable[[], bool]], Generator[T, None, None]]],
) -> Generator[tuple[int, T], None, None]:
    """Run generators at the same time; yield the number of one and its next item, as they come.

    Closing this, or an exception in one of them, ends all of them after their current step.

    Args:
        starts: Each returns a generator from a function that returns whether the consumer has left.
    """
    if len(starts) == 1:  # no thread for what is the usual case of a server
        with closing(starts[0](lambda: False)) as only:
            yield from ((0, first) for first in only)
        return
    items: SimpleQueue[tuple[int, T | _End | BaseException]] = SimpleQueue()
    is_left = threading.Event()

    def pump(number: int) -> None:
        end: _End | BaseException = _End()
        try:
            with closing(starts[number](is_left.is_set)) as own:
                for item in own:
                    items.put((number, item))
                    if is_left.is_set():
                        break
        except BaseException as error:
            end = error
        items.put((number, end))

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvrag-batch")  # starts as many as it needs
    try:
        for number in range(len(starts)):
            pool.submit(pump, number)
        left = len(starts)
        while left:
            number, item = items.get()
            if isinstance(item, BaseException):
                raise item
            if isinstance(item, _End):
                left -= 1
            else:
                yield number, item
    finally:
        is_left.set()
        pool.shutdown(wait=False, cancel_futures=True)

"""One implementation for synchronous and asynchronous callers: coroutines.

On a blocking client they never suspend, so synchronous code runs them to the end in its own thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Generator
from inspect import isawaitable
from typing import TypeVar

T = TypeVar("T")


async def value_of(result: T | Awaitable[T]) -> T:
    """Return the result of a call, which an asynchronous client returns as an awaitable."""
    return await result if isawaitable(result) else result


def run(work: Awaitable[T]) -> T:
    """Run work that never suspends."""
    try:
        next(work.__await__())
    except StopIteration as done:
        value: T = done.value
        return value
    raise RuntimeError("a coroutine for a blocking client was suspended")


def iterate(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield the items, none of which is None, of a generator that never suspends. Closing this closes it."""
    try:
        while (item := run(anext(items, None))) is not None:
            yield item
    finally:
        run(items.aclose())

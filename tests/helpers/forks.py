"""Work in a forked process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def forked(work: Callable[[], T]) -> T:
    """Return what `work` returns, or raise what it raises, in a child; fail if the child hangs."""
    context = multiprocessing.get_context("fork")
    results, sending = context.Pipe(duplex=False)

    def run() -> None:
        try:
            sending.send((work(), None))
        except Exception as error:
            sending.send((None, error))

    child = context.Process(target=run)
    child.start()
    sending.close()
    try:
        assert results.poll(60), "the child hangs"
        value, error = results.recv()
    finally:
        child.kill()
        child.join()
    if error is not None:
        raise error
    returned: T = value
    return returned

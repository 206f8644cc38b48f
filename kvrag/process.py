"""What belongs to a process: what a forked one may still use, its threads, and running out of memory.

A fork copies the memory and one thread. A pool without its threads or a connection that both processes use would block
the child for ever, or damage what it is connected to: engines, stores and streams of the parent are refused there.

Every thread that runs a parallel operation of torch on the CPU gets a team of OpenMP threads, and keeps it. As soon as
a process has more of them than processors, libgomp no longer lets them spin between two operations: they sleep, and
waking them takes as long as many operations of a small model. Blending in one thread took 1.8 times as long because
another thread had loaded the model.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, thread
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import BoundedSemaphore, Event, Lock
from typing import Generic, TypeVar

from kvrag.errors import OutOfMemoryError, SettingError, first_line, out_of_memory

T = TypeVar("T")


def refuse(what: str) -> SettingError:
    """Return the error for the use of something in a forked process."""
    return SettingError(
        f"{what} was in use when this process was forked: create the engine after the fork only, or close it before; "
        'or start processes with multiprocessing\'s "spawn"'
    )


def check_process(process: int, what: str) -> None:
    """Raise SettingError unless this is the process with that id, in which something was created."""
    if process != os.getpid():
        raise refuse(what)


class Background:
    """A thread for work that answers do not wait for, one after the other. Thread-safe."""

    def __init__(self, name: str, most: int) -> None:
        """Start without work; `most` of it may be waiting or in progress."""
        self.closed = Event()
        self._pool, self._room = ThreadPoolExecutor(1, name), BoundedSemaphore(most)

    def later(self, work: Callable[..., object], *args: object) -> bool:
        """Do this later; return False if too much is waiting already."""
        if self.closed.is_set() or not self._room.acquire(blocking=False):
            return False
        with suppress(RuntimeError):  # closed in the meantime, or the program ends
            self._pool.submit(work, *args).add_done_callback(lambda _: self._room.release())
        return True

    @property
    def is_over(self) -> bool:
        """Whether work is to end."""
        # at its end, the interpreter sets `_shutdown` and waits for this thread; an open stream is never closed then
        return self.closed.is_set() or thread._shutdown

    def wait(self) -> None:
        """Wait until the work so far is done; for tests and benchmarks."""
        self._pool.submit(lambda: None).result()

    def close(self, finish: bool = False) -> None:
        """End; with `finish`, after the work so far."""
        self.closed.set()
        self._pool.shutdown(finish, cancel_futures=not finish)


class Shared(Generic[T]):
    """Instances by key, shared while in use. Threads that need the same one at the same time create it once.

    A forked process has none.
    """

    def __init__(self) -> None:
        self._instances: weakref.WeakValueDictionary[tuple[int, str], T] = weakref.WeakValueDictionary()
        self._locks: dict[tuple[int, str], Lock] = {}

    def get(self, key: str, create: Callable[[], T], is_usable: Callable[[T], bool] = lambda instance: True) -> T:
        """Return the instance of a key; create one if there is none that is usable."""
        own = os.getpid(), key
        with self._locks.setdefault(own, Lock()):
            instance = self._instances.get(own)
            if instance is None or not is_usable(instance):
                instance = self._instances[own] = create()
        return instance


@functools.cache
def log_once(message: str) -> None:
    """Log a warning, once in this process."""
    logging.getLogger("kvrag").warning("%s (logged once)", message)


@contextmanager
def releasing_threads() -> Iterator[None]:
    """Release the calling thread's OpenMP threads at the end; also a decorator."""
    try:
        yield
    finally:
        if not sys.is_finalizing():
            release_team()


def release_team() -> None:
    """End the OpenMP threads of the calling thread; its next parallel operation starts new ones."""
    if "torch" in sys.modules and (release := _release()) is not None:
        release()


os.register_at_fork(before=release_team)  # the child would wait for them for ever


@functools.cache
def _release() -> Callable[[], object] | None:
    """Return a function that ends the calling thread's team; None without libgomp, which alone needs it."""
    import torch

    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        with suppress(OSError, AttributeError):  # a library that is not loaded, or older than OpenMP 5.0
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
            soft = 1  # omp_pause_soft
            return functools.partial(library.omp_pause_resource, soft, library.omp_get_initial_device())
    return None


@contextmanager
def reporting_memory() -> Iterator[None]:
    """Raise OutOfMemoryError if memory runs out within."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        reason = (first_line(error) or type(error).__name__)[:160]
        error.__traceback__ = None  # its frames would keep the tensors of the failed pass
        raise OutOfMemoryError(
            "memory ran out: use a shorter prompt, fewer or shorter chunks, a smaller dtype or a smaller "
            f"conversation_bytes or ram_bytes ({reason})"
        ) from error

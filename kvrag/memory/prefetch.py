"""Reads chunks from the store into the RAM tier, ahead of the prompt that will contain them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from kvrag.memory.tier import MemoryTier
from kvrag.store import KVStore

logger = logging.getLogger("kvrag")

_WAITING = 4  # calls; more are ignored, since their prompts would come before their chunks are read


class Prefetcher:
    """Reads one chunk at a time in a background thread. Never evicts chunks from the RAM tier. Thread-safe."""

    def __init__(self, store: KVStore, memory: MemoryTier) -> None:
        self._store, self._memory = store, memory
        self._room = threading.BoundedSemaphore(_WAITING)
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(1, "kvrag-prefetch")

    def start(self, find: Callable[[], Iterable[str]]) -> None:
        """Start to read the chunks whose keys `find` returns, and return at once. Errors are logged only."""
        if not self._memory.max_bytes or self._closed.is_set() or not self._room.acquire(blocking=False):
            return
        try:
            self._pool.submit(self._work, find)
        except RuntimeError:  # closed in the meantime, or the program ends
            self._room.release()

    def wait(self) -> None:
        """Wait until the calls so far are done; for tests and benchmarks."""
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """End after the layer that is being read."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, find: Callable[[], Iterable[str]]) -> None:
        try:
            for key in find():
                if self._closed.is_set():
                    return
                if not self._memory.is_at_hand(key) and not self._read(key):
                    return
        except Exception as error:  # the request itself reports it
            logger.debug("could not read ahead: %s", error)
        finally:
            self._room.release()

    def _read(self, key: str) -> bool:
        """Read a chunk; return False if there is no room for it."""
        opened = self._store.open(key)
        if opened is None:
            return True
        try:
            with closing(self._memory.keeping(opened, only_free=True)) as reader:
                for number in range(reader.num_layers):
                    keys, values = reader.layer(number)
                    if self._closed.is_set() or reader.num_layers * (keys.nbytes + values.nbytes) > self._memory.free:
                        return False
                return True
        finally:
            self._memory.drop(self._store.missing([key]))  # it may have been removed between being opened and kept

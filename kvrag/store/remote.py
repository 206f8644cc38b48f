"""A chunk that is read from a bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrag.errors import ChunkUnreadableError, StoreError
from kvrag.store.chunkfile import PackedChunk

_GROUP = 4 << 20  # bytes of adjacent layers per request ...
_IN_FLIGHT = 3  # ... and requests per chunk at a time, so that several chunks arrive layer by layer

TIMEOUT_S = 10.0
"""Seconds after which a read counts as failed."""


class DeletedError(StoreError):
    """A chunk has been deleted while it was read."""


class RemoteChunk(PackedChunk):
    """A chunk in a bucket. Its layers are fetched in groups, in the background, some ahead of the one that is read."""

    tier = "shared"

    def __init__(
        self,
        key: str,
        fingerprint: str,
        remote: Any,
        name: str,
        size: int,
        beginning: bytes,
        pool: ThreadPoolExecutor,
        failed: Callable[[StoreError], None] = lambda error: None,
        used: Callable[[RemoteChunk], None] = lambda chunk: None,
    ) -> None:
        """Read the header and start to fetch the layers; raises as PackedChunk.

        Args:
            remote: The ObjectStore, which imports this module.
            name: Of the object.
            size: Number of its bytes.
            beginning: The first of them, including the header.
            failed: Called if layers cannot be read because the bucket does not answer.
            used: Called when the reader is closed.
        """
        self._pool, self._failed, self._used = pool, failed, used
        self._fetch, self._first = partial(remote.read_range, name), beginning
        self._groups: list[tuple[int, int]] = []
        self._fetches: list[Future[bytes | memoryview]] = []
        self._lock = threading.Lock()
        self._is_closed = False
        super().__init__(key, fingerprint, size, beginning)
        with self._noticing_faults():
            self._groups = self._grouped()
        self._fetch_ahead(0)

    def _grouped(self) -> list[tuple[int, int]]:
        """Return the byte ranges to fetch: of the layers that are not in the beginning."""
        groups: list[tuple[int, int]] = []
        for start, stop in map(self._span, range(self.num_layers)):
            if stop <= len(self._first):
                continue
            if groups and stop - groups[-1][0] <= _GROUP:
                groups[-1] = groups[-1][0], stop
            else:
                groups.append((start, stop))
        return groups

    def _fetch_ahead(self, number: int) -> None:
        """Fetch the groups from this one on that are not being fetched."""
        # the store has been closed, or no thread can be started: its readers stay valid
        with self._lock, suppress(RuntimeError):
            for start, stop in self._groups[len(self._fetches) : number + _IN_FLIGHT]:
                self._fetches.append(self._pool.submit(self._fetch, start, stop))

    def _range(self, start: int, stop: int) -> Tensor:
        content = torch.empty(stop - start, dtype=torch.uint8)
        content.numpy()[:] = np.frombuffer(self._read(start, stop), np.uint8)
        return content

    def _read(self, start: int, stop: int) -> bytes | memoryview:
        if stop <= len(self._first):
            return memoryview(self._first)[start:stop]
        # none for a part of the header, before there are groups
        number = next((n for n, (first, last) in enumerate(self._groups) if first <= start and stop <= last), 0)
        self._fetch_ahead(number)
        try:
            if number >= len(self._fetches):
                return self._fetch(start, stop)
            fetched = memoryview(self._fetches[number].result(TIMEOUT_S))
        except (WaitTimeoutError, StoreError) as error:
            reason = f"no answer for {TIMEOUT_S:g} s" if isinstance(error, WaitTimeoutError) else str(error)
            if not isinstance(error, DeletedError):  # of a deleted chunk, the bucket does answer
                self._failed(StoreError(reason))
            raise ChunkUnreadableError(self.key, reason) from error
        offset = self._groups[number][0]
        return fetched[start - offset : stop - offset]

    def close(self) -> None:
        """See ChunkReader.close."""
        if not self._is_closed:
            self._is_closed = True
            self._used(self)

"""Chunks in a bucket, each read in one request, so that its first layers can be used while the others arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrag.errors import ChunkUnreadableError, StoreError
from kvrag.store.chunkfile import PackedChunk

TIMEOUT_S = 10.0
"""Seconds after which a read counts as failed."""


class Download:
    """An object of a bucket, which arrives in a thread. `name` is the object's, `size` its number of bytes."""

    def __init__(self, remote: Any, name: str) -> None:
        """Request the object from an ObjectStore, which imports this module."""
        self.name, self.size = name, 0
        self._remote, self._content, self._changed = remote, bytearray(), threading.Condition()
        self.error: BaseException | None = None
        """Why the object did not arrive."""
        self._is_over = False
        try:
            threading.Thread(target=self._receive, name="kvrag-fetch", daemon=True).start()
        except RuntimeError as error:  # there are too many threads
            self._end(StoreError(str(error)))

    def _receive(self) -> None:
        try:
            self.size, pieces = self._remote.open(self.name)
            for piece in pieces:
                with self._changed:
                    self._content += piece
                    self._changed.notify_all()
        except BaseException as error:  # raised where it is read
            self._end(error)
        else:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self.error, self._is_over = error, True
            self._changed.notify_all()

    def read(self, start: int, stop: int) -> bytearray:
        """Return a range of bytes, fewer where the object ends; wait until they are here.

        Raises StoreError, and FileNotFoundError if there is no such object.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._content) >= stop or self._is_over, TIMEOUT_S):
                raise StoreError(f"no answer for {TIMEOUT_S:g} s")
            if self.error and len(self._content) < stop:
                raise self.error
            return self._content[start:stop]


class RemoteChunk(PackedChunk):
    """A chunk in a bucket."""

    tier = "shared"

    def __init__(
        self,
        key: str,
        fingerprint: str,
        download: Download,
        failed: Callable[[StoreError], None],
        used: Callable[[RemoteChunk], None],
    ) -> None:
        """Read everything except the layers; raises as PackedChunk.

        Args:
            failed: Called if the bucket does not answer.
            used: Called when the reader is closed.
        """
        self.key, self._download, self._failed, self._used = key, download, failed, used
        with self._noticing_faults():
            self._range(0, 1)  # its size is known from then on
        super().__init__(key, fingerprint, download.size)

    def _range(self, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        try:
            content = self._download.read(start, stop)
        except StoreError as error:
            self._failed(error)
            raise ChunkUnreadableError(self.key, error) from error
        received = torch.from_numpy(np.frombuffer(content, np.uint8))
        return received if into is None else into.copy_(received)

    def close(self) -> None:
        """See ChunkReader.close."""
        self._used(self)

"""Chunks dropped a moment ago, still readable.

Frameworks edit a document by deleting it and adding it again: what has not changed need not be encoded again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from kvrag.store.protocol import ChunkReader

_MAX_CHUNKS = 256  # each is an open file


class DroppedChunks:
    """Open readers of chunks that the store has no more, the latest few. Thread-safe."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, ChunkReader] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, key: str, reader: ChunkReader) -> None:
        """Take over an open reader, close the oldest one if there are too many."""
        with self._lock:
            closing = [self._readers.pop(key)] if key in self._readers else []
            self._readers[key] = reader
            if len(self._readers) > _MAX_CHUNKS:
                closing.append(self._readers.popitem(last=False)[1])
        for old in closing:
            old.close()

    def take(self, key: str) -> ChunkReader | None:
        """The reader, the caller's to close from now on, or None."""
        with self._lock:
            return self._readers.pop(key, None)

    def clear(self) -> None:
        """Close them all."""
        with self._lock:
            readers, self._readers = self._readers, OrderedDict()
        for reader in readers.values():
            reader.close()

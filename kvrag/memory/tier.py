"""Tiers in memory: recently read chunks, bounded in bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress

from cachetools import LRUCache

from kvrag.errors import ChunkUnreadableError, DamagedChunkError
from kvrag.store.values import ChunkReader, Layer

Place = Callable[[int, Layer], Layer | None]
"""Returns a layer as a tier keeps it, by its number; None = there is no memory for it."""


class MemoryTier:
    """LRU cache of whole chunks in front of a store. Never stale: the key determines the KV. Thread-safe."""

    def __init__(
        self, max_bytes: int, faster: MemoryTier | None = None, name: str = "ram", place: Place | None = None
    ) -> None:
        """Create an empty tier.

        Args:
            faster: A tier in front of it, for chunks that are read from this one, so for the second time at least.
            name: The readers' `tier`.
            place: Moves layers to where this tier keeps them; None = as they are read.
        """
        self.name, self._faster, self.place = name, faster, place
        self._chunks: LRUCache[str, _Cached] = LRUCache(max_bytes, getsizeof=lambda chunk: chunk.nbytes)
        self._reading: weakref.WeakSet[_Keeping] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def max_bytes(self) -> int:
        """Maximum size in bytes."""
        return int(self._chunks.maxsize)

    @property
    def bytes(self) -> int:
        """Current size in bytes."""
        return int(self._chunks.currsize)

    def is_at_hand(self, key: str) -> bool:
        """Return whether the chunk is cached, or being read in order to be."""
        with self._lock:
            here = key in self._chunks or any(reader.key == key for reader in self._reading)
        return here or (self._faster is not None and self._faster.is_at_hand(key))

    def open(self, key: str) -> ChunkReader | None:
        """Return a reader of the chunk, or None if it is not cached."""
        if self._faster is not None and (reader := self._faster.open(key)):
            return reader
        with self._lock:
            chunk = self._chunks.get(key)
        return chunk if chunk is None or self._faster is None else self._faster.keeping(chunk)

    def keys(self) -> list[str]:
        """Return the keys of the cached chunks."""
        with self._lock:
            here = list(self._chunks)
        return here if self._faster is None else list({*here, *self._faster.keys()})

    def drop(self, keys: Iterable[str]) -> None:
        """Drop chunks, including those that are being read."""
        dropped = set(keys)
        if self._faster is not None:
            self._faster.drop(dropped)
        with self._lock:
            for key in dropped:
                self._chunks.pop(key, None)
            for reader in self._reading:
                reader.keeps = reader.keeps and reader.key not in dropped

    def keeping(self, reader: ChunkReader) -> ChunkReader:
        """Wrap a reader: the chunk is cached when the reader is closed, if all of its layers were read."""
        if reader.tier == self.name:
            return reader
        if self.max_bytes == 0:
            return reader if self._faster is None else self._faster.keeping(reader)
        keeping = _Keeping(reader, self)
        with self._lock:
            self._reading.add(keeping)
        return keeping

    def keep(self, reader: _Keeping) -> None:
        """Cache a chunk of which all layers were read, unless it was dropped meanwhile."""
        chunk = _Cached(reader, self.name, reader.layers)
        with self._lock:
            self._reading.discard(reader)
            if reader.keeps and reader.key not in self._chunks and chunk.nbytes <= self.max_bytes:
                self._chunks[reader.key] = chunk


class _Chunk:
    """Tokens and layers of a chunk; see ChunkReader."""

    def __init__(self, reader: ChunkReader, tier: str, layers: dict[int, Layer]) -> None:
        self.key, self.namespace, self.ids = reader.key, reader.namespace, reader.ids
        self.context_tokens, self.num_layers = reader.context_tokens, reader.num_layers
        self.tier, self.layers = tier, layers


class _Cached(_Chunk):
    """A chunk in a tier."""

    bytes_read = 0

    def __init__(self, reader: ChunkReader, tier: str, layers: dict[int, Layer]) -> None:
        super().__init__(reader, tier, layers)
        self.layer = layers.__getitem__

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + sum(keys.nbytes + values.nbytes for keys, values in self.layers.values())

    def close(self) -> None:
        pass


class _Keeping(_Chunk):
    """A chunk that is being read; when it is closed, the tier caches it if all of its layers were read."""

    def __init__(self, reader: ChunkReader, memory: MemoryTier) -> None:
        super().__init__(reader, reader.tier, {})
        self._reader, self._memory = reader, memory
        self.keeps = True

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def layer(self, number: int) -> Layer:
        layer = self._reader.layer(number)
        if self.keeps and (place := self._memory.place):
            placed = place(number, layer)
            self.keeps = self.keeps and placed is not None
            layer = placed or layer
        self.layers[number] = layer
        return layer

    def close(self) -> None:
        if self.keeps and len(self.layers) == self.num_layers - 1 and self.num_layers - 1 not in self.layers:
            with suppress(ChunkUnreadableError, DamagedChunkError):
                self.layer(self.num_layers - 1)  # stored states, which most prompts read of one chunk only
        self._reader.close()
        if len(self.layers) == self.num_layers:
            self._memory.keep(self)
        self.layers = {}

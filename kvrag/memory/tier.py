"""Tiers in memory: recently read chunks, bounded in bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from operator import attrgetter

import torch
from cachetools import LRUCache
from torch import Tensor

from kvrag.errors import ChunkUnreadableError, DamagedChunkError, out_of_memory
from kvrag.process import log_once
from kvrag.store.chunkfile import PackedChunk
from kvrag.store.values import ChunkReader, Layer

TOGETHER = 8
"""Number of layers that are copied to a GPU at once, at most."""


class Pinned:
    """Page-locked memory for the layers of a chunk, from which a GPU copies several times as fast. Thread-safe."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._lock = num_layers, threading.Lock()
        self._pieces: dict[tuple[int, int], Tensor] = {}

    def __call__(self, number: int, num_bytes: int) -> Tensor:
        """Return memory for a layer, (num_bytes,) uint8, behind that of the layer before; any if none can be locked."""
        # torch rounds the memory up to a power of two: that of several layers has less left over
        room = (1 << (num_bytes * TOGETHER - 1).bit_length()) // num_bytes
        piece, place = divmod(number, room)
        wanted = num_bytes * min(room, self._num_layers - piece * room)
        try:
            with self._lock:
                if (memory := self._pieces.get((piece, num_bytes))) is None:
                    memory = torch.empty(1 << (wanted - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
                    self._pieces[piece, num_bytes] = memory
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            log_once("no more memory can be page-locked, so chunks reach the GPU more slowly: lower ram_bytes")
            return torch.empty(num_bytes, dtype=torch.uint8)
        return memory[place * num_bytes : (place + 1) * num_bytes]


class MemoryTier:
    """LRU cache of whole chunks in front of a store. Never stale: the key determines the KV. Thread-safe."""

    def __init__(
        self,
        max_bytes: int,
        faster: MemoryTier | None = None,
        name: str = "ram",
        allocate: Callable[[int], Callable[[int, int], Tensor]] | None = None,
    ) -> None:
        """Create an empty tier.

        Args:
            faster: A tier in front of it, for chunks that are read from this one, so for the second time at least.
            name: The readers' `tier`. That of the "device" keeps what `Keeping.moved` gets, others what is read.
            allocate: Returns `PackedChunk.allocate` for a chunk of so many layers; None = any memory.
        """
        self.name, self._faster, self._allocate = name, faster, allocate
        self._chunks: LRUCache[str, _Cached] = LRUCache(max_bytes, attrgetter("nbytes"))
        self._reading: weakref.WeakSet[Keeping] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def max_bytes(self) -> int:
        """Maximum size in bytes."""
        return int(self._chunks.maxsize)

    def is_at_hand(self, key: str) -> bool:
        """Return whether the chunk is cached, or being read in order to be."""
        with self._lock:
            here = key in self._chunks or any(reader.key == key for reader in self._reading)
        return here or (self._faster is not None and self._faster.is_at_hand(key))

    def open(self, key: str) -> ChunkReader | None:
        """Return a reader of the chunk, or None if it is not cached."""
        with self._lock:
            chunk = self._chunks.get(key)  # also if the faster tier has it, which may drop it earlier
        if self._faster is not None and (reader := self._faster.open(key)):
            return reader
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
        if self._allocate and isinstance(reader, PackedChunk):
            reader.allocate = self._allocate(reader.num_layers)
        if self.max_bytes == 0:
            return reader if self._faster is None else self._faster.keeping(reader)
        keeping = Keeping(reader, self)
        with self._lock:
            # where chunks are copied from one tier to another, those on their way take memory in both
            if keeping.nbytes + sum(other.nbytes for other in self._reading) > self.max_bytes:
                return reader
            self._reading.add(keeping)
        return keeping

    def relieved(self) -> MemoryTier | None:
        """Return this tier without the faster one, which is emptied and halved; None if it has none. Memory ran out."""
        if self._faster is None or not self._faster.max_bytes:
            return None
        log_once(f"memory ran out: chunks in the {self._faster.name} tier were dropped, and it becomes smaller")
        with self._faster._lock:
            self._faster._chunks = LRUCache(self._faster.max_bytes // 2, attrgetter("nbytes"))
        alone = copy(self)
        alone._faster = None
        return alone

    def keep(self, reader: Keeping) -> None:
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
        # several may share a larger piece of memory
        memory = (part.untyped_storage() for layer in layers.values() for part in layer)
        self.nbytes: int = self.ids.nbytes + sum({one.data_ptr(): one.nbytes() for one in memory}.values())

    def close(self) -> None:
        pass


class Keeping(_Chunk):
    """A chunk that is being read; when it is closed, the tier caches it if all of its layers were read."""

    def __init__(self, reader: ChunkReader, memory: MemoryTier) -> None:
        super().__init__(reader, reader.tier, {})
        self._reader, self._memory = reader, memory
        self.keeps = True
        self.nbytes: int = getattr(reader, "nbytes", 0)  # of chunks in memory

    @property
    def bytes_read(self) -> int:
        """See ChunkReader."""
        return self._reader.bytes_read

    def layer(self, number: int) -> Layer:
        """See ChunkReader."""
        layer = self._reader.layer(number)
        if self._memory.name != "device":
            self.layers[number] = layer
        return layer

    def moved(self, number: int, layer: Layer) -> None:
        """Take a layer, unpacked and on the model's device."""
        if self._memory.name == "device":
            self.layers[number] = layer

    def close(self) -> None:
        """See ChunkReader."""
        if self.keeps and len(self.layers) == self.num_layers - 1 and self.num_layers - 1 not in self.layers:
            with suppress(ChunkUnreadableError, DamagedChunkError):
                last = self.num_layers - 1
                self.layers[last] = self.layer(last)  # stored states, which most prompts read of one chunk only
        self._reader.close()
        if len(self.layers) == self.num_layers:
            self._memory.keep(self)
        self.layers = {}

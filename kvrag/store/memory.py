"""The RAM tier: chunks that were read lately, bounded in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from kvrag.store.protocol import ChunkReader

Layers = Sequence[tuple[Tensor, Tensor]]


class MemoryTier:
    """An LRU of whole chunks, in front of a store. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._chunks: OrderedDict[str, tuple[Layers, int, int, str]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def open(self, key: str) -> ChunkReader | None:
        """A reader of the chunk, or None."""
        with self._lock:
            if key not in self._chunks:
                return None
            self._chunks.move_to_end(key)
            layers, _, context, source, ids = self._chunks[key]
            return _MemoryReader(layers, context, source, ids)

    def keep(self, key: str, layers: Layers, context: int = 0, source: str = "", ids=None) -> None:
        """Take a chunk in, drop the least recently used ones that no longer fit."""
        size = sum(keys.nbytes + values.nbytes for keys, values in layers)
        if size > self.max_bytes:
            return
        with self._lock:
            if key in self._chunks:
                return
            self._chunks[key] = (layers, size, context, source, ids)
            self.bytes += size
            while self.bytes > self.max_bytes:
                _, (_, dropped, *_) = self._chunks.popitem(last=False)
                self.bytes -= dropped

    def drop(self, keys) -> None:
        """Forget a chunk."""
        with self._lock:
            for key in keys:
                _, size, *_ = self._chunks.pop(key, ((), 0))
                self.bytes -= size

    def keys(self):
        return list(self._chunks)

    def keeping(self, key: str, reader: ChunkReader) -> ChunkReader:
        """A reader that takes the chunk in once all of its layers have been read."""
        return _KeepingReader(self, key, reader) if self.max_bytes > 0 else reader


class _MemoryReader:
    tier = "ram"
    bytes_read = 0

    def __init__(self, layers: Layers, context: int, source: str, ids) -> None:
        self.ids, self.context_tokens = ids, context
        self._layers, self.context, self.source = layers, context, source
        self.num_layers = len(layers)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        return self._layers[number]

    def close(self) -> None:
        pass


class _KeepingReader:
    def __init__(self, memory: MemoryTier, key: str, reader: ChunkReader) -> None:
        self._memory, self._key, self._reader = memory, key, reader
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.tier, self.num_layers = reader.tier, reader.num_layers
        self.context, self.source = reader.context, reader.source
        self.ids, self.context_tokens = reader.ids, reader.context

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        self._layers[number] = self._reader.layer(number)
        return self._layers[number]

    def close(self) -> None:
        self._reader.close()
        if len(self._layers) == self.num_layers:
            layers = [self._layers[number] for number in range(self.num_layers)]
            self._memory.keep(self._key, layers, self.context, self.source, self.ids)

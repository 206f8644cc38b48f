"""The matched part of a prompt, and its KV read layer by layer, ahead of the forward pass that needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.errors import ChunkUnreadableError, DamagedChunkError, out_of_memory
from kvrag.fingerprint import text_key
from kvrag.reuse.conversation import CachedPrefix
from kvrag.reuse.trace import Trace
from kvrag.store import ChunkReader
from kvrag.store.codec import unpack
from kvrag.types import Run

_AHEAD = 2  # layers read before they are needed
_pool = ThreadPoolExecutor(max_workers=16, thread_name_prefix="kvrag-read")

LayerKV = dict[str, tuple[Tensor, Tensor]]
"""Chunk key -> position-free keys and values of one layer, each (H, T, D)."""


@dataclass(frozen=True)
class Matched:
    """A prompt and its reusable parts.

    Attributes:
        ids: Token ids of the prompt.
        runs: Runs of stored chunks after the cached prefix, ascending and disjoint.
        readers: An open reader for every key in `runs`.
        prefix: Cached prefix from a conversation.
    """

    ids: Sequence[int]
    runs: Sequence[Run] = ()
    readers: Mapping[str, ChunkReader] = field(default_factory=dict)
    prefix: CachedPrefix | None = None

    @property
    def kept(self) -> int:
        """Number of positions in the cached prefix."""
        return self.prefix.length if self.prefix else 0

    @property
    def cold(self) -> list[ChunkReader]:
        """Readers of the chunks that are not in RAM."""
        return [reader for reader in self.readers.values() if reader.tier != "ram"]

    @property
    def cold_tokens(self) -> int:
        """Number of tokens that are read from below the RAM tier."""
        return sum(len(run) for run in self.runs if self.readers[run.key].tier != "ram")

    @property
    def behind(self) -> dict[str, str]:
        """Keys of the texts, and of their chunks, that were encoded behind something."""
        readers = [self.readers[key] for key in {run.key for run in self.runs}]
        return {text_key(each.namespace, each.ids): each.key for each in readers if each.context_tokens}

    @property
    def bytes_read(self) -> int:
        """Bytes read from below the RAM tier so far."""
        return sum(reader.bytes_read for reader in self.readers.values())

    @property
    def tier(self) -> str:
        """Source of the chunks: "ram", "disk", "mixed", or "" without chunks."""
        tiers = {reader.tier for reader in self.readers.values()}
        return tiers.pop() if len(tiers) == 1 else "mixed" if tiers else ""

    def close(self) -> None:
        """Close the readers."""
        for reader in self.readers.values():
            reader.close()


class LayerLoader:
    """Loads several chunks layer by layer; its own threads read ahead."""

    def __init__(self, backend: Backend, readers: Mapping[str, ChunkReader], codec: str, trace: Trace) -> None:
        """Start reading the first layers.

        Args:
            readers: Chunk key -> open reader. The caller closes it.
            codec: Codec of the tensors that the readers return.
        """
        self.trace = trace
        self._backend, self._readers, self._codec = backend, readers, codec
        # nothing to wait for, so no reason to queue behind a slow disk
        self._is_at_hand = codec == "native" and all(reader.tier == "ram" for reader in readers.values())
        self._ahead = _AHEAD if backend.passes_may_wait else backend.num_layers
        self._reads: dict[int, Future[LayerKV]] = {}
        self._read_ahead(0)
        if not backend.passes_may_wait:
            self._wait_for_all()

    def layer(self, number: int) -> LayerKV:
        """Return a layer of all chunks, on its device. Each layer can be requested once.

        Other threads can use the model while this one waits.

        Raises:
            DamagedChunkError: A chunk's bytes differ from those that were written.
            ChunkUnreadableError: A chunk cannot be read at the moment.
        """
        with self.trace.step("load", synchronise=False):
            if self._is_at_hand:
                return self._read(number)
            self._read_ahead(number)
            read = self._reads[number]
            self._reads[number] = Future()  # frees the tensors
            if not read.done():
                with self._backend.waiting():
                    read.exception()
            return read.result()

    def close(self) -> None:
        """Wait for pending reads, so that the readers can be closed."""
        for read in self._reads.values():
            if not read.cancel() and read.running():
                read.exception()

    def _wait_for_all(self) -> None:
        """Wait until all layers are in memory. An error in one process is raised in all of them."""
        error = None
        try:
            for read in self._reads.values():
                read.result()
        except (DamagedChunkError, ChunkUnreadableError) as caught:
            error = caught
        for other in filter(None, self._backend.gather(error)):
            self.close()
            raise other

    def _read_ahead(self, number: int) -> None:
        if self._is_at_hand or not self._readers:
            return
        for layer in range(number, min(number + 1 + self._ahead, self._backend.num_layers)):
            if layer not in self._reads:
                self._reads[layer] = _pool.submit(self._read, layer)

    def _read(self, number: int) -> LayerKV:
        # all layers at once would fill a device whose memory the engine has divided up
        ahead = self._backend.passes_may_wait
        device = self._backend.layer_device(number) if ahead else torch.device("cpu")
        chunks: LayerKV = {}
        for key, reader in self._readers.items():
            try:
                with self.trace.reading():
                    packed = reader.layer(number)
                chunks[key] = unpack(packed, self._codec, device)
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise ChunkUnreadableError(key, "out of memory") from error
        return chunks

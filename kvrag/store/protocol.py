"""What a store of chunk KV must do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvrag.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk as it is stored.

    Attributes:
        key: `Fingerprint.chunk_key(ids)`; it determines everything else but what stood before the chunk.
        ids: (T,) token ids.
        anchors: What `kvrag.reuse.match` indexes the chunk by; opaque to the store.
        layers: Per layer keys (position-free) and values on the CPU: (H, T, D) each, or packed by `kvrag.store.codec`.
        context: How many tokens stood between it and the preamble when it was encoded ...
        source: ... and the name of what they and the chunk are pieces of; "" = there were none.
    """

    key: str
    ids: NDArray[np.uint32]
    anchors: bytes
    layers: Sequence[tuple[Tensor, Tensor]]
    context: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the match index needs to know of a chunk. `number` rises with every chunk put."""

    number: int
    key: str
    ids: NDArray[np.uint32]
    anchors: bytes


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What is in a store. `damaged` counts chunks quarantined since it was created."""

    path: str
    fingerprint: str
    model: str
    codec: str
    chunks: int
    tokens: int
    bytes: int
    documents: int
    max_bytes: int | None
    damaged: int


class ChunkReader(Protocol):
    """One open chunk, readable from any thread and even if the chunk is deleted meanwhile.

    Attributes:
        tier: "disk" or "ram".
        num_layers: How many layers the chunk has.
        context, source: See ChunkRecord.
    """

    tier: str
    num_layers: int
    context: int
    source: str

    @property
    def bytes_read(self) -> int:
        """Bytes that came from below the RAM tier so far."""

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as they were put, on the CPU, not to be changed.

        Raises:
            DamagedChunkError: The bytes are not those that were written.
        """

    def close(self) -> None:
        """Let go of the file."""


class KVStore(Protocol):
    """A store of one model's chunk KV under one codec.

    All methods are thread-safe; several processes may share one store.
    """

    def bind(self, fingerprint: Fingerprint) -> None:
        """Claim the store for a model, or check that it is that model's.

        Raises:
            FingerprintMismatchError: It holds another model's KV, or that of another codec.
        """

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are not stored, in order."""

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """Store chunks durably, known ones once; returns the bytes they take.

        Raises:
            StoreFullError: No room; what was stored before stays.
            StoreReadOnlyError: Cannot be written.
        """

    def open(self, key: str) -> ChunkReader | None:
        """Open a chunk; None if it is not stored (any more).

        Raises:
            DamagedChunkError: The file is truncated or no chunk.
        """

    def entries(self, after: int) -> Iterable[Entry]:
        """Chunks with a number above `after`, ascending."""

    def removals(self) -> int:
        """A count that changes when chunks have been removed."""

    def remove(self, keys: Sequence[str]) -> None:
        """Delete chunks, whoever holds them."""

    def quarantine(self, key: str) -> None:
        """Take a damaged chunk out of use, keeping its bytes for inspection."""

    def touch(self, keys: Sequence[str]) -> None:
        """These chunks have been used."""

    def set_document(self, document: str, keys: Sequence[str]) -> int:
        """Say which chunks a document consists of now; chunks that no document holds any more are removed.

        Returns:
            How many chunks were removed.
        """

    def documents(self, prefix: str = "") -> dict[str, list[str]]:
        """The named documents that have chunks and whose names begin so, sorted, each with its chunks' keys."""

    def stats(self) -> StoreStats:
        """Counts, for people and tests."""

    def close(self) -> None:
        """Release files. Open readers stay valid."""


@runtime_checkable
class KeepsTexts(Protocol):
    """What a store may offer besides: a place for small texts that belong to its chunks, such as a calibration.

    For a store without these methods the engine remembers such texts as long as it lives.
    """

    def read_text(self, name: str) -> str | None:
        """The text kept under `name`, None if there is none.

        Raises:
            StoreError: It is there but cannot be read.
        """

    def write_text(self, name: str, text: str) -> None:
        """Keep a text, whole or not at all; it replaces the one of that name.

        Raises:
            StoreFullError: No room.
            StoreReadOnlyError: Cannot be written.
        """


class Texts:
    """Texts in memory, for stores that keep none."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def read_text(self, name: str) -> str | None:
        """See KeepsTexts.read_text."""
        return self._texts.get(name)

    def write_text(self, name: str, text: str) -> None:
        """See KeepsTexts.write_text."""
        self._texts[name] = text

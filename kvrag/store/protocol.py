"""What a store of chunk KV must do, and the rule that picks what it serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvrag.fingerprint import Fingerprint

ON_REQUEST = "\x01on request"
"""The document that holds texts which came with a request; not among `documents`, and collected when unused."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A chunk as it is stored: one variant of a text.

    Attributes:
        key: `Fingerprint.chunk_key(ids, context, namespace)`; it determines everything else.
        namespace: Where the text is visible.
        ids: (T,) token ids.
        context: (C,) token ids between the preamble and the chunk when it was encoded; empty = it was encoded alone.
        layers: Per layer keys (position-free) and values on the CPU: (H, T, D) each, or packed by `kvrag.store.codec`.
    """

    key: str
    namespace: str
    ids: NDArray[np.uint32]
    context: NDArray[np.uint32]
    layers: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A text that has a stored variant. `number` rises with every text; one that comes back gets a new number."""

    number: int
    text: str
    namespace: str
    ids: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Holding:
    """A document holds a text as a piece of `source` ("" = of nothing known) and relies on the variant `key`."""

    text: str
    key: str
    source: str


@dataclass(frozen=True, slots=True)
class TextState:
    """What is durably recorded of a text.

    Attributes:
        variants: Keys of the stored variants, and how many tokens each was encoded behind.
        sources: All sources of all documents that hold the text, and the variant that each relies on; "" = several,
            as documents have it that only say that they are of one source.
    """

    variants: Mapping[str, int]
    sources: Mapping[str, str]


def serve(state: TextState, alone_only: bool) -> str | None:
    """Return the key of the variant that a prompt gets; None = the text is computed with the prompt.

    The words of one document must not reach the readers of another: only a text with a single source is served as it
    was encoded behind that source. `alone_only`: not even then.
    """
    if len(state.sources) == 1 and not alone_only:
        ((source, key),) = state.sources.items()
        if source and key in state.variants:
            return key
    return next((key for key, context_tokens in state.variants.items() if context_tokens == 0), None)


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """What is in one namespace of a store. `texts` may have several `chunks` each: one per variant."""

    namespace: str
    texts: int
    chunks: int
    tokens: int
    bytes: int
    documents: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What is in a store, all namespaces together and one by one.

    `damaged` counts chunks quarantined since it was created.
    """

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
    namespaces: tuple[NamespaceStats, ...] = ()


class ChunkReader(Protocol):
    """One open chunk, readable from any thread.

    It stays readable when the chunk is deleted, unless too many files are open already.

    Attributes:
        key: As asked for, and as the file's content says.
        namespace: Where its text is visible.
        ids: (T,) token ids.
        context_tokens: How many tokens it was encoded behind.
        tier: "disk" or "ram".
        num_layers: How many layers the chunk has.
    """

    key: str
    namespace: str
    ids: NDArray[np.uint32]
    context_tokens: int
    tier: str
    num_layers: int

    @property
    def bytes_read(self) -> int:
        """Bytes that came from below the RAM tier so far."""

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as they were put, on the CPU, not to be changed.

        Raises:
            DamagedChunkError: The bytes are not those that were written.
            ChunkUnreadableError: They cannot be read just now.
        """

    def close(self) -> None:
        """Let go of the file."""


class KVStore(Protocol):
    """A store of one model's chunk KV under one codec.

    All methods are thread-safe; several processes may share one store. What a prompt calls (`look_up`, `open`,
    `entries`, `removed`, `removals`, `touch`) never waits for a writer.

    Attributes:
        catalog_folder: Where what was derived from the entries may be kept; None = nowhere.
    """

    @property
    def catalog_folder(self) -> Path | None:
        """See above."""

    def bind(self, fingerprint: Fingerprint) -> None:
        """Claim the store for a model, or check that it is that model's.

        Raises:
            FingerprintMismatchError: It holds another model's KV, or that of another codec.
        """

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that are not stored, in order."""

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """Store chunks durably, known ones once; returns the bytes they take.

        Raises:
            StoreFullError: No room; what was stored before stays.
            StoreReadOnlyError: Cannot be written.
        """

    def open(self, key: str) -> ChunkReader | None:
        """Open a chunk; None if it is not stored (any more).

        Raises:
            DamagedChunkError: The file is truncated, no chunk, or not the chunk of this key.
            ChunkUnreadableError: It cannot be read just now.
        """

    def look_up(self, texts: Sequence[str]) -> dict[str, TextState]:
        """Return what is durably recorded of these texts, all of them, at one moment."""

    def entries(self, after: int) -> Iterable[Entry]:
        """Return the texts with a number above `after`, ascending."""

    def removed(self, after: int) -> tuple[int, Sequence[int]] | None:
        """Return the numbers of texts that have gone since the position `after`, and the position now.

        Args:
            after: An earlier position, or 0 from whoever knows no entries yet: that returns the position alone.

        Returns:
            None: That is too long ago. Read all entries again.
        """

    def removals(self) -> int:
        """Return a count that changes when chunks have been removed, by any process."""

    def remove(self, keys: Sequence[str]) -> None:
        """Delete chunks, whoever relies on them."""

    def quarantine(self, key: str) -> None:
        """Take a damaged chunk out of use, keeping its bytes for inspection."""

    def touch(self, keys: Sequence[str]) -> None:
        """Note that these chunks have been used. Written later, by another thread."""

    def set_document(
        self, document: str, holdings: Sequence[Holding], namespace: str = "", replace: bool = True
    ) -> list[str]:
        """Record what a document consists of.

        Args:
            document: Its name. "" and `ON_REQUEST` collect: what they held before they hold on to.
            replace: It consists of nothing else any more. False = these are added.

        Returns:
            Keys of the chunks that were removed because no document relies on them any more.
        """

    def documents(self, prefix: str = "", namespace: str = "") -> dict[str, list[str]]:
        """Return the namespace's documents whose names begin so, sorted, each with the keys that it relies on."""

    def stats(self) -> StoreStats:
        """Return counts, for people and tests."""

    def close(self) -> None:
        """Write what is pending and release files. Open readers stay valid."""


@runtime_checkable
class KeepsTexts(Protocol):
    """What a store may offer besides: a place for small texts that belong to its chunks, such as a calibration.

    For a store without these methods the engine remembers such texts as long as it lives.
    """

    def read_text(self, name: str) -> str | None:
        """Return the text kept under `name`, None if there is none.

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

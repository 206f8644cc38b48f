"""Protocol of a store of chunk KV, and the rule that picks the variant to serve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvrag.fingerprint import Fingerprint

ON_REQUEST = "\x01on request"
"""Document that holds the texts of requests; not listed by `documents`, and deleted when unused."""


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A stored chunk: one variant of a text.

    Attributes:
        key: `Fingerprint.chunk_key(ids, context, namespace)`; it determines everything else.
        ids: (T,) token ids.
        context: (C,) token ids between the preamble and the chunk when it was encoded; empty = encoded alone.
        layers: Per layer keys (position-free) and values on the CPU: (H, T, D) each, or packed by `kvrag.store.codec`.
    """

    key: str
    namespace: str
    ids: NDArray[np.uint32]
    context: NDArray[np.uint32]
    layers: Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Entry:
    """A text with a stored variant. `number` increases with every text; a text that is stored again gets a new one."""

    number: int
    text_key: str
    namespace: str
    ids: NDArray[np.uint32]


class Holding(NamedTuple):
    """A piece of a document: it holds a text from `source` ("" = unknown) and relies on the variant `key`."""

    text_key: str
    key: str
    source: str


@dataclass(frozen=True, slots=True)
class TextState:
    """Durable state of a text.

    Attributes:
        variants: Key of each stored variant, and the number of context tokens it was encoded with.
        sources: Every source of every document that holds the text, and the variant that it relies on; "" where
            documents that name the same source rely on different variants.
    """

    variants: Mapping[str, int]
    sources: Mapping[str, str]


def visible_variant(state: TextState, alone_only: bool) -> str | None:
    """Return the key of the variant that a prompt gets; None = the text is computed with the prompt.

    Words of one document must not reach readers of another. The variant with context is served only if the text has a
    single source, and never if `alone_only` is set.
    """
    if len(state.sources) == 1 and not alone_only:
        ((source, key),) = state.sources.items()
        if source and key in state.variants:
            return key
    return next((key for key, context_tokens in state.variants.items() if context_tokens == 0), None)


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Contents of one namespace, and its byte budget. A text may have several chunks, one per variant."""

    namespace: str
    texts: int
    chunks: int
    tokens: int
    bytes: int
    documents: int
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store; `damaged` counts the chunks quarantined since it was created."""

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
    """An open chunk, readable from any thread, also after it is deleted, unless too many files are open.

    Attributes:
        key: The requested key, verified against the file's content.
        ids: (T,) token ids.
        context_tokens: Number of context tokens it was encoded with.
        tier: "disk", "ram", "device", or "shared" for a bucket or server that machines share.
    """

    key: str
    namespace: str
    ids: NDArray[np.uint32]
    context_tokens: int
    tier: str
    num_layers: int

    @property
    def bytes_read(self) -> int:
        """Bytes read from below the RAM tier so far."""

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as they were stored, on the CPU; unpacked and on its device, if the chunk
        is in a tier there. Do not change them.

        Raises DamagedChunkError if they differ from what was written, ChunkUnreadableError if reading fails.
        """

    def close(self) -> None:
        """Release the file."""


class KVStore(Protocol):
    """A store of one model's chunk KV under one codec.

    All methods are thread-safe; several processes may share one store. The methods called for a prompt (`look_up`,
    `open`, `entries`, `removed`, `removals`, `touch`) never wait for a writer.
    """

    @property
    def read_only(self) -> bool:
        """Whether all writes fail, also into `catalog_folder`."""

    @property
    def catalog_folder(self) -> Path | None:
        """Folder for data derived from the entries; None = keep it in memory."""

    def bind(self, fingerprint: Fingerprint) -> None:
        """Claim the store for a model, or raise FingerprintMismatchError if it holds KV of another model or codec."""

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are not stored, in order."""

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """Store chunks durably, each key once; return their size in bytes.

        Raises StoreFullError if there is no room; chunks stored before are kept.
        """

    def open(self, key: str) -> ChunkReader | None:
        """Open a chunk; None if it is not stored. Raises as ChunkReader.layer, also for another chunk's content."""

    def look_up(self, text_keys: Sequence[str]) -> dict[str, TextState]:
        """Return the durable state of all of these texts from one snapshot."""

    def entries(self, after: int) -> Iterable[Entry]:
        """Return the texts with a number above `after`, in ascending order."""

    def removed(self, after: int) -> tuple[int, Sequence[int]] | None:
        """Return the current position of the removal log and the numbers of the texts removed since position `after`.

        0 = return the current position only. None if the log no longer reaches back: read all entries again.
        """

    def removals(self) -> int:
        """Return a counter that changes when any process removes chunks."""

    def remove(self, keys: Sequence[str]) -> None:
        """Delete chunks, even if documents rely on them."""

    def quarantine(self, key: str) -> None:
        """Take a damaged chunk out of use and keep its bytes for inspection."""

    def touch(self, keys: Sequence[str]) -> None:
        """Record that these chunks were used. The write happens later, in another thread."""

    def set_document(
        self, document: str, holdings: Sequence[Holding], namespace: str = "", replace: bool = True
    ) -> list[str]:
        """Record the texts of a document; return the keys of the chunks removed because no document relies on them.

        Texts that it had and lacks now are not kept for prompts either.

        Earlier holdings are kept if `replace` is False, or the document is "" or `ON_REQUEST`.
        """

    def forget_requests(
        self, namespace: str = "", choose: Callable[[Sequence[str]], Collection[str]] = lambda text_keys: text_keys
    ) -> list[str]:
        """Delete the chunks that only prompts brought, of the texts that `choose` returns; return their keys."""

    def documents(self, prefix: str = "", namespace: str = "") -> dict[str, list[str]]:
        """Return the namespace's documents with this prefix, sorted, each with the keys that it relies on."""

    def count_tokens(self, prefix: str = "", namespace: str = "") -> dict[str, int]:
        """Return the number of tokens of the texts of each document with this prefix."""

    def read_text(self, name: str) -> str | None:
        """Return a small text kept beside the chunks, None if there is none; raises StoreError if it cannot be read."""

    def change_text(self, name: str, change: Callable[[str | None], str]) -> None:
        """Replace a text (None = there is none or it cannot be read) by the result of `change`, atomically.

        `change` is called again if another writer was faster, so that no change is lost.
        """

    def stats(self) -> StoreStats:
        """Return counts for reports and tests."""

    def close(self) -> None:
        """Write pending data and release files. Open readers stay valid."""


@runtime_checkable
class ReadsAhead(Protocol):
    """Optional part of a store with a slow connection."""

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Start to read these chunks, all of which are about to be opened, and return at once."""

"""Values that stores take and return, and the rule that picks the variant to serve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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

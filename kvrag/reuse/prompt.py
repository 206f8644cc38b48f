"""A prompt, and the stored chunks that it reuses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrag.config import BlendConfig
from kvrag.reuse.conversation import CachedPrefix
from kvrag.reuse.lookup import Match
from kvrag.store import ChunkReader
from kvrag.types import Run

_MEMORY = ("ram", "device")  # tiers


@dataclass(frozen=True)
class Prompt:
    """A prompt to prefill."""

    ids: Sequence[int]
    config: BlendConfig = field(default_factory=BlendConfig)  # as it was asked for
    namespace: str = ""
    prefix: CachedPrefix | None = None  # from a conversation
    notes: Sequence[str] = ()  # for the report
    matches: Sequence[Match] = ()  # runs of stored chunks after the cached prefix, ascending and disjoint
    readers: Mapping[str, ChunkReader] = field(default_factory=dict)  # by the runs' chunk keys; the prompt closes them

    @functools.cached_property
    def runs(self) -> list[Run]:
        """Runs of the stored chunks."""
        return [match.run for match in self.matches]

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the chunks that it contains, whether their KV is used or not, with those of the cached prefix."""
        return frozenset(self.readers) | (self.prefix.conversation.keys if self.prefix else frozenset())

    @property
    def kept(self) -> int:
        """Number of positions in the cached prefix."""
        return self.prefix.length if self.prefix else 0

    @property
    def cold(self) -> list[ChunkReader]:
        """Readers of the chunks that are not in memory."""
        return [reader for reader in self.readers.values() if reader.tier not in _MEMORY]

    @property
    def cold_tokens(self) -> int:
        """Number of tokens that are read from below the tiers in memory."""
        return sum(len(run) for run in self.runs if self.readers[run.key].tier not in _MEMORY)

    @property
    def with_context(self) -> dict[str, str]:
        """Chunk keys of the reused chunks that were encoded with context, by text key."""
        return {match.text_key: match.run.key for match in self.matches if match.context_tokens}

    @property
    def bytes_read(self) -> int:
        """Bytes read from below the RAM tier so far."""
        return sum(reader.bytes_read for reader in self.readers.values())

    @property
    def tier(self) -> str:
        """Source of the chunks: as `ChunkReader.tier`, "mixed", or "" without chunks."""
        tiers = {reader.tier for reader in self.readers.values()}
        return tiers.pop() if len(tiers) == 1 else "mixed" if tiers else ""

    def close(self) -> None:
        """Close the readers."""
        for reader in self.readers.values():
            reader.close()

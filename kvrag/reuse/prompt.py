"""A prompt, and the stored chunks that it reuses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvrag.backend.protocol import Backend
from kvrag.config import BlendConfig
from kvrag.index.lookup import Match
from kvrag.memory.conversation import CachedPrefix, Conversations, Placed
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
    conversations: Conversations | None = None  # in which the rest of its history is looked up
    is_full: bool = False  # full prefill was chosen: its chunks are recorded and not opened

    @functools.cached_property
    def runs(self) -> list[Run]:
        """Runs of the stored chunks."""
        return [match.run for match in self.matches]

    @property
    def stored(self) -> list[Run]:
        """Runs of chunks in the store, without those of earlier prompts."""
        return [match.run for match in self.matches if match.is_stored]

    @property
    def chunks(self) -> tuple[Placed, ...]:
        """Positions and keys of the chunks on which its KV may depend."""
        kept = self.prefix.chunks if self.prefix else ()
        stored = ((max(run.start - run.offset, 0), run.key) for run in self.stored)
        earlier = ((match.run.start, key) for match in self.matches for key in match.keys)
        return tuple(sorted({*kept, *stored, *earlier}))

    def with_history(self, backend: Backend) -> Prompt:
        """Return the prompt with the rest of its history, in the gaps between its matches."""
        if self.conversations is None:
            return self
        starts = [self.kept, *(run.stop for run in self.runs)]
        stops = [*(run.start for run in self.runs), len(self.ids)]
        gaps = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        found = self.conversations.find_earlier(backend, self.ids, gaps, self.config.min_run, self.namespace)
        matches = [*self.matches, *(earlier for earlier, _ in found)]
        readers = {**self.readers, **{reader.key: reader for _, reader in found}}
        return replace(self, matches=sorted(matches, key=lambda match: match.run.start), readers=readers)

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
        """Chunk keys of the stored chunks that were encoded with context, by text key."""
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

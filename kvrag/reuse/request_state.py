"""A request: one prompt, from its tokens to the KV that its answer continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, KVCache
from kvrag.config import BlendConfig
from kvrag.index.catalog import Match
from kvrag.memory.conversation import CachedPrefix, Conversations, Placed
from kvrag.store import ChunkReader
from kvrag.types import BlendReport, Run

if TYPE_CHECKING:
    from kvrag.reuse.deepen import Deepening
    from kvrag.reuse.select import Selection

_MEMORY = ("ram", "device")  # tiers


@dataclass(eq=False)
class RequestState:
    """State of one request. It is filled in step by step; `kvrag.request` has the steps.

    Asked: `token_ids`, `config`, `namespace`, `notes`; `conversations` if earlier prompts may be reused. Looked up:
    `prefix`, `matches`, `readers`, `chunks`. Planned: `applied`. Stitched: `reused`, `exact`, `cache`. Selected:
    `selection`. Blended: `logits`, `report`, `deepening`, and `cache` is complete: it can be decoded. After the answer,
    its KV is freed; explanations read the rest.

    Attributes:
        config: Settings as they were asked for.
        notes: For the report.
        prefix: First positions, from a conversation.
        matches: Runs of stored chunks after the cached prefix, ascending and disjoint.
        readers: By the runs' chunk keys; the request closes them.
        chunks: Positions and keys of the chunks on which its KV may depend.
        applied: `config` with the policy and the ratio that were chosen.
        reused: (T,) bool; KV of the other positions is computed.
        exact: (T,) bool: a reused position whose KV equals full prefill's: in a run right after the preamble, encoded
            there, with a lossless codec.
        cache: Each layer is stitched when a forward pass first reaches it.
        logits: (1, V) float32, after the last token.
        recomputed: (S,) reused positions that were recomputed.
        report: Without `ttft_s`, which the caller sets.
        deepening: None = the ratio is fixed.
        is_forgotten: A chunk or a text in it was deleted: its KV is not kept, and it is not explained.
    """

    token_ids: Sequence[int]
    config: BlendConfig = field(default_factory=BlendConfig)
    namespace: str = ""
    notes: Sequence[str] = ()
    conversations: Conversations | None = None

    prefix: CachedPrefix | None = None
    matches: Sequence[Match] = ()
    readers: Mapping[str, ChunkReader] = field(default_factory=dict)
    chunks: tuple[Placed, ...] = ()

    applied: BlendConfig = field(init=False)
    reused: Tensor = field(init=False)
    exact: Tensor = field(init=False)
    cache: KVCache = field(init=False)
    selection: Selection = field(init=False)
    logits: Tensor = field(init=False)
    recomputed: Tensor = field(init=False)
    report: BlendReport = field(init=False)
    deepening: Deepening | None = None
    is_forgotten: bool = False

    def __post_init__(self) -> None:
        self.ids = torch.tensor(self.token_ids, dtype=torch.long)  # (T,)

    @classmethod
    def laid_out(cls, ids: Tensor, runs: Sequence[Run], reused: Tensor, exact: Tensor, cache: KVCache) -> RequestState:
        """Return a request whose KV is stitched already."""
        request = cls(ids.tolist(), matches=[Match(run, run.key, 0) for run in runs])
        request.reused, request.exact, request.cache = reused, exact, cache
        return request

    # ---------------------------------------------------------------- looked up

    @property
    def runs(self) -> list[Run]:
        """Runs of the matches."""
        return [match.run for match in self.matches]

    @property
    def stored(self) -> list[Run]:
        """Runs of chunks in the store, without those of earlier prompts."""
        return [match.run for match in self.matches if match.is_stored]

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the chunks on which its KV may depend."""
        return frozenset(key for _, key in self.chunks)

    @property
    def kept(self) -> int:
        """Number of positions in the cached prefix."""
        return self.prefix.length if self.prefix else 0

    @property
    def with_context(self) -> dict[str, str]:
        """Chunk keys of the stored chunks that were encoded with context, by text key."""
        return {match.text_key: match.run.key for match in self.matches if match.context_tokens}

    @property
    def cold(self) -> list[ChunkReader]:
        """Readers of the chunks that are not in memory."""
        return [reader for reader in self.readers.values() if reader.tier not in _MEMORY]

    @property
    def cold_tokens(self) -> int:
        """Number of tokens that are read from below the tiers in memory."""
        return sum(len(run) for run in self.runs if self.readers[run.key].tier not in _MEMORY)

    @property
    def bytes_read(self) -> int:
        """Bytes read from below the RAM tier so far."""
        return sum(reader.bytes_read for reader in self.readers.values())

    @property
    def tier(self) -> str:
        """Source of the chunks: as `ChunkReader.tier`, "mixed", or "" without chunks."""
        tiers = {reader.tier for reader in self.readers.values()}
        return tiers.pop() if len(tiers) == 1 else "mixed" if tiers else ""

    def add_history(self, backend: Backend) -> None:
        """Add the rest of its history, where `config` asks for it, in the gaps between its matches."""
        if self.conversations is None or self.config.history != "blend" or self.config.policy == "full":
            return
        starts = [self.kept, *(run.stop for run in self.runs)]
        stops = [*(run.start for run in self.runs), len(self.ids)]
        gaps = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        found = self.conversations.find_earlier(backend, self.token_ids, gaps, self.config.min_run, self.namespace)
        matches = [*self.matches, *(earlier for earlier, _ in found)]
        self.readers = {**self.readers, **{reader.key: reader for _, reader in found}}
        self.matches = sorted(matches, key=lambda match: match.run.start)
        self.place_chunks()

    def reuse_nothing(self) -> None:
        """Drop the matches. Its `chunks` stay: deleting a chunk deletes the conversations that contain it."""
        self.close()
        self.matches = ()

    def place_chunks(self) -> None:
        """Set `chunks` by the matches and the cached prefix."""
        kept = self.prefix.chunks if self.prefix else ()
        stored = ((max(run.start - run.offset, 0), run.key) for run in self.stored)
        earlier = ((match.run.start, key) for match in self.matches for key in match.keys)
        self.chunks = tuple(sorted({*kept, *stored, *earlier}))

    def close(self) -> None:
        """Close the readers."""
        readers, self.readers = self.readers, {}
        for reader in readers.values():
            reader.close()

    # ---------------------------------------------------------------- stitched

    @property
    def fresh(self) -> Tensor:
        """(F,) positions without stored KV."""
        return (~self.reused).nonzero().squeeze(1)

    @property
    def inexact(self) -> Tensor:
        """(R,) reused positions whose KV may deviate; a policy selects from them."""
        inexact = self.reused & ~self.exact
        inexact[: self.kept] = False  # blended in an earlier turn
        return inexact.nonzero().squeeze(1)

    @property
    def selected(self) -> Tensor:
        """(S,) reused positions that are recomputed."""
        return self.selection.selected

    def tail(self) -> int:
        """Return the number of positions up to the last that keeps its stitched KV; 1 if none does, 0 without any."""
        kept = self.reused.index_fill(0, self.selected, False)
        return int(kept.nonzero()[-1]) + 1 if kept.any() else int(self.reused.any())

    def num_exact(self, selected: Tensor) -> int:
        """Return the number of leading positions with full prefill's KV once the `selected` ones are recomputed."""
        deviating = (self.reused & ~self.exact).index_fill(0, selected, False)
        return int(deviating.int().argmax()) if deviating.any() else len(self.ids)

    # ---------------------------------------------------------------- answered

    @property
    def is_exact(self) -> bool:
        """True once all KV is full prefill's."""
        return self.report.exact or (self.deepening is not None and self.deepening.is_complete)

    def note_first_token(self, ttft_s: float) -> None:
        """Complete the report with the seconds from the call to the first token."""
        self.note_stages()
        self.report = replace(self.report, ttft_s=ttft_s, exact=self.is_exact)

    def note_stages(self) -> None:
        """Enter into `recomputed` and the report what was recomputed while the model was unsure."""
        if self.deepening is not None and self.deepening.stages:
            self.recomputed = self.deepening.recomputed
            stages = tuple(self.deepening.stages)
            self.report = replace(self.report, recomputed_tokens=len(self.recomputed), stages=stages)

    @contextmanager
    def kv_freed_at_end(self) -> Iterator[None]:
        """Free the KV at the end of the block."""
        try:
            yield
        finally:
            for name in ("cache", "logits", "selection"):
                self.__dict__.pop(name, None)
            self.prefix = self.deepening = self.conversations = None

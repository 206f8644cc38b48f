"""A request: one prompt, from its tokens to its answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.backend.protocol import Backend, KVCache
from kvrag.config import BlendConfig
from kvrag.index.catalog import Match
from kvrag.memory.conversation import Blended, CachedPrefix, Conversations, Placed, Turn
from kvrag.store import ChunkReader
from kvrag.types import BlendReport, Run

_MEMORY = ("ram", "device")  # tiers


@dataclass(eq=False)
class Request:
    """One request, from the question to its explanations. The steps of `kvrag.answer` and `kvrag.prefill` fill it in.

    Its states are asked, begun, looked up, planned, stitched, selected and blended: `cache` is then complete, and can
    be decoded. While it is decoded, `note_first_token` and `note_completed` update the report. Once it is answered or
    abandoned, its KV is freed (`kv_freed_at_end`); explanations read the rest.

    Attributes:
        config: Settings as they were asked for.
        notes: For the report.
        created: Keys of chunks that were encoded for this answer.
        conversations: Those that may be continued; None = earlier prompts are not reused.
        question_end: Position where the chat template's generation prompt begins, which the next turn may lack, or 0.
        prefix: First positions, from a conversation.
        matches: Runs of stored chunks after the cached prefix, ascending and disjoint; `match` sets them.
        runs, stored: Those of the matches, and without those of earlier prompts.
        num_matched: Tokens of the runs.
        is_encoded_alone: Most of them were encoded without the text before them.
        readers: By the runs' chunk keys; the request closes them.
        chunks: Positions and keys of the chunks on which its KV may depend.
        planned: `config` with a policy and a ratio, before the chunks were known.
        reused: (T,) bool; KV of the other positions is computed.
        exact: (T,) bool: a reused position whose KV equals full prefill's: in a run right after the preamble, encoded
            there, with a lossless codec.
        cache: Each layer is stitched when a forward pass first reaches it.
        selected, deeper: (S,) reused positions to recompute, and those to recompute next.
        logits: (1, V) float32, after the last token.
        recomputed: (S,) reused positions that were recomputed.
        report: Without `ttft_s`, which the caller sets.
        late: None = the ratio is fixed.
        relieve: Frees memory that only makes its prefill faster; returns None if there is none.
        is_forgotten: A chunk or a text in it was deleted: its KV is not kept, and it is not explained.
    """

    # asked
    given: InitVar[Sequence[int] | NDArray[np.int64]]
    config: BlendConfig = field(default_factory=BlendConfig)
    namespace: str = ""
    notes: Sequence[str] = ()
    created: Collection[str] = ()
    token_ids: NDArray[np.int64] = field(init=False)  # given ones, converted once
    # begun
    conversations: Conversations | None = None
    question_end: int = 0
    # looked up
    prefix: CachedPrefix | None = None
    matches: Sequence[Match] = ()
    runs: Sequence[Run] = ()
    stored: Sequence[Run] = ()
    num_matched: int = 0
    is_encoded_alone: bool = False
    readers: Mapping[str, ChunkReader] = field(default_factory=dict)
    chunks: tuple[Placed, ...] = ()
    # planned
    planned: BlendConfig = field(init=False)
    # stitched
    reused: Tensor = field(init=False)
    exact: Tensor = field(init=False)
    cache: KVCache = field(init=False)
    # selected
    selected: Tensor = field(init=False)
    deeper: Tensor = field(init=False)
    # blended
    logits: Tensor = field(init=False)
    recomputed: Tensor = field(init=False)
    report: BlendReport = field(init=False)
    late: Any = None  # a LateRecompute while more can be recomputed
    relieve: Callable[[], object] = lambda: None
    # in any state
    is_forgotten: bool = False

    def __post_init__(self, given: Sequence[int] | NDArray[np.int64]) -> None:
        self.token_ids = np.array(given, np.int64)
        self.ids = torch.from_numpy(self.token_ids)  # (T,)

    # ---------------------------------------------------------------- looked up

    def match(self, matches: Sequence[Match]) -> None:
        """Set the matches and what follows from them and the cached prefix."""
        self.matches, self.runs = matches, [match.run for match in matches]
        self.stored = [match.run for match in matches if match.text_key]
        self.num_matched = sum(map(len, self.runs))
        alone = sum(map(len, [match.run for match in matches if not match.context_tokens]))
        self.is_encoded_alone = 2 * alone > self.num_matched
        kept = self.prefix.chunks if self.prefix else ()
        stored = ((max(run.start - run.offset, 0), run.key) for run in self.stored)
        earlier = ((match.run.start, key) for match in matches for key in match.keys)
        self.chunks = tuple(sorted({*kept, *stored, *earlier}))

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
        if self.conversations is None or self.config.edited_history != "blend" or self.config.policy == "full":
            return
        starts = [self.kept, *(run.stop for run in self.runs)]
        stops = [*(run.start for run in self.runs), len(self.ids)]
        gaps = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
        found = self.conversations.find_earlier(backend, self.token_ids, gaps, self.config.min_run, self.namespace)
        matches = [*self.matches, *(earlier for earlier, _ in found)]
        self.readers = {**self.readers, **{reader.key: reader for _, reader in found}}
        self.match(sorted(matches, key=lambda match: match.run.start))

    def reuse_nothing(self) -> None:
        """Drop the matches. Its `chunks` stay: deleting a chunk deletes the conversations that contain it."""
        self.close()
        self.matches = self.runs = self.stored = ()
        self.num_matched = 0

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

    def tail(self) -> int:
        """Return the number of positions up to the last that keeps its stitched KV; 1 if none does, 0 without any."""
        kept = self.reused.index_fill(0, self.selected, False)
        return int(kept.nonzero()[-1]) + 1 if kept.any() else int(self.reused.any())

    def num_exact(self, selected: Tensor) -> int:
        """Return the number of leading positions with full prefill's KV once the `selected` ones are recomputed."""
        deviating = (self.reused & ~self.exact).index_fill(0, selected, False)
        return int(deviating.int().argmax()) if deviating.any() else len(self.ids)

    # ---------------------------------------------------------------- blended

    def report_prefill(
        self, config: BlendConfig, decision: str, seconds: Mapping[str, float], notes: Sequence[str]
    ) -> None:
        """Set the report of its prefill, by the settings that were chosen and the seconds of each step."""
        self.recomputed = self.selected  # grows while the model is unsure
        assert config.ratio is not None
        times: dict[str, Any] = {f"{step}_s": duration for step, duration in seconds.items()}
        self.report = BlendReport(
            prompt_tokens=len(self.ids),
            **self.counts(),
            runs=tuple(self.stored),
            policy=str(config.policy),  # a plain text, for serialisers
            ratio=config.ratio,
            **times,
            ttft_s=0.0,  # set by `note_first_token`
            bytes_loaded=self.bytes_read,
            tier=self.tier,
            exact=self.num_exact(self.selected) == len(self.ids),
            notes=(*self.notes, *notes),
            decision=decision,
            conversation_tokens=self.kept,
            moved_tokens=self.num_matched - sum(map(len, self.stored)),
        )

    # ---------------------------------------------------------------- answered

    @property
    def is_exact(self) -> bool:
        """True once all KV is full prefill's."""
        return self.report.exact or (self.late is not None and self.late.completed is not None)

    def note_first_token(self, ttft_s: float) -> None:
        """Complete the report with the seconds from the call to the first token."""
        self.note_completed()
        self.report = replace(self.report, ttft_s=ttft_s, exact=self.is_exact)

    def note_completed(self) -> None:
        """Enter into `recomputed` and the report what was recomputed while the model was unsure."""
        done = self.late
        if not done or (done.deepened, done.completed) == (self.report.deepened, self.report.completed):
            return
        again = torch.zeros_like(self.reused).index_fill(0, self.selected, True)
        if done.deepened:
            again[self.deeper] = True
        if done.completed:
            again[len(self.ids) + done.completed.token - done.completed.rows :] = True
        self.recomputed = (self.reused & again).nonzero().squeeze(1)
        more = "all the rest" if done.completed else "more"
        decision = self.report.decision and f"{self.report.decision.partition('; then')[0]}; then on doubt {more}"
        steps: dict[str, Any] = {"deepened": done.deepened, "completed": done.completed, "decision": decision}
        self.report = replace(self.report, **self.counts(), **steps)

    def counts(self) -> dict[str, Any]:
        """Return the report's numbers of tokens by what was computed so far."""
        created = torch.zeros_like(self.reused)
        for run in self.stored:
            created[run.start : run.stop] = run.key in self.created
        created &= self.reused
        return {
            "reused_tokens": int((self.reused & ~created.index_fill(0, self.recomputed, True)).sum()),
            "recomputed_tokens": len(self.recomputed),
            "fresh_tokens": int((~self.reused).sum()),
            "created_tokens": int(created.sum()),
        }

    def keep(self, answer: Sequence[int] = (), generation_prompt: int = 0) -> None:
        """Keep the prompt and its answer for the next turn, which contains it without the generation prompt.

        Without an answer, keep only what equals full prefill's: other prompts may share that. Blended KV depends on the
        question, so only this conversation may continue from it.
        """
        conversations, prefix, num_tokens = self.conversations, self.prefix, len(self.ids)
        if conversations is None or not self.config.reuses_prompts or sys.is_finalizing():  # torch would abort
            return
        ids = np.concatenate([self.token_ids, np.array(answer, np.int64)])[: self.cache.get_seq_length()]
        exact = len(ids) if self.is_exact else self.num_exact(self.selected[:0])
        turn = Turn(self.kept, num_tokens - generation_prompt, num_tokens)
        # the variants that the prefix was blended from are recorded: once one of these texts gets another variant, the
        # conversation must not be continued
        blended = Blended(
            self.planned,
            (*(prefix.turns if prefix else ()), turn),
            {**self.with_context, **(prefix.with_context if prefix else {})},
        )
        replaced = prefix.continued if prefix else None
        ids = ids if answer and not conversations.keeps_states else ids[:exact]
        conversations.keep(self, ids, exact, self.cache, self.chunks, blended, replaced)

    @contextmanager
    def kv_freed_at_end(self) -> Iterator[None]:
        """Free the KV at the end of the block."""
        try:
            yield
        finally:
            for name in ("cache", "logits"):
                self.__dict__.pop(name, None)
            self.prefix = self.late = self.conversations = None

"""Life of a request: from prompt ids to a cache that is ready to decode.

`Pipeline.prefill` is CacheBlend (arXiv:2405.16444) in five steps: match the prompt with stored chunks, load their KV,
stitch it in prompt order, select the tokens to recompute, and blend.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.config import BlendConfig
from kvrag.control.controller import Decision
from kvrag.control.tuning import Tuning
from kvrag.errors import ChunkUnreadableError, DamagedChunkError, StoreError, reporting_memory
from kvrag.fingerprint import text_key
from kvrag.reuse.blend import blend, blended_rows, prefill
from kvrag.reuse.catalog import Catalog
from kvrag.reuse.conversation import CachedPrefix
from kvrag.reuse.load import LayerLoader, Matched
from kvrag.reuse.select import Selection, select
from kvrag.reuse.stitch import Stitched, stitch
from kvrag.reuse.trace import Trace
from kvrag.store import ChunkReader, KVStore, MemoryTier, ReadsAhead, serve
from kvrag.types import BlendReport, Run

_ROOM = 256  # positions of a new cache for the answer, before it grows
_FAILURES = 3  # per prompt; afterwards, forward passes no longer depend on reads, see `_open`


class Found(NamedTuple):
    """A run of a stored chunk in a prompt, the key of its text, and the number of tokens it was encoded behind."""

    run: Run
    text: str
    context_tokens: int


def match(
    catalog: Catalog,
    store: KVStore,
    ids: Sequence[int],
    min_run: int,
    namespace: str,
    kept: int = 0,
    alone_only: bool = False,
    removals: int | None = None,
    withheld: set[str] | None = None,
) -> list[Found]:
    """Return the runs of stored chunks in a prompt, behind its first `kept` tokens.

    Texts are matched on a snapshot; the variant to use depends on the store's current state.

    Args:
        alone_only: Only chunks that were encoded alone.
        removals: The store's counter, if it has just been read.
        withheld: Gets the keys of the matched texts of which no variant may be used at present.
    """
    runs = catalog.match(ids[kept:], min_run, namespace, removals)
    states = store.look_up(list(dict.fromkeys(run.key for run in runs)))
    served = {text: serve(state, alone_only) for text, state in states.items()}
    if withheld is not None:
        withheld.update(text for text, key in served.items() if key is None)
    return [
        Found(
            replace(run, key=key, start=run.start + kept, stop=run.stop + kept),
            run.key,
            states[run.key].variants[key],
        )
        for run in runs
        if (key := served.get(run.key))
    ]


@dataclass
class Prompt:
    """A prompt in progress.

    Attributes:
        ids: Token ids.
        config: Blend settings, with a ratio.
        namespace: Namespace of the chunks to reuse.
        prefix: Cached prefix from a conversation.
        found: What `Pipeline.match` returned for it; None = not matched yet.
        notes: Notes for the report.
        removals: The store's counter, if it has just been read.
        damaged, unreadable: Keys of chunks found to be damaged or unreadable.
    """

    ids: Sequence[int]
    config: BlendConfig
    namespace: str = ""
    prefix: CachedPrefix | None = None
    found: Sequence[Found] | None = None
    notes: list[str] = field(default_factory=list)
    removals: int | None = None
    damaged: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt with a complete cache, ready for `kvrag.generate.decode`.

    Attributes:
        stitched: The prompt, its reused parts and its cache.
        selected: (S,) reused positions that were recomputed.
        logits: (1, V) float32, after the last token.
        config: Settings that it was blended with.
        report: Report without `ttft_s`, which the caller sets.
        behind: Keys of texts that were reused as encoded behind their source, and of those variants.
        keys: Keys of the chunks that the prompt contains, reused or computed, its cached prefix included.
    """

    stitched: Stitched
    selected: Tensor
    logits: Tensor
    config: BlendConfig
    report: BlendReport
    behind: Mapping[str, str] = field(default_factory=dict)
    keys: frozenset[str] = frozenset()

    @property
    def ids(self) -> Tensor:
        """(T,) token ids of the prompt."""
        return self.stitched.ids

    @property
    def exact(self) -> int:
        """Number of leading positions with full prefill's KV."""
        return self.stitched.num_exact(self.selected)


@dataclass(frozen=True)
class Pipeline:
    """Shared components of all requests. Thread-safe, because all components are.

    Attributes:
        backend, store, memory, catalog, tuning: The components.
        codec: Codec of the stored chunks.
        alone_only: Reuse only chunks that were encoded alone.
    """

    backend: Backend
    store: KVStore
    memory: MemoryTier
    catalog: Catalog
    tuning: Tuning
    codec: str
    alone_only: bool = False

    def prefill(self, prompt: Prompt) -> Prefilled:
        """Prefill a prompt from stored chunks; unreadable chunks are recomputed. Changes `prompt`."""
        while True:
            try:
                with reporting_memory():
                    return self._attempt(prompt)
            except (DamagedChunkError, ChunkUnreadableError) as error:
                self._set_aside(prompt, error)

    def _attempt(self, prompt: Prompt) -> Prefilled:
        trace = Trace(self.backend)
        with trace.step("match"):
            found = self._match(prompt)
        with closing(found):
            config, decision = self._decide(prompt.config, found)
            matched = Matched(prompt.ids, prefix=prompt.prefix) if config.policy == "full" else found
            if matched.runs or matched.prefix:
                capacity = self._capacity(prompt)
                with closing(LayerLoader(self.backend, matched, self.codec, trace, capacity)) as loader:
                    with trace.step("stitch"):
                        stitched = stitch(self.backend, matched, loader, capacity, self.codec)
                    with trace.step("select"):
                        selection = select(self.backend, stitched, config)
                    logits = self._blend(matched, stitched, selection, trace)
            else:
                logits, stitched = self._full(prompt, trace)
                selection = Selection(stitched.inexact)
        self.store.touch(list(matched.readers))
        report = _report(prompt, config, decision, matched, stitched, selection, trace)
        keys = frozenset(found.readers) | (prompt.prefix.conversation.keys if prompt.prefix else frozenset())
        return Prefilled(stitched, selection.positions, logits, config, report, matched.behind, keys)

    # ---------------------------------------------------------------- the steps

    def served_keys(self, texts: Sequence[str]) -> list[str]:
        """Return the keys of the chunks that prompts with these texts would get now, for those that are stored."""
        states = self.store.look_up(list(dict.fromkeys(texts)))
        return [key for state in states.values() if (key := serve(state, self.alone_only))]

    def find(self, ids: Sequence[int], min_run: int, namespace: str = "") -> list[tuple[Run, NDArray[np.uint32]]]:
        """Return the runs of stored chunks in a prompt, each with the token ids of its chunk."""
        found = []
        for run, text, _ in self.match(ids, min_run, namespace):
            with contextlib.suppress(KeyError):  # removed in the meantime
                found.append((run, self.catalog.ids(text)))
        return found

    def withdrawn(self, behind: Mapping[str, str]) -> list[str]:
        """Return those of the variants that a prompt would not get now: another source has their text since.

        Args:
            behind: As `Prefilled.behind`.
        """
        states = self.store.look_up(list(behind)) if behind else {}
        return [key for text, key in behind.items() if serve(states[text], self.alone_only) != key]

    def match(
        self, ids: Sequence[int], min_run: int, namespace: str, kept: int = 0, removals: int | None = None
    ) -> list[Found]:
        """See `match`."""
        return match(self.catalog, self.store, ids, min_run, namespace, kept, self.alone_only, removals)

    def _match(self, prompt: Prompt) -> Matched:
        """Match the prompt behind its cached prefix, and open the chunks."""
        config, kept = prompt.config, prompt.prefix.length if prompt.prefix else 0
        if config.policy == "full":
            return Matched(prompt.ids, prefix=prompt.prefix)
        ids = np.asarray(prompt.ids, np.uint32)
        readers: dict[str, ChunkReader] = {}
        texts: dict[str, str] = {}
        runs: list[Run] = []
        try:
            if (found := prompt.found) is None:
                found = self.match(prompt.ids, config.min_run, prompt.namespace, kept, prompt.removals)
            if isinstance(self.store, ReadsAhead):
                keys = dict.fromkeys(run.key for run, _, _ in found)
                self.store.read_ahead([key for key in keys if not self.memory.is_at_hand(key)])
            for run, text, context_tokens in found:
                reader = readers.get(run.key)
                if reader is None:
                    reader = self._open(prompt, run.key)
                    if reader is None:
                        continue
                    readers[run.key] = reader
                    texts[run.key] = text_key(reader.namespace, reader.ids)
                # the file is verified, the manifest can be damaged
                recorded = (reader.namespace, texts[run.key], reader.context_tokens)
                is_as_recorded = recorded == (prompt.namespace, text, context_tokens)
                if is_as_recorded and np.array_equal(
                    reader.ids[run.offset : run.offset + len(run)], ids[run.start : run.stop]
                ):
                    runs.append(run)
                else:
                    prompt.notes.append(f"chunk {run.key} does not match the store's manifest; recomputed")
            everywhere = set[str].intersection(*self.backend.gather({run.key for run in runs}))
            runs = [run for run in runs if run.key in everywhere]
        except BaseException:
            Matched(prompt.ids, runs, readers).close()
            raise
        return Matched(prompt.ids, runs, readers, prompt.prefix, texts)

    def _open(self, prompt: Prompt, key: str) -> ChunkReader | None:
        """Open a chunk; None if it is not stored or unreadable.

        A chunk that fails during a forward pass wastes that pass. After a few failures, the chunks of an unreadable
        store are therefore skipped, and the chunks of a damaged store are read completely before the pass.
        """
        if key in prompt.damaged or key in prompt.unreadable:
            return None
        if reader := self.memory.open(key):
            return reader
        if len(prompt.unreadable) >= _FAILURES:
            return None
        try:
            reader = self.store.open(key)
            if reader and len(prompt.damaged) >= _FAILURES:
                _read_whole(reader)
        except (DamagedChunkError, ChunkUnreadableError) as error:
            self._set_aside(prompt, error)
            return None
        return self.memory.keeping(reader) if reader else None

    def _set_aside(self, prompt: Prompt, error: DamagedChunkError | ChunkUnreadableError) -> None:
        """Continue without a chunk. A damaged one is quarantined."""
        prompt.notes.append(f"{error}; recomputed")
        if isinstance(error, ChunkUnreadableError):
            prompt.unreadable.add(error.key)
        else:
            prompt.damaged.add(error.key)
            self.memory.drop([error.key])
            with contextlib.suppress(StoreError):  # on a full disk it stays in place
                self.store.quarantine(error.key)

    def _decide(self, config: BlendConfig, matched: Matched) -> tuple[BlendConfig, Decision | None]:
        if config.controller != "auto" or not matched.runs:
            return config, None
        decision = self._agreed(config, matched)
        policy = "full" if decision.full else config.policy
        return replace(config, ratio=decision.ratio, policy=policy), decision

    def _agreed(self, config: BlendConfig, matched: Matched) -> Decision:
        """Return the first process's decision. If reading a chunk fails in one process, all raise that error."""
        try:
            own: Decision | ChunkUnreadableError | DamagedChunkError = self.tuning.decide(config, matched)
        except (DamagedChunkError, ChunkUnreadableError) as error:
            own = error
        decisions = []
        for each in self.backend.gather(own):
            if not isinstance(each, Decision):
                raise each
            decisions.append(each)
        return decisions[0]

    def _full(self, prompt: Prompt, trace: Trace) -> tuple[Tensor, Stitched]:
        with trace.step("blend"):
            done = prefill(self.backend, torch.tensor(prompt.ids), self._capacity(prompt))
        self.tuning.observe_full(len(prompt.ids), trace)
        return done

    def _blend(self, matched: Matched, stitched: Stitched, selection: Selection, trace: Trace) -> Tensor:
        before = trace.seconds["stall"] + trace.seconds["stitch"]
        with trace.step("blend"):
            logits = blend(self.backend, stitched, selection)
        pass_s = trace.seconds["blend"] - (trace.seconds["stall"] + trace.seconds["stitch"] - before)
        rows, reused = len(blended_rows(self.backend, stitched, selection)), int(stitched.reused.sum())
        self.tuning.observe_blend(matched, rows, reused, pass_s, trace)
        return logits

    def _capacity(self, prompt: Prompt) -> int:
        return min(len(prompt.ids) + _ROOM, self.backend.context_window)


def _read_whole(reader: ChunkReader) -> None:
    """Read every layer, which verifies its digest. Closes the reader on failure."""
    try:
        for number in range(reader.num_layers):
            reader.layer(number)
    except BaseException:
        reader.close()
        raise


def _report(
    prompt: Prompt,
    config: BlendConfig,
    decision: Decision | None,
    matched: Matched,
    stitched: Stitched,
    selection: Selection,
    trace: Trace,
) -> BlendReport:
    assert config.ratio is not None  # settled
    num_tokens, reused, seconds = len(prompt.ids), int(stitched.reused.sum()), trace.seconds
    return BlendReport(
        prompt_tokens=num_tokens,
        reused_tokens=reused,
        recomputed_tokens=len(selection.positions),
        fresh_tokens=num_tokens - reused,
        runs=tuple(stitched.runs),
        policy=config.policy,
        ratio=config.ratio,
        match_s=seconds["match"],
        load_s=seconds["read"],
        load_stall_s=seconds["stall"],
        stitch_s=seconds["stitch"],
        select_s=seconds["select"],
        blend_s=seconds["blend"],
        ttft_s=0.0,
        bytes_loaded=matched.bytes_read,
        tier=matched.tier,
        exact=stitched.num_exact(selection.positions) == num_tokens,
        notes=tuple(prompt.notes),
        decision=decision.reason if decision else "",
        conversation_tokens=stitched.kept,
    )

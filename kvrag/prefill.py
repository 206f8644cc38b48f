"""Prefill: from a prompt's tokens to a cache that is ready to decode.

`Pipeline.prefill` follows CacheBlend (arXiv:2405.16444): look up the prompt's chunks, plan how much to recompute (the
paper's section 5, "loading controller"), load their KV, stitch it in prompt order, select the tokens to recompute
(section 4.3), blend (section 4.2), and observe the durations for the next plan.

Loading and stitching are lazy: `select` and `blend` ask for one layer at a time, and the next layers are read meanwhile
(section 5). Each step fills in its part of the `Request`. Chunks that are damaged or cannot be read are left out, so
that their tokens are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import filterfalse
from typing import TypeVar, cast

import numpy as np

from kvrag.backend.protocol import Backend
from kvrag.control.plan import Plan, Planner
from kvrag.errors import ChunkUnreadableError, DamagedChunkError, OutOfMemoryError, StoreError, out_of_memory
from kvrag.index.catalog import Catalog, Match
from kvrag.memory.tier import MemoryTier
from kvrag.process import reporting_memory
from kvrag.request import Request
from kvrag.reuse.blend import LateRecompute, blend, blended_rows, select, stitch
from kvrag.reuse.load import LayerLoader, Trace
from kvrag.store import ChunkReader, KVStore
from kvrag.store.values import text_key

_FAILURES = 3  # per prompt; afterwards, forward passes no longer depend on reads, see `Recovery`
_ROOM = 256  # spare positions for the answer in a new cache; the cache grows when they are used up

T = TypeVar("T")


@dataclass(frozen=True)
class Pipeline:
    """The components that all requests share. Each is thread-safe, so this class is too."""

    backend: Backend
    store: KVStore
    memory: MemoryTier  # chunks of the store that are in memory
    lookup: Catalog  # finds the runs of stored chunks in a prompt
    planner: Planner  # chooses policy, ratio and margin
    codec: str  # of the stored chunks

    def prefill(self, request: Request, plan: Plan, matches: Sequence[Match] | None = None) -> None:
        """Prefill a request from stored chunks. Chunks that cannot be read are computed like fresh text.

        Args:
            plan: From `Planner.plan`, before the chunks are known: it decides which kept prefix can be used. Another
                one, with the chunks, sets the final policy and ratio.
            matches: Chunks to use; None = look them up.
        """
        request.relieve = self.memory.relieved
        recovery = Recovery(self.backend, self.store, self.memory)
        recovery.run(lambda: self._prefill(request, plan, matches, recovery))
        self.store.touch([run.key for run in request.report.runs])

    def _prefill(self, request: Request, plan: Plan, matches: Sequence[Match] | None, recovery: Recovery) -> None:
        backend, trace = self.backend, Trace(self.backend)
        with closing(request):
            with trace.step("match", synchronise=False):
                if matches is None:
                    matches = self.lookup.find(
                        request.token_ids, request.config.min_run, request.namespace, request.kept
                    )
                recovery.open(request, matches)
                request.add_history(backend)
            request.planned = plan.config
            # in all processes of tensor parallelism alike
            if request.runs and not plan.is_full:
                plan = recovery.agree(lambda: self.planner.plan(request.config, request.namespace, request))
            if plan.is_full:
                request.reuse_nothing()
            capacity = min(len(request.ids) + _ROOM, backend.context_window)
            with closing(LayerLoader(backend, request, self.codec, trace, capacity)) as layers:
                recovery.agree(layers.wait)
                with trace.step("stitch", synchronise=False):
                    stitch(backend, request, layers)
                with trace.step("select"):
                    request.selected, request.deeper = select(backend, request, plan.config)
                with trace.step("blend"):
                    request.logits = blend(backend, request)
            self.planner.observe(request, plan.config, len(blended_rows(backend, request)), trace)
            request.report_prefill(plan.config, plan.reason, trace.seconds, recovery.notes)
        is_open = (plan.margin or plan.is_observed) and not request.report.exact
        request.late = LateRecompute(backend, request, plan.margin, plan.start) if is_open else None


class Recovery:
    """Opens the chunks of one prompt, and repeats its prefill without those that fail, or without the device's tier.

    A chunk that fails during a forward pass wastes that pass. After a few failures, the chunks of an unreadable store
    are therefore skipped, and the chunks of a damaged store are read completely before the pass. `notes`, for the
    report, say what was left out and why.
    """

    def __init__(self, backend: Backend, store: KVStore, memory: MemoryTier) -> None:
        self.notes: list[str] = []
        self._backend, self._store, self._memory = backend, store, memory
        self._damaged: set[str] = set()
        self._unreadable: set[str] = set()

    def run(self, attempt: Callable[[], T]) -> T:
        """Return the result of the first attempt in which no chunk fails."""
        relieved = False
        while True:
            try:
                with reporting_memory():
                    return attempt()
            except (DamagedChunkError, ChunkUnreadableError, OutOfMemoryError) as error:
                if out_of_memory(error) and not relieved and (relieved := self._relieve()):
                    continue
                if isinstance(error, OutOfMemoryError):
                    raise
                self._leave_out(error)

    def _relieve(self) -> bool:
        """Free memory that only makes prompts faster; return whether there was some."""
        slower = self._memory.relieved()
        if slower is not None:
            self._memory = slower
        return self._backend.relieve() or slower is not None

    def agree(self, work: Callable[[], T]) -> T:
        """Return the first process's result. If reading a chunk fails in one process, all raise that error."""
        try:
            outcome: T | DamagedChunkError | ChunkUnreadableError = work()
        except (DamagedChunkError, ChunkUnreadableError) as error:
            outcome = error
        results = self._backend.gather(outcome)
        for result in results:
            if isinstance(result, DamagedChunkError | ChunkUnreadableError):
                raise result
        return cast(T, results[0])

    def open(self, request: Request, matches: Sequence[Match]) -> None:
        """Give a request those of the matches whose chunks can be opened in all processes. Close it."""
        request.readers = {}
        request.match(())
        if not matches:
            return
        ids = request.token_ids.astype(np.uint32)
        readers: dict[str, ChunkReader] = {}
        text_keys: dict[str, str] = {}
        opened: list[Match] = []
        try:
            keys = dict.fromkeys(match.run.key for match in matches)
            self._store.read_ahead([*filterfalse(self._memory.is_at_hand, keys)])
            for match in matches:
                run = match.run
                if (reader := readers.get(run.key)) is None:
                    if (reader := self._open(run.key)) is None:
                        continue
                    readers[run.key] = reader
                    text_keys[run.key] = text_key(reader.namespace, reader.ids)
                # the file is verified, the manifest can be damaged
                recorded = (reader.namespace, text_keys[run.key], reader.context_tokens)
                is_as_recorded = recorded == (request.namespace, match.text_key, match.context_tokens)
                stored = reader.ids[run.offset : run.offset + run.stop - run.start]
                if is_as_recorded and np.array_equal(stored, ids[run.start : run.stop]):
                    opened.append(match)
                else:
                    self.notes.append(f"chunk {run.key} does not match the store's manifest; recomputed")
            everywhere = set[str].intersection(*self._backend.gather({match.run.key for match in opened}))
        finally:
            request.readers = readers
        request.match([match for match in opened if match.run.key in everywhere])

    def _open(self, key: str) -> ChunkReader | None:
        """Open a chunk; None if it is not stored or unreadable."""
        if key in self._damaged or key in self._unreadable:
            return None
        if reader := self._memory.open(key):
            return reader
        if len(self._unreadable) >= _FAILURES:
            return None
        reader = None
        try:
            reader = self._store.open(key)
            if reader and len(self._damaged) >= _FAILURES:
                for number in range(reader.num_layers):
                    reader.layer(number)  # verifies its digest
        except BaseException as error:
            if reader:
                reader.close()
            if not isinstance(error, DamagedChunkError | ChunkUnreadableError):
                raise
            self._leave_out(error)
            return None
        return self._memory.keeping(reader) if reader else None

    def _leave_out(self, error: DamagedChunkError | ChunkUnreadableError) -> None:
        """Continue without a chunk. A damaged one is deleted."""
        self.notes.append(f"{error}; recomputed")
        if isinstance(error, ChunkUnreadableError):
            self._unreadable.add(error.key)
        else:
            self._damaged.add(error.key)
            self._memory.drop([error.key])
            with suppress(StoreError):  # on a full disk it stays in place
                self._store.discard(error.key)

"""Recovery: chunks that are damaged or cannot be read are left out, so that their tokens are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, cast

import numpy as np

from kvrag.backend.protocol import Backend
from kvrag.errors import ChunkUnreadableError, DamagedChunkError, StoreError, reporting_memory
from kvrag.fingerprint import text_key
from kvrag.index.lookup import Match
from kvrag.memory.tier import MemoryTier
from kvrag.reuse.request_state import RequestState
from kvrag.store import ChunkReader, KVStore

_FAILURES = 3  # per prompt; afterwards, forward passes no longer depend on reads, see `Recovery`

T = TypeVar("T")


class Recovery:
    """Opens the chunks of one prompt, and repeats its prefill without those that fail.

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
        while True:
            try:
                with reporting_memory():
                    return attempt()
            except (DamagedChunkError, ChunkUnreadableError) as error:
                self._leave_out(error)

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

    def open(self, request: RequestState, matches: Sequence[Match]) -> None:
        """Give a request those of the matches whose chunks can be opened in all processes. Close it."""
        request.matches, request.readers = (), {}
        request.place_chunks()
        if not matches:
            return
        ids = np.asarray(request.token_ids, np.uint32)
        readers: dict[str, ChunkReader] = {}
        text_keys: dict[str, str] = {}
        opened: list[Match] = []
        try:
            keys = dict.fromkeys(match.run.key for match in matches)
            self._store.read_ahead([key for key in keys if not self._memory.is_at_hand(key)])
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
                stored = reader.ids[run.offset : run.offset + len(run)]
                if is_as_recorded and np.array_equal(stored, ids[run.start : run.stop]):
                    opened.append(match)
                else:
                    self.notes.append(f"chunk {run.key} does not match the store's manifest; recomputed")
            everywhere = set[str].intersection(*self._backend.gather({match.run.key for match in opened}))
        finally:
            request.readers = readers
        request.matches = [match for match in opened if match.run.key in everywhere]
        request.place_chunks()

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
        """Continue without a chunk. A damaged one is quarantined."""
        self.notes.append(f"{error}; recomputed")
        if isinstance(error, ChunkUnreadableError):
            self._unreadable.add(error.key)
        else:
            self._damaged.add(error.key)
            self._memory.drop([error.key])
            with suppress(StoreError):  # on a full disk it stays in place
                self._store.quarantine(error.key)

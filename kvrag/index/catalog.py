"""The catalog of reusable texts: the store's entries, indexed in memory for matching.

A snapshot is a tuple of immutable segments. Prompts match against the current snapshot without waiting; a refresh
creates the next one and swaps it in. New texts get a segment of their own, which is joined with others of its size;
removed texts are marked in the `alive` array of their segment.

Texts are matched on the snapshot; which variant of each text a prompt may use depends on the store's current state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvrag.index.match import match
from kvrag.index.segment import Ids, Segment, Tokens, join
from kvrag.store import Entry, KVStore, visible_variant
from kvrag.types import Run

_LARGEST = 1 << 23  # tokens of joined segments; indexing that many takes a third of a second


@dataclass(frozen=True)
class _Snapshot:
    """Immutable state that prompts are matched against."""

    segments: tuple[Segment, ...] = ()
    last: int = 0  # texts up to this number are in a segment
    removals: int = -1  # the store's counter when removed texts were last marked


class Match(NamedTuple):
    """A run of a stored chunk in a prompt."""

    run: Run
    text_key: str
    context_tokens: int  # that the chunk was encoded with
    keys: frozenset[str] = frozenset()  # of the chunks that the KV depends on, if it is from an earlier prompt


class Catalog:
    """The texts of a store, for matching. Thread-safe.

    After `update`, `match` sees what this and other processes have stored and removed.
    """

    def __init__(self, store: KVStore, alone_only: bool = False) -> None:
        """Index the texts of a store. `alone_only`: `find` uses only chunks that were encoded without context."""
        self._store, self._alone_only = store, alone_only
        self._snapshot = _Snapshot()
        self._removed: deque[Entry] = deque()  # for `take_removed`
        self._removing: list[Entry] | None = None  # for `removing`, under _refreshing
        self._refreshing = threading.Lock()  # held while building the next snapshot; prompts do not wait for it
        self.refresh()
        self._removed.clear()

    def update(self) -> int:
        """Index what was stored or removed; return the store's counter of removals. Call it once per prompt.

        It does not wait for another thread that is doing so.
        """
        removals = self._store.removals()
        if self._refreshing.acquire(blocking=False):
            try:
                self._advance(removals)
            finally:
                self._refreshing.release()
        return removals

    def match(self, ids: Tokens, min_run: int, namespace: str = "") -> list[Run]:
        """Return the prompt's runs in the current snapshot; see `kvrag.index.match.match`."""
        return match(self._snapshot.segments, ids, min_run, namespace)

    def refresh(self) -> None:
        """Index everything that has been stored or removed. Call it after ingestion, before the next prompt."""
        with self._refreshing:
            self._advance()

    @contextmanager
    def removing(self) -> Iterator[list[Entry]]:
        """Yield a list that gets the texts which the body removes from the store."""
        with self._refreshing:
            texts = self._removing = []
            try:
                yield texts
                self._advance()
            finally:
                self._removing = None

    def take_removed(self) -> list[Entry]:
        """Return the texts that were removed from the store and from the snapshot since the last call."""
        removed = list[Entry]()
        with suppress(IndexError):
            while True:
                removed.append(self._removed.popleft())
        return removed

    def containing(self, find: Callable[[Ids, str], int | None], among: Collection[str]) -> list[str]:
        """Return the keys of those texts, `among` these keys, in whose ids and namespace `find` finds something."""
        keys = np.array([key.encode() for key in among], np.bytes_)
        return [
            segment.text_key(row)
            for segment in self._snapshot.segments
            for row in np.flatnonzero(segment.alive & np.isin(segment.keys, keys)).tolist()
            if find(segment.text(row), segment.namespaces[segment.spaces[row]]) is not None
        ]

    def ids(self, text_key: str) -> Ids:
        """Return a text's token ids; raises KeyError."""
        for segment in reversed(self._snapshot.segments):
            row = segment.row(text_key)
            if row is not None:
                return segment.text(row)
        raise KeyError(text_key)

    def find(
        self,
        ids: Tokens,
        min_run: int,
        namespace: str = "",
        kept: int = 0,
        withheld: set[str] | None = None,
    ) -> list[Match]:
        """Return the runs of stored chunks in a prompt after its first `kept` tokens, ascending and disjoint.

        Adds the keys of the matched texts without a usable variant to `withheld`.
        """
        runs = self.match(ids[kept:], min_run, namespace)
        variants = self._variants(run.key for run in runs)
        if withheld is not None:
            withheld.update(text_key for text_key, variant in variants.items() if variant is None)
        return [
            Match(Run(run.start + kept, run.stop + kept, variant[0], run.offset), run.key, variant[1])
            for run in runs
            if (variant := variants.get(run.key))
        ]

    def find_chunks(self, ids: Sequence[int], min_run: int, namespace: str = "") -> list[tuple[Run, Ids]]:
        """Return the runs of stored chunks in a prompt, each with the token ids of its chunk."""
        self.update()
        chunks = []
        for run, text_key, *_ in self.find(ids, min_run, namespace):
            with suppress(KeyError):  # removed in the meantime
                chunks.append((run, self.ids(text_key)))
        return chunks

    def usable(self, text_keys: Iterable[str]) -> dict[str, str]:
        """Return the chunk key of each text's usable variant, by text key; texts without one are left out."""
        return {text_key: variant[0] for text_key, variant in self._variants(text_keys).items() if variant}

    def _variants(self, text_keys: Iterable[str]) -> dict[str, tuple[str, int] | None]:
        """Return chunk key and context tokens of each text's usable variant, by text key; None without one."""
        variants: dict[str, tuple[str, int] | None] = {}
        for text_key, state in self._store.look_up(list(dict.fromkeys(text_keys))).items():
            chunk_key = visible_variant(state, self._alone_only)
            variants[text_key] = None if chunk_key is None else (chunk_key, state.variants[chunk_key])
        return variants

    def withdrawn(self, variants: Mapping[str, str]) -> list[str]:
        """Return those of the chunk keys (by text key) that may no longer be used: other sources have the text too."""
        usable = self.usable(variants) if variants else {}
        return [chunk_key for text_key, chunk_key in variants.items() if usable.get(text_key) != chunk_key]

    def __len__(self) -> int:
        return sum(segment.num_alive for segment in self._snapshot.segments)

    # ---------------------------------------------------------------- refreshing

    def _advance(self, removals: int | None = None) -> None:
        """Build the next snapshot."""
        snapshot = self._without_removed(self._snapshot, removals)
        if entries := list(self._store.entries(snapshot.last)):
            segments = [*snapshot.segments, Segment.of(entries)]
            while _are_alike(segments[-2:]):  # like a binary counter: few segments, and every text is rarely moved
                segments[-2:] = [join(segments[-2:])]
            # again, so that a text removed in the meantime is covered
            snapshot = self._without_removed(_Snapshot(tuple(segments), entries[-1].number, snapshot.removals))
        self._snapshot = snapshot

    def _without_removed(self, snapshot: _Snapshot, removals: int | None = None) -> _Snapshot:
        """Mark removed texts, if the store's counter has changed."""
        if removals is None:
            removals = self._store.removals()
        if removals == snapshot.removals:
            return snapshot
        stored, segments = self._store.numbers(), list[Segment]()
        for segment in snapshot.segments:
            left = segment.only(stored)
            if left is not segment:
                self._note_removed(segment.entries(segment.alive & ~left.alive))
            if 2 * left.num_alive < len(left):
                left = join([left])
            segments += [left] * bool(len(left))
        return replace(snapshot, segments=tuple(segments), removals=removals)

    def _note_removed(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._removed.append(entry)
            if self._removing is not None:
                self._removing.append(entry)


def _are_alike(segments: Sequence[Segment]) -> bool:
    """Return whether these are two segments of similar size, which are small enough to be joined by a prompt."""
    if len(segments) < 2:
        return False
    first, second = (segment.num_tokens for segment in segments)
    return 2 * second >= first and first + second < _LARGEST

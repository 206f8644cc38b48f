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
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from kvrag.index.match import match
from kvrag.index.segment import Ids, Segment, Tokens, join
from kvrag.store import Entry, KVStore, visible_variant
from kvrag.types import Run

T = TypeVar("T")

_LARGEST = 1 << 23  # tokens of segments that a prompt joins; indexing that many takes a third of a second


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

    After `update`, `find` sees what this and other processes have stored and removed.
    """

    def __init__(self, store: KVStore, alone_only: bool = False) -> None:
        """Index the texts of a store. `alone_only`: `find` uses only chunks that were encoded without context."""
        self._store, self._alone_only = store, alone_only
        self._snapshot = _Snapshot()
        self.removed: deque[Entry] | None = None
        """Gets the texts that were removed from the store and from the snapshot; None = nobody wants them."""
        self._refreshing = threading.Lock()  # held while building the next snapshot; prompts do not wait for it
        self.refresh()

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

    def refresh(self) -> None:
        """Index everything that has been stored or removed. Call it after ingestion, before the next prompt."""
        with self._refreshing:
            self._advance()

    def removing(self, remove: Callable[[], T]) -> tuple[T, list[Entry]]:
        """Call a function that removes texts from the store; return its result, and these texts."""
        with self._refreshing:
            self._advance()
            result = remove()
            return result, self._advance()

    def containing(self, find: Callable[[Ids, str], int | None], among: Collection[str]) -> list[str]:
        """Return the keys of those texts, `among` these keys, in whose ids and namespace `find` finds something."""
        return [text.text_key for text in self._texts(among) if find(text.ids, text.namespace) is not None]

    def _texts(self, text_keys: Collection[str]) -> Iterator[Entry]:
        keys = np.array([key.encode() for key in text_keys], np.bytes_)
        for segment in self._snapshot.segments:
            yield from segment.entries(segment.alive & np.isin(segment.keys, keys))

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
        runs = match(self._snapshot.segments, ids[kept:], min_run, namespace)
        variants = self._variants(run.key for run in runs)
        if withheld is not None:
            withheld.update(run.key for run in runs if run.key not in variants)
        return [
            Match(Run(run.start + kept, run.stop + kept, chunk_key, run.offset), run.key, context_tokens)
            for run in runs
            if run.key in variants
            for chunk_key, context_tokens in [variants[run.key]]
        ]

    def find_chunks(self, ids: Sequence[int], min_run: int, namespace: str = "") -> list[tuple[Run, Ids]]:
        """Return the runs of stored chunks in a prompt, each with the token ids of its chunk."""
        self.update()
        matches = self.find(ids, min_run, namespace)
        texts = {text.text_key: text.ids for text in self._texts({match.text_key for match in matches})}
        return [(run, texts[key]) for run, key, *_ in matches if key in texts]  # others were removed in the meantime

    def usable(self, text_keys: Iterable[str]) -> dict[str, str]:
        """Return the chunk key of each text's usable variant, by text key; texts without one are left out."""
        return {text_key: chunk_key for text_key, (chunk_key, _) in self._variants(text_keys).items()}

    def _variants(self, text_keys: Iterable[str]) -> dict[str, tuple[str, int]]:
        """Return chunk key and context tokens of each text's usable variant, by text key."""
        states = self._store.look_up(list(dict.fromkeys(text_keys)))
        chosen = ((text_key, visible_variant(state, self._alone_only)) for text_key, state in states.items())
        return {text_key: (key, states[text_key].variants[key]) for text_key, key in chosen if key is not None}

    def withdrawn(self, variants: Mapping[str, str]) -> list[str]:
        """Return those of the chunk keys (by text key) that may no longer be used: other sources have the text too."""
        usable = self.usable(variants) if variants else {}
        return [chunk_key for text_key, chunk_key in variants.items() if usable.get(text_key) != chunk_key]

    # ---------------------------------------------------------------- refreshing

    def _advance(self, removals: int | None = None) -> list[Entry]:
        """Build the next snapshot; return the texts that were removed since the last one."""
        segments, last, removed = [*self._snapshot.segments], self._snapshot.last, list[Entry]()
        if entries := list(self._store.entries(last)):
            segments.append(Segment.of(entries))
            last = entries[-1].number
            while len(segments) > 1:  # like a binary counter: few segments, and every text is rarely moved
                first, second = (len(segment.ids) for segment in segments[-2:])
                if 2 * second < first or first + second >= _LARGEST:
                    break
                segments[-2:] = [join(segments[-2:])]
        if entries or removals is None:  # only now, so that a new text removed in the meantime is covered
            removals = self._store.removals()
        if removals != self._snapshot.removals:
            stored, indexed, segments = self._store.numbers(), segments, []
            for segment in indexed:
                is_stored = np.isin(segment.numbers, stored)
                removed += segment.entries(segment.alive & ~is_stored)
                left = replace(segment, alive=segment.alive & is_stored)
                if num_alive := left.alive.sum():
                    segments.append(left if 2 * num_alive >= len(left) else join([left]))
        if self.removed is not None:
            self.removed += removed
        self._snapshot = _Snapshot(tuple(segments), last, removals)
        return removed

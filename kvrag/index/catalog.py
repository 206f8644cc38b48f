"""The catalog of reusable texts: the store's entries, indexed for matching, stored on disk and shared by processes.

A snapshot is a tuple of immutable segments. Prompts match against the current snapshot without waiting; a refresh
creates the next one and swaps it in. New texts are indexed into small segments in memory, the tail; removed texts are
marked in the `alive` array of their segment. When the tail has grown, a thread replaces the file, which has one segment
with all texts. Other processes then map it instead of keeping their own tail. Everything is derived from the store: if
the file is missing or damaged, the texts are indexed again.

Texts are matched on the snapshot; which variant of each text a prompt may use depends on the store's current state.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from kvrag.errors import StoreError
from kvrag.index.match import match
from kvrag.index.segment import MAX_TOKENS, DamagedSegmentError, Ids, Segment, join, read, write
from kvrag.process import Background
from kvrag.store import Entry, KVStore, visible_variant
from kvrag.store.base import CATALOG_LOCK
from kvrag.types import Run

logger = logging.getLogger("kvrag")

# all but the last one in tokens
_AT_ONCE = 1 << 20  # indexed by a prompt before it is matched; more is indexed by a thread
_PORTION = 1 << 21  # indexed at once
_TAIL = 1 << 21  # kept in memory before it is written, or half of what the file has ...
_LONG_TAIL = 1 << 26  # ... and never more
_DEAD = 0.25  # share of the file's texts before it is written again
_FILE = "catalog.segment"


@dataclass(frozen=True)
class _Snapshot:
    """Immutable state that prompts are matched against."""

    segments: tuple[Segment, ...] = ()  # the one on disk, if there is one, followed by the tail
    last: int = 0  # texts up to this number are in a segment
    position: int = 0  # up to which the store's removal log has been applied; 0 = no entries yet
    removals: int = -1  # the store's counter at that time
    signature: tuple[int, ...] = ()  # of the file

    @property
    def file(self) -> Segment | None:
        """The segment on disk."""
        return next((segment for segment in self.segments if segment.is_mapped), None)

    @property
    def tail(self) -> tuple[Segment, ...]:
        """Segments in memory."""
        return tuple(segment for segment in self.segments if not segment.is_mapped)


class Match(NamedTuple):
    """A run of a stored chunk in a prompt."""

    run: Run
    text_key: str
    context_tokens: int  # that the chunk was encoded with
    keys: frozenset[str] = frozenset()  # of the chunks that the KV depends on, if it is from an earlier prompt

    @property
    def is_stored(self) -> bool:
        """True if the chunk is in the store; False if it is from an earlier prompt."""
        return bool(self.text_key)


class Catalog:
    """The texts of a store, for matching. Thread-safe.

    Opening maps files without reading them. After `update`, `match` sees what this process has refreshed and, usually,
    recent changes by other processes.
    """

    def __init__(self, store: KVStore, alone_only: bool = False) -> None:
        """Open the catalog of a store. `alone_only`: `find` uses only chunks that were encoded without context."""
        self._store, self._alone_only = store, alone_only
        self._path = store.catalog_folder / _FILE
        self._snapshot = _Snapshot()
        self._removed: deque[Entry] = deque()  # for `take_removed`
        self._removing: list[Entry] | None = None  # for `removing`, under _refreshing
        self._refreshing = threading.Lock()  # held while building the next snapshot; prompts do not wait for it
        self._background = Background("kvrag-catalog", 1)
        self._is_writable = not store.read_only
        with self._refreshing:
            is_behind = self._advance(_AT_ONCE)
        self._removed.clear()
        self._maintain(is_behind)

    def update(self) -> int:
        """Index what was stored or removed; return the store's counter of removals. Call it once per prompt.

        It does not wait for another thread that is doing so, and leaves large additions to a thread.
        """
        removals = self._store.removals()
        if self._refreshing.acquire(blocking=False):
            try:
                is_behind = self._advance(_AT_ONCE, removals)
            finally:
                self._refreshing.release()
            self._maintain(is_behind)
        return removals

    def match(self, ids: Sequence[int] | Ids, min_run: int, namespace: str = "") -> list[Run]:
        """Return the prompt's runs in the current snapshot; see `kvrag.index.match.match`."""
        return match(self._snapshot.segments, ids, min_run, namespace)

    def refresh(self) -> None:
        """Index everything that has been stored or removed. Call it after ingestion, before the next prompt."""
        self._catch_up()
        self._maintain(False)

    @contextmanager
    def removing(self) -> Iterator[list[Entry]]:
        """Yield a list that gets the texts which the body removes from the store."""
        with self._refreshing:
            texts = self._removing = []
            try:
                yield texts
                self._advance(0)
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
        ids: Sequence[int],
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

    def close(self) -> None:
        """Stop writing; the files stay as they were before."""
        self._background.close(finish=True)

    # ---------------------------------------------------------------- refreshing

    def _advance(self, limit: int, removals: int | None = None) -> bool:
        """Build the next snapshot, with about `limit` tokens of new texts; return whether there is more to do."""
        snapshot = self._adopt(self._apply_removals(self._snapshot, removals))  # then the file may be another one
        # applied again after the entries, so that an entry removed in the meantime is covered
        snapshot = self._apply_removals(snapshot, removals)
        entries, num_tokens = [], 0
        for entry in self._store.entries(snapshot.last):
            entries.append(entry)
            num_tokens += len(entry.ids)
            if num_tokens >= limit:
                break
        if entries:
            segments = [*snapshot.segments, Segment.of(entries)]
            while _are_alike(segments[-2:]):  # like a binary counter: few segments, and every text is rarely moved
                segments[-2:] = [join(segments[-2:])]
            snapshot = self._apply_removals(replace(snapshot, segments=tuple(segments), last=entries[-1].number))
        self._snapshot = snapshot
        return bool(entries) and num_tokens >= limit

    def _apply_removals(self, snapshot: _Snapshot, removals: int | None = None) -> _Snapshot:
        """Mark removed texts."""
        if removals is None:
            removals = self._store.removals()
        if removals == snapshot.removals:
            return snapshot
        log = self._store.removed(snapshot.position)
        if log is None:
            logger.info("the log of removals is too short, or another store's: all texts are indexed again")
            self._note_removed(entry for segment in snapshot.segments for entry in segment.entries(segment.numbers))
            position, _ = self._store.removed(0) or (0, ())
            return _Snapshot(position=position, removals=removals, signature=snapshot.signature)
        position, removed = log
        segments = snapshot.segments
        if removed:
            numbers = np.unique(np.asarray(removed, np.int64))
            self._note_removed(entry for segment in segments for entry in segment.entries(numbers))
            segments = tuple(segment.without(numbers) for segment in segments)
            segments = tuple(join([s]) if not s.is_mapped and 2 * s.num_alive < len(s) else s for s in segments)
        return replace(snapshot, segments=segments, position=position, removals=removals)

    def _note_removed(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._removed.append(entry)
            if self._removing is not None:
                self._removing.append(entry)

    # ---------------------------------------------------------------- the file

    def _adopt(self, snapshot: _Snapshot) -> _Snapshot:
        """Use the file, if it has changed."""
        signature = _signature(self._path)
        if signature == snapshot.signature:
            return snapshot
        try:
            files = (read(self._path),) if signature else ()
        except DamagedSegmentError as error:
            logger.warning("%s; its texts are indexed again", error)
            files = ()
        base, position = (files[0].last, files[0].position) if files else (0, 0)
        if snapshot.file and base < snapshot.file.last:  # the tail begins after it
            return _Snapshot(files, base, position, -1, signature)
        is_newer = (segment.numbers > base for segment in snapshot.tail)
        tail = [s.without(s.numbers[~newer]) for s, newer in zip(snapshot.tail, is_newer, strict=True) if newer.any()]
        position = min(position, snapshot.position) if tail else position
        return _Snapshot((*files, *tail), max(base, snapshot.last), position, -1, signature)

    def _maintain(self, is_behind: bool) -> None:
        """Catch up and write files in a thread, if needed."""
        if is_behind or self._should_write(_TAIL):
            self._background.later(self._work)

    def _work(self) -> None:
        try:
            self._catch_up()
            if self._should_write(_TAIL):
                self._write()
        except (StoreError, OSError) as error:
            if not self._background.is_over:
                logger.warning("the catalog could not be brought up to date: %s", error)

    def _catch_up(self) -> None:
        """Index everything; what does not fit into memory is written."""
        is_behind = True
        while is_behind and not self._background.is_over:
            with self._refreshing:
                is_behind = self._advance(_PORTION)
            while self._should_write(_LONG_TAIL) and not self._write():
                # another thread or process is writing, possibly these texts
                if self._background.closed.wait(0.1) or self._background.is_over:
                    return

    def _should_write(self, least: int) -> bool:
        """Return whether the tail has grown, to `least` tokens at least, or many of the file's texts are dead."""
        file, tail = self._snapshot.file, sum(segment.num_tokens for segment in self._snapshot.tail)
        most = max(least, min(file.num_tokens // 2, _LONG_TAIL)) if file else least
        is_full = file is not None and file.num_tokens + tail >= MAX_TOKENS
        has_dead = file is not None and file.num_alive < (1 - _DEAD) * len(file)
        return self._is_writable and not is_full and (tail >= most or has_dead)

    def _write(self) -> bool:
        """Replace the file by one with all texts; return whether this process, and no other, has done it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._path.with_name(CATALOG_LOCK), blocking=False):
                with self._refreshing:
                    self._advance(0)
                    snapshot = self._snapshot
                if not self._should_write(_TAIL):  # another process has written it
                    return False
                write(snapshot.segments, self._path, snapshot.position, self._check_open)
                with self._refreshing:
                    self._advance(0)
                for path in self._path.parent.glob("*"):  # left by a killed writer, or an earlier version
                    if path.name not in (_FILE, CATALOG_LOCK):
                        path.unlink(missing_ok=True)
        except (Timeout, CancelledError):  # another process is writing, or the catalog was closed
            return False
        except DamagedSegmentError as error:
            logger.warning("%s; its texts are indexed again", error)
            self._path.unlink(missing_ok=True)
            with self._refreshing:
                self._snapshot = _Snapshot()
        except OSError as error:
            self._is_writable = False
            logger.info("the catalog stays in memory: %s", error)
            return False
        return True

    def _check_open(self) -> None:
        if self._background.is_over:
            raise CancelledError


def _are_alike(segments: Sequence[Segment]) -> bool:
    """Return whether two segments are both in memory and of similar size."""
    if len(segments) < 2 or segments[0].is_mapped:
        return False
    first, second = (segment.num_tokens for segment in segments)
    return 2 * second >= first and first + second < MAX_TOKENS


def _signature(path: Path) -> tuple[int, ...]:
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size

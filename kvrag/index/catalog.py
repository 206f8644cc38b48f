"""The catalog of reusable texts: the store's entries, indexed for matching, stored on disk and shared by processes.

A snapshot is a tuple of immutable segments. Prompts match against the current snapshot without waiting; a refresh
creates the next one and swaps it in. New texts are indexed into small segments in memory, the tail; removed texts are
marked in the `alive` array of their segment. When the tail has grown, a thread writes it to a file, merges files of
similar size and replaces the head, a small file that lists them. Other processes then map the same files instead of
keeping their own tail. Everything is derived from the store: missing or damaged files are indexed again.

`Lookup` also decides which variant of each text a prompt may use, by the store's current state.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from kvrag.errors import StoreError
from kvrag.index.match import match
from kvrag.index.segment import MAX_TOKENS, SUFFIX, DamagedSegmentError, Ids, Segment, join, read, write
from kvrag.store import Entry, KVStore, visible_variant
from kvrag.store.base import CATALOG_LOCK
from kvrag.store.durable import write_file
from kvrag.types import Run

logger = logging.getLogger("kvrag")

# all but the last two in tokens
_AT_ONCE = 1 << 20  # indexed by a prompt before it is matched; more is indexed by a thread
_PORTION = 1 << 21  # indexed at once
_TAIL = 1 << 21  # kept in memory before it is written ...
_LONG_TAIL = 1 << 25  # ... and while there is much to index
_FULL = 1 << 30  # in a file: no file is merged beyond it
_SMALL = 4  # files of similar size before they are merged
_DEAD = 0.25  # share of a file's texts before it is written again
_HEAD = "head.json"


@dataclass(frozen=True)
class _Snapshot:
    """Immutable state that prompts are matched against."""

    segments: tuple[Segment, ...] = ()  # those on disk, followed by the tail
    base: int = 0  # texts up to this number are in segments on disk ...
    last: int = 0  # ... and up to this one in any segment
    position: int = 0  # up to which the store's removal log has been applied; 0 = no entries yet
    removals: int = -1  # the store's counter at that time
    head: tuple[int, ...] = ()  # signature of the head file

    @property
    def files(self) -> tuple[Segment, ...]:
        """Segments on disk."""
        return tuple(segment for segment in self.segments if segment.name)

    @property
    def tail(self) -> tuple[Segment, ...]:
        """Segments in memory."""
        return tuple(segment for segment in self.segments if not segment.name)


class Catalog:
    """The texts of a store, for matching. Thread-safe.

    Opening maps files without reading them. After `update`, `match` sees what this process has refreshed and, usually,
    recent changes by other processes.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._folder = store.catalog_folder
        self._snapshot = _Snapshot()
        self._removed: deque[Entry] = deque()  # for `take_removed`
        self._removing: list[Entry] | None = None  # for `removing`, under _refreshing
        self._refreshing = threading.Lock()  # held while building the next snapshot; prompts do not wait for it
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # held while starting the thread
        self._closed = threading.Event()
        self._is_writable = not store.read_only
        self._damaged: set[str] = set()  # files that have been logged
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

    def __len__(self) -> int:
        return sum(segment.num_alive for segment in self._snapshot.segments)

    def close(self) -> None:
        """Stop writing; the files stay as they were before."""
        with self._starting:
            self._closed.set()
        if self._thread is not None:
            self._thread.join()

    # ---------------------------------------------------------------- refreshing

    def _advance(self, limit: int, removals: int | None = None) -> bool:
        """Build the next snapshot, with about `limit` tokens of new texts; return whether there is more to do."""
        is_patient = limit > _AT_ONCE
        snapshot = self._adopt(self._snapshot)
        # applied again after the entries, so that an entry removed in the meantime is covered
        snapshot, is_behind = self._apply_removals(snapshot, is_patient, removals)
        entries, num_tokens = [], 0
        for entry in self._store.entries(snapshot.last):
            entries.append(entry)
            num_tokens += len(entry.ids)
            if num_tokens >= limit:
                is_behind = True
                break
        if entries:
            segments = [*snapshot.segments, Segment.of(entries)]
            while _are_alike(segments[-2:]):  # like a binary counter: few segments, and every text is rarely moved
                segments[-2:] = [join(segments[-2:])]
            snapshot = replace(snapshot, segments=tuple(segments), last=entries[-1].number)
            snapshot, _ = self._apply_removals(snapshot, is_patient)
        self._snapshot = snapshot
        return is_behind

    def _apply_removals(
        self, snapshot: _Snapshot, is_patient: bool, removals: int | None = None
    ) -> tuple[_Snapshot, bool]:
        """Mark removed texts; return whether this was postponed."""
        if removals is None:
            removals = self._store.removals()
        if removals == snapshot.removals:
            return snapshot, False
        log = self._store.removed(snapshot.position)
        if log is None:
            if snapshot.segments and not is_patient:
                return snapshot, True  # prompts do not wait for it: the store is asked for every match
            position, _ = self._store.removed(0) or (0, ())
            return replace(self._compare(snapshot), position=position, removals=removals), False
        position, removed = log
        segments = snapshot.segments
        if removed:
            numbers = np.unique(np.asarray(removed, np.int64))
            self._note_removed(entry for segment in segments for entry in segment.entries(numbers))
            segments = tuple(segment.without(numbers) for segment in segments)
            segments = tuple(join([s]) if not s.name and 2 * s.num_alive < len(s) else s for s in segments)
        return replace(snapshot, segments=segments, position=position, removals=removals), False

    def _compare(self, snapshot: _Snapshot) -> _Snapshot:
        """Find removed texts without the log, by comparing all entries."""
        logger.info("the log of removals is too short: comparing the catalog with the store")
        alive = [np.zeros(len(segment), bool) for segment in snapshot.segments]
        for entry in self._store.entries(0):
            if entry.number > snapshot.last:
                break
            for segment, mask in zip(snapshot.segments, alive, strict=True):
                row = int(np.searchsorted(segment.numbers, entry.number))
                if row < len(segment) and segment.numbers[row] == entry.number:
                    if segment.text_key(row) != entry.text_key:
                        return _Snapshot(head=snapshot.head)  # another store's numbers: start again
                    mask[row] = True
        for segment, mask in zip(snapshot.segments, alive, strict=True):
            self._note_removed(segment.entries(segment.numbers[~mask]))
        segments = tuple(replace(s, alive=s.alive & mask) for s, mask in zip(snapshot.segments, alive, strict=True))
        return replace(snapshot, segments=segments)

    def _note_removed(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._removed.append(entry)
            if self._removing is not None:
                self._removing.append(entry)

    # ---------------------------------------------------------------- files

    def _adopt(self, snapshot: _Snapshot) -> _Snapshot:
        """Use the files listed by the head, if it has changed."""
        signature = _signature(self._folder / _HEAD)
        if signature == snapshot.head:
            return snapshot
        files, base, position = self._read_head(snapshot)
        if base < snapshot.base:  # the tail begins after it
            return _Snapshot(tuple(files), base, base, position, -1, signature)
        is_newer = (segment.numbers > base for segment in snapshot.tail)
        tail = [s.without(s.numbers[~newer]) for s, newer in zip(snapshot.tail, is_newer, strict=True) if newer.any()]
        position = min(position, snapshot.position) if snapshot.position else position
        return _Snapshot((*files, *tail), base, max(base, snapshot.last), position, -1, signature)

    def _read_head(self, snapshot: _Snapshot) -> tuple[list[Segment], int, int]:
        """Return the intact files listed by the head, the last number in them, and the position in the log."""
        known = {segment.name: segment for segment in snapshot.files}
        try:
            raw = (self._folder / _HEAD).read_bytes()
            digest, _, text = raw.partition(b"\n")
            if xxhash.xxh3_64_hexdigest(text).encode() != digest:
                raise ValueError("it is damaged")
            head = json.loads(text)
        except FileNotFoundError:
            return [], 0, 0
        except (OSError, ValueError) as error:
            self._log_damage(_HEAD, error)
            return [], 0, 0
        files: list[Segment] = []
        for listed in head["segments"]:
            try:
                segment = known.get(listed["name"]) or read(self._folder / listed["name"])
            except DamagedSegmentError as error:
                self._log_damage(error.name, error)
                return files, files[-1].last if files else 0, head["position"]
            files.append(replace(segment, alive=segment.alive & _unpack(listed["alive"], len(segment))))
        return files, head["last"], head["position"]

    def _log_damage(self, name: str, error: Exception) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            logger.warning("%s/%s cannot be used (%s); its texts are indexed again", self._folder, name, error)

    def _maintain(self, is_behind: bool) -> None:
        """Catch up and write files in a thread, if needed."""
        if not (is_behind or self._should_write()):
            return
        with self._starting:
            if not self._closed.is_set() and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="kvrag-catalog", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        try:
            self._catch_up()
            while self._should_write() and self._write():
                pass
        except (StoreError, OSError) as error:
            if not self._closed.is_set():
                logger.warning("the catalog could not be brought up to date: %s", error)

    def _catch_up(self) -> None:
        """Index everything; what does not fit into memory is written, and merged at the end."""
        is_behind = True
        while is_behind and not self._closed.is_set():
            with self._refreshing:
                is_behind = self._advance(_PORTION)
            while self._is_writable and self._tail_size() >= _LONG_TAIL and not self._write(merges=False):
                if self._closed.wait(0.1):  # another thread or process is writing, possibly these texts
                    return

    def _tail_size(self) -> int:
        return sum(segment.num_tokens for segment in self._snapshot.tail)

    def _should_write(self) -> bool:
        return self._is_writable and (self._tail_size() >= _TAIL or _to_merge(self._snapshot.files) is not None)

    def _write(self, merges: bool = True) -> bool:
        """Write the tail, merge files, replace the head; return whether this process, and no other, has done it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self._folder / CATALOG_LOCK, blocking=False):
                with self._refreshing:
                    self._advance(0)
                    snapshot = self._snapshot
                if not self._should_write():  # another process has written it
                    return False
                files = list(snapshot.files)
                if snapshot.tail:
                    files += self._write_file(snapshot.tail)
                if merges and (adjacent := _to_merge(files)) is not None:
                    files[adjacent] = self._write_file(files[adjacent])
                self._write_head(files, snapshot)
                with self._refreshing:
                    self._advance(0)
                self._clean(files)
        except (Timeout, CancelledError):  # another process is writing, or the catalog was closed
            return False
        except DamagedSegmentError as error:
            self._log_damage(error.name, error)
            (self._folder / error.name).unlink(missing_ok=True)
            with self._refreshing:
                self._snapshot = _Snapshot()
        except OSError as error:
            self._is_writable = False
            logger.info("the catalog stays in memory: %s", error)
            return False
        return True

    def _write_file(self, segments: Sequence[Segment]) -> list[Segment]:
        alive = [segment for segment in segments if segment.num_alive]
        return [read(self._folder / write(alive, self._folder, self._check_open))] if alive else []

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise CancelledError

    def _write_head(self, files: Sequence[Segment], snapshot: _Snapshot) -> None:
        listed = [{"name": file.name, "alive": _pack(file.alive)} for file in files]
        head = {"last": snapshot.last, "position": snapshot.position, "segments": listed}
        text = json.dumps(head).encode()
        write_file(self._folder / _HEAD, xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text)

    def _clean(self, files: Sequence[Segment]) -> None:
        """Delete files that the head does not list; processes that have mapped them keep them."""
        names = {file.name for file in files}
        for path in [*self._folder.glob(f"*{SUFFIX}"), *self._folder.glob(".*.tmp")]:
            if path.name not in names:
                with suppress(OSError):
                    path.unlink()


def _are_alike(segments: Sequence[Segment]) -> bool:
    """Return whether two segments are both in memory and of similar size."""
    if len(segments) < 2 or segments[0].name:
        return False
    first, second = (segment.num_tokens for segment in segments)
    return 2 * second >= first and first + second < MAX_TOKENS


def _to_merge(files: Sequence[Segment]) -> slice | None:
    """Return adjacent files to merge: one with many dead texts, or several of similar size; None without any."""
    for i, file in enumerate(files):
        if file.num_alive < (1 - _DEAD) * len(file):
            return slice(i, i + 1)
    first, num_tokens = len(files), 0
    while first and num_tokens + files[first - 1].num_tokens <= _FULL:
        if num_tokens and files[first - 1].num_tokens > _SMALL * num_tokens:
            break
        first -= 1
        num_tokens += files[first].num_tokens
    return slice(first, len(files)) if len(files) - first >= _SMALL else None


def _signature(path: Path) -> tuple[int, ...]:
    try:
        stat = os.stat(path)
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _pack(alive: NDArray[np.bool_]) -> str:
    return base64.b64encode(zlib.compress(np.packbits(alive).tobytes(), 1)).decode()


def _unpack(text: str, count: int) -> NDArray[np.bool_]:
    bits = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.unpackbits(bits, count=count).astype(bool)


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


class Lookup(Catalog):
    """A catalog that looks up the chunks that prompts may reuse. Thread-safe.

    Texts are matched on the catalog's snapshot; the variant to use depends on the store's current state.
    """

    def __init__(self, store: KVStore, alone_only: bool) -> None:
        """Open the catalog of a store. `alone_only`: use only chunks that were encoded without context."""
        super().__init__(store)
        self._alone_only = alone_only

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

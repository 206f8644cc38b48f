"""Base of the stores: a manifest in a local folder, and one stored chunk per row."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.config import check_budget, check_namespace, check_number
from kvrag.errors import DamagedChunkError, StoreError, StoreFullError
from kvrag.fingerprint import Fingerprint, check_owner, codec_of
from kvrag.process import check_process, log_once
from kvrag.store import chunkfile
from kvrag.store.chunkfile import SUFFIX, PackedChunk
from kvrag.store.log import Log
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.values import ON_REQUEST, ChunkRecord, Entry, Holding, StoreStats, TextState

logger = logging.getLogger("kvrag")

MANIFEST = "manifest.sqlite"
_REMOVE, _ADD = 500, 200  # chunks that one change removes or adds
_LOW_WATERMARK = 0.95  # share of a budget that eviction leaves

Progress = Callable[[int, int], None]
"""Called with (chunks done, chunks to do)."""


def no_progress(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """Numbers of chunks."""

    sound: int
    damaged: int  # deleted
    unreadable: int  # at the moment


class KVStore(ABC):
    """A store of one model's chunk KV under one codec.

    Its manifest, in a local folder, answers every query except for the content of chunks. All methods are thread-safe;
    several processes may share one store. The methods called for a prompt (`look_up`, `open`, `entries`, `numbers`,
    `removals`, `touch`) never wait for a writer.
    """

    name: str  # in messages
    path: Path  # the local folder
    max_bytes: int | None  # byte budget of the local folder; None = none
    _manifest: Manifest
    _changes: Manifest | Log  # takes changes: the manifest itself, or the log that it follows

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: Counter[str] = Counter()  # under _lock
        self._process = os.getpid()
        self._writers = ThreadPoolExecutor(4, "kvrag-write")  # they only wait: for fsync, or for the network

    @abstractmethod
    def open(self, key: str) -> PackedChunk | None:
        """Open a chunk; None if it is not stored. Raises as ChunkReader.layer, also for another chunk's content."""

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Start to read these chunks, all of which are about to be opened, and return at once, if reading is slow."""
        return

    @abstractmethod
    def close(self) -> None:
        """Write pending data and release files. Open chunks stay readable."""

    @abstractmethod
    def owner(self) -> dict[str, str]:
        """Return the parts of the fingerprint that the store is claimed for, {} if unclaimed."""

    @abstractmethod
    def _claim(self, fingerprint: Fingerprint) -> None:
        """Claim the store, unless another process is faster."""

    @property
    def _fingerprint(self) -> str:
        return self.owner().get("digest", "")

    def bind(self, fingerprint: Fingerprint) -> None:
        """Claim the store for a model, or raise FingerprintMismatchError if it holds KV of another model or codec."""
        if not self.owner():
            self._claim(fingerprint)
        if owner := self.owner():
            check_owner(owner, fingerprint, self.name)

    @abstractmethod
    def _write_chunk(self, name: str, header: bytes, body: memoryview) -> None:
        """Store a chunk durably under a new name."""

    @abstractmethod
    def _delete(self, names: Iterable[str]) -> None:
        """Delete chunks without a row. `gc` deletes those that cannot be deleted now."""

    @abstractmethod
    def _open_file(self, name: str, key: str) -> PackedChunk:
        """Open a chunk by its file; raises DamagedChunkError if there is none."""

    def clean(self) -> int:
        """Delete what killed writers left, as far as that is quick; return its number.

        Called after a document was forgotten.
        """
        return 0

    @abstractmethod
    def delete_leftovers(self) -> int:
        """Delete what killed writers left, and chunks without a row; return their number. Also purges the manifest.

        Recent ones stay if nothing tells whether their writer lives.
        """

    def check(self, progress: Progress = no_progress) -> StoreCheck:
        """Read all chunks, and delete those that are damaged or differ from their rows."""
        rows, found = self._manifest.rows(), Counter[str]()
        for done, row in enumerate(rows, 1):
            found[self._check_chunk(row)] += 1
            progress(done, len(rows))
        return StoreCheck(found["sound"], found["damaged"], found["unreadable"])

    def _check_chunk(self, row: ManifestRow) -> str:
        """Check one chunk; return the field of StoreCheck that counts it, or "removed"."""
        try:
            chunk = self._open_file(row.file, row.key)
            is_sound = ManifestRow.of(chunk.record(), row.file, chunk.size) == row
        except DamagedChunkError:
            is_sound = False
        except StoreError as error:
            logger.warning("%s", error)
            return "unreadable"
        if is_sound:
            return "sound"
        return "damaged" if self._discard(row.key, row.file) else "removed"  # meanwhile, and maybe stored again

    def check_room(self, needed: float) -> None:
        """Raise StoreFullError if the disk has no room for that many bytes. A bucket has no size."""
        return

    def _check_open(self) -> None:
        """Raise StoreError if the store cannot be used, SettingError in a forked process."""
        check_process(self._process, "this store")

    @property
    def _current(self) -> Manifest:
        """Return the manifest; raise as `_check_open`."""
        self._check_open()
        return self._manifest

    # ---------------------------------------------------------------- chunks

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that are not stored, in order."""
        known = self._current.known(keys)
        return [key for key in keys if key not in known]

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """Store chunks durably, each key once; return their size in bytes.

        Raises StoreFullError if there is no room; chunks stored before are kept.
        """
        new = {record.key: record for record in records}
        wanted = [new[key] for key in self.missing(list(new))]
        if not wanted:
            return 0
        sizes: Counter[str | None] = Counter()
        for record in wanted:
            size = chunkfile.estimate(record)
            sizes.update({record.namespace: size, None: size})
        self._make_room(sizes)
        self.check_room(sizes[None])
        writing = [self._writers.submit(self._write, record) for record in wanted]
        wait(writing)  # wait for all of them, so that no writer is still running after an error
        rows = [written.result() for written in writing if not written.exception()]
        if error := next(filter(None, (written.exception() for written in writing)), None):
            self._delete(row.file for row in rows)
            raise error
        known = self._add(rows)
        self._delete(row.file for row in known)  # another writer was faster
        self.keep_budgets(sizes)  # other writers may have stored chunks since `_make_room`
        return sum(row.num_bytes for row in rows) - sum(row.num_bytes for row in known)

    def _write(self, record: ChunkRecord) -> ManifestRow:
        """Write a record under a unique name."""
        name = f"{record.key}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        header, body = chunkfile.serialise(record, self._fingerprint)
        self._write_chunk(name, header, body)
        return ManifestRow.of(record, name, len(header) + body.nbytes)

    def _add(self, rows: Sequence[ManifestRow]) -> list[ManifestRow]:
        """Record stored chunks; return the rows whose key had another file already."""
        pages = [rows[i : i + _ADD] for i in range(0, len(rows), _ADD)]
        return [row for page in pages for row in self._changes.change("add", rows=page)]

    def remove(self, keys: Sequence[str]) -> None:
        """Delete chunks, even if documents rely on them."""
        self._check_open()
        self._remove(keys)

    def _remove(self, keys: Sequence[str], **conditions: Any) -> list[str]:
        """Delete those of these chunks that meet conditions, see Manifest.remove; return their keys."""
        gone: list[str] = []
        for i in range(0, len(keys), _REMOVE):
            # rows first: a file without a row is a leftover, a row without a file is damage
            removed = self._changes.change("remove", keys=keys[i : i + _REMOVE], **conditions)
            self._delete(file for _, file in removed)
            gone += [key for key, _ in removed]
        return gone

    def touch(self, keys: Sequence[str]) -> None:
        """Record that these chunks were used. The write happens later, in another thread."""
        with self._lock:
            self._touched.update(keys)

    def _record_uses(self) -> None:
        """Record the uses that `touch` has collected."""
        with self._lock:
            uses, self._touched = self._touched, Counter()
        try:
            if keys := sorted(self._counted(list(uses))):
                self._changes.change("touch", keys=keys, uses=[uses[key] for key in keys])
        except StoreError as error:  # a full disk must not fail a request; and a remote may only be read
            log_once(f"uses are not recorded: {error}")

    def _counted(self, keys: Sequence[str]) -> Collection[str]:
        """Return those of these chunks whose uses matter."""
        return keys

    # ---------------------------------------------------------------- texts and their holders

    def look_up(self, text_keys: Sequence[str]) -> dict[str, TextState]:
        """Return the durable state of all of these texts from one snapshot."""
        return self._current.look_up(text_keys)

    def entries(self, after: int) -> Iterator[Entry]:
        """Return the texts with a number above `after`, in ascending order.

        The numbers differ between machines, and all are new when a manifest is replaced.
        """
        return self._current.entries(after)

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all texts."""
        return self._current.numbers()

    def removals(self) -> int:
        """Return a counter that changes when any process removes chunks."""
        return self._current.counter("removals")

    def set_document(
        self, document: str, holdings: Sequence[Holding], namespace: str = "", replace: bool = True
    ) -> list[str]:
        """Record the texts of a document; return the keys of the chunks removed because no document relies on them.

        Texts that it had and lacks now are not kept for prompts either.

        Earlier holdings are kept if `replace` is False, or the document is "" or `ON_REQUEST`.
        """
        self._check_open()
        replace = replace and document not in ("", ON_REQUEST)
        names = {"document": document, "namespace": namespace}
        removed = self._changes.change("hold", **names, holdings=holdings, replace=replace)
        self._delete(name for _, name in removed)
        return [key for key, _ in removed]

    def forget_requests(
        self, namespace: str = "", choose: Callable[[Sequence[str]], Collection[str]] = lambda text_keys: text_keys
    ) -> list[str]:
        """Delete the chunks that only prompts brought, of the texts that `choose` returns; return their keys."""
        texts = [text for space, text in self._current.unused_requests(math.inf) if space == namespace]
        chosen = sorted(choose(texts)) if texts else []
        if not chosen:
            return []
        self._changes.change("release", requests=[(namespace, text) for text in chosen])
        keys = [key for state in self._manifest.look_up(chosen).values() for key in state.variants]
        return self._remove(keys, unheld=True)

    def documents(self, prefix: str = "", namespace: str = "") -> dict[str, list[str]]:
        """Return the namespace's documents with this prefix, sorted, each with the keys that it relies on."""
        return self._current.documents(prefix, namespace)

    def count_tokens(self, prefix: str = "", namespace: str = "") -> dict[str, int]:
        """Return the number of tokens of the texts of each document with this prefix."""
        return self._current.count_tokens(prefix, namespace)

    def counts(self, prefix: str) -> dict[str, int]:
        """Return the counters whose names begin with `prefix`, without it."""
        return self._current.counters(prefix)

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add to counters, for all processes and machines."""
        self._check_open()
        self._changes.change("count", numbers=numbers)

    # ---------------------------------------------------------------- budgets

    def set_budget(self, namespace: str, max_bytes: int | None) -> int:
        """Set the byte budget of a namespace, for all processes and machines; None = none.

        Its chunks are evicted beyond it, now and whenever chunks are stored. Returns the number evicted now.
        """
        max_bytes = None if max_bytes is None else check_budget("a budget", max_bytes)
        check_namespace(namespace)
        self._check_open()
        self._changes.change("set_budget", namespace=namespace, bytes=max_bytes)
        return 0 if max_bytes is None else self._evict(max_bytes, namespace)

    def _limits(self) -> dict[str | None, int]:
        """Return the byte budget of each namespace that has one; that of None is for all together."""
        return dict[str | None, int](self._manifest.budgets().items())

    def keep_budgets(self, namespaces: Collection[str | None] | None = None) -> None:
        """Evict the chunks that exceed the budgets of these namespaces; None = all."""
        for namespace, max_bytes in self._limits().items():
            if namespaces is None or namespace in namespaces:
                self._evict(max_bytes, namespace)

    def _make_room(self, sizes: Mapping[str | None, int]) -> None:
        """Evict enough chunks to store this many bytes in each namespace, down to the low watermark of its budget."""
        limits = {name: size for name, size in self._limits().items() if name in sizes}
        for namespace, max_bytes in limits.items():
            if sizes[namespace] > max_bytes:
                whose, remedy = f"the namespace {namespace!r}", "raise it with `kvrag store budget`"
                if namespace is None:
                    whose, remedy = "the store", "raise max_bytes"
                raise StoreFullError(
                    f"{sizes[namespace]} bytes exceed the budget of {max_bytes} bytes of {whose}: {remedy}"
                )
        for namespace, max_bytes in limits.items():
            needed = sizes[namespace]
            if self._manifest.num_bytes(namespace) + needed > max_bytes:
                self._evict(max(0, int(max_bytes * _LOW_WATERMARK) - needed), namespace)

    def _evict(self, limit: int, namespace: str | None = None) -> int:
        """Remove the chunks that save least until a namespace (None = the store) takes `limit` bytes; count them."""
        if self._manifest.num_bytes(namespace) <= limit:
            return 0
        self._record_uses()
        evicted = 0
        while keys := self._manifest.coldest(limit, _REMOVE, namespace):  # the same for all that evict at the same time
            removed = self._remove(keys)
            evicted += len(removed)
            if not removed:  # another process or machine was faster
                break
        return evicted

    # ---------------------------------------------------------------- maintenance

    def stats(self) -> StoreStats:
        """Return counts for reports and tests."""
        parts, namespaces = self.owner(), tuple(self._current.namespaces())
        return StoreStats(
            path=self.name,
            fingerprint=parts.get("digest", ""),
            model=json.loads(parts.get("model", '""')),
            codec=codec_of(parts),
            chunks=sum(namespace.chunks for namespace in namespaces),
            tokens=sum(namespace.tokens for namespace in namespaces),
            bytes=sum(namespace.bytes for namespace in namespaces),
            documents=sum(namespace.documents for namespace in namespaces),
            max_bytes=self._limits().get(None),
            damaged=self._manifest.counter("damaged"),
            namespaces=namespaces,
        )

    def gc(self, unused_days: float = 7.0) -> tuple[int, int]:
        """Delete unneeded chunks and files; return (chunks, files) deleted. Also enforces the budgets.

        Unneeded: chunks that no document relies on, including chunks of requests unused for `unused_days`, and files
        without a row. Token ids of deleted texts are deleted from the manifest and its log.
        """
        check_number("unused_days", unused_days, least=-math.inf)
        self._record_uses()
        if requests := self._manifest.unused_requests(time.time() - unused_days * 86400):
            self._changes.change("release", requests=requests)
        # another process or machine may record a document that relies on them at this moment
        unheld = self._remove(self._manifest.unheld(), unheld=True)
        self.keep_budgets()  # a killed writer did not
        return len(unheld), self.delete_leftovers()

    def discard(self, key: str) -> None:
        """Delete a damaged chunk."""
        self._discard(key, self._manifest.file(key))

    def _discard(self, key: str, name: str | None) -> bool:
        """Delete a damaged chunk; return False if its row has been deleted or has another file."""
        if not self._remove([key], counter="damaged", file=name):
            return False
        logger.warning("chunk %s is damaged: deleted, it is encoded again when needed", key)
        return True

"""The embedded store: a folder with one safetensors file per chunk and a SQLite manifest.

Chunks are content-addressed: the key determines the bytes, so writers need no lock and a lost file is a miss that is
encoded again. Order of writing: file under a temporary name, fsync, rename, then the row. A process killed in between
leaves a file that the next writer of the same chunk replaces, or that `check` adopts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from kvrag.errors import (
    DamagedChunkError,
    FingerprintMismatchError,
    SettingError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from kvrag.fingerprint import Fingerprint
from kvrag.store import chunkfile
from kvrag.store.manifest import Manifest
from kvrag.store.protocol import ChunkReader, ChunkRecord, Entry, StoreStats

logger = logging.getLogger("kvrag")

_OWNER = "fingerprint.json"
_LOW_WATERMARK = 0.8  # evict down to this share of the budget, so that not every put evicts
_TOUCH_EVERY = 1.0  # seconds
_STALE = 3600.0  # seconds after which a temporary file belongs to nobody


class FileStore:
    """Chunk KV in a folder. Several processes may share it."""

    def __init__(self, path: str | Path, max_bytes: int | None = None, min_free_bytes: int = 1 << 30) -> None:
        """Open or create.

        Args:
            max_bytes: Least recently used chunks are evicted beyond this; None = no budget of its own.
            min_free_bytes: Writing stops before the disk has less than this left.

        Raises:
            StoreError: The folder cannot be created or opened.
        """
        if max_bytes is not None and max_bytes <= 0:
            raise SettingError(f"max_bytes must be positive, got {max_bytes}")
        self.path = Path(path).expanduser().resolve()
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        try:
            for folder in (self.path, self._chunks):  # what is in it is as confidential as the documents
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents have the usual mode
        except OSError as error:
            if not (self.path / "manifest.sqlite").exists():
                raise StoreError(
                    f"cannot create the store folder {self.path} ({error.strerror}): choose another one"
                ) from error
        self._manifest = Manifest(self.path / "manifest.sqlite")
        self._fingerprint = ""
        self._touched: set[str] = set()
        self._last_touch = time.monotonic()
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvrag-write")  # fsync waits, cores do not
        if not self._manifest.read_only:
            self._sweep()
            if self._manifest.rebuilt or self._lost_its_manifest():
                self.check()

    def _lost_its_manifest(self) -> bool:
        """Emptied or deleted, which SQLite takes for a new one."""
        return not self._manifest.totals()[0] and any(self._chunks.glob(f"*/*{chunkfile.SUFFIX}"))

    @property
    def _chunks(self) -> Path:
        return self.path / "chunks"

    def _file(self, key: str) -> Path:
        return self._chunks / key[:2] / f"{key}{chunkfile.SUFFIX}"

    def bind(self, fingerprint: Fingerprint) -> None:
        """See KVStore.bind."""
        mine = {"digest": fingerprint.digest, **fingerprint.parts()}
        theirs = self._owner() or (mine if self._manifest.read_only else self._claim(mine))
        if theirs["digest"] != mine["digest"]:
            different = [name for name in mine if name not in ("digest", "model") and mine[name] != theirs.get(name)]
            held, loaded = json.loads(theirs["model"]), json.loads(mine["model"])
            way_out = "load the model as it was then, use another store folder, or delete this one"
            if different == ["codec"]:
                way_out = f"open it with codec {_codec(theirs)} instead of {_codec(mine)}, or {way_out}"
            raise FingerprintMismatchError(
                f"the store {self.path} holds KV of {held}, not of {loaded} as it is loaded now "
                f"(different: {', '.join(different)}): {way_out}"
            )
        self._fingerprint = fingerprint.digest

    def _owner(self) -> dict[str, str]:
        """The fingerprint's parts, in a file of its own, so that it outlives a damaged manifest; empty if unclaimed."""
        try:
            parts: dict[str, str] = json.loads((self.path / _OWNER).read_text())
            if not (isinstance(parts, dict) and {"digest", "model"} <= set(parts)):
                raise ValueError("no fingerprint in it")
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise StoreError(
                f"{self.path / _OWNER} is damaged ({error}): delete the store folder and warm again"
            ) from error
        return parts

    def _claim(self, parts: dict[str, str]) -> dict[str, str]:
        tmp = self.path / f".{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            tmp.write_text(json.dumps(parts, indent=1))
            os.link(tmp, self.path / _OWNER)  # the first of two processes wins
        except FileExistsError:
            pass
        except OSError as error:
            raise self._explain(error) from error
        finally:
            tmp.unlink(missing_ok=True)
        return self._owner()

    def missing(self, keys: Sequence[str]) -> list[str]:
        """See KVStore.missing."""
        known = self._manifest.known(keys)
        return [key for key in keys if key not in known]

    def put(self, records: Sequence[ChunkRecord]) -> int:
        """See KVStore.put."""
        if self._manifest.read_only:
            raise StoreReadOnlyError(f"{self.path} cannot be written: choose another store folder")
        new = {record.key: record for record in records}
        wanted = [new[key] for key in self.missing(list(new))]
        contents = list(self._writers.map(lambda record: chunkfile.pack(record, self._fingerprint), wanted))
        self._make_room(sum(map(len, contents)))
        try:
            writing = [self._writers.submit(self._write, *pair) for pair in zip(wanted, contents, strict=True)]
            wait(writing)  # all of them: after an error no writer is left at work
            for written in writing:
                written.result()
            self._manifest.add(self._rows(wanted, contents))
        except OSError as error:
            raise self._explain(error) from error
        return sum(map(len, contents))

    def _rows(self, records: list[ChunkRecord], contents: list[bytes]) -> Iterator[tuple[str, int, int, bytes, bytes]]:
        """Taken by the manifest while nobody else can change it."""
        for record, content in zip(records, contents, strict=True):
            if not self._file(record.key).exists():  # removed since by another process that did not know this writer
                self._write(record, content)
            yield record.key, len(record.ids), len(content), record.ids.astype("<u4").tobytes(), record.anchors

    def _write(self, record: ChunkRecord, content: bytes) -> None:
        chunkfile.write(self._file(record.key), content, f".{os.getpid()}.{uuid.uuid4().hex}.tmp")

    def _explain(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(
                f"the disk of {self.path} is full: free space, set a smaller max_bytes or choose another store folder"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnlyError(f"{self.path} cannot be written ({error.strerror}): choose another store folder")
        return StoreError(f"cannot write to {self.path}: {error}")

    def _make_room(self, needed: int) -> None:
        if self.max_bytes is not None:
            used = self._manifest.totals()[2]
            if needed > self.max_bytes:
                raise StoreFullError(
                    f"{needed} bytes do not fit into the store's budget of {self.max_bytes}: raise max_bytes"
                )
            if used + needed > self.max_bytes:
                keep = max(0, int(self.max_bytes * _LOW_WATERMARK) - needed)
                self._flush_touched()
                self.remove(self._manifest.oldest(used - keep))
        free = shutil.disk_usage(self.path).free
        if free - needed < self.min_free_bytes:
            raise StoreFullError(
                f"{self.path}: {free / 1e9:.1f} GB free, {needed / 1e9:.3f} GB needed and "
                f"{self.min_free_bytes / 1e9:.1f} GB kept free: make room, set max_bytes or choose another folder"
            )

    def open(self, key: str) -> ChunkReader | None:
        """See KVStore.open."""
        try:
            chunk = chunkfile.ChunkFile(self._file(key))
        except FileNotFoundError:
            if self.missing([key]):
                return None
            raise DamagedChunkError(key, "its file is gone") from None
        if chunk.fingerprint != self._fingerprint:
            chunk.close()
            raise DamagedChunkError(key, "it was written by another model")
        return chunk

    def look_up(self, texts):
        return {text: text for text in texts if not self.missing([text])}

    def entries(self, after: int) -> Iterable[Entry]:
        """See KVStore.entries."""
        return self._manifest.entries(after)

    def removals(self) -> int:
        """See KVStore.removals."""
        return self._manifest.counter("removals")

    def quarantine(self, key: str) -> None:
        """See KVStore.quarantine. The file goes to the folder `quarantine`."""
        logger.warning("chunk %s is damaged: moved to quarantine, it will be encoded again when it is needed", key)
        if self._manifest.read_only:
            return
        aside = self.path / "quarantine"
        try:
            aside.mkdir(exist_ok=True, mode=0o700)
            os.replace(self._file(key), aside / f"{key}-{time.time_ns()}{chunkfile.SUFFIX}")
        except FileNotFoundError:
            pass  # gone altogether, or another process was quicker
        except OSError as error:
            raise self._explain(error) from error
        self._manifest.remove([key], counter="damaged")

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Written once a second at most."""
        with self._lock:
            self._touched.update(keys)
            due = time.monotonic() - self._last_touch > _TOUCH_EVERY
        if due:
            self._flush_touched()

    def _flush_touched(self) -> None:
        with self._lock:
            touched, self._touched = sorted(self._touched), set()
            self._last_touch = time.monotonic()
        if touched and not self._manifest.read_only:
            try:
                self._manifest.touch(touched)
            except StoreError as error:  # a disk that is full must not cost an answer
                logger.warning("times of use were not written: %s", error)

    def set_document(self, document: str, keys: Sequence[str]) -> int:
        """See KVStore.set_document."""
        orphans = self._manifest.hold(document, keys, replace=bool(document))
        self.remove(orphans)
        return len(orphans)

    def documents(self, prefix: str = "", namespace: str = "") -> dict[str, list[str]]:
        """See KVStore.documents."""
        return self._manifest.documents(prefix)

    def remove(self, keys: Sequence[str]) -> None:
        """Delete chunks, rows first: a file without a row is a leftover, a row without a file would be damage."""
        if not keys:
            return
        self._manifest.remove(keys)
        with self._manifest.absent(keys) as absent:  # not those that another process has stored again since
            for key in absent:
                self._file(key).unlink(missing_ok=True)

    def read_text(self, name: str) -> str | None:
        """See KeepsTexts.read_text. A text is a file of that name in the store folder."""
        try:
            return (self.path / name).read_text("utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {self.path / name}: {error}") from error

    def write_text(self, name: str, text: str) -> None:
        """See KeepsTexts.write_text."""
        if self._manifest.read_only:
            raise StoreReadOnlyError(f"{self.path} cannot be written: choose another store folder")
        try:
            chunkfile.write(self.path / name, text.encode(), f".{os.getpid()}.{uuid.uuid4().hex}.tmp")
        except OSError as error:
            raise self._explain(error) from error

    def stats(self) -> StoreStats:
        """See KVStore.stats."""
        chunks, tokens, size, documents = self._manifest.totals()
        parts = self._owner()
        return StoreStats(
            path=str(self.path),
            fingerprint=parts.get("digest", ""),
            model=json.loads(parts.get("model", '""')),
            codec=_codec(parts),
            chunks=chunks,
            tokens=tokens,
            bytes=size,
            documents=documents,
            max_bytes=self.max_bytes,
            damaged=self._manifest.counter("damaged"),
        )

    def check(self, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[int, int, int]:
        """Read everything: quarantine what is damaged, adopt whole files that have no row, replace a damaged manifest.

        Returns:
            (sound chunks, quarantined, adopted).
        """
        if not self._manifest.is_sound() and not self._manifest.read_only:
            self._manifest.rebuild()
        rows = {entry.key: (entry.ids.tobytes(), entry.anchors) for entry in self._manifest.entries(0)}
        paths = {path.name.removesuffix(chunkfile.SUFFIX): path for path in self._chunks.glob(f"*/*{chunkfile.SUFFIX}")}
        keys = sorted({*rows, *paths})
        sound = damaged = adopted = 0
        for done, key in enumerate(keys, 1):
            try:
                chunk = chunkfile.ChunkFile(self._file(key))
                try:
                    for number in range(chunk.num_layers):
                        chunk.layer(number)
                    ids, anchors = chunk.ids_and_anchors()
                finally:
                    chunk.close()
            except (DamagedChunkError, FileNotFoundError):
                self.quarantine(key)
                damaged += 1
            else:
                sound += 1
                described = ids.astype("<u4").tobytes(), anchors
                if rows.get(key) != described:
                    if key in rows:
                        self._manifest.remove([key])  # its row says something else than its file
                    self._manifest.add([(key, len(ids), self._file(key).stat().st_size, *described)])
                    self._manifest.hold("", [key], replace=False)
                    adopted += 1
            progress(done, len(keys))
        return sound, damaged, adopted

    def gc(self) -> tuple[int, int]:
        """Delete chunks that no document holds, leftover files and quarantined ones; returns (chunks, files)
        deleted."""
        unheld = self._manifest.unheld()
        self.remove(unheld)
        paths = {path.name.removesuffix(chunkfile.SUFFIX): path for path in self._chunks.glob("*/*")}
        with self._manifest.absent(list(paths)) as absent:
            leftovers = [paths[key] for key in absent if _is_stale(paths[key])]
            leftovers += [path for path in (self.path / "quarantine").glob("*") if _is_stale(path)]
            for path in leftovers:
                path.unlink(missing_ok=True)
        return len(unheld), len(leftovers)

    def _sweep(self) -> None:
        """Temporary files of writers that were killed."""
        for path in [*self.path.glob(".*.tmp"), *self._chunks.glob("*/.*.tmp")]:
            if _is_stale(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Write what is pending and release the manifest."""
        self._flush_touched()
        self._writers.shutdown()
        self._manifest.close()


def _codec(parts: dict[str, str]) -> str:
    """Under its name in the settings."""
    return str(json.loads(parts.get("codec", '"none"'))).replace("none", "native")


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE
    except FileNotFoundError:
        return False  # its writer has just finished

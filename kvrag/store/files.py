"""The embedded store: a folder with one safetensors file per chunk and a SQLite manifest.

Chunks are content-addressed: a chunk's KV is a function of its key, so writers need no lock and a lost file is a miss
that is encoded again. Every writing makes a file of its own name, which the chunk's row records: whoever deletes a row
may delete its file at any later time, whatever others have stored under the key since. Order of writing: file under a
temporary name, fsync, rename, then the row. A process killed in between leaves a file without a row, for `gc`.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass
from pathlib import Path

from kvrag.errors import (
    ChunkUnreadableError,
    DamagedChunkError,
    FingerprintMismatchError,
    SettingError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from kvrag.fingerprint import FORMAT, Fingerprint, text_key
from kvrag.store import chunkfile
from kvrag.store.chunkfile import SUFFIX, ChunkFile
from kvrag.store.durable import TEMPORARY, write_file
from kvrag.store.manifest import Manifest, Row, old_format
from kvrag.store.protocol import ON_REQUEST, ChunkReader, ChunkRecord, Entry, Holding, StoreStats, TextState

logger = logging.getLogger("kvrag")

OWNER = "fingerprint.json"
MANIFEST = "manifest.sqlite"
_LOW_WATERMARK = 0.8  # evict down to this share of the budget, so that not every put evicts
_EVICT = 500  # chunks in one transaction
_TOUCH_EVERY = 1.0  # seconds
_STALE = 3600.0  # seconds after which a file without a row belongs to nobody
UNUSED_DAYS = 7.0
"""Days after which texts that came with requests are collected."""


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """What `FileStore.check` found.

    Attributes:
        sound: Chunks that are whole, `adopted` and `repaired` ones among them.
        damaged: Chunks put into quarantine.
        adopted: Whole files that had no row.
        repaired: Chunks whose row said something else than their file.
        unreadable: Chunks that could not be read just now; they stay.
    """

    sound: int
    damaged: int
    adopted: int
    repaired: int
    unreadable: int


class FileStore:
    """Chunk KV in a folder. Several processes may share it."""

    def __init__(self, path: str | Path, max_bytes: int | None = None, min_free_bytes: int = 1 << 30) -> None:
        """Open or create.

        Args:
            max_bytes: Least recently used chunks are evicted beyond this; None = no budget of its own.
            min_free_bytes: Writing stops before the disk has less than this left.

        Raises:
            StoreError: The folder cannot be created or opened, or another version wrote it.
        """
        if max_bytes is not None and max_bytes <= 0:
            raise SettingError(f"max_bytes must be positive, got {max_bytes}")
        self.path = Path(path).expanduser().resolve()
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        check_layout(self.path)
        try:
            for folder in (self.path, self._chunks):  # what is in it is as confidential as the documents
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents have the usual mode
        except OSError as error:
            if not (self.path / MANIFEST).exists():
                raise StoreError(
                    f"cannot create the store folder {self.path} ({error.strerror}): choose another one"
                ) from error
        self._manifest = Manifest(self.path / MANIFEST)
        self._bound = ""
        self._lock = threading.Lock()  # of the next two
        self._touched: set[str] = set()
        self._flushing: threading.Timer | None = None
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvrag-write")  # fsync waits, cores do not
        if not self._manifest.read_only:
            self._sweep()
            if self._manifest.is_new:
                self._recover()

    @property
    def _chunks(self) -> Path:
        return self.path / "chunks"

    @property
    def catalog_folder(self) -> Path | None:
        """See KVStore."""
        return None if self._manifest.read_only else self.path / "catalog"

    def _file(self, name: str) -> Path:
        # a manifest that is damaged, or somebody's, must not lead to other files
        if os.path.basename(name) != name or not name.endswith(SUFFIX):
            name = f"no name{SUFFIX}"
        return self._chunks / name[:2] / name

    @property
    def _fingerprint(self) -> str:
        """Digest of what is stored here, bound or not."""
        if not self._bound:
            with contextlib.suppress(StoreError):
                self._bound = self._owner().get("digest", "")
        return self._bound

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
        self._bound = fingerprint.digest

    def _owner(self) -> dict[str, str]:
        """The fingerprint's parts, in a file of its own, so that it outlives a damaged manifest; empty if unclaimed."""
        return read_owner(self.path)

    def _claim(self, parts: dict[str, str]) -> dict[str, str]:
        with contextlib.suppress(FileExistsError):  # the first of two processes wins
            self._durably(self.path / OWNER, json.dumps(parts, indent=1).encode(), replace=False)
        return self._owner()

    def _durably(self, path: Path, *parts: bytes | memoryview, replace: bool = True) -> int:
        if self._manifest.read_only:
            raise StoreReadOnlyError(f"{self.path} cannot be written: choose another store folder")
        try:
            return write_file(path, *parts, replace=replace)
        except OSError as error:
            if isinstance(error, FileExistsError) and not replace:
                raise
            raise self._explain(error) from error

    # ---------------------------------------------------------------- chunks

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
        self._make_room(sum(map(chunkfile.estimate, wanted)))
        writing = [self._writers.submit(self._write, record) for record in wanted]
        wait(writing)  # all of them: after an error no writer is left at work
        rows = [written.result() for written in writing if not written.exception()]
        try:
            for written in writing:
                written.result()
            known = self._manifest.add(rows)
        except BaseException:
            self._unlink(row.file for row in rows)
            raise
        self._unlink(row.file for row in known)  # somebody else was quicker
        return sum(row.num_bytes for row in rows) - sum(row.num_bytes for row in known)

    def _write(self, record: ChunkRecord) -> Row:
        """Write a file of a name that no other has."""
        name = f"{record.key}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        size = self._durably(self._file(name), *chunkfile.pack(record, self._fingerprint))
        ids = record.ids.astype("<u4")
        text = text_key(record.namespace, ids.tolist())
        return Row(record.key, text, record.namespace, ids.tobytes(), len(record.context), name, size)

    def _explain(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(
                f"the disk of {self.path} is full: free space, set a smaller max_bytes or choose another store folder"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnlyError(f"{self.path} cannot be written ({error.strerror}): choose another store folder")
        return StoreError(f"cannot write to {self.path}: {error}")

    def _make_room(self, needed: int) -> None:
        if not needed:
            return
        if self.max_bytes is not None:
            used = self._manifest.num_bytes()
            if needed > self.max_bytes:
                raise StoreFullError(
                    f"{needed} bytes do not fit into the store's budget of {self.max_bytes}: raise max_bytes"
                )
            if used + needed > self.max_bytes:
                keep = max(0, int(self.max_bytes * _LOW_WATERMARK) - needed)
                self._flush_touched()
                self.remove(self._manifest.oldest(used - keep))
        try:
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise self._explain(error) from error
        if free - needed < self.min_free_bytes:
            raise StoreFullError(
                f"{self.path}: {free / 1e9:.1f} GB free, {needed / 1e9:.3f} GB needed and "
                f"{self.min_free_bytes / 1e9:.1f} GB kept free: make room, set max_bytes or choose another folder"
            )

    def open(self, key: str) -> ChunkReader | None:
        """See KVStore.open."""
        seen = None
        while (name := self._manifest.file(key)) is not None:
            try:
                return ChunkFile(self._file(name), key, self._fingerprint)
            except FileNotFoundError:  # removed since, and maybe stored again
                if name == seen:
                    raise DamagedChunkError(key, "its file is gone") from None
                seen = name
        return None

    def remove(self, keys: Sequence[str]) -> None:
        """See KVStore.remove. Rows go first: a file without a row is a leftover, a row without a file is damage."""
        for i in range(0, len(keys), _EVICT):
            self._unlink(self._manifest.remove(keys[i : i + _EVICT]))

    def _unlink(self, names: Iterable[str]) -> None:
        """Delete files without a row; nobody waits for it. What cannot be deleted is left to `gc`."""
        for name in names:
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s was not deleted: %s", self._file(name), error.strerror)

    def quarantine(self, key: str) -> None:
        """See KVStore.quarantine. The file goes to the folder `quarantine`."""
        logger.warning("chunk %s is damaged: moved to quarantine, it will be encoded again when it is needed", key)
        if not self._manifest.read_only:
            for name in self._manifest.remove([key], counter="damaged"):
                self._put_aside(self._file(name))

    def _put_aside(self, path: Path) -> None:
        aside = self.path / "quarantine"
        try:
            aside.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, aside / path.name)
        except FileNotFoundError:
            pass  # gone altogether, or another process was quicker
        except OSError as error:
            raise self._explain(error) from error

    # ---------------------------------------------------------------- texts and who holds them

    def look_up(self, texts: Sequence[str]) -> dict[str, TextState]:
        """See KVStore.look_up."""
        return self._manifest.look_up(texts)

    def entries(self, after: int) -> Iterator[Entry]:
        """See KVStore.entries."""
        return self._manifest.entries(after)

    def removed(self, after: int) -> tuple[int, Sequence[int]] | None:
        """See KVStore.removed."""
        return self._manifest.removed(after)

    def removals(self) -> int:
        """See KVStore.removals."""
        return self._manifest.counter("removals")

    def set_document(
        self, document: str, holdings: Sequence[Holding], namespace: str = "", replace: bool = True
    ) -> list[str]:
        """See KVStore.set_document."""
        removed = self._manifest.hold(document, holdings, namespace, replace and document not in ("", ON_REQUEST))
        self._unlink(name for _, name in removed)
        return [key for key, _ in removed]

    def documents(self, prefix: str = "", namespace: str = "") -> dict[str, list[str]]:
        """See KVStore.documents."""
        return self._manifest.documents(prefix, namespace)

    # ---------------------------------------------------------------- times of use

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Written once a second at most."""
        with self._lock:
            self._touched.update(keys)
            if self._touched and self._flushing is None and not self._manifest.read_only:
                self._flushing = threading.Timer(_TOUCH_EVERY, self._flush_touched)
                self._flushing.daemon = True
                self._flushing.start()

    def _flush_touched(self) -> None:
        with self._lock:
            touched, self._touched = sorted(self._touched), set()
            self._flushing = None
        if touched and not self._manifest.read_only:
            try:
                self._manifest.touch(touched)
            except StoreError as error:  # a disk that is full must not cost an answer
                logger.warning("times of use were not written: %s", error)

    # ---------------------------------------------------------------- small texts

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
        self._durably(self.path / name, text.encode())

    # ---------------------------------------------------------------- looking after it

    def stats(self) -> StoreStats:
        """See KVStore.stats."""
        parts, namespaces = self._owner(), tuple(self._manifest.namespaces())
        return StoreStats(
            path=str(self.path),
            fingerprint=parts.get("digest", ""),
            model=json.loads(parts.get("model", '""')),
            codec=_codec(parts),
            chunks=sum(namespace.chunks for namespace in namespaces),
            tokens=sum(namespace.tokens for namespace in namespaces),
            bytes=sum(namespace.bytes for namespace in namespaces),
            documents=sum(namespace.documents for namespace in namespaces),
            max_bytes=self.max_bytes,
            damaged=self._manifest.counter("damaged"),
            namespaces=namespaces,
        )

    def check(self, progress: Callable[[int, int], None] = lambda done, total: None) -> StoreCheck:
        """Read everything and compare it with the manifest.

        What is damaged goes to quarantine, whole files without a row get one, rows that say something else than their
        file are repaired, and a damaged manifest is replaced.
        """
        if not self._manifest.read_only and not self._manifest.is_sound():
            self._manifest.rebuild()
            return self._recover(progress)
        return self._check(progress)

    def _recover(self, progress: Callable[[int, int], None] = lambda done, total: None) -> StoreCheck:
        """Fill an empty manifest from the chunk files.

        They do not say which documents held them. Chunks encoded alone are held without a name, and are served as
        before, also instead of their other variants. Those that were encoded behind a source's words are held by
        nobody, so that nobody gets them before their documents are warmed again, which encodes nothing.
        """
        return self._check(progress, hold=True)

    def _check(self, progress: Callable[[int, int], None], hold: bool = False) -> StoreCheck:
        rows = self._manifest.rows()
        names = {key: row.file for key, row in rows.items()}
        for path in sorted(self._chunks.glob(f"*/*{SUFFIX}")):  # a second file of a key is a leftover, for `gc`
            names.setdefault(path.name.removesuffix(SUFFIX).partition("-")[0], path.name)
        counts = dict.fromkeys(("sound", "damaged", "adopted", "repaired", "unreadable"), 0)
        for done, (key, name) in enumerate(names.items(), 1):
            for what in self._check_chunk(name, key, rows.get(key), hold):
                counts[what] += 1
            progress(done, len(names))
        if not self._manifest.read_only:
            self._manifest.recount()
        return StoreCheck(**counts)

    def _check_chunk(self, name: str, key: str, row: Row | None, hold: bool) -> list[str]:
        """What the chunk in this file counts as, once something has been done about it."""
        path = self._file(name)
        try:
            chunk = ChunkFile(path, key, self._fingerprint)
            try:
                for number in range(chunk.num_layers):
                    chunk.layer(number)
            finally:
                chunk.close()
        except ChunkUnreadableError as error:
            logger.warning("%s", error)
            return ["unreadable"]
        except (DamagedChunkError, FileNotFoundError):
            if row and self._manifest.file(key) != name:
                return []  # removed meanwhile, and maybe stored again
            if row:
                self.quarantine(key)
            elif path.exists() and not self._manifest.read_only:
                logger.warning("%s is damaged and has no entry: moved to quarantine", path)
                self._put_aside(path)
            return ["damaged"]
        ids, text = chunk.ids.astype("<u4").tobytes(), text_key(chunk.namespace, chunk.ids.tolist())
        found = Row(key, text, chunk.namespace, ids, chunk.context_tokens, name, path.stat().st_size)
        if row == found or self._manifest.read_only:
            return ["sound"]
        self._manifest.correct(found)
        if hold and not chunk.context_tokens:
            self._manifest.hold("", [Holding(text, key, "")], chunk.namespace, replace=False)
        if not path.exists():  # removed meanwhile, by somebody who deleted no row since there was none
            self._manifest.remove([key], file=name)
        return ["sound", "repaired" if row else "adopted"]

    def gc(self, unused_days: float = UNUSED_DAYS) -> tuple[int, int]:
        """Delete what nobody needs; returns (chunks, files) deleted.

        That are chunks that no document relies on, among them those that came with requests and have not been used for
        so many days, files without a row, and quarantined ones.
        """
        self._flush_touched()
        self._manifest.drop_requests(time.time() - unused_days * 86400)
        unheld = self._manifest.unheld()
        self.remove(unheld)
        paths = [path for path in self._chunks.glob("*/*") if _is_stale(path)]
        known = self._manifest.files()  # read after the folder: what was written since is not stale
        leftovers = [path for path in paths if path.name not in known]
        leftovers += [path for path in (self.path / "quarantine").glob("*") if _is_stale(path)]
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(unheld), len(leftovers)

    def _sweep(self) -> None:
        """Temporary files of writers that were killed."""
        for path in [*self.path.glob(TEMPORARY), *self._chunks.glob(f"*/{TEMPORARY}")]:
            if _is_stale(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """See KVStore.close."""
        with self._lock:
            flushing = self._flushing
        if flushing is not None:
            flushing.cancel()
        self._flush_touched()
        self._writers.shutdown()
        self._manifest.close()


def read_owner(folder: Path) -> dict[str, str]:
    """Return the parts of the fingerprint that a store's folder is claimed for, see `Fingerprint.parts`, or nothing.

    Raises:
        StoreError: They cannot be read.
    """
    try:
        parts: dict[str, str] = json.loads((folder / OWNER).read_text())
        if not (isinstance(parts, dict) and {"digest", "model"} <= set(parts)):
            raise ValueError("no fingerprint in it")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {folder / OWNER} ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{folder / OWNER} is damaged ({error}): delete the store folder and warm again") from error
    return parts


def check_layout(folder: Path) -> None:
    """Refuse a folder that another version wrote.

    Raises:
        StoreError: Says how to encode it again.
    """
    try:
        written = json.loads(read_owner(folder).get("format", str(FORMAT)))
    except (StoreError, ValueError):  # damaged: that is reported when it is bound
        return
    if written != FORMAT:
        raise old_format(folder, written)


def _codec(parts: dict[str, str]) -> str:
    """Under its name in the settings."""
    return str(json.loads(parts.get("codec", '"none"'))).replace("none", "native")


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE
    except FileNotFoundError:
        return False  # its writer has just finished

"""The embedded store: a folder with one safetensors file per chunk and a SQLite manifest.

Chunks are content-addressed: a chunk's KV is a function of its key. Writers need no lock, and a lost file is a miss
that is encoded again. Every write creates a file with a new name, which the chunk's row records. A process that deletes
a row may therefore delete the file at any later time, even if the key has been stored again. Order of writing: file
under a temporary name, fsync, rename, row. A process killed in between leaves a file without a row; `gc` deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from kvrag.store import budget, chunkfile
from kvrag.store.chunkfile import SUFFIX, ChunkFile
from kvrag.store.durable import TEMPORARY, write_file
from kvrag.store.manifest import Holder, Manifest, Row, old_format
from kvrag.store.protocol import ON_REQUEST, ChunkRecord, Entry, Holding, StoreStats, TextState

logger = logging.getLogger("kvrag")

OWNER = "fingerprint.json"
MANIFEST = "manifest.sqlite"
_EVICT = 500  # chunks per transaction
_TOUCH_EVERY = 1.0  # seconds
_STALE = 3600.0  # seconds after which a file without a row is a leftover
UNUSED_DAYS = 7.0
"""Days after which unused texts of requests are collected."""


@dataclass(frozen=True, slots=True)
class StoreCheck:
    """Result of `FileStore.check`.

    Attributes:
        sound: Intact chunks, including `adopted` and `repaired` ones.
        damaged: Chunks moved to quarantine.
        adopted: Intact files that had no row.
        repaired: Chunks whose row did not match their file.
        unreadable: Chunks that could not be read at the moment; they are kept.
    """

    sound: int
    damaged: int
    adopted: int
    repaired: int
    unreadable: int


class FileStore:
    """Chunk KV in a folder. Several processes may share it."""

    def __init__(self, path: str | Path, max_bytes: int | None = None, min_free_bytes: int = 1 << 30) -> None:
        """Open or create the store.

        Args:
            max_bytes: Byte budget; chunks that save least are evicted beyond it. None = no budget. While several
                threads or processes are storing, each can exceed it by the chunks that it is storing at the moment.
                Budgets of namespaces are kept in the store, see `set_budget`.
            min_free_bytes: Writing stops before less than this is free on the disk.

        Raises:
            StoreError: The folder cannot be created or opened, or has another version's format.
        """
        if re.match(r"[a-z][a-z0-9]+:/", str(path)):
            raise SettingError(f"{path} is not a folder: a URL needs kvrag.SharedStore, or store= of the engine")
        if max_bytes is not None and max_bytes <= 0:
            raise SettingError(f"max_bytes must be positive, got {max_bytes}")
        self.path = Path(path).expanduser().resolve()
        self._chunks = self.path / "chunks"
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        check_layout(self.path)
        self._bound = ""
        self._lock = threading.Lock()  # guards the next two attributes
        self._touched: Counter[str] = Counter()
        self._flushing: threading.Timer | None = None
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvrag-write")  # fsync only waits
        with _translated(self.path):
            try:
                for folder in (self.path, self._chunks):  # the content is as confidential as the documents
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents keep the default mode
            except OSError as error:
                if not (self.path / MANIFEST).exists():
                    raise StoreError(
                        f"cannot create the store folder {self.path} ({error.strerror}): choose another one"
                    ) from error
            self._manifest = Manifest(self.path / MANIFEST)
            if not self._manifest.read_only:
                self._sweep()
                if self._manifest.is_new:
                    self._recover()

    @property
    def read_only(self) -> bool:
        """See KVStore.read_only."""
        return self._manifest.read_only

    @property
    def catalog_folder(self) -> Path:
        """See KVStore.catalog_folder."""
        return self.path / "catalog"

    def _file(self, name: str) -> Path:
        # a manifest that is damaged, or somebody's, must not lead to other files
        if os.path.basename(name) != name or not name.endswith(SUFFIX):
            name = f"no name{SUFFIX}"
        return self._chunks.joinpath(name[:2], name)

    @property
    def _fingerprint(self) -> str:
        """Return the fingerprint digest that the store is bound to or claimed for."""
        if not self._bound:
            with contextlib.suppress(StoreError):
                self._bound = self.owner().get("digest", "")
        return self._bound

    def bind(self, fingerprint: Fingerprint) -> None:
        """See KVStore.bind."""
        mine = {"digest": fingerprint.digest, **fingerprint.parts()}
        theirs = self.owner() or (mine if self._manifest.read_only else self._claim(mine))
        check_owner(theirs, mine, f"the store {self.path}", "store folder")
        self._bound = fingerprint.digest

    def owner(self) -> dict[str, str]:
        """Return the fingerprint's parts, {} if unclaimed. Their own file survives a damaged manifest."""
        return read_owner(self.path)

    def contents(self) -> Iterator[tuple[dict[str, int], list[Row], list[Holder]]]:
        """See Manifest.contents."""
        return self._manifest.contents()

    def _claim(self, parts: dict[str, str]) -> dict[str, str]:
        with contextlib.suppress(FileExistsError):  # the first of two processes wins
            self._durably(self.path / OWNER, json.dumps(parts, indent=1).encode(), replace=False)
        return self.owner()

    def _durably(self, path: Path, *parts: bytes | memoryview, replace: bool = True) -> int:
        if self._manifest.read_only:
            raise StoreReadOnlyError(f"{self.path} is not writable: choose another store folder")
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
            raise StoreReadOnlyError(f"{self.path} is not writable: choose another store folder")
        new = {record.key: record for record in records}
        wanted = [new[key] for key in self.missing(list(new))]
        sizes = budget.sizes(wanted)
        self._make_room(sizes)
        writing = [self._writers.submit(self._write, record) for record in wanted]
        wait(writing)  # wait for all of them, so that no writer is still running after an error
        rows = [written.result() for written in writing if not written.exception()]
        try:
            for written in writing:
                written.result()
            known = self._manifest.add(rows)
        except BaseException:
            self._unlink(row.file for row in rows)
            raise
        self._unlink(row.file for row in known)  # another writer was faster
        self.keep_budgets(sizes)  # others have stored chunks since there was room
        return sum(row.num_bytes for row in rows) - sum(row.num_bytes for row in known)

    def _write(self, record: ChunkRecord) -> Row:
        """Write a record to a file with a unique name."""
        name = f"{record.key}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        size = self._durably(self._file(name), *chunkfile.serialise(record, self._fingerprint))
        ids = record.ids.astype("<u4")
        text = text_key(record.namespace, ids.tolist())
        return Row(record.key, text, record.namespace, ids.tobytes(), len(record.context), name, size)

    def _explain(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(
                f"the disk of {self.path} is full: free space, set a smaller max_bytes, or choose another store folder"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnlyError(f"{self.path} is not writable ({error.strerror}): choose another store folder")
        return StoreError(f"cannot write to {self.path}: {error}")

    def _make_room(self, sizes: Mapping[str, int]) -> None:
        """Evict what has to go for this many bytes of each namespace."""
        needed = sum(sizes.values())
        if not needed:
            return
        budgets = self._manifest.budgets()
        budget.check_portion(sizes, budgets)
        if self.max_bytes is not None and needed > self.max_bytes:
            raise StoreFullError(f"{needed} bytes exceed the store's budget of {self.max_bytes} bytes: raise max_bytes")
        rooms: list[tuple[str | None, int, int]] = [
            (namespace, size, budgets[namespace]) for namespace, size in sizes.items() if namespace in budgets
        ]
        if self.max_bytes is not None:
            rooms.append((None, needed, self.max_bytes))
        for namespace, size, most in rooms:
            limit = budget.limit_for(size, self._manifest.num_bytes(namespace), most)
            if limit is not None:
                self._evict(limit, namespace)
        try:
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            raise self._explain(error) from error
        if free - needed < self.min_free_bytes:
            raise StoreFullError(
                f"the disk of {self.path} has {free / 1e9:.1f} GB free; {needed / 1e9:.3f} GB are needed and "
                f"{self.min_free_bytes / 1e9:.1f} GB must stay free: free space, or choose another folder"
            )

    def keep_budgets(self, namespaces: Collection[str] | None = None) -> None:
        """Evict beyond the budgets, of the store and of these namespaces (None = all)."""
        if self.max_bytes is not None:
            self._evict(self.max_bytes)
        for namespace, max_bytes in self._manifest.budgets().items():
            if namespaces is None or namespace in namespaces:
                self._evict(max_bytes, namespace)

    def _evict(self, limit: int, namespace: str | None = None) -> int:
        """Remove the chunks that save least until those of a namespace, None = all, take at most `limit` bytes.

        Returns:
            The number of removed chunks.
        """
        if self._manifest.num_bytes(namespace) <= limit:
            return 0
        self._flush_touched()
        removed = 0
        while names := self._manifest.evict(limit, _EVICT, namespace):
            self._unlink(names)
            removed += len(names)
        return removed

    def set_budget(self, namespace: str, max_bytes: int | None) -> int:
        """Set the byte budget of a namespace, for all processes; None = none.

        Beyond it, the namespace's own chunks are evicted, now and whenever chunks are stored.

        Returns:
            The number of chunks evicted now.

        Raises:
            SettingError: The budget is not positive.
            StoreReadOnlyError: The store is not writable.
        """
        budget.check_budget(max_bytes)
        self._manifest.set_budget(namespace, max_bytes)
        return 0 if max_bytes is None else self._evict(max_bytes, namespace)

    def budgets(self) -> dict[str, int]:
        """Return the byte budget of each namespace that has one."""
        return self._manifest.budgets()

    def open(self, key: str) -> ChunkFile | None:
        """See KVStore.open."""
        seen = None
        while (name := self._manifest.file(key)) is not None:
            try:
                return ChunkFile(self._file(name), key, self._fingerprint)
            except FileNotFoundError:  # removed since, and possibly stored again
                if name == seen:
                    raise DamagedChunkError(key, "its file is missing") from None
                seen = name
        return None

    def remove(self, keys: Sequence[str]) -> None:
        """See KVStore.remove. Rows go first: a file without a row is a leftover, a row without a file is damage."""
        for i in range(0, len(keys), _EVICT):
            self._unlink(self._manifest.remove(keys[i : i + _EVICT]))

    def _unlink(self, names: Iterable[str]) -> None:
        """Delete files without a row in the background. `gc` deletes those that cannot be deleted now."""
        for name in names:
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", self._file(name), error.strerror)

    def quarantine(self, key: str) -> None:
        """See KVStore.quarantine. The file is moved to the folder `quarantine`."""
        logger.warning("chunk %s is damaged: moved to quarantine, it is encoded again when needed", key)
        if not self._manifest.read_only:
            for name in self._manifest.remove([key], counter="damaged"):
                self._put_aside(self._file(name))

    def _put_aside(self, path: Path) -> None:
        aside = self.path / "quarantine"
        try:
            aside.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, aside / path.name)
        except FileNotFoundError:
            pass  # already gone, or another process was faster
        except OSError as error:
            raise self._explain(error) from error

    # ---------------------------------------------------------------- texts and their holders

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

    def count_tokens(self, prefix: str = "", namespace: str = "") -> dict[str, int]:
        """See KVStore.count_tokens."""
        return self._manifest.count_tokens(prefix, namespace)

    # ---------------------------------------------------------------- times of use

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Times are written at most once a second."""
        with self._lock:
            self._touched.update(keys)
            if self._touched and self._flushing is None and not self._manifest.read_only:
                self._flushing = threading.Timer(_TOUCH_EVERY, self._flush_touched)
                self._flushing.daemon = True
                self._flushing.start()

    def _flush_touched(self) -> None:
        with self._lock:
            touched, self._touched = self._touched, Counter()
            self._flushing = None
        if touched and not self._manifest.read_only:
            try:
                self._manifest.touch(dict(sorted(touched.items())))
            except StoreError as error:  # a full disk must not fail a request
                logger.warning("cannot write times of use: %s", error)

    # ---------------------------------------------------------------- small texts

    def read_text(self, name: str) -> str | None:
        """See KeepsTexts.read_text. A text is a file with that name in the store folder."""
        try:
            return (self.path / name).read_text("utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {self.path / name}: {error}") from error

    def write_text(self, name: str, text: str) -> None:
        """See KeepsTexts.write_text."""
        self._durably(self.path / name, text.encode())

    def change_text(self, name: str, change: Callable[[str | None], str]) -> None:
        """See KeepsTexts.change_text."""
        with self._manifest.transaction():  # one process at a time
            try:
                before = self.read_text(name)
            except StoreError:
                before = None
            self.write_text(name, change(before))

    # ---------------------------------------------------------------- maintenance

    def stats(self) -> StoreStats:
        """See KVStore.stats."""
        parts, namespaces = self.owner(), tuple(self._manifest.namespaces())
        return StoreStats(
            path=str(self.path),
            fingerprint=parts.get("digest", ""),
            model=json.loads(parts.get("model", '""')),
            codec=codec_of(parts),
            chunks=sum(namespace.chunks for namespace in namespaces),
            tokens=sum(namespace.tokens for namespace in namespaces),
            bytes=sum(namespace.bytes for namespace in namespaces),
            documents=sum(namespace.documents for namespace in namespaces),
            max_bytes=self.max_bytes,
            damaged=self._manifest.counter("damaged"),
            namespaces=namespaces,
        )

    def check(self, progress: Callable[[int, int], None] = lambda done, total: None) -> StoreCheck:
        """Read all chunks and compare them with the manifest.

        Damaged chunks are moved to quarantine, intact files without a row get one, rows that do not match their file
        are repaired, and a damaged manifest is rebuilt.
        """
        with _translated(self.path):
            if not self._manifest.read_only and not self._manifest.is_sound():
                self._manifest.rebuild()
                return self._recover(progress)
            return self._check(progress)

    def _recover(self, progress: Callable[[int, int], None] = lambda done, total: None) -> StoreCheck:
        """Rebuild an empty manifest from the chunk files.

        The files do not record which documents held them. Chunks encoded alone get an anonymous holder and are served
        as before, also in place of their other variants. Chunks encoded with context get no holder, so they are not
        served until their documents are warmed again, which encodes nothing.
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
        """Check one chunk file, repair what is possible, and return the StoreCheck counters that it adds to."""
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
                logger.warning("%s is damaged and has no row: moved to quarantine", path)
                self._put_aside(path)
            return ["damaged"]
        ids, text = chunk.ids.astype("<u4").tobytes(), text_key(chunk.namespace, chunk.ids.tolist())
        found = Row(key, text, chunk.namespace, ids, chunk.context_tokens, name, path.stat().st_size)
        if row == found or self._manifest.read_only:
            return ["sound"]
        self._manifest.correct(found)
        if hold and not chunk.context_tokens:
            self._manifest.hold("", [Holding(text, key, "")], chunk.namespace, replace=False)
        if not path.exists():  # removed in the meantime, without deleting a row because there was none
            self._manifest.remove([key], file=name)
        return ["sound", "repaired" if row else "adopted"]

    def gc(self, unused_days: float = UNUSED_DAYS) -> tuple[int, int]:
        """Delete unneeded chunks and files; return (chunks, files) deleted. Evicts beyond the budget.

        Unneeded are chunks that no document relies on, including chunks of requests unused for `unused_days`, files
        without a row, and quarantined files. Token ids of deleted texts are deleted from the manifest's log and from
        the catalog, which is built anew.
        """
        with _translated(self.path):
            self._flush_touched()
            self._manifest.release(self._manifest.unused_requests(time.time() - unused_days * 86400))
            unheld = self._manifest.unheld()
            self.remove(unheld)
            self.keep_budgets()  # a writer that was killed has not
            leftovers = self.delete_leftovers()
            if self._manifest.purge():
                for path in self.catalog_folder.glob("*"):
                    path.unlink(missing_ok=True)
            return len(unheld), leftovers

    def delete_leftovers(self) -> int:
        """Delete files without a row and quarantined files, unless they are recent; return their number."""
        paths = [path for path in self._chunks.glob("*/*") if _is_stale(path)]
        known = self._manifest.files()  # read after listing the folder: files written since are not stale
        leftovers = [path for path in paths if path.name not in known]
        leftovers += [path for path in (self.path / "quarantine").glob("*") if _is_stale(path)]
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    def keys(self) -> list[str]:
        """Return the keys of all chunks."""
        return [name.partition("-")[0] for name in self._manifest.files()]

    def _sweep(self) -> None:
        """Delete temporary files of killed writers."""
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
    """Return the parts of the fingerprint that a store folder is claimed for, {} if unclaimed; see `Fingerprint.parts`.

    Raises:
        StoreError: The file cannot be read.
    """
    try:
        return parse_owner((folder / OWNER).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StoreError(f"cannot read {folder / OWNER} ({error.strerror})") from error
    except ValueError as error:
        raise StoreError(f"{folder / OWNER} is damaged ({error}): delete the store folder and warm again") from error


def parse_owner(content: bytes) -> dict[str, str]:
    """Return the parts of the fingerprint in the content of such a file; raises ValueError."""
    try:
        parts = json.loads(content)
        read = {name: json.loads(part) for name, part in parts.items() if name != "digest"}
        if read.get("format", FORMAT) == FORMAT:
            Fingerprint.of(parts)
        is_sound = "model" in read and re.fullmatch(r"[0-9a-f]{32}", parts["digest"])  # it becomes a folder's name
    except (KeyError, TypeError, AttributeError, RecursionError):
        is_sound = False
    if not is_sound:
        raise ValueError("it contains no fingerprint")
    return dict(parts)


def check_owner(theirs: dict[str, str], mine: dict[str, str], name: str, kind: str) -> None:
    """Raise FingerprintMismatchError unless a store is claimed for this model and codec.

    Args:
        theirs, mine: Parts of the store's fingerprint and of the model's, both with `digest`.
        name, kind: What to call the store, and stores of its kind.
    """
    if theirs["digest"] == mine["digest"]:
        return
    different = [name for name in mine if name not in ("digest", "model") and mine[name] != theirs.get(name)]
    held, loaded = json.loads(theirs["model"]), json.loads(mine["model"])
    way_out = f"load the model with the same settings, use another {kind}, or delete this one"
    if different == ["codec"]:
        way_out = f"use codec {codec_of(theirs)} instead of {codec_of(mine)}, or {way_out}"
    raise FingerprintMismatchError(
        f"{name} holds KV of {held}, not of {loaded} as it is loaded now (different: {', '.join(different)}): {way_out}"
    )


def check_layout(folder: Path) -> None:
    """Raise StoreError if another version wrote the folder.

    Raises:
        StoreError: The message says how to encode it again.
    """
    try:
        written = json.loads(read_owner(folder).get("format", str(FORMAT)))
    except (StoreError, ValueError):  # a damaged file is reported by `bind`
        return
    if written != FORMAT:
        raise old_format(folder, written)


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Raise StoreError for an error of the operating system."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot use the store {folder}: {error}") from error


def codec_of(parts: dict[str, str]) -> str:
    """Return the name of the codec in the settings."""
    return str(json.loads(parts.get("codec", '"none"'))).replace("none", "native")


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE
    except FileNotFoundError:
        return False  # its writer has just finished and renamed it

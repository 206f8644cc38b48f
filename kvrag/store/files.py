"""The embedded store: a folder with one safetensors file per chunk and a SQLite manifest.

Chunks are content-addressed: a chunk's KV is a function of its key. Writers need no lock, and a lost file is a miss
that is encoded again. Every write creates a file with a new name, which the chunk's row records. A process that deletes
a row may therefore delete the file at any later time, even if the key has been stored again. Order of writing: file
under a temporary name, fsync, rename, row. A process killed in between leaves a file without a row; `gc` deletes it.
Locks tell whether its writer lives: each on its temporary file, and all together on one file until the row is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrag.config import check_budget, check_number, check_type
from kvrag.errors import DamagedChunkError, SettingError, StoreError, StoreFullError, StoreReadOnlyError
from kvrag.fingerprint import Fingerprint
from kvrag.store.base import MANIFEST, KVStore, Progress, StoreCheck, no_progress
from kvrag.store.chunkfile import SUFFIX, ChunkFile, PackedChunk, key_of
from kvrag.store.durable import BOOT, TEMPORARY, delete_left, is_stale, try_lock, write_file
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.owner import OWNER, owner_file, read_owner
from kvrag.store.schema import INCOMPLETE, translated
from kvrag.store.values import ChunkRecord, Holding

logger = logging.getLogger("kvrag")

_TOUCH_EVERY = 1.0  # seconds
_WRITERS = "chunks.lock"  # locked by those who write chunks


class FileStore(KVStore):
    """Chunk KV in a folder. Several processes may share it."""

    def __init__(self, path: str | Path, max_bytes: int | None = None, min_free_bytes: int = 1 << 30) -> None:
        """Open or create the store.

        Args:
            max_bytes: Byte budget; beyond it, the chunks that save least are evicted. None = no budget. Threads and
                processes that store at the same time can each exceed it by the chunks that they are storing.
                See `set_budget` for budgets of namespaces.
            min_free_bytes: Writing fails if less than this would stay free on the disk.
        """
        check_type("path", path, str | Path, "a folder")
        if re.match(r"[a-z][a-z0-9]+:/", str(path)):
            raise SettingError(f"{path} is not a folder: a URL needs kvrag.SharedStore, or store= of the engine")
        max_bytes = None if max_bytes is None else check_budget("max_bytes", max_bytes)
        check_number("min_free_bytes", min_free_bytes)
        super().__init__()
        self.path = Path(path).expanduser().resolve()
        self.name, self._chunks = str(self.path), self.path / "chunks"
        self.max_bytes, self.min_free_bytes = max_bytes, min_free_bytes
        self._owner = read_owner(self.path)
        self._flushing: threading.Timer | None = None  # under _lock
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvrag-write")  # fsync only waits
        with translated(self.path):
            try:
                for folder in (self.path, self._chunks):  # the content is as confidential as the documents
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents keep the default mode
            except OSError as error:
                if not (self.path / MANIFEST).exists():  # otherwise it can be read
                    raise StoreError(
                        f"cannot create the store folder {folder} ({error.strerror}): choose another one"
                    ) from error
            self._manifest = self._changes = Manifest(self.path / MANIFEST)
            if self._manifest.is_incomplete and not self.read_only:
                self._check(no_progress)
            self._delete_temporary()

    @property
    def read_only(self) -> bool:  # type: ignore[override]
        """True if all writes fail."""
        return self._manifest.read_only

    def _file(self, name: str) -> Path:
        # a damaged or forged manifest must not lead to files outside the folder
        if os.path.basename(name) != name or not name.endswith(SUFFIX):
            name = f"no name{SUFFIX}"
        return self._chunks.joinpath(name[:2], name)

    def owner(self) -> dict[str, str]:
        """Return the fingerprint's parts, {} if unclaimed. Their own file survives a damaged manifest."""
        self._owner = self._owner or read_owner(self.path)
        return self._owner

    def _claim(self, fingerprint: Fingerprint) -> None:
        with translated(self.path), contextlib.suppress(FileExistsError):  # the first of two processes wins
            write_file(self.path / OWNER, owner_file(fingerprint), replace=False)

    def _durably(self, path: Path, *parts: bytes | memoryview, beside: Path | None = None) -> None:
        if self.read_only:
            raise StoreReadOnlyError(f"{self.path} is not writable: choose another store folder")
        with translated(self.path):
            write_file(path, *parts, beside=beside)

    # ---------------------------------------------------------------- chunks

    @contextlib.contextmanager
    def _writers_lock(self) -> Iterator[int]:
        with open(self.path / _WRITERS, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            yield file.fileno()

    def _put(self, records: Sequence[ChunkRecord]) -> tuple[int, list[ChunkRecord]]:
        if self.read_only:
            return super()._put(records)
        with translated(self.path), self._writers_lock() as lock:
            with contextlib.suppress(OSError):  # a file system without locks: see `delete_leftovers`
                fcntl.flock(lock, fcntl.LOCK_SH)
            return super()._put(records)

    def _add(self, rows: Sequence[ManifestRow]) -> list[ManifestRow]:
        try:
            return self._manifest.add(rows)  # one transaction
        except BaseException:
            self._delete(row.file for row in rows)
            raise

    def _write_chunk(self, name: str, header: bytes, body: memoryview) -> None:
        self._durably(self._file(name), header, body, beside=self._chunks)  # where few files are beside it

    def _make_room(self, sizes: Mapping[str | None, int]) -> None:
        super()._make_room(sizes)
        self.check_room(sizes[None])

    def check_room(self, needed: float) -> None:
        with translated(self.path):
            free = shutil.disk_usage(self.path).free
        if needed and free - needed < self.min_free_bytes:
            raise StoreFullError(
                f"the disk of {self.path} has {free / 2**30:.1f} GiB free; {needed / 2**30:.3f} GiB are needed and "
                f"{self.min_free_bytes / 2**30:.1f} GiB must stay free: free space, or choose another folder"
            )

    def _limits(self) -> dict[str | None, int]:
        return super()._limits() | ({} if self.max_bytes is None else {None: self.max_bytes})

    def open(self, key: str) -> PackedChunk | None:
        name = self._manifest.file(key)
        while name is not None:
            try:
                return self._open_file(name, key)
            except DamagedChunkError as error:
                seen, name = name, self._manifest.file(key)
                if name == seen or not isinstance(error.__cause__, FileNotFoundError):
                    raise  # otherwise removed meanwhile, and possibly stored again
        return None

    def _open_file(self, name: str, key: str) -> PackedChunk:
        try:
            return ChunkFile(self._file(name), key, self._fingerprint)
        except FileNotFoundError as error:
            raise DamagedChunkError(key, "its file is missing") from error

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", self._file(name), error.strerror)

    def _put_aside(self, name: str) -> None:
        path, aside = self._file(name), self.path / "quarantine"
        with translated(self.path), contextlib.suppress(FileNotFoundError):  # moved by another process
            aside.mkdir(exist_ok=True, mode=0o700)
            os.replace(path, aside / path.name)

    # ---------------------------------------------------------------- uses

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Times are written at most once a second."""
        if self.read_only:
            return
        super().touch(keys)
        with self._lock:
            if self._touched and self._flushing is None:
                self._flushing = threading.Timer(_TOUCH_EVERY, self._record_uses)
                self._flushing.daemon = True
                self._flushing.start()

    def _record_uses(self) -> None:
        with self._lock:
            self._flushing = None
        super()._record_uses()

    # ---------------------------------------------------------------- small texts

    def read_text(self, name: str) -> str | None:
        """See KVStore.read_text. A text is a file with that name in the store folder."""
        try:
            return (self.path / name).read_text("utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"cannot read {self.path / name}: {error}") from error

    def change_text(self, name: str, change: Callable[[str | None], str]) -> None:
        with self._manifest.transaction():  # one process at a time
            try:
                before = self.read_text(name)
            except StoreError:
                before = None
            self._durably(self.path / name, change(before).encode())

    # ---------------------------------------------------------------- maintenance

    def check(self, progress: Progress = no_progress) -> StoreCheck:
        """See KVStore.check. Intact files without a row get one, and a damaged manifest is rebuilt."""
        with translated(self.path):
            if not self.read_only and not self._manifest.is_sound():
                self._manifest.rebuild()
            return self._check(progress)

    def _check(self, progress: Progress) -> StoreCheck:
        # of two files of a key, one is a leftover, for `gc`
        names = {key_of(path.name): path.name for path in self._chunks.glob(f"*/*{SUFFIX}")}
        found = self._check_chunks(names, progress)
        if not self.read_only:
            self._manifest.recount()
            if self._manifest.is_incomplete and not found.unreadable:
                self._manifest.set_counters({INCOMPLETE: 0})
        return found

    def _correct(self, row: ManifestRow) -> None:
        """See KVStore. In an incomplete manifest, a chunk without a row gets one, and a holder if it can be served.

        The files do not record which documents held them. Chunks encoded alone get an anonymous holder and are served
        as before, also in place of their other variants. Chunks encoded with context get no holder, so they are not
        served until their documents are warmed again, which does not encode them again.
        """
        with self._manifest.transaction():
            is_lost = self._manifest.is_incomplete and self._manifest.file(row.key) is None
            self._manifest.correct(row)
            if is_lost and not row.context_tokens:
                self._manifest.hold("", row.namespace, [Holding(row.text_key, row.key, "")], replace=False)
        if not self._file(row.file).exists():  # removed in the meantime, without deleting a row because there was none
            self._remove([row.key], file=row.file)

    def clean(self) -> int:
        with translated(self.path):
            aside = [] if self.read_only or self._manifest.is_incomplete else list(self.path.glob("quarantine/*"))
            held = self._manifest.held([key_of(path.name) for path in aside]) if aside else ()
            return self._delete_temporary() + _unlink(path for path in aside if key_of(path.name) not in held)

    def _delete_temporary(self) -> int:
        """Delete the temporary files of killed writers."""
        patterns = () if self.read_only else (TEMPORARY, f"*/{TEMPORARY}", f"namespaces/**/{TEMPORARY}")
        return delete_left(path for pattern in patterns for path in self.path.glob(pattern))

    def delete_leftovers(self) -> int:
        if self._manifest.is_incomplete:
            return self._delete_temporary()  # the others may be chunks
        with self._writers_lock() as lock:
            is_alone = try_lock(lock) is True  # so none on this machine is about to add the row of its file
            paths = list(self.path.glob("chunks/*/*"))
            known = self._manifest.files()  # read after listing the folder: it has the rows of all that are stale
            unknown = (path for path in paths if path.name not in known)
            left = _unlink(path for path in unknown if (is_alone and f"-{BOOT}" in path.name) or is_stale(path))
        return left + self._delete_temporary() + _unlink(filter(is_stale, self.path.glob("quarantine/*")))

    def keys(self) -> list[str]:
        """Return the keys of all chunks."""
        return list(map(key_of, self._manifest.files()))

    def close(self) -> None:
        with self._lock:
            if self._flushing:
                self._flushing.cancel()
        self._record_uses()
        self._writers.shutdown()
        self._manifest.close()


def _unlink(paths: Iterable[Path]) -> int:
    """Delete files; return their number."""
    unneeded = list(paths)
    for path in unneeded:
        path.unlink(missing_ok=True)
    return len(unneeded)

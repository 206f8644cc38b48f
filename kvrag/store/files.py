"""The embedded store: a folder with one safetensors file per chunk and a SQLite manifest.

Chunks are content-addressed: a chunk's KV is a function of its key. Writers need no lock, and a lost file is a miss
that is encoded again. Every write creates a file with a new name, which the chunk's row records. A process that deletes
a row may therefore delete the file at any later time, even if the key has been stored again. Order of writing: file
under a temporary name, fsync, rename, row. A process killed in between leaves a file without a row; `gc` deletes it,
unless a process that stores chunks holds the lock of writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kvrag.config import check_budget, check_number, check_type
from kvrag.errors import DamagedChunkError, SettingError, StoreFullError
from kvrag.fingerprint import OWNER, Fingerprint, owner_file, parse_owner
from kvrag.store.base import MANIFEST, KVStore
from kvrag.store.chunkfile import SUFFIX, ChunkFile, PackedChunk
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.schema import translated
from kvrag.store.values import ChunkRecord

logger = logging.getLogger("kvrag")

_TEMPORARY = ".*.tmp"  # pattern of the files that a killed writer leaves behind
_TOUCH_EVERY = 1.0  # seconds
_WRITERS = "chunks.lock"  # locked by those who write files


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
        self._owner: dict[str, str] = {}
        self.owner()  # before anything is created in a store that it cannot read
        self._flushing: threading.Timer | None = None  # under _lock
        with translated(self.path):
            for folder in (self.path, self._chunks):  # the content is as confidential as the documents
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents keep the default mode
        self._manifest = self._changes = Manifest(self.path / MANIFEST)
        self.clean()

    def _file(self, name: str) -> Path:
        # a damaged or forged manifest must not lead to files outside the folder
        if os.path.basename(name) != name or not name.endswith(SUFFIX):
            name = f"no name{SUFFIX}"
        return self._chunks.joinpath(name[:2], name)

    def owner(self) -> dict[str, str]:
        """Return the fingerprint's parts, {} if unclaimed. Their own file survives a damaged manifest."""
        if not self._owner:
            with translated(self.path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._owner = parse_owner((self.path / OWNER).read_bytes(), self.name)
        return self._owner

    def _claim(self, fingerprint: Fingerprint) -> None:
        with self._locked(), contextlib.suppress(FileExistsError):  # the first of two processes wins
            write_file(self.path / OWNER, owner_file(fingerprint), replace=False)

    # ---------------------------------------------------------------- chunks

    @contextlib.contextmanager
    def _locked(self, how: int = fcntl.LOCK_SH) -> Iterator[bool]:
        """Hold the lock of those who write files; yield whether it is held."""
        opener = partial(os.open, mode=0o600)
        with translated(self.path), open(self.path / _WRITERS, "ab", opener=opener) as file:
            try:
                fcntl.flock(file, how)
                is_held = True
            except BlockingIOError:
                is_held = False
            yield is_held

    def put(self, records: Sequence[ChunkRecord]) -> int:
        with self._locked():
            return super().put(records)

    def _add(self, rows: Sequence[ManifestRow]) -> list[ManifestRow]:
        try:
            return self._manifest.add(rows)  # one transaction
        except BaseException:
            self._delete(row.file for row in rows)
            raise

    def _write_chunk(self, name: str, header: bytes, body: memoryview) -> None:
        with translated(self.path):
            write_file(self._file(name), header, body, beside=self._chunks)  # where few files are beside it

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
            except DamagedChunkError:
                seen, name = name, self._manifest.file(key)
                if name == seen:  # otherwise removed meanwhile, and possibly stored again
                    raise
        return None

    def _open_file(self, name: str, key: str) -> PackedChunk:
        return ChunkFile(self._file(name), key, self._fingerprint)

    def _delete(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._file(name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cannot delete %s: %s", self._file(name), error.strerror)

    # ---------------------------------------------------------------- uses

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Times are written at most once a second."""
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

    # ---------------------------------------------------------------- maintenance

    def clean(self) -> int:
        """See KVStore.clean: deletes temporary files."""
        return self._delete_unknown(_TEMPORARY, f"*/{_TEMPORARY}")

    def delete_leftovers(self) -> int:
        deleted = self._delete_unknown("chunks/*/*") + self.clean()
        self._manifest.purge()
        return deleted

    def _delete_unknown(self, *patterns: str) -> int:
        """Delete files without a row, unless a process is writing; return their number."""
        with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB) as is_alone:
            paths = [path for pattern in patterns for path in self.path.glob(pattern)]
            files = self._manifest.files() if paths else {}  # after listing the folder: it has the rows of all of them
            known = {*files.values()}
            left = [path for path in paths if is_alone and path.name not in known]
            for path in left:
                path.unlink(missing_ok=True)
            return len(left)

    def keys(self) -> list[str]:
        """Return the keys of all chunks."""
        return list(self._manifest.files())

    def close(self) -> None:
        with self._lock:
            if self._flushing:
                self._flushing.cancel()
        self._record_uses()
        self._writers.shutdown()
        self._manifest.close()


def write_file(path: Path, *parts: bytes | memoryview, replace: bool = True, beside: Path | None = None) -> None:
    """Write a file durably: it is either absent or complete. After an OSError, there is none.

    The parts are written under a temporary name, flushed to disk and renamed.

    Args:
        replace: False = the first writer of a name wins, others get FileExistsError.
        beside: Folder of the temporary file, on the same disk; None = that of `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    tmp = (beside or path.parent) / f".{uuid.uuid4().hex}.tmp"
    try:
        with open(tmp, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(tmp, path)
        else:
            os.link(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)

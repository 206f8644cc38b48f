"""The embedded store: a folder with one safetensors file per chunk and a SQLite manifest.

Chunks are content-addressed: a chunk's KV is a function of its key. Writers need no lock, and a lost file is a miss
that is encoded again. Every write creates a file with a new name, which the chunk's row records. A process that deletes
a row may therefore delete the file at any later time, even if the key has been stored again. Order of writing: file
under a temporary name, fsync, rename, row. A process killed in between leaves a file without a row; `gc` deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvrag.errors import (
    ChunkUnreadableError,
    DamagedChunkError,
    SettingError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
)
from kvrag.fingerprint import Fingerprint
from kvrag.store.base import MANIFEST, ManifestStore, Progress, StoreCheck, no_progress, row_of
from kvrag.store.chunkfile import SUFFIX, ChunkFile, key_of
from kvrag.store.durable import TEMPORARY, write_file
from kvrag.store.manifest import Manifest, ManifestRow
from kvrag.store.owner import OWNER, check_layout, check_owner, owner_file, read_owner
from kvrag.store.protocol import Holding
from kvrag.store.schema import translated

logger = logging.getLogger("kvrag")

_TOUCH_EVERY = 1.0  # seconds
_STALE = 3600.0  # seconds after which a file without a row is a leftover


class FileStore(ManifestStore):
    """Chunk KV in a folder. Several processes may share it."""

    def __init__(self, path: str | Path, max_bytes: int | None = None, min_free_bytes: int = 1 << 30) -> None:
        """Open or create the store.

        Args:
            max_bytes: Byte budget; beyond it, the chunks that save least are evicted. None = no budget. Threads and
                processes that store at the same time can each exceed it by the chunks that they are storing.
                See `set_budget` for budgets of namespaces.
            min_free_bytes: Writing fails if less than this would stay free on the disk.

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
        with translated(self.path):
            try:
                for folder in (self.path, self._chunks):  # the content is as confidential as the documents
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # parents keep the default mode
            except OSError as error:
                if not (self.path / MANIFEST).exists():
                    raise StoreError(
                        f"cannot create the store folder {self.path} ({error.strerror}): choose another one"
                    ) from error
            self._manifest = self._changes = Manifest(self.path / MANIFEST)
            if not self._manifest.read_only:
                self._sweep()
                if self._manifest.is_new:
                    self._recover()

    @property
    def read_only(self) -> bool:  # type: ignore[override]
        """See KVStore.read_only."""
        return self._manifest.read_only

    def _file(self, name: str) -> Path:
        # a damaged or forged manifest must not lead to files outside the folder
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

    def _claim(self, parts: dict[str, str]) -> dict[str, str]:
        with contextlib.suppress(FileExistsError):  # the first of two processes wins
            self._durably(self.path / OWNER, owner_file(parts), replace=False)
        return self.owner()

    def _durably(self, path: Path, *parts: bytes | memoryview, replace: bool = True) -> None:
        if self._manifest.read_only:
            raise StoreReadOnlyError(f"{self.path} is not writable: choose another store folder")
        try:
            write_file(path, *parts, replace=replace)
        except OSError as error:
            if isinstance(error, FileExistsError) and not replace:
                raise
            raise self._explain(error) from error

    # ---------------------------------------------------------------- chunks

    def _add(self, rows: Sequence[ManifestRow]) -> list[ManifestRow]:
        try:
            return super()._add(rows)
        except BaseException:
            self._delete(row.file for row in rows)
            raise

    def _write_chunk(self, name: str, header: bytes, body: memoryview) -> None:
        self._durably(self._file(name), header, body)

    def _explain(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return StoreFullError(
                f"the disk of {self.path} is full: free space, set a smaller max_bytes, or choose another store folder"
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnlyError(f"{self.path} is not writable ({error.strerror}): choose another store folder")
        return StoreError(f"cannot write to {self.path}: {error}")

    def _make_room(self, sizes: Mapping[str, int]) -> None:
        needed = sum(sizes.values())
        if not needed:
            return
        if self.max_bytes is not None and needed > self.max_bytes:
            raise StoreFullError(f"{needed} bytes exceed the store's budget of {self.max_bytes} bytes: raise max_bytes")
        super()._make_room(sizes)
        if self.max_bytes is not None:
            self._evict_for(needed, self.max_bytes)
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
        """Evict the chunks that exceed the budgets of the store and of these namespaces; None = all."""
        if self.max_bytes is not None:
            self._evict(self.max_bytes)
        super().keep_budgets(namespaces)

    def open(self, key: str) -> ChunkFile | None:
        """See KVStore.open."""
        seen = None
        while (name := self._manifest.file(key)) is not None:
            try:
                return ChunkFile(self._file(name), key, self._fingerprint)
            except FileNotFoundError:  # removed meanwhile, and possibly stored again
                if name == seen:
                    raise DamagedChunkError(key, "its file is missing") from None
                seen = name
        return None

    def _delete(self, names: Iterable[str]) -> None:
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
            pass  # already deleted or moved by another process
        except OSError as error:
            raise self._explain(error) from error

    # ---------------------------------------------------------------- uses

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Times are written at most once a second."""
        with self._lock:
            self._touched.update(keys)
            if self._touched and self._flushing is None and not self._manifest.read_only:
                self._flushing = threading.Timer(_TOUCH_EVERY, self._record_uses)
                self._flushing.daemon = True
                self._flushing.start()

    def _record_uses(self) -> None:
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

    def check(self, progress: Progress = no_progress) -> StoreCheck:
        """Read all chunks and compare them with the manifest.

        Damaged chunks are moved to quarantine, intact files without a row get one, rows that do not match their file
        are repaired, and a damaged manifest is rebuilt.
        """
        with translated(self.path):
            if not self._manifest.read_only and not self._manifest.is_sound():
                self._manifest.rebuild()
                return self._recover(progress)
            return self._check(progress)

    def _recover(self, progress: Progress = no_progress) -> StoreCheck:
        """Rebuild an empty manifest from the chunk files.

        The files do not record which documents held them. Chunks encoded alone get an anonymous holder and are served
        as before, also in place of their other variants. Chunks encoded with context get no holder, so they are not
        served until their documents are warmed again, which does not encode them again.
        """
        return self._check(progress, hold=True)

    def _check(self, progress: Progress, hold: bool = False) -> StoreCheck:
        rows = self._manifest.rows()
        names = {key: row.file for key, row in rows.items()}
        for path in sorted(self._chunks.glob(f"*/*{SUFFIX}")):  # a second file of a key is a leftover, for `gc`
            names.setdefault(key_of(path.name), path.name)
        checked = (self._check_chunk(name, key, rows.get(key), hold) for key, name in names.items())
        result = self._tally(len(names), checked, progress)
        if not self._manifest.read_only:
            self._manifest.recount()
        return result

    def _check_chunk(self, name: str, key: str, row: ManifestRow | None, hold: bool) -> list[str]:
        """Check one chunk file, repair what is possible, and return the StoreCheck counters that it adds to."""
        path = self._file(name)
        try:
            with contextlib.closing(ChunkFile(path, key, self._fingerprint)) as chunk:
                actual = row_of(chunk, name, path.stat().st_size)
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
        if row == actual or self._manifest.read_only:
            return ["sound"]
        self._manifest.correct(actual)
        if hold and not chunk.context_tokens:
            self._manifest.hold("", [Holding(actual.text_key, key, "")], chunk.namespace, replace=False)
        if not path.exists():  # removed in the meantime, without deleting a row because there was none
            self._manifest.remove([key], file=name)
        return ["sound", "repaired" if row else "adopted"]

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
        return list(map(key_of, self._manifest.files()))

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
        self._record_uses()
        self._writers.shutdown()
        self._manifest.close()


def _is_stale(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > _STALE
    except FileNotFoundError:
        return False  # its writer has just finished and renamed it

"""The shared store: machines share a prefix of a bucket (the remote), each with a local cache folder.

The local folder has a copy of the manifest, kept up to date by the log (`kvrag.store.log`), and a `FileStore` with the
chunks that this machine has used, within a byte budget. Lookups of a prompt are answered from the copy; a thread
follows the log. Chunks are written to the remote before `put` returns. Chunks that a prompt has
read from the remote are copied into the local folder afterwards.

KV that was encoded with preceding context is only served while the copy is known to be current. While the remote cannot
be reached, texts are served by their variants encoded alone, or computed with the prompt.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

from cachetools import TTLCache

from kvrag.config import check_budget, check_type, without_password
from kvrag.errors import ChunkUnreadableError, DamagedChunkError, SettingError, StoreError, StoreFullError, needing
from kvrag.fingerprint import OWNER, Fingerprint, check_owner, owner_file, parse_owner
from kvrag.process import Background
from kvrag.store.base import MANIFEST, KVStore, Progress, StoreCheck, no_progress
from kvrag.store.chunkfile import PackedChunk
from kvrag.store.files import FileStore, write_file
from kvrag.store.log import Log
from kvrag.store.manifest import Manifest
from kvrag.store.remote import TIMEOUT_S, Download, RemoteChunk
from kvrag.store.schema import translated
from kvrag.store.values import ON_REQUEST, ChunkRecord, StoreStats, TextState

if TYPE_CHECKING:
    from kvrag.store.objects import ObjectStore

logger = logging.getLogger("kvrag")

_OPTIONS = {"s3": ["endpoint", "region"], "gs": [], "az": ["account", "endpoint"]}  # of URLs, by scheme
_POLL_S = 0.5  # between looks at the log ...
_RETRY_S = 2.0  # ... and after a failure
_TRUST_S = 10.0  # age of the copy up to which chunks encoded with preceding context are served
_PROMOTIONS = 8  # chunks at a time that wait to be copied into the local folder
_USED_EVERY_S = 3600.0  # between reports of the chunks that were used
_STALE_S = 3600.0  # age of an object that nothing names, from which on it is a leftover
_ROUNDS = 100  # of changing a text before other machines do
_COMPACT_EVERY, _KEPT = 500, 100  # changes in the log, and those that stay when it is compacted
_CLOSE_S = 1.0  # for the end of requests to a store that does not answer
CACHE_BYTES = 64 << 30
"""Default byte budget of the local copies of chunks."""


class SharedStore(KVStore):
    """Chunk KV in a bucket, shared by machines, with a local folder in front. Thread-safe.

    Attributes:
        url: URL of the remote, without a password.
        path: The local folder of this machine for this remote.
    """

    def __init__(
        self,
        url: str,
        cache: str | Path | None = None,
        cache_bytes: int = CACHE_BYTES,
        min_free_bytes: int = 1 << 30,
    ) -> None:
        """Connect to the remote.

        Args:
            url: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or az://CONTAINER/PREFIX.
            cache: Folder of local copies, a subfolder for each remote; None = `~/.cache/kvrag/shared`.
            cache_bytes: Byte budget of the local copies of chunks; those that save least are evicted first.
            min_free_bytes: No copies are made if less than this would stay free on the local disk.
        """
        cache_bytes = check_budget("cache_bytes", cache_bytes)
        check_type("cache", cache, str | Path | None, "a folder")
        super().__init__()
        self._remote = connect(url)
        self.name = self.url = self._remote.url
        folder = blake2b(f"{without_password(url)}?{url.partition('?')[2]}".encode(), digest_size=8).hexdigest()
        self._cache = Path(cache or "~/.cache/kvrag/shared").expanduser().resolve() / folder
        self._settings = {"max_bytes": cache_bytes, "min_free_bytes": min_free_bytes}
        self._is_open = self._is_closed = False
        self._owner = self._read_owner()
        if self._owner:
            self._open_local()

    # ---------------------------------------------------------------- opening

    def _read_owner(self) -> dict[str, str]:
        (content,) = self._remote.read([OWNER])
        return {} if content is None else parse_owner(content, self.url)

    def owner(self) -> dict[str, str]:
        """Return the parts of the fingerprint that the remote is claimed for, {} if unclaimed."""
        return self._owner

    def bind(self, fingerprint: Fingerprint) -> None:
        super().bind(fingerprint)
        if not self._is_open:
            self._open_local()

    def _claim(self, fingerprint: Fingerprint) -> None:
        if not self._remote.is_conditional():
            raise StoreError(
                f"{self.url} ignores conditional writes (If-Match, If-None-Match), which keep machines from "
                "overwriting each other: use a newer version of the object store, or another one"
            )
        self._remote.swap(OWNER, owner_file(fingerprint), None)  # the first of two machines wins
        self._owner = self._read_owner()
        if not self._owner:
            raise StoreError(f"{self.url} has lost its {OWNER}: the prefix is being deleted, or not writable")

    def _open_local(self) -> None:
        self.path = self._cache.with_name(f"{self._cache.name}-{self._fingerprint}")
        local = self.path / "local"
        with translated(self.path):
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_file(local / OWNER, owner_file(Fingerprint.of(self._owner)))
        self._manifest = Manifest(self.path / MANIFEST)
        self._local = FileStore(local, **self._settings)
        self._log = self._changes = Log(
            self._remote, self._manifest, self._drop_removed, self._recheck_owner, self._appended
        )
        self._promoter = Background("kvrag-promote", _PROMOTIONS)
        self._opening: TTLCache[str, Download] = TTLCache(1 << 20, 2 * TIMEOUT_S)  # under _lock
        self._recorded = time.monotonic()
        self._is_open = True
        self._confirmed = float("-inf")  # when the copy was last known to be current
        self._is_failing = False  # the last attempt to reach the remote failed
        self._ending = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="kvrag-follow", daemon=True)
        self._follower.start()
        try:
            self._pull()
            self._drop_unknown(self._local.keys())  # of a process that was killed before it dropped them
        except BaseException:
            self.close()
            raise

    def _drop_unknown(self, keys: Sequence[str]) -> None:
        """Delete the copies of those of these chunks that are not stored."""
        known = self._manifest.known(keys)
        self._local.remove([key for key in keys if key not in known])

    def _drop_removed(self, keys: Sequence[str]) -> None:
        """Drop what this machine has of removed chunks."""
        with self._lock:
            for key in keys:
                self._opening.pop(key, None)  # they would hold their KV until the next chunk is read ahead
        self._local.remove(keys)

    def _check_open(self) -> None:
        super()._check_open()
        if self._is_closed:
            raise StoreError(f"the store {self.url} is closed")
        if not self._is_open:
            raise StoreError(f"{self.url} has no store: create one with `kvrag warm PATH --store {self.url}`")

    def _follow(self) -> None:
        """Keep the copy up to date, in a thread that no prompt waits for."""
        while not self._ending.wait(_RETRY_S if self._is_failing else _POLL_S):
            try:
                self._pull()
            except StoreError as error:
                if not self._ending.is_set():
                    self._fail(error)

    def _pull(self) -> None:
        started = time.monotonic()
        self._log.pull()
        self._confirm(started)
        if started - self._recorded > _USED_EVERY_S:
            self._record_uses()

    def _confirm(self, since: float) -> None:
        """Record that the copy was current at that time."""
        self._confirmed, self._is_failing = max(self._confirmed, since), False

    def _fail(self, error: StoreError) -> None:
        """Record that the remote cannot be reached."""
        if not self._is_failing:
            logger.warning("%s; prompts are answered from this machine's copy", error)
        self._is_failing = True

    def _recheck_owner(self) -> None:
        """Check that the remote still belongs to this model: it may have been deleted and claimed for another one."""
        fingerprint = Fingerprint.of(self._owner)
        if owner := self._read_owner():
            check_owner(owner, fingerprint, self.url)
        else:
            self._remote.swap(OWNER, owner_file(fingerprint), None)

    def _appended(self, number: int, since: float) -> None:
        self._confirm(since)
        if number % _COMPACT_EVERY == 0:
            self._in_background(partial(self._log.compact, _KEPT))

    @property
    def max_bytes(self) -> int | None:
        """Byte budget of the local copies."""
        return self._local.max_bytes

    @max_bytes.setter
    def max_bytes(self, size: int | None) -> None:
        self._local.max_bytes = size

    def sync(self) -> None:
        """Apply all operations that any machine has recorded so far; raises StoreError."""
        self._check_open()
        self._pull()

    # ---------------------------------------------------------------- chunks

    def put(self, records: Sequence[ChunkRecord]) -> int:
        # an error may come after the rows were recorded, so the objects stay: `gc` deletes those without a row
        num_bytes = super().put(records)
        self._copy(records)
        return num_bytes

    def _write_chunk(self, name: str, header: bytes, body: memoryview) -> None:
        self._remote.write(_object(name), header + bytes(body))

    def _copy(self, records: Iterable[ChunkRecord]) -> None:
        """Store chunks in the local folder; on a full disk, keep the copies at their current size."""
        try:
            wanted = list(records)
            self._local.put(wanted)
            self._drop_unknown([record.key for record in wanted])  # removed in the meantime
        except StoreError as error:  # of a damaged chunk, the prompt that reads it reports it
            logger.info("no local copy: %s", error)
            if isinstance(error, StoreFullError) and (used := self._local.stats().bytes):
                self._local.max_bytes = used

    def read_ahead(self, keys: Sequence[str]) -> None:
        self._check_open()
        with self._lock:
            absent = [key for key in keys if key not in self._opening]
        for key in self._local.missing(absent):
            if name := self._manifest.file(key):
                with self._lock:
                    self._opening[key] = Download(self._remote, _object(name))

    def open(self, key: str) -> PackedChunk | None:
        self._check_open()
        if self._manifest.file(key) is None:
            return None
        try:
            if reader := self._local.open(key):
                return reader
        except DamagedChunkError:
            self._local.discard(key)
        except ChunkUnreadableError as error:
            logger.info("%s; it is read from %s", error, self.url)
        seen = None
        while (name := self._manifest.file(key)) is not None:
            if name == seen:  # the bucket lost it
                self._in_background(partial(self._remove, [key], file=name))
                return None
            if self._is_failing:
                raise ChunkUnreadableError(key, f"{self.url} cannot be reached")
            try:
                return self._open_file(name, key)
            except DamagedChunkError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
            try:
                self._log.pull()  # removed meanwhile, and maybe stored again
            except StoreError as error:
                self._fail(error)
                raise ChunkUnreadableError(key, error) from error
            seen = name
        return None

    def _open_file(self, name: str, key: str) -> RemoteChunk:
        with self._lock:
            download = self._opening.pop(key, None)
        if download is None or download.name != _object(name) or download.error:
            download = Download(self._remote, _object(name))
        return RemoteChunk(key, self._fingerprint, download, self._fail, self._promote)

    def _promote(self, chunk: RemoteChunk) -> None:
        """Copy a chunk into the local folder, unless too many are waiting."""
        kept = copy.copy(chunk)  # has its own `bytes_read`
        self._promoter.later(self._copy, (each.record() for each in [kept]))

    def _delete(self, names: Iterable[str]) -> None:
        try:
            if listed := list(map(_object, names)):
                self._remote.delete(listed)
        except StoreError as error:
            logger.warning("chunks without a row are left until `kvrag store gc`: %s", error)

    def discard(self, key: str) -> None:
        """See KVStore.discard. A local copy is deleted first: the next prompt reads the shared chunk."""
        self._check_open()
        if self._local.missing([key]):
            super().discard(key)
        else:
            self._local.discard(key)

    # ---------------------------------------------------------------- texts and their uses

    def look_up(self, text_keys: Sequence[str]) -> dict[str, TextState]:
        """See KVStore.look_up. While the remote cannot be reached, no holders are reported."""
        states = super().look_up(text_keys)
        if time.monotonic() - self._confirmed <= _TRUST_S:
            return states
        return {text_key: replace(state, sources={}) for text_key, state in states.items()}

    def touch(self, keys: Sequence[str]) -> None:
        """See KVStore.touch. Counts for the local copies; reported to all machines once an hour."""
        self._check_open()
        self._local.touch(keys)
        super().touch(keys)

    def _record_uses(self) -> None:
        self._recorded = time.monotonic()
        super()._record_uses()

    def _counted(self, keys: Sequence[str]) -> Collection[str]:
        # without budgets, only texts of requests are removed when they are not used
        return self._manifest.known(keys) if self._manifest.budgets() else self._manifest.held(keys, ON_REQUEST)

    def count(self, numbers: Mapping[str, int]) -> None:
        """See KVStore.count. Raises StoreError at once if the last attempt to reach the remote failed."""
        self._check_open()
        if self._is_failing:
            raise StoreError(f"{self.url} cannot be reached")
        super().count(numbers)

    # ---------------------------------------------------------------- maintenance

    def local_stats(self) -> StoreStats:
        """Return the counts of this machine's copies."""
        self._check_open()
        return self._local.stats()

    def check(self, progress: Progress = no_progress) -> StoreCheck:
        """See KVStore.check; also checks the local copies."""
        self.sync()
        self._local.check()
        return super().check(progress)

    def gc(self, unused_days: float = 7.0) -> tuple[int, int]:
        """See KVStore.gc. Token ids of deleted texts are also erased from the log."""
        self.sync()
        return super().gc(unused_days)

    def clean(self) -> int:
        """See KVStore.clean. Looks at this machine alone."""
        return self._local.clean()

    def delete_leftovers(self) -> int:
        """See KVStore.delete_leftovers. Also compacts the log, and deletes local copies of removed chunks."""
        listed = list(self._remote.listed("chunks/"))
        self._log.pull()  # the rows of all listed chunks
        known = set(map(_object, self._manifest.files().values()))
        leftovers = [name for name, age in listed if name not in known and age > _STALE_S]
        self._remote.delete(leftovers)
        self._log.compact()
        self._remote.delete(self._log.leftovers(_STALE_S))
        self._drop_unknown(self._local.keys())
        self._local.keep_budgets()
        self._local.delete_leftovers()
        self._manifest.purge()
        return len(leftovers)

    def _in_background(self, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            except StoreError as error:
                logger.warning("%s", error)

        with contextlib.suppress(RuntimeError):  # the store has been closed
            self._writers.submit(guarded)

    def close(self) -> None:
        super()._check_open()
        was_open, self._is_closed = self._is_open and not self._is_closed, True
        if was_open:
            ending = threading.Thread(target=self._end, name="kvrag-close", daemon=True)
            ending.start()
            ending.join(_CLOSE_S if self._is_failing else None)  # requests end after their timeouts

    def _unfollow(self) -> None:
        self._ending.set()
        self._follower.join()

    def _end(self) -> None:
        self._unfollow()
        self._record_uses()
        self._writers.shutdown()
        self._promoter.close(finish=True)
        for part in (self._local, self._manifest):
            part.close()


def is_shared(store: str | Path) -> bool:
    """Return whether this is the URL of a bucket, and not a folder; raises SettingError if it is neither."""
    text = str(store)
    if re.match(r"\w[\w+.-]+://", text):
        return True
    if re.match(rf"({'|'.join(_OPTIONS)}):", text):
        raise SettingError(f"{text} is not a URL: write {text.partition(':')[0]}://, and pass it as a string")
    return False


def connect(url: str) -> ObjectStore:
    """Return the bucket that a URL names; sends nothing. Raises KvragError if it is wrong or a package is missing."""
    try:
        parts, public = urlsplit(check_type("url", url, str, "a string")), without_password(url)
    except ValueError as error:
        raise SettingError(f"{url!r:.80} is not a URL: {error}") from None
    scheme, options = parts.scheme.lower(), dict(parse_qsl(parts.query, keep_blank_values=True))
    if scheme not in _OPTIONS:
        schemes = ", ".join(f"{name}://" for name in _OPTIONS)
        raise SettingError(f"{public} has an unknown scheme: use a folder, or one of {schemes}")
    if not parts.hostname:
        raise SettingError(f"{public} names no bucket: use {scheme}://BUCKET/PREFIX")
    if unknown := ", ".join(sorted(options.keys() - set(_OPTIONS[scheme]))):
        known = ", ".join(_OPTIONS[scheme]) or "none"
        raise SettingError(f"{public} has an unknown option {unknown} (known: {known})")
    with needing("kvrag[shared]"):
        from kvrag.store.objects import ObjectStore
    return ObjectStore(public, scheme, parts.netloc, unquote(parts.path).strip("/"), options)


def _object(name: str) -> str:
    """Return the object of a chunk's file."""
    return f"chunks/{name[:2]}/{name}"


def open_store(store: KVStore | str | Path, cache: str | Path | None = None) -> KVStore:
    """Open a store by its name; a store is returned as it is. `cache`: folder of a shared store's local copies."""
    if isinstance(store, (str, Path)) and is_shared(store):
        return SharedStore(str(store), cache)
    if cache is not None:
        raise SettingError("store_cache is the folder of local copies of a shared store: leave it out")
    if isinstance(store, (str, Path)):
        return FileStore(store)
    if not hasattr(store, "look_up"):
        raise SettingError(f"store must be a store, a folder or a URL, got {store!r:.80}")
    return store

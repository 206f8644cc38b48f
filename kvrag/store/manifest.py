"""The manifest: one SQLite file that says which chunks there are, who holds them and when they were last used."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvrag.errors import StoreError, StoreFullError, StoreReadOnlyError
from kvrag.store.protocol import Entry

logger = logging.getLogger("kvrag")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chunks (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL UNIQUE,
    num_tokens INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    uses INTEGER NOT NULL DEFAULT 0,
    ids BLOB NOT NULL,
    anchors BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS chunks_used ON chunks (used);
CREATE TABLE IF NOT EXISTS holders (document TEXT, key TEXT, PRIMARY KEY (document, key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS holders_key ON holders (key);
"""


class Manifest:
    """SQLite in WAL mode: readers never wait, writers of several processes take turns.

    Attributes:
        read_only: The folder cannot be written.
        rebuilt: The file was damaged and has been moved aside; the caller fills the new one from the chunk files.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self.read_only = self.rebuilt = False
        self._path = path
        with _alone(path), _translated(path):
            try:
                self._connection = self._open()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._replace(error)

    def _open(self) -> sqlite3.Connection:
        # SQLite itself complains only when it has something to write
        if self._path.exists() and not all(os.access(path, os.W_OK) for path in (self._path, self._path.parent)):
            self.read_only = True
            return self._open_to_read()
        try:
            connection = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")  # a lost row is a miss, its file is found again
            connection.executescript(_SCHEMA)
        except sqlite3.OperationalError as error:
            if not self._path.exists() or _primary(error) not in _UNWRITABLE:
                raise
            connection = self._open_to_read()
            self.read_only = True
        connection.execute("SELECT count(*), total(num_bytes) FROM chunks").fetchone()
        return connection

    def _open_to_read(self) -> sqlite3.Connection:
        """With what its writer has not yet moved out of the log, if SQLite can read that in a read-only folder."""
        uri = f"{self._path.as_uri()}?mode=ro"
        connection = sqlite3.connect(uri, uri=True, timeout=60, check_same_thread=False)
        try:
            connection.execute("SELECT count(*) FROM chunks").fetchone()
        except sqlite3.OperationalError:
            connection = sqlite3.connect(f"{uri}&immutable=1", uri=True, check_same_thread=False)
        return connection

    def _replace(self, error: object) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}")
        logger.warning("%s is damaged (%s); moved to %s", self._path, error, aside.name)
        self._path.rename(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self.rebuilt = True
        self._connection = self._open()

    def is_sound(self) -> bool:
        """Whether SQLite finds nothing wrong with the file; reads all of it."""
        with self._lock:
            try:
                return bool(self._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])
            except sqlite3.DatabaseError:
                return False

    def rebuild(self) -> None:
        """Move the file aside and begin a new one; the caller fills it from the chunk files."""
        with self._lock, _alone(self._path), _translated(self._path):
            self._connection.close()
            self._replace("found by a check")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        if self.read_only:
            raise StoreReadOnlyError(f"{self._path.parent} cannot be written: choose another store folder")
        with self._lock, _translated(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk ends it by itself
                    self._connection.execute("ROLLBACK")
                raise

    def _all(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, _translated(self._path):
            return self._connection.execute(query, values).fetchall()

    def counter(self, name: str) -> int:
        """A counter of the store."""
        rows = self._all("SELECT value FROM counters WHERE name = ?", name)
        return int(rows[0][0]) if rows else 0

    def known(self, keys: Sequence[str]) -> set[str]:
        """Those of `keys` that have a row."""
        found: set[str] = set()
        for i in range(0, len(keys), 500):  # SQLite's limit on parameters
            part = keys[i : i + 500]
            marks = ",".join("?" * len(part))
            found.update(row[0] for row in self._all(f"SELECT key FROM chunks WHERE key IN ({marks})", *part))
        return found

    def add(self, rows: Iterable[tuple[str, int, int, bytes, bytes]]) -> None:
        """Insert (key, num_tokens, num_bytes, ids, anchors); known keys stay as they are."""
        now = time.time()
        with self._writing() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO chunks (key, num_tokens, num_bytes, created, used, ids, anchors)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(key, tokens, size, now, now, ids, anchors) for key, tokens, size, ids, anchors in rows],
            )

    def remove(self, keys: Sequence[str], counter: str | None = None) -> None:
        """Delete rows; `counter` counts them under another name as well."""
        with self._writing() as connection:
            connection.executemany("DELETE FROM chunks WHERE key = ?", [(key,) for key in keys])
            for name in filter(None, ("removals", counter)):
                connection.execute(
                    "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2",
                    (name, len(keys)),
                )

    @contextlib.contextmanager
    def absent(self, keys: Sequence[str]) -> Iterator[list[str]]:
        """Those of `keys` that have no row; while the context lasts, no process can add one."""
        with self._writing():
            known = self.known(keys)
            yield [key for key in keys if key not in known]

    def entries(self, after: int) -> list[Entry]:
        """Chunks with a higher number, ascending."""
        rows = self._all("SELECT number, key, ids, anchors FROM chunks WHERE number > ? ORDER BY number", after)
        try:
            return [Entry(number, key, np.frombuffer(ids, "<u4"), anchors) for number, key, ids, anchors in rows]
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self._path}: {error}; `kvrag store check` repairs a damaged manifest") from error

    def touch(self, keys: Sequence[str]) -> None:
        """Move to the young end of the LRU order."""
        now = time.time()
        with self._writing() as connection:
            connection.executemany(
                "UPDATE chunks SET used = ?, uses = uses + 1 WHERE key = ?", [(now, key) for key in keys]
            )

    def hold(self, document: str, keys: Sequence[str], replace: bool) -> list[str]:
        """Set (or add to) a document's chunks; returns keys that nobody holds any more because of it."""
        with self._writing() as connection:
            before = {row[0] for row in connection.execute("SELECT key FROM holders WHERE document = ?", (document,))}
            dropped = before - set(keys) if replace else set()
            connection.executemany(
                "DELETE FROM holders WHERE document = ? AND key = ?", [(document, key) for key in dropped]
            )
            connection.executemany("INSERT OR IGNORE INTO holders VALUES (?, ?)", [(document, key) for key in keys])
            held = "SELECT 1 FROM holders WHERE key = ? LIMIT 1"
            return [key for key in sorted(dropped) if connection.execute(held, (key,)).fetchone() is None]

    def documents(self, prefix: str) -> dict[str, list[str]]:
        """Named documents whose names begin so, and the keys each holds."""
        # a range, for which SQLite uses the index
        rows = self._all(
            "SELECT document, key FROM holders"
            " WHERE document > '' AND document >= ?1 AND document < ?1 || char(1114111) ORDER BY document, key",
            prefix,
        )
        documents: dict[str, list[str]] = {}
        for document, key in rows:
            documents.setdefault(document, []).append(key)
        return documents

    def unheld(self) -> list[str]:
        """Chunks that no document holds."""
        return [row[0] for row in self._all("SELECT key FROM chunks WHERE key NOT IN (SELECT key FROM holders)")]

    def oldest(self, num_bytes: int) -> list[str]:
        """Least recently used chunks that together take at least `num_bytes`."""
        keys, total = [], 0
        for key, size in self._all("SELECT key, num_bytes FROM chunks ORDER BY used, number"):
            if total >= num_bytes:
                break
            keys.append(key)
            total += size
        return keys

    def totals(self) -> tuple[int, int, int, int]:
        """Chunks, tokens, bytes, named documents."""
        (row,) = self._all("SELECT count(*), total(num_tokens), total(num_bytes) FROM chunks")
        ((documents,),) = self._all("SELECT count(DISTINCT document) FROM holders WHERE document != ''")
        return int(row[0]), int(row[1]), int(row[2]), int(documents)

    def keys(self) -> list[str]:
        """All chunks."""
        return [row[0] for row in self._all("SELECT key FROM chunks ORDER BY number")]

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL)


def _primary(error: sqlite3.Error) -> int:
    """SQLite's error code without what it adds in the upper bits."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time opens a manifest: creating it and moving a damaged one aside take several steps."""
    try:
        lock = open(path.with_name(f"{path.name}.lock"), "ab")  # noqa: SIM115  closed below
    except OSError:
        yield  # a folder that cannot be written: nothing to create or to move
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreError(f"the store {path.parent} is closed") from error
    except sqlite3.OperationalError as error:
        if _primary(error) == sqlite3.SQLITE_FULL:
            raise StoreFullError(
                f"the disk of {path.parent} is full: free space or choose another store folder"
            ) from error
        if _primary(error) == sqlite3.SQLITE_READONLY:
            raise StoreReadOnlyError(f"{path.parent} cannot be written: choose another store folder") from error
        raise StoreError(f"{path}: {error}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{path}: {error}; `kvrag store check` repairs a damaged manifest") from error

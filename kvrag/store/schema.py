"""The manifest's file: its tables, how it is opened, and connections to it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import math
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from filelock import FileLock

from kvrag.errors import StoreError, StoreFullError, StoreReadOnlyError
from kvrag.fingerprint import FORMAT, old_format
from kvrag.process import refuse

logger = logging.getLogger("kvrag")

PAGE = 2000
"""Rows per read or write."""

_CLOCK = "clock"  # counter with the clock of the scores, see `kvrag.store.manifest`
_TICKS = 10**9  # value of that counter per unit of the clock
_HALF_LIFE = 4.0  # of a use, on the clock

# A text row lives as long as one of its chunks. A trigger guarantees it on every code path.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    text TEXT NOT NULL UNIQUE,
    namespace TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    ids BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS chunks (
    key TEXT PRIMARY KEY,
    text TEXT NOT NULL,
    context_tokens INTEGER NOT NULL,
    file TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    uses INTEGER NOT NULL DEFAULT 0,
    chunk_namespace TEXT,
    score REAL
);
CREATE INDEX IF NOT EXISTS chunks_text ON chunks (text, key, context_tokens);
CREATE INDEX IF NOT EXISTS chunks_score ON chunks (score, key, num_bytes);
CREATE INDEX IF NOT EXISTS chunks_namespace ON chunks (chunk_namespace, score, key, num_bytes);
CREATE TABLE IF NOT EXISTS holders (
    namespace TEXT NOT NULL, document TEXT NOT NULL, text TEXT NOT NULL, source TEXT NOT NULL, key TEXT NOT NULL,
    PRIMARY KEY (namespace, document, text, source)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS holders_text ON holders (text, source, key);
CREATE INDEX IF NOT EXISTS holders_key ON holders (key);
CREATE TRIGGER IF NOT EXISTS chunk_deleted AFTER DELETE ON chunks BEGIN
    INSERT INTO counters VALUES ('removals', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1;
    DELETE FROM texts WHERE text = OLD.text AND NOT EXISTS (SELECT 1 FROM chunks WHERE text = OLD.text);
END;
"""
_CHECK = "PRAGMA integrity_check"
COUNT = "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2"


class Database:
    """SQLite in WAL mode: readers never wait, writers of several processes are serialised."""

    def __init__(self, path: Path) -> None:
        """Open or create the manifest. Raises StoreError."""
        self._path, self._folder = path, path.parent
        self._lock = threading.RLock()  # guards the one writing connection
        self._idle: deque[sqlite3.Connection] = deque()  # reading connections
        self._closed = False
        # one process at a time: creating it takes several steps
        with translated(self._folder), FileLock(path.with_name(f"{path.name}.lock"), mode=0o600):
            self._writer = self._open()

    def _open(self) -> sqlite3.Connection:
        connection = SQLiteFile(self._path)
        is_new = not _has_tables(connection, self._folder)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA secure_delete=ON")  # a deleted text's ids are overwritten
        connection.execute("PRAGMA synchronous=NORMAL")  # a lost row is a miss, and `gc` deletes its file
        connection.create_function("raised", 5, raised)
        if is_new:
            connection.execute(f"PRAGMA user_version={FORMAT}")
            with connection:  # all of it, or it is new again
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
                _start_counting(connection, time.time_ns() // 1000)
        for table in ("texts", "chunks", "holders", "counters"):
            connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchone()
        return connection

    # ---------------------------------------------------------------- copies

    def snapshot(self) -> tuple[bytes, dict[str, int]]:
        """Return the file's content without traces of deleted rows, and the counters in it."""
        with translated(self._folder), _in_memory() as copy:
            with self._lock:
                self._writer.backup(copy)
            copy.execute("VACUUM")
            return copy.serialize(), dict(copy.execute("SELECT name, value FROM counters"))

    def restore(self, content: bytes | None) -> list[str]:
        """Make this a copy of another manifest (None = an empty one); return the keys of the chunks that it lacks.

        All texts get new numbers. Raises ValueError if the content, as of `snapshot`, is damaged.
        """
        with translated(self._folder), _in_memory() as copy:
            try:
                if content is None:
                    copy.executescript(f"{_SCHEMA}; PRAGMA user_version={FORMAT}")
                elif content:
                    copy.deserialize(content)
                is_sound = _has_tables(copy, self._folder) and copy.execute(_CHECK).fetchall() == [("ok",)]
            except sqlite3.DatabaseError:
                is_sound = False
            if not is_sound:
                raise ValueError("it is not a manifest")
            with self._lock:
                return self._copy_from(copy)

    def _copy_from(self, copy: sqlite3.Connection) -> list[str]:
        before = {key for (key,) in self._all("SELECT key FROM chunks")}
        left = before - {key for (key,) in copy.execute("SELECT key FROM chunks")}
        with self._reading() as connection:
            highest = [time.time_ns() // 1000, *_counted(connection), *_counted(copy)]
        copy.execute("UPDATE texts SET number = number + ?1 - (SELECT min(number) FROM texts)", (max(highest) + 1,))
        _start_counting(copy, max(highest) + 1)
        copy.execute("INSERT OR REPLACE INTO counters VALUES ('purged', -1)")
        copy.backup(self._writer)
        return list(left)

    # ---------------------------------------------------------------- connections

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run one write transaction, or a part of this thread's; an error undoes all of it."""
        with self._lock, translated(self._folder):
            if self._writer.in_transaction:
                yield self._writer
                return
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # SQLite rolls back by itself on a full disk
                    self._writer.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection for this thread with a consistent snapshot; it does not wait for writers."""
        idle = self._idle
        with translated(self._folder):
            try:
                connection = idle.pop()
            except IndexError:
                if self._closed:
                    raise StoreError(f"the store {self._folder} is closed") from None
                connection = SQLiteFile(self._path, "?mode=rw")
                connection.execute("PRAGMA query_only=1")
                connection.execute("PRAGMA cache_size=-8000")
            try:
                connection.execute("BEGIN")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
            idle.append(connection)
            if self._closed:
                self._close_idle()

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _all(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._reading() as connection:
            return connection.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        with self._lock:
            self._close_idle()
            self._writer.close()


class SQLiteFile(sqlite3.Connection):
    """A connection for all threads, without implicit transactions.

    A process that was forked while the file was open gets SettingError. There, SQLite takes locks of the other process
    for its own: a file that was opened again lost what was written after the other process had closed it.
    """

    def __init__(self, path: Path, options: str = "") -> None:
        """Open the file. `options` are those of SQLite's URIs."""
        if (file := _file(path)) and file in _inherited:
            raise refuse(str(path))
        self.path = path
        super().__init__(
            f"{path.absolute().as_uri()}{options}", uri=True, timeout=60, isolation_level=None, check_same_thread=False
        )
        self.file = _file(path)
        _connections.add(self)

    def close(self) -> None:
        """Close the file, for children as well."""
        super().close()
        _connections.discard(self)


class _Inherited(SQLiteFile):
    """A connection that was open when this process was forked."""

    def __getattribute__(self, name: str) -> NoReturn:
        raise refuse(str(object.__getattribute__(self, "path")))


_connections: weakref.WeakSet[SQLiteFile] = weakref.WeakSet()
_inherited: set[tuple[int, int] | None] = set()


def _file(path: Path) -> tuple[int, int] | None:
    """Return what identifies a file; None if there is none."""
    with contextlib.suppress(OSError):
        state = path.stat()
        return state.st_dev, state.st_ino
    return None


def _after_fork() -> None:
    for connection in list(_connections):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # or its end would close the file, also for the parent
        _inherited.add(connection.file)
        connection.__class__ = _Inherited
    _connections.clear()


os.register_at_fork(after_in_child=_after_fork)


def raised(score: float | None, uses: int, tokens: int, num_bytes: int, clock: float) -> float:
    """Return the score of a chunk after more uses; `score` is the one before, None = not used yet."""
    gained = math.log2(max(uses * tokens, 1) / max(num_bytes, 1)) + clock / _HALF_LIFE
    if score is None:
        return gained
    return max(score, gained) + math.log2(1 + 2.0 ** -abs(score - gained))


def clock_of(connection: sqlite3.Connection) -> float:
    """Return the time on the clock of the scores."""
    row = connection.execute("SELECT value FROM counters WHERE name = ?", (_CLOCK,)).fetchone()
    return row[0] / _TICKS if row else 0.0


def advance(connection: sqlite3.Connection, uses: int) -> None:
    """Advance the clock by this many uses."""
    (chunks,) = connection.execute("SELECT count(*) FROM chunks").fetchone()
    connection.execute(COUNT, (_CLOCK, int(uses * _TICKS / max(chunks, 1))))


def _in_memory() -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(":memory:", isolation_level=None))


def _start_counting(connection: sqlite3.Connection, start: int) -> None:
    """Let numbers of texts and the counter of removals begin after all that readers have seen in another manifest."""
    connection.execute("DELETE FROM sqlite_sequence")
    connection.execute("INSERT INTO sqlite_sequence VALUES ('texts', ?)", (start,))
    connection.execute("INSERT OR REPLACE INTO counters VALUES ('removals', ?)", (start,))


def _counted(connection: sqlite3.Connection) -> list[int]:
    """Return the number of the last text and the counter of removals."""
    last = "SELECT seq FROM sqlite_sequence WHERE name = 'texts'"
    return [
        value for (value,) in connection.execute(f"{last} UNION SELECT value FROM counters WHERE name = 'removals'")
    ]


def _has_tables(connection: sqlite3.Connection, folder: Path) -> bool:
    """Return whether there are tables; raise StoreError for those of another version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (number,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if number and version != FORMAT:
        raise old_format(str(folder))
    return bool(number)


_DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)  # SQLite's messages repeat file content
_FULL = sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE  # the second one: no room for the index of the log


@contextlib.contextmanager
def translated(folder: Path) -> Iterator[None]:
    """Raise StoreError for an error of SQLite or the operating system in a store's folder or a file."""
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreError(f"the store {folder} is closed") from error
    except (*_DAMAGED, OSError) as error:
        number, code = getattr(error, "errno", None), getattr(error, "sqlite_errorcode", 0)
        if code in _FULL or number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(
                f"the disk of {folder} is full: free space, set a smaller max_bytes, or choose another store folder"
            ) from error
        primary = code & 0xFF  # an extended code has more in the upper bits
        if primary == sqlite3.SQLITE_READONLY or number in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StoreReadOnlyError(f"{folder} is not writable ({error}): choose another store folder") from error
        remedy = "; it is damaged: delete it and warm again"
        if isinstance(error, OSError | sqlite3.OperationalError):
            remedy = ": choose another store folder" * isinstance(error, OSError)
        raise StoreError(f"cannot use {folder}: {error}{remedy}") from error

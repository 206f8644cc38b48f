"""The manifest: one SQLite file with the texts, chunks, holders, times of use and budgets.

Chunks are evicted by their score, lowest first: see decision 23. The score is the logarithm of

    (tokens to compute again) / bytes * sum over all uses of 2 ** (clock at that use / half-life)

Counting a use only adds a term, and scores of different ages compare as they are, so an index can hold them. The clock
counts uses: it is 1 further when there were as many uses as there are chunks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from kvrag.errors import StoreError, StoreFullError, StoreReadOnlyError
from kvrag.fingerprint import FORMAT
from kvrag.store.protocol import ON_REQUEST, Entry, Holding, NamespaceStats, TextState

logger = logging.getLogger("kvrag")

_LOG = 100_000  # number of removals kept
_PAGE = 2000  # rows per read or write
_HALF_LIFE = 4.0  # of a use, on the clock
_STORED = 2  # uses that storing counts for: new chunks must outlast those that are hardly used
CLOCK, _TICKS = "clock", 10**9  # counter of the manifest, and its value per unit of the clock
_BUDGET = "budget "  # and a namespace: counter with its budget in bytes

# A text row lives as long as one of its chunks. Triggers guarantee it on every code path.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS totals (
    namespace TEXT PRIMARY KEY, texts INTEGER NOT NULL DEFAULT 0, chunks INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
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
DROP INDEX IF EXISTS chunks_used;
CREATE TABLE IF NOT EXISTS holders (
    namespace TEXT NOT NULL, document TEXT NOT NULL, text TEXT NOT NULL, source TEXT NOT NULL, key TEXT NOT NULL,
    PRIMARY KEY (namespace, document, text, source)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS holders_text ON holders (text, source, key);
CREATE INDEX IF NOT EXISTS holders_key ON holders (key);
CREATE TABLE IF NOT EXISTS removed (position INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER NOT NULL);
CREATE TRIGGER IF NOT EXISTS text_added AFTER INSERT ON texts BEGIN
    INSERT INTO totals (namespace, texts) VALUES (NEW.namespace, 1)
        ON CONFLICT (namespace) DO UPDATE SET texts = texts + 1;
END;
CREATE TRIGGER IF NOT EXISTS text_removed AFTER DELETE ON texts BEGIN
    UPDATE totals SET texts = texts - 1 WHERE namespace = OLD.namespace;
    INSERT INTO removed (number) VALUES (OLD.number);
END;
CREATE TRIGGER IF NOT EXISTS chunk_added AFTER INSERT ON chunks BEGIN
    UPDATE totals SET chunks = chunks + 1, bytes = bytes + NEW.num_bytes,
        tokens = tokens + (SELECT num_tokens FROM texts WHERE text = NEW.text)
        WHERE namespace = (SELECT namespace FROM texts WHERE text = NEW.text);
END;
CREATE TRIGGER IF NOT EXISTS chunk_removed AFTER DELETE ON chunks BEGIN
    UPDATE totals SET chunks = chunks - 1, bytes = bytes - OLD.num_bytes,
        tokens = tokens - (SELECT num_tokens FROM texts WHERE text = OLD.text)
        WHERE namespace = (SELECT namespace FROM texts WHERE text = OLD.text);
    INSERT INTO counters VALUES ('removals', 1) ON CONFLICT (name) DO UPDATE SET value = value + 1;
    DELETE FROM texts WHERE text = OLD.text AND NOT EXISTS (SELECT 1 FROM chunks WHERE text = OLD.text);
END;
"""
_RECOUNT = """
DELETE FROM texts WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE chunks.text = texts.text);
DELETE FROM totals;
INSERT INTO totals (namespace, texts, chunks, tokens, bytes)
    SELECT namespace, count(DISTINCT number), count(*), total(num_tokens), total(num_bytes)
    FROM chunks JOIN texts USING (text) GROUP BY namespace;
"""


class Row(NamedTuple):
    """A chunk's row. `ids` are little-endian uint32; `file` is a name without its folder."""

    key: str
    text: str
    namespace: str
    ids: bytes
    context_tokens: int
    file: str
    num_bytes: int


class Holder(NamedTuple):
    """A document of a namespace that holds a text from a source and relies on the variant `key`."""

    namespace: str
    document: str
    text: str
    source: str
    key: str


class Manifest:
    """SQLite in WAL mode: readers never wait, writers of several processes are serialised.

    Attributes:
        read_only: The folder is not writable.
        is_new: The file did not exist, or was damaged and has been moved aside. The caller fills the new one from the
            chunk files.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        """Open or create the manifest.

        Args:
            read_only: Do not create or change any file.

        Raises:
            StoreError: The file cannot be opened, or has another format.
        """
        self._path = path
        self._lock = threading.RLock()  # guards the one writing connection
        self._idle: deque[sqlite3.Connection] = deque()  # reading connections
        self.read_only, self.is_new, self._closed = read_only, False, False
        with _translated(path):
            if read_only:
                self._writer = self._open_to_read()
                return
            with _alone(path):
                try:
                    self._writer = self._open()
                except _DAMAGED as error:
                    if isinstance(error, sqlite3.OperationalError):
                        raise
                    self._replace(error)

    def _open(self) -> sqlite3.Connection:
        # SQLite reports a read-only file only on the first write
        if self._path.exists() and not all(os.access(path, os.W_OK) for path in (self._path, self._path.parent)):
            self.read_only = True
            return self._open_to_read()
        try:
            connection = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
            self.is_new = not _check_format(self._path, connection)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA secure_delete=ON")  # a deleted text's ids are overwritten
            connection.execute("PRAGMA synchronous=NORMAL")  # a lost row is a miss, and `check` finds its file again
            connection.execute(f"PRAGMA user_version={FORMAT}")
            connection.create_function("raised", 5, _raised)
            _add_columns(connection)
            connection.executescript(_SCHEMA)
            _add_scores(connection)
            # positions are never reused, even when a damaged manifest is rebuilt
            connection.execute(
                "INSERT INTO sqlite_sequence SELECT 'removed', ?"
                " WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'removed')",
                (time.time_ns() // 1000,),
            )
        except sqlite3.OperationalError as error:
            if not self._path.exists() or _primary(error) not in _UNWRITABLE:
                raise
            connection = self._open_to_read()
            self.read_only = True
        for table in ("texts", "chunks", "holders", "totals", "counters", "removed"):
            connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchone()
        return connection

    def _open_to_read(self) -> sqlite3.Connection:
        """Open for reading, including the write-ahead log if it is readable."""
        uri = f"{self._path.as_uri()}?mode=ro"
        # SQLite would create missing log files
        has_log = all(self._path.with_name(self._path.name + suffix).exists() for suffix in ("-wal", "-shm"))
        for way in ("", "&immutable=1") if has_log else ("&immutable=1",):
            connection = sqlite3.connect(uri + way, uri=True, timeout=60, isolation_level=None, check_same_thread=False)
            try:
                _check_format(self._path, connection)
                connection.execute("SELECT count(*) FROM totals").fetchone()
                break
            except sqlite3.OperationalError:
                connection.close()
                if way:
                    raise
        return connection

    def _replace(self, error: object) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns()}")
        logger.warning("%s is damaged (%s); moved to %s", self._path, error, aside.name)
        self._path.rename(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        self._writer = self._open()

    def is_sound(self) -> bool:
        """Return whether SQLite's integrity check passes; reads the whole file."""
        try:
            with self._reading() as connection:
                return bool(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])
        except StoreError:
            return False

    def rebuild(self) -> None:
        """Move the file aside and start a new one, which the caller fills from the chunk files."""
        with self._lock, _alone(self._path), _translated(self._path):
            self._writer.close()
            while self._idle:
                self._idle.pop().close()
            self._replace("the integrity check failed")

    # ---------------------------------------------------------------- connections

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run one write transaction, or a part of this thread's."""
        if self.read_only:
            raise StoreReadOnlyError(f"{self._path.parent} is not writable: choose another store folder")
        with self._lock, _translated(self._path):
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
        with _translated(self._path):
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connect_reader()
            try:
                connection.execute("BEGIN")
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            if self._closed:
                self._close_idle()

    def _connect_reader(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"the store {self._path.parent} is closed")
        if self.read_only:
            return self._open_to_read()
        connection = sqlite3.connect(self._path, timeout=60, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA query_only=1")
        connection.execute("PRAGMA cache_size=-8000")
        return connection

    def _close_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes of this thread within one transaction; an error undoes all of them."""
        with self._writing():
            yield

    def _all(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._reading() as connection:
            return connection.execute(query, values).fetchall()

    # ---------------------------------------------------------------- lookups of a request

    def look_up(self, texts: Sequence[str]) -> dict[str, TextState]:
        """See KVStore.look_up."""
        variants: dict[str, dict[str, int]] = {text: {} for text in texts}
        sources: dict[str, dict[str, str]] = {text: {} for text in texts}
        with self._reading() as connection:
            for part, marks in _parts(list(variants)):
                rows = connection.execute(f"SELECT text, key, context_tokens FROM chunks WHERE text IN ({marks})", part)
                for text, key, context_tokens in rows:
                    if text in variants:  # an index that is damaged leads anywhere
                        variants[text][key] = context_tokens
            for part, marks in _parts(list(variants)):
                rows = connection.execute(f"SELECT text, source, key FROM holders WHERE text IN ({marks})", part)
                for text, source, key in rows:
                    if text in sources:  # one source, two contexts: anybody can name a source, so neither is trusted
                        sources[text][source] = key if sources[text].get(source, key) == key else ""
        return {text: TextState(variants[text], sources[text]) for text in variants}

    def file(self, key: str) -> str | None:
        """Return the name of a chunk's file; None if the chunk is not stored."""
        rows = self._all("SELECT file FROM chunks WHERE key = ?", key)
        return rows[0][0] if rows else None

    def known(self, keys: Sequence[str]) -> set[str]:
        """Return the keys that have a row."""
        found: set[str] = set()
        with self._reading() as connection:
            for part, marks in _parts(keys):
                found.update(
                    row[0] for row in connection.execute(f"SELECT key FROM chunks WHERE key IN ({marks})", part)
                )
        return found

    def counter(self, name: str) -> int:
        """Return the value of a counter."""
        rows = self._all("SELECT value FROM counters WHERE name = ?", name)
        return int(rows[0][0]) if rows else 0

    def entries(self, after: int) -> Iterator[Entry]:
        """See KVStore.entries."""
        while True:
            rows = self._all(
                "SELECT number, text, namespace, ids FROM texts WHERE number > ? ORDER BY number LIMIT ?", after, _PAGE
            )
            try:
                for number, text, namespace, ids in rows:
                    yield Entry(number, text, namespace, np.frombuffer(ids, "<u4"))
            except (ValueError, TypeError) as error:
                raise StoreError(f"{self._path}: {error}; `kvrag store check` repairs a damaged manifest") from error
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def removed(self, after: int) -> tuple[int, list[int]] | None:
        """See KVStore.removed."""
        with self._reading() as connection:
            row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'removed'").fetchone()
            position = int(row[0]) if row else 0
            if after == 0:
                return position, []
            (oldest,) = connection.execute("SELECT min(position) FROM removed").fetchone()
            if not (position if oldest is None else oldest - 1) <= after <= position:
                return None
            rows = connection.execute("SELECT number FROM removed WHERE position > ? ORDER BY position", (after,))
            return position, [row[0] for row in rows]

    # ---------------------------------------------------------------- changes

    def add(self, rows: Iterable[Row]) -> list[Row]:
        """Insert chunks and their texts in one transaction; return the rows whose key had another file already."""
        now, rows = time.time(), iter(rows)
        known: list[Row] = []
        with self._writing() as connection:
            while page := list(islice(rows, _PAGE)):
                connection.executemany(
                    "INSERT OR IGNORE INTO texts (text, namespace, num_tokens, ids) VALUES (?, ?, ?, ?)",
                    [(row.text, row.namespace, len(row.ids) // 4, row.ids) for row in page],
                )
                clock, before = _clock(connection), len(known)
                connection.executemany(
                    "INSERT OR IGNORE INTO chunks"
                    " (key, text, context_tokens, file, num_bytes, created, used, chunk_namespace, score)"
                    f" VALUES (?1, ?2, ?3, ?4, ?5, {now}, {now}, ?6, raised(NULL, {_STORED}, ?7 + ?3, ?5, {clock}))",
                    [
                        (
                            row.key,
                            row.text,
                            row.context_tokens,
                            row.file,
                            row.num_bytes,
                            row.namespace,
                            len(row.ids) // 4,
                        )
                        for row in page
                    ],
                )
                for row in page:
                    (file,) = connection.execute("SELECT file FROM chunks WHERE key = ?", (row.key,)).fetchone()
                    if file != row.file:
                        known.append(row)
                _advance(connection, len(page) - (len(known) - before))
        return known

    def correct(self, row: Row) -> None:
        """Replace a chunk's rows by this one."""
        with self._writing() as connection:
            connection.execute("DELETE FROM chunks WHERE key = ?", (row.key,))
            connection.execute(
                "DELETE FROM texts WHERE text = ? AND (ids, namespace) != (?, ?)", (row.text, row.ids, row.namespace)
            )
        self.add([row])

    def remove(self, keys: Sequence[str], counter: str | None = None, file: str | None = None) -> list[str]:
        """Delete rows of chunks; return the names of their files.

        Args:
            counter: Name of a counter to add the deleted chunks to.
            file: Delete only rows with this file.
        """
        with self._writing() as connection:
            removed = _remove(connection, keys, file)
            if counter:
                self.count(counter, len(removed))
        return [name for _, name in removed]

    def evict(self, limit: int, most: int, namespace: str | None = None) -> list[str]:
        """Delete the rows of at most `most` chunks, see `coldest`; return the names of their files.

        The size is read in the same transaction, so that several processes do not evict for the same need.
        """
        with self._writing() as connection:
            removed = _remove(connection, self.coldest(limit, most, namespace))
        return [file for _, file in removed]

    def coldest(self, limit: int, most: int, namespace: str | None = None) -> list[str]:
        """Return the keys of the chunks to remove until all take `limit` bytes, at most `most`.

        Args:
            namespace: Only chunks of this namespace count, and only these are removed; None = all.
        """
        keys = []
        where, names = ("", ()) if namespace is None else ("WHERE chunk_namespace = ?", (namespace,))
        with self._writing() as connection:
            total = "SELECT total(bytes) FROM totals WHERE ?1 IS NULL OR namespace = ?1"
            (left,) = connection.execute(total, (namespace,)).fetchone()
            query = f"SELECT key, num_bytes FROM chunks {where} ORDER BY score, key LIMIT ?"
            for key, size in connection.execute(query, (*names, most)):
                if left <= limit:
                    break
                keys.append(key)
                left -= size
        return keys

    def touch(self, uses: Mapping[str, int]) -> None:
        """Record that these chunks were used now, so many times each."""
        now = time.time()
        with self._writing() as connection:
            clock, before = _clock(connection), connection.total_changes
            connection.executemany(
                "UPDATE chunks SET used = ?1, uses = uses + ?2, score = raised(score, ?2, context_tokens +"
                " (SELECT num_tokens FROM texts WHERE texts.text = chunks.text), num_bytes, ?3) WHERE key = ?4",
                [(now, count, clock, key) for key, count in uses.items()],
            )
            if connection.total_changes > before:  # a shared store also hears of chunks that it does not have
                _advance(connection, sum(uses.values()))

    # ---------------------------------------------------------------- budgets

    def set_budget(self, namespace: str, max_bytes: int | None) -> None:
        """Set the byte budget of a namespace; None = none. Removes no chunks."""
        with self._writing() as connection:
            connection.execute("DELETE FROM counters WHERE name = ?", (_BUDGET + namespace,))
            if max_bytes is not None:
                connection.execute("INSERT INTO counters VALUES (?, ?)", (_BUDGET + namespace, max_bytes))

    def budgets(self) -> dict[str, int]:
        """Return the byte budget of each namespace that has one."""
        return budgets_in(dict(self._all("SELECT name, value FROM counters WHERE name GLOB ?", f"{_BUDGET}*")))

    def scores(self) -> Iterator[list[tuple[str, float]]]:
        """Yield pages of (key, score) of all chunks; see `set_scores`."""
        query, after = "SELECT key, score FROM chunks WHERE key > ? AND score IS NOT NULL ORDER BY key LIMIT ?", ""
        while page := self._all(query, after, _PAGE):
            yield page
            after = page[-1][0]

    def set_scores(self, scores: Iterable[tuple[str, float]]) -> None:
        """Replace the scores of these chunks by those of another manifest with the same clock."""
        with self._writing() as connection:
            connection.executemany("UPDATE chunks SET score = ?2 WHERE key = ?1", scores)

    def hold(self, document: str, holdings: Sequence[Holding], namespace: str, replace: bool) -> list[tuple[str, str]]:
        """Record a document's holdings; return (key, file) of the chunks removed because no document relies on them."""
        name = (namespace, document)
        with self._writing() as connection:
            if replace:
                rows = connection.execute("SELECT key FROM holders WHERE namespace = ? AND document = ?", name)
                before = {row[0] for row in rows}
                connection.execute("DELETE FROM holders WHERE namespace = ? AND document = ?", name)
            else:
                before = set()
                for holding in holdings:
                    before.update(
                        row[0]
                        for row in connection.execute(
                            "SELECT key FROM holders WHERE namespace = ? AND document = ? AND text = ? AND source = ?",
                            (*name, holding.text, holding.source),
                        )
                    )
            connection.executemany(
                "INSERT OR REPLACE INTO holders (namespace, document, text, source, key) VALUES (?, ?, ?, ?, ?)",
                [(*name, holding.text, holding.source, holding.key) for holding in holdings],
            )
            held = "SELECT 1 FROM holders WHERE key = ? LIMIT 1"
            unheld = [key for key in sorted(before) if connection.execute(held, (key,)).fetchone() is None]
            return _remove(connection, unheld)

    def unused_requests(self, since: float) -> list[tuple[str, str]]:
        """Return (namespace, text) of the request texts that have not been used since."""
        return self._all(
            "SELECT DISTINCT namespace, text FROM holders WHERE document = ? AND NOT EXISTS"
            " (SELECT 1 FROM chunks WHERE chunks.key = holders.key AND used >= ?)",
            ON_REQUEST,
            since,
        )

    def release(self, requests: Iterable[tuple[str, str]]) -> None:
        """Remove the holders of these request texts, given as (namespace, text)."""
        with self._writing() as connection:
            connection.executemany(
                "DELETE FROM holders WHERE namespace = ? AND text = ? AND document = ?",
                [(*request, ON_REQUEST) for request in requests],
            )

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Set counters, each 63 bits."""
        with self._writing() as connection:
            connection.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?)", list(counters.items()))

    def count(self, counter: str, by: int = 1) -> None:
        """Raise a counter."""
        with self._writing() as connection:
            connection.execute(
                "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2",
                (counter, by),
            )

    def replace(self, rows: Iterable[Row], holders: Iterable[Holder]) -> list[str]:
        """Make these the only chunks and holders; return the keys of the chunks removed.

        What stays keeps its number.
        """
        with self._writing() as connection:
            connection.execute("CREATE TEMP TABLE kept (key TEXT PRIMARY KEY, file TEXT) WITHOUT ROWID")
            rows = iter(rows)
            while page := list(islice(rows, _PAGE)):
                connection.executemany("INSERT INTO kept VALUES (?, ?)", [(row.key, row.file) for row in page])
                moved = "SELECT key FROM kept JOIN chunks USING (key) WHERE key = ? AND kept.file != chunks.file"
                for row in page:
                    if connection.execute(moved, (row.key,)).fetchone():
                        self.correct(row)
                self.add(page)
            others = "SELECT key FROM chunks WHERE key NOT IN (SELECT key FROM kept)"
            gone = [row[0] for row in connection.execute(others)]
            _remove(connection, gone)
            connection.execute("DROP TABLE kept")
            connection.execute("DELETE FROM holders")
            connection.executemany(
                "INSERT INTO holders (namespace, document, text, source, key) VALUES (?, ?, ?, ?, ?)", holders
            )
        return gone

    def purge(self) -> bool:
        """Empty the log that SQLite keeps beside the file; return whether chunks were removed since the last time."""
        with self._lock, _translated(self._path):
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        removals = self.counter("removals")
        if removals == self.counter("purged"):
            return False
        with self._writing() as connection:
            connection.execute("INSERT OR REPLACE INTO counters VALUES ('purged', ?)", (removals,))
        return True

    def recount(self) -> None:
        """Recompute the totals, which may be wrong in a damaged file."""
        with self._writing() as connection:
            for statement in _RECOUNT.strip().split(";\n"):
                connection.execute(statement)

    # ---------------------------------------------------------------- listings and maintenance

    def documents(self, prefix: str, namespace: str) -> dict[str, list[str]]:
        """See KVStore.documents."""
        # a range condition, so that SQLite uses the index
        rows = self._all(
            "SELECT DISTINCT document, key FROM holders WHERE namespace = ?1"
            " AND document > '' AND document >= ?2 AND document < ?2 || char(1114111) AND document != ?3"
            " ORDER BY document, key",
            namespace,
            prefix,
            ON_REQUEST,
        )
        documents: dict[str, list[str]] = {}
        for document, key in rows:
            documents.setdefault(document, []).append(key)
        return documents

    def count_tokens(self, prefix: str, namespace: str) -> dict[str, int]:
        """See KVStore.count_tokens."""
        rows = self._all(
            "SELECT document, sum(num_tokens) FROM (SELECT DISTINCT document, text FROM holders WHERE namespace = ?1"
            " AND document > '' AND document >= ?2 AND document < ?2 || char(1114111) AND document != ?3)"
            " JOIN texts USING (text) GROUP BY document",
            namespace,
            prefix,
            ON_REQUEST,
        )
        return dict(rows)

    def unheld(self) -> list[str]:
        """Return the chunks that no document relies on."""
        return [row[0] for row in self._all("SELECT key FROM chunks WHERE key NOT IN (SELECT key FROM holders)")]

    def num_bytes(self, namespace: str | None = None) -> int:
        """Return the total size of all chunks of a namespace; None = of all."""
        return int(self._all("SELECT total(bytes) FROM totals WHERE ?1 IS NULL OR namespace = ?1", namespace)[0][0])

    def namespaces(self) -> list[NamespaceStats]:
        """Return the statistics of each namespace that is not empty or has a budget."""
        with self._reading() as connection:
            documents = dict(
                connection.execute(
                    "SELECT namespace, count(DISTINCT document) FROM holders WHERE document NOT IN ('', ?) GROUP BY 1",
                    (ON_REQUEST,),
                ).fetchall()
            )
            rows = connection.execute("SELECT namespace, texts, chunks, tokens, bytes FROM totals").fetchall()
        counts = {name: [int(count) for count in counted] for name, *counted in rows}
        budgets = self.budgets()
        return [
            NamespaceStats(name, texts, chunks, tokens, size, documents.get(name, 0), budgets.get(name))
            for name in sorted({*documents, *counts, *budgets})
            for texts, chunks, tokens, size in [counts.get(name, [0, 0, 0, 0])]
            if chunks or name in documents or name in budgets
        ]

    def held_by_requests(self, keys: Sequence[str]) -> list[str]:
        """Return those of the chunks that texts of requests rely on."""
        found: list[str] = []
        with self._reading() as connection:
            for part, marks in _parts(keys):
                query = f"SELECT DISTINCT key FROM holders WHERE key IN ({marks}) AND document = ?"
                found += [row[0] for row in connection.execute(query, (*part, ON_REQUEST))]
        return found

    def contents(self) -> Iterator[tuple[dict[str, int], list[Row], list[Holder]]]:
        """Yield everything from one snapshot: first the counters, then pages of chunks, then pages of holders."""
        chunks = "SELECT key, text, namespace, ids, context_tokens, file, num_bytes FROM chunks JOIN texts USING (text)"
        with self._reading() as connection:
            yield dict(connection.execute("SELECT name, value FROM counters").fetchall()), [], []
            cursor = connection.execute(f"{chunks} ORDER BY key")
            while page := cursor.fetchmany(_PAGE):
                yield {}, [Row(*row) for row in page], []
            cursor = connection.execute("SELECT namespace, document, text, source, key FROM holders")
            while page := cursor.fetchmany(_PAGE):
                yield {}, [], [Holder(*row) for row in page]

    def rows(self) -> dict[str, Row]:
        """Return all chunks by key."""
        query = (
            "SELECT key, text, namespace, ids, context_tokens, file, num_bytes FROM chunks LEFT JOIN texts USING (text)"
        )
        return {row[0]: Row(*row) for row in self._all(query)}

    def files(self) -> set[str]:
        """Return the names of all chunks' files."""
        return {row[0] for row in self._all("SELECT file FROM chunks")}

    def close(self) -> None:
        """Close the file."""
        self._closed = True
        with self._lock:
            self._close_idle()
            self._writer.close()


def budgets_in(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the budgets of namespaces that are among these counters."""
    return {name.removeprefix(_BUDGET): value for name, value in counters.items() if name.startswith(_BUDGET)}


def _raised(score: float | None, uses: int, tokens: int, num_bytes: int, clock: float) -> float:
    """Return the score of a chunk after more uses; None = it had none."""
    gained = math.log2(max(uses * tokens, 1) / max(num_bytes, 1)) + clock / _HALF_LIFE
    if score is None:
        return gained
    return max(score, gained) + math.log2(1 + 2.0 ** -abs(score - gained))


def _clock(connection: sqlite3.Connection) -> float:
    row = connection.execute("SELECT value FROM counters WHERE name = ?", (CLOCK,)).fetchone()
    return row[0] / _TICKS if row else 0.0


def _advance(connection: sqlite3.Connection, uses: int) -> None:
    (chunks,) = connection.execute("SELECT total(chunks) FROM totals").fetchone()
    connection.execute(
        "INSERT INTO counters VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET value = value + ?2",
        (CLOCK, int(uses * _TICKS / max(chunks, 1))),
    )


def _add_columns(connection: sqlite3.Connection) -> None:
    """Add the columns that chunks do not have in manifests of older versions.

    Older versions must be able to go on: new columns may be NULL, and no other table has a column of their name.
    """
    columns = {row[1] for row in connection.execute("PRAGMA table_info(chunks)")}
    for name, kind in (("chunk_namespace", "TEXT"), ("score", "REAL")):
        if columns and name not in columns:
            connection.execute(f"ALTER TABLE chunks ADD COLUMN {name} {kind}")


def _add_scores(connection: sqlite3.Connection) -> None:
    """Fill in the rows of older versions: as if each chunk had been used once, when it was used last."""
    (rows, first, last) = connection.execute(
        "SELECT count(*), min(used), max(used) FROM chunks WHERE chunk_namespace IS NULL"
    ).fetchone()
    if not rows:
        return
    connection.execute("BEGIN IMMEDIATE")
    clock = _clock(connection) + 1
    connection.execute(
        "UPDATE chunks SET chunk_namespace = (SELECT namespace FROM texts WHERE texts.text = chunks.text), score ="
        " coalesce(score, raised(NULL, 1, context_tokens + (SELECT num_tokens FROM texts WHERE texts.text ="
        " chunks.text), num_bytes, ? + (used - ?) / ?)) WHERE chunk_namespace IS NULL",
        (clock, last, max(last - first, 1.0)),
    )
    connection.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (CLOCK, int(clock * _TICKS)))
    connection.execute("COMMIT")


def _remove(connection: sqlite3.Connection, keys: Sequence[str], file: str | None = None) -> list[tuple[str, str]]:
    """Delete rows within the current transaction; return (key, file) of the deleted ones."""
    removed = []
    for key in keys:
        row = connection.execute("SELECT file FROM chunks WHERE key = ?", (key,)).fetchone()
        if row and file in (None, row[0]):
            connection.execute("DELETE FROM chunks WHERE key = ?", (key,))
            removed.append((key, str(row[0])))
    connection.execute(
        "DELETE FROM removed WHERE position <= (SELECT seq FROM sqlite_sequence WHERE name = 'removed') - ?", (_LOG,)
    )
    return removed


def old_format(folder: Path, written: object) -> StoreError:
    """Return the error for a store in another version's format."""
    return StoreError(
        f"the store {folder} has format {written}, which this version cannot read: "
        "encode it again with `kvrag warm --store NEW_FOLDER DOCS`"
    )


def _check_format(path: Path, connection: sqlite3.Connection) -> bool:
    """Raise StoreError for the first format and DatabaseError for an unknown one. Return whether tables exist."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    columns = "SELECT count(*), total(name = 'anchors') FROM pragma_table_info('chunks')"
    num_columns, is_first = connection.execute(columns).fetchone()
    if is_first:
        raise old_format(path.parent, 1)
    if num_columns and version != FORMAT:
        raise sqlite3.DatabaseError(f"unknown format {version}")
    return bool(num_columns)


def _parts(keys: Sequence[str]) -> Iterator[tuple[Sequence[str], str]]:
    """Split keys into parts, each with its SQL placeholders: SQLite limits the number of parameters."""
    for i in range(0, len(keys), 500):
        part = keys[i : i + 500]
        yield part, ",".join("?" * len(part))


_DAMAGED = (sqlite3.DatabaseError, UnicodeDecodeError)  # SQLite's messages repeat file content
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_FULL)


def _primary(error: sqlite3.Error) -> int:
    """Return SQLite's primary error code, without the extended code in the upper bits."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time open a manifest: creating it or moving a damaged one aside takes several steps."""
    lock = FileLock(path.with_name(f"{path.name}.lock"), mode=0o600)
    try:
        lock.acquire()
    except OSError:
        yield  # a read-only folder: nothing to create or move
        return
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.ProgrammingError as error:
        raise StoreError(f"the store {path.parent} is closed") from error
    except sqlite3.OperationalError as error:
        if _primary(error) == sqlite3.SQLITE_FULL:
            raise StoreFullError(
                f"the disk of {path.parent} is full: free space, or choose another store folder"
            ) from error
        if _primary(error) == sqlite3.SQLITE_READONLY:
            raise StoreReadOnlyError(f"{path.parent} is not writable: choose another store folder") from error
        raise StoreError(f"{path}: {error}") from error
    except _DAMAGED as error:
        raise StoreError(f"{path}: {error}; `kvrag store check` repairs a damaged manifest") from error
    except OSError as error:
        raise StoreError(f"cannot use {path}: {error}") from error

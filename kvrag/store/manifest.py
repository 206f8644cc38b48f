"""The manifest: one SQLite file with the texts, chunks, holders, times of use and budgets.

Chunks with the lowest score are evicted first: see decision 23. The score is the logarithm of

    tokens / bytes * sum over all uses of 2 ** (clock at that use / half-life)

Counting a use only adds a term, and scores of different ages are comparable, so an index can hold them. The clock
counts uses: it advances by 1 when there have been as many uses as there are chunks.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrag.errors import StoreError
from kvrag.store.schema import COUNT, PAGE, Database, advance, clock_of, translated
from kvrag.store.values import ON_REQUEST, ChunkRecord, Entry, Holding, NamespaceStats, TextState, text_key

_WITH_PREFIX = (  # a range condition, so that SQLite uses the index
    "WHERE namespace = ?1 AND document > '' AND document >= ?2 AND document < ?2 || char(1114111) AND document != ?3"
)
_LISTED = "(SELECT value FROM json_each(?1))"  # SQLite limits the number of parameters
_UNHELD = "key NOT IN (SELECT key FROM holders)"
_BUDGET = "budget "  # and a namespace: counter with its budget in bytes
_STORED = 2  # uses that storing counts as: new chunks must outlast chunks that are hardly used

OPERATIONS = ("add", "hold", "remove", "release", "touch", "count", "set_budget")
"""Methods that change a manifest, as they are named in the log of a shared store."""

Removed = tuple[str, str]
"""Key and file of a chunk whose row was deleted."""


class ManifestRow(NamedTuple):
    """A chunk's row. `ids` are little-endian uint32; `file` is a name without its folder."""

    key: str
    text_key: str
    namespace: str
    ids: bytes
    context_tokens: int
    file: str
    num_bytes: int

    @classmethod
    def of(cls, chunk: ChunkRecord, file: str, size: int) -> ManifestRow:
        """Return the row of a chunk."""
        ids, key = chunk.ids.astype("<u4").tobytes(), text_key(chunk.namespace, chunk.ids)
        return cls(chunk.key, key, chunk.namespace, ids, len(chunk.context), file, size)


class Manifest(Database):
    """Queries and changes of the manifest; see `Database` about concurrency."""

    # ---------------------------------------------------------------- lookups of a request

    def look_up(self, text_keys: Sequence[str]) -> dict[str, TextState]:
        """See KVStore.look_up."""
        variants: dict[str, dict[str, int]] = {text_key: {} for text_key in text_keys}
        sources: dict[str, dict[str, str]] = {text_key: {} for text_key in text_keys}
        listed = json.dumps(list(variants))
        with self._reading() as connection:
            query = f"SELECT text, key, context_tokens FROM chunks WHERE text IN {_LISTED}"
            for text_key, key, context_tokens in connection.execute(query, (listed,)):
                if text_key in variants:  # not so if the index is damaged
                    variants[text_key][key] = context_tokens
            query = f"SELECT text, source, key FROM holders WHERE text IN {_LISTED}"
            for text_key, source, key in connection.execute(query, (listed,)):
                if text_key in sources:  # one source, two contexts: documents can lie about sources, so trust neither
                    known = sources[text_key]
                    known[source] = key if known.get(source, key) == key else ""
        return {text_key: TextState(variants[text_key], sources[text_key]) for text_key in variants}

    def file(self, key: str) -> str | None:
        """Return the name of a chunk's file; None if the chunk is not stored."""
        rows = self._all("SELECT file FROM chunks WHERE key = ?", key)
        return rows[0][0] if rows else None

    def known(self, keys: Sequence[str]) -> set[str]:
        """Return the keys that have a row."""
        return {key for (key,) in self._all(f"SELECT key FROM chunks WHERE key IN {_LISTED}", json.dumps(keys))}

    def counter(self, name: str) -> int:
        """Return the value of a counter."""
        rows = self._all("SELECT value FROM counters WHERE name = ?", name)
        return int(rows[0][0]) if rows else 0

    def counters(self, prefix: str) -> dict[str, int]:
        """See KVStore.counts."""
        rows = self._all("SELECT name, value FROM counters WHERE name GLOB ?", f"{prefix}*")
        return {name.removeprefix(prefix): value for name, value in rows}

    def entries(self, after: int) -> Iterator[Entry]:
        """See KVStore.entries."""
        while True:
            rows = self._all(
                "SELECT number, text, namespace, ids FROM texts WHERE number > ? ORDER BY number LIMIT ?", after, PAGE
            )
            try:
                for number, text_key, namespace, ids in rows:
                    yield Entry(number, text_key, namespace, np.frombuffer(ids, "<u4"))
            except (ValueError, TypeError) as error:
                raise StoreError(f"{self._path} is damaged ({error}): delete the folder and warm again") from error
            if len(rows) < PAGE:
                return
            after = rows[-1][0]

    def numbers(self) -> NDArray[np.int64]:
        """See KVStore.numbers."""
        return np.array([number for (number,) in self._all("SELECT number FROM texts")], np.int64)

    # ---------------------------------------------------------------- changes

    def change(self, op: str, **fields: Any) -> Any:
        """Call one of the methods of `OPERATIONS`."""
        return getattr(self, op)(**fields)

    def add(self, rows: Sequence[ManifestRow]) -> list[ManifestRow]:
        """Insert chunks and their texts in one transaction; return the rows whose key had another file already."""
        now = time.time()
        with self.transaction() as connection:
            connection.executemany(
                "INSERT OR IGNORE INTO texts (text, namespace, num_tokens, ids) VALUES (?, ?, ?, ?)",
                [(row.text_key, row.namespace, len(row.ids) // 4, row.ids) for row in rows],
            )
            clock = clock_of(connection)
            connection.executemany(
                "INSERT OR IGNORE INTO chunks"
                " (key, text, context_tokens, file, num_bytes, created, used, chunk_namespace, score)"
                f" VALUES (?1, ?2, ?3, ?4, ?5, {now}, {now}, ?6, raised(NULL, {_STORED}, ?7, ?5, {clock}))",
                [(*row[:2], *row[4:], row.namespace, len(row.ids) // 4) for row in rows],
            )
            query = f"SELECT key, file FROM chunks WHERE key IN {_LISTED}"
            files = dict(connection.execute(query, (json.dumps([row.key for row in rows]),)).fetchall())
            known = [row for row in rows if files[row.key] != row.file]
            advance(connection, len(rows) - len(known))
        return known

    def remove(
        self, keys: Sequence[str], counter: str | None = None, file: str | None = None, unheld: bool = False
    ) -> list[Removed]:
        """Delete rows of chunks, and count them in this counter.

        Args:
            file: Delete only rows with this file.
            unheld: Delete only chunks that no document relies on.
        """
        with self.transaction() as connection:
            removed = _remove_rows(connection, keys, file, unheld)
            if counter:
                connection.execute(COUNT, (counter, len(removed)))
        return removed

    def hold(self, document: str, namespace: str, holdings: Sequence[Holding], replace: bool) -> list[Removed]:
        """Record a document's holdings; return the chunks removed because no document relies on them."""
        name, texts = (namespace, document), {text_key for text_key, _, _ in holdings}
        with self.transaction() as connection:
            if replace:
                let_go = _let_go(connection, "namespace = ? AND document = ?", [name])
            else:
                replaced = [(*name, text_key, source) for text_key, _, source in holdings]
                let_go = _let_go(connection, "namespace = ? AND document = ? AND text = ? AND source = ?", replaced)
            # prompts do not keep a text that its document has lost
            requests = [(namespace, ON_REQUEST, text) for text in {text for text, _ in let_go} - texts]
            let_go += _let_go(connection, "namespace = ? AND document = ? AND text = ?", requests)
            rows = [(*name, text_key, source, key) for text_key, key, source in holdings]
            holders = "holders (namespace, document, text, source, key) VALUES (?, ?, ?, ?, ?)"
            connection.executemany(f"INSERT OR REPLACE INTO {holders}", rows)
            return _remove_rows(connection, sorted({key for _, key in let_go}), unheld=True)

    def unused_requests(self, since: float) -> list[tuple[str, str]]:
        """Return (namespace, text key) of the request texts that have not been used since."""
        return self._all(
            "SELECT DISTINCT namespace, text FROM holders WHERE document = ? AND NOT EXISTS"
            " (SELECT 1 FROM chunks WHERE chunks.key = holders.key AND used >= ?)",
            ON_REQUEST,
            since,
        )

    def release(self, requests: Iterable[tuple[str, str]]) -> None:
        """Remove the holders of these request texts, given as (namespace, text key)."""
        with self.transaction() as connection:
            held = [(*request, ON_REQUEST) for request in requests]
            connection.executemany("DELETE FROM holders WHERE namespace = ? AND text = ? AND document = ?", held)

    def set_counter(self, name: str, value: int) -> None:
        """Set a counter of 63 bits."""
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO counters VALUES (?, ?)", (name, value))

    def purge(self) -> None:
        """Rewrite the file and empty SQLite's write-ahead log, if chunks were removed since.

        SQLite overwrites deleted rows, but not the copies that it left when it moved rows to other pages.
        """
        if (removals := self.counter("removals")) == self.counter("purged"):
            return
        with self._lock, translated(self._folder):
            self._writer.execute("VACUUM")
            ((is_busy, *_),) = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        if is_busy:
            raise StoreError(f"{self._path} is being read: repeat `kvrag store gc`, which could not empty its log")
        self.set_counter("purged", removals)

    # ---------------------------------------------------------------- scores and budgets

    def num_bytes(self, namespace: str | None = None) -> int:
        """Return the total size of all chunks of a namespace; None = of all."""
        where = "" if namespace is None else "WHERE chunk_namespace = ?1"  # apart, so that SQLite uses an index
        return int(self._all(f"SELECT total(num_bytes) FROM chunks {where}", *[namespace] * bool(where))[0][0])

    def coldest(self, limit: int, most: int, namespace: str | None = None) -> list[str]:
        """Return the chunks to remove, at most `most`, until those of a namespace (None = all) take `limit` bytes."""
        where = "" if namespace is None else "WHERE chunk_namespace = ?1"  # apart, so that SQLite uses an index
        query = f"SELECT key, num_bytes FROM chunks {where} ORDER BY score, key LIMIT ?2"
        left, keys = self.num_bytes(namespace), []
        for key, size in self._all(query, namespace, most):
            if left <= limit:
                break
            keys.append(key)
            left -= size
        return keys

    def touch(self, keys: Sequence[str], uses: Sequence[int]) -> None:
        """Record the number of uses of each of these chunks, at the current time."""
        now = time.time()
        with self.transaction() as connection:
            clock, before = clock_of(connection), connection.total_changes
            connection.executemany(
                "UPDATE chunks SET used = ?1, uses = uses + ?2, score = raised(score, ?2,"
                " (SELECT num_tokens FROM texts WHERE texts.text = chunks.text), num_bytes, ?3) WHERE key = ?4",
                [(now, count, clock, key) for key, count in zip(keys, uses, strict=True)],
            )
            if connection.total_changes > before:  # a shared log may name chunks that are no longer stored
                advance(connection, sum(uses))

    def set_budget(self, namespace: str, bytes: int | None) -> None:
        """Set the byte budget of a namespace; None = none. Removes no chunks."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM counters WHERE name = ?", (_BUDGET + namespace,))
            if bytes is not None:
                connection.execute("INSERT INTO counters VALUES (?, ?)", (_BUDGET + namespace, bytes))

    def budgets(self) -> dict[str, int]:
        """Return the byte budget of each namespace that has one."""
        return self.counters(_BUDGET)

    def count(self, numbers: Mapping[str, int]) -> None:
        """Add to counters."""
        with self.transaction() as connection:
            connection.executemany(COUNT, list(numbers.items()))

    # ---------------------------------------------------------------- listings and maintenance

    def documents(self, prefix: str, namespace: str) -> dict[str, list[str]]:
        """See KVStore.documents."""
        query = f"SELECT DISTINCT document, key FROM holders {_WITH_PREFIX} ORDER BY document, key"
        documents: dict[str, list[str]] = {}
        for document, key in self._all(query, namespace, prefix, ON_REQUEST):
            documents.setdefault(document, []).append(key)
        return documents

    def count_tokens(self, prefix: str, namespace: str) -> dict[str, int]:
        """See KVStore.count_tokens."""
        texts = f"SELECT DISTINCT document, text FROM holders {_WITH_PREFIX}"
        query = f"SELECT document, sum(num_tokens) FROM ({texts}) JOIN texts USING (text) GROUP BY document"
        return dict(self._all(query, namespace, prefix, ON_REQUEST))

    def unheld(self) -> list[str]:
        """Return the chunks that no document relies on."""
        return [key for (key,) in self._all(f"SELECT key FROM chunks WHERE {_UNHELD}")]

    def namespaces(self) -> list[NamespaceStats]:
        """Return the statistics of each namespace that is not empty or has a budget."""
        with self._reading() as connection:
            documents = dict(
                connection.execute(
                    "SELECT namespace, count(DISTINCT document) FROM holders WHERE document NOT IN ('', ?) GROUP BY 1",
                    (ON_REQUEST,),
                ).fetchall()
            )
            rows = connection.execute(
                "SELECT namespace, count(DISTINCT text), count(*), sum(num_tokens), sum(num_bytes)"
                " FROM chunks JOIN texts USING (text) GROUP BY namespace"
            ).fetchall()
        counts = {name: counted for name, *counted in rows}
        budgets = self.budgets()
        return [
            NamespaceStats(name, texts, chunks, tokens, size, documents.get(name, 0), budgets.get(name))
            for name in sorted({*documents, *counts, *budgets})
            for texts, chunks, tokens, size in [counts.get(name, [0, 0, 0, 0])]
        ]

    def held(self, keys: Sequence[str], document: str) -> set[str]:
        """Return the chunks, out of these, that a document relies on, stored or not."""
        query = f"SELECT key FROM holders WHERE key IN {_LISTED} AND document = ?2"
        return {key for (key,) in self._all(query, json.dumps(keys), document)}

    def rows(self) -> list[ManifestRow]:
        """Return the rows of all chunks."""
        fields = "key, text, namespace, ids, context_tokens, file, num_bytes"
        return [ManifestRow(*row) for row in self._all(f"SELECT {fields} FROM chunks LEFT JOIN texts USING (text)")]

    def files(self) -> dict[str, str]:
        """Return the name of each chunk's file, by the chunk's key."""
        return dict(self._all("SELECT key, file FROM chunks"))


def _let_go(connection: sqlite3.Connection, where: str, values: Sequence[tuple[str, ...]]) -> list[tuple[str, str]]:
    """Delete holdings, once with each of these values; return the texts and the chunks that they had."""
    query = f"SELECT text, key FROM holders WHERE {where}"
    held = [row for each in values for row in connection.execute(query, each).fetchall()]
    connection.executemany(f"DELETE FROM holders WHERE {where}", values)
    return held


def _remove_rows(
    connection: sqlite3.Connection, keys: Sequence[str], file: str | None = None, unheld: bool = False
) -> list[Removed]:
    """Delete rows within the current transaction, see `Manifest.remove`."""
    where, values = f"WHERE key IN {_LISTED} AND (?2 IS NULL OR file = ?2)", (json.dumps(keys), file)
    where += f" AND {_UNHELD}" * unheld
    removed = connection.execute(f"SELECT key, file FROM chunks {where}", values).fetchall()
    connection.execute(f"DELETE FROM chunks {where}", values)
    return removed

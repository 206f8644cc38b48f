"""Eviction of chunks: scores, and budgets of namespaces.

Chunks with the lowest score are evicted first: see decision 23. The score is the logarithm of

    (tokens to compute again) / bytes * sum over all uses of 2 ** (clock at that use / half-life)

Counting a use only adds a term, and scores of different ages are comparable, so an index can hold them. The clock
counts uses: it advances by 1 when there have been as many uses as there are chunks.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence

from kvrag.store.schema import Database, advance, clock_of

_LOG = 100_000  # number of removals kept
_BUDGET = "budget "  # and a namespace: counter with its budget in bytes
_BYTES = "SELECT total(bytes) FROM totals WHERE ?1 IS NULL OR namespace = ?1"

Removed = tuple[str, str]
"""Key and file of a chunk whose row was deleted."""


class Eviction(Database):
    """The part of the manifest that scores chunks and removes those that save least."""

    def num_bytes(self, namespace: str | None = None) -> int:
        """Return the total size of all chunks of a namespace; None = of all."""
        return int(self._all(_BYTES, namespace)[0][0])

    def evict(self, limit: int, most: int, namespace: str | None = None) -> list[Removed]:
        """Delete the rows of at most `most` chunks, see `coldest`.

        The size is read in the same transaction, so that two processes do not make the same room twice.
        """
        with self._writing() as connection:
            return remove_rows(connection, self.coldest(limit, most, namespace))

    def coldest(self, limit: int, most: int, namespace: str | None = None) -> list[str]:
        """Return the keys of the chunks to remove until all take `limit` bytes, at most `most`.

        Args:
            namespace: Only chunks of this namespace count, and only these are removed; None = all.
        """
        keys = []
        where = "" if namespace is None else "WHERE chunk_namespace = ?1"  # apart, so that SQLite uses an index
        with self._writing() as connection:
            (left,) = connection.execute(_BYTES, (namespace,)).fetchone()
            query = f"SELECT key, num_bytes FROM chunks {where} ORDER BY score, key LIMIT ?2"
            for key, size in connection.execute(query, (namespace, most)):
                if left <= limit:
                    break
                keys.append(key)
                left -= size
        return keys

    def touch(self, uses: Mapping[str, int]) -> None:
        """Record the number of uses of each of these chunks, at the current time."""
        now = time.time()
        with self._writing() as connection:
            clock, before = clock_of(connection), connection.total_changes
            connection.executemany(
                "UPDATE chunks SET used = ?1, uses = uses + ?2, score = raised(score, ?2, context_tokens +"
                " (SELECT num_tokens FROM texts WHERE texts.text = chunks.text), num_bytes, ?3) WHERE key = ?4",
                [(now, count, clock, key) for key, count in uses.items()],
            )
            if connection.total_changes > before:  # a shared log may name chunks that are no longer stored
                advance(connection, sum(uses.values()))

    # ---------------------------------------------------------------- budgets

    def set_budget(self, namespace: str, max_bytes: int | None) -> None:
        """Set the byte budget of a namespace; None = none. Removes no chunks."""
        with self._writing() as connection:
            connection.execute("DELETE FROM counters WHERE name = ?", (_BUDGET + namespace,))
            if max_bytes is not None:
                connection.execute("INSERT INTO counters VALUES (?, ?)", (_BUDGET + namespace, max_bytes))

    def budgets(self) -> dict[str, int]:
        """Return the byte budget of each namespace that has one."""
        rows = self._all("SELECT name, value FROM counters WHERE name GLOB ?", f"{_BUDGET}*")
        return {name.removeprefix(_BUDGET): value for name, value in rows}

    def set_scores(self, scores: Iterable[tuple[str, float]]) -> None:
        """Replace the scores of these chunks by those of another manifest with the same clock."""
        with self._writing() as connection:
            connection.executemany("UPDATE chunks SET score = ?2 WHERE key = ?1", scores)


def remove_rows(connection: sqlite3.Connection, keys: Sequence[str], file: str | None = None) -> list[Removed]:
    """Delete rows, only those with this file if one is given, within the current transaction."""
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

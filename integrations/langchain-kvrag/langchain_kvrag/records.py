"""SQLiteRecordManager: record manager of `langchain_core.indexing.index` in one SQLite file."""

from __future__ import annotations

import asyncio
import json
import math
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langchain_core.indexing import RecordManager

from kvrag import StoreError
from kvrag.store.schema import SQLiteFile

# instead of langchain-classic's SQLRecordManager, which loses the source of renewed records after a failed indexing
_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS records (
    namespace TEXT NOT NULL, key TEXT NOT NULL, group_id TEXT, updated_at REAL NOT NULL,
    PRIMARY KEY (namespace, key)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS records_by_time ON records (namespace, updated_at);
CREATE INDEX IF NOT EXISTS records_by_group ON records (namespace, group_id);
COMMIT;
"""
_UPSERT = """
INSERT INTO records (namespace, key, group_id, updated_at) VALUES (?, ?, ?, ?)
ON CONFLICT (namespace, key) DO UPDATE SET updated_at = excluded.updated_at
"""


def _off_the_loop(name: str) -> Any:
    """Return an async method that calls the method of this name in a thread."""

    async def method(self: RecordManager, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.to_thread(getattr(self, name), *args, **kwargs)

    method.__doc__ = f"Like `{name}`, off the event loop."
    return method


class SQLiteRecordManager(RecordManager):
    """Record manager in one SQLite file, safe for several threads and processes."""

    def __init__(self, namespace: str, path: str | Path) -> None:
        """Open or create the file with its schema.

        Args:
            namespace: Separates the records of several vector stores.

        Raises:
            StoreError: The file cannot be opened, or is not a SQLite file.
        """
        super().__init__(namespace)
        self.path = Path(path)
        self._lock = threading.RLock()
        self._latest = 0.0
        with self._translated():
            self._db = SQLiteFile(self.path)
        self.create_schema()

    def create_schema(self) -> None:
        """Create missing tables; the constructor already does. Required by the interface."""
        with self._lock, self._translated():
            self._db.executescript(_SCHEMA)

    def get_time(self) -> float:
        """Return seconds since 1970, later than all earlier results, even if the clock is set back."""
        ((stored,),) = self._read("SELECT max(updated_at) FROM records WHERE namespace = ?", self.namespace)
        with self._lock:
            self._latest = max(time.time(), math.nextafter(max(self._latest, stored or 0.0), math.inf))
            return self._latest

    def update(
        self,
        keys: Sequence[str],
        *,
        group_ids: Sequence[str | None] | None = None,
        time_at_least: float | None = None,
    ) -> None:
        """Insert records, or update their times.

        Args:
            group_ids: One per key; None = known records keep theirs.

        Raises:
            ValueError: The numbers of groups and keys differ, or `time_at_least` is in the future.
        """
        if group_ids is not None and len(keys) != len(group_ids):
            raise ValueError(f"got {len(group_ids)} group_ids for {len(keys)} keys: pass one per key")
        upsert = _UPSERT if group_ids is None else f"{_UPSERT}, group_id = excluded.group_id"
        with self._transaction() as db:
            now = self.get_time()
            if time_at_least is not None and time_at_least > now:
                raise ValueError(f"time_at_least must be in the past, got {time_at_least} at {now}")
            groups = [None] * len(keys) if group_ids is None else group_ids
            db.executemany(upsert, [(self.namespace, *pair, now) for pair in zip(keys, groups, strict=True)])

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return whether each key has a record."""
        query = "SELECT key FROM records WHERE namespace = ? AND key IN (SELECT value FROM json_each(?))"
        known = {key for (key,) in self._read(query, self.namespace, json.dumps(list(keys)))}
        return [key in known for key in keys]

    def list_keys(
        self,
        *,
        before: float | None = None,
        after: float | None = None,
        group_ids: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> list[str]:
        """Return the keys updated before and after these times in these groups, oldest first; None = any."""
        conditions: dict[str, object] = {"namespace = ?": self.namespace}
        if before is not None:
            conditions["updated_at < ?"] = before
        if after is not None:
            conditions["updated_at > ?"] = after
        if group_ids is not None:
            conditions["group_id IN (SELECT value FROM json_each(?))"] = json.dumps(list(group_ids))
        query = f"SELECT key FROM records WHERE {' AND '.join(conditions)} ORDER BY updated_at, key LIMIT ?"
        return [key for (key,) in self._read(query, *conditions.values(), -1 if limit is None else limit)]

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete records; unknown keys are ignored."""
        with self._transaction() as db:
            db.executemany("DELETE FROM records WHERE namespace = ? AND key = ?", [(self.namespace, k) for k in keys])

    acreate_schema = _off_the_loop("create_schema")
    aget_time = _off_the_loop("get_time")
    aupdate = _off_the_loop("update")
    aexists = _off_the_loop("exists")
    alist_keys = _off_the_loop("list_keys")
    adelete_keys = _off_the_loop("delete_keys")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _read(self, query: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        with self._lock, self._translated():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated():
            self._db.execute("BEGIN IMMEDIATE")  # so that times increase across processes
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeEncodeError) as error:  # the latter for file names that are not valid text
            is_closed = isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error)
            why = "is closed" if is_closed else f"cannot be used: {error}"
            raise StoreError(f"the record manager {self.path} {why}") from error

"""A chunk index that machines share: each has a copy, and every document is an object in a shared store."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from kvrag.errors import StoreError
from kvrag.retrieval.index import ChunkIndex, Hit

logger = logging.getLogger("kvrag")

_SCHEMA = "CREATE TABLE IF NOT EXISTS mirrored (name TEXT PRIMARY KEY, object TEXT NOT NULL, document TEXT NOT NULL)"


class Place(Protocol):
    """The part of a shared store that this needs; see `kvrag.store.SharedStore`."""

    def publications(self) -> int:
        """Return a number that changes when any machine publishes or withdraws something."""

    def published(self, folder: str) -> list[str]:
        """Return the names of what was published in a folder."""

    def read_published(self, folder: str, name: str) -> bytes | None:
        """Return what was published under a name."""

    def publish(self, folder: str, name: str, content: bytes, replaces: Sequence[str]) -> None:
        """Publish something, and withdraw what it replaces."""

    def withdraw(self, folder: str, names: Sequence[str]) -> None:
        """Withdraw what was published under these names."""


class SharedIndex(ChunkIndex):
    """A ChunkIndex whose documents other machines add and remove, too. Vectors are shared: each is computed once."""

    def __init__(self, path: str | Path, embedder: str | None, place: Place, namespace: str) -> None:
        """Open this machine's copy, and bring it up to date.

        Raises:
            StoreError: As ChunkIndex; or the place cannot be reached.
        """
        super().__init__(path, embedder)
        self._place, self._folder = place, _hash(namespace)
        self._seen: int | None = None
        self._db.execute(_SCHEMA)
        self._sync()

    def _sync(self) -> None:
        """Take in what others have added and removed."""
        publications = self._place.publications()
        with self._lock:
            if publications == self._seen:
                return
            latest = {name.partition("-")[0]: name for name in sorted(self._place.published(self._folder))}
            mine = {name: (found, document) for name, found, document in self._read("SELECT * FROM mirrored")}
            for name in set(mine) - set(latest):
                super().remove(mine[name][1])
                with self._transaction() as db:
                    db.execute("DELETE FROM mirrored WHERE name = ?", (name,))
            for name, found in latest.items():
                if mine.get(name, ("", ""))[0] != found:
                    content = self._place.read_published(self._folder, found)
                    if content is None:  # replaced in the meantime
                        continue
                    if found != f"{name}-{_digest(content)}":
                        logger.warning("%s in the index is damaged: add its document again", found)
                        continue
                    self._take(name, found, content)
            self._seen = publications

    def _take(self, name: str, found: str, content: bytes) -> None:
        read = json.loads(zlib.decompress(content))
        if read["embedder"] != self.embedder:
            raise StoreError(f"the documents were embedded with {read['embedder']}: pass --embedder {read['embedder']}")
        vectors = {text: np.frombuffer(base64.b64decode(vector), np.float32) for text, vector in read["chunks"]}
        pages = {text: (first, last) for text, first, last in read["pages"]}
        with self._transaction() as db:
            self._enter(db, list(vectors), vectors, read["document"], pages)
            db.execute("INSERT OR REPLACE INTO mirrored VALUES (?, ?, ?)", (name, found, read["document"]))

    def _try_sync(self) -> None:
        """Search what is here if the place cannot be reached."""
        try:
            self._sync()
        except StoreError as error:
            logger.warning("%s; this machine's copy of the index is searched", error)

    def add(
        self,
        texts: Sequence[str],
        document: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
        pages: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> int:
        """See ChunkIndex.add. The document is published before this returns."""
        self._sync()
        added = super().add(texts, document, progress, pages)
        rows = self._read(
            "SELECT text, vector FROM documents JOIN chunks ON id = chunk WHERE document = ? ORDER BY position",
            (document,),
        )
        its_pages = self._read(
            "SELECT text, first, last FROM pages JOIN documents USING (document, position) JOIN chunks ON id = chunk"
            " WHERE document = ?",
            (document,),
        )
        chunks = [[text, base64.b64encode(vector).decode()] for text, vector in rows]
        made = {"embedder": self.embedder, "document": document, "chunks": chunks, "pages": its_pages}
        content = zlib.compress(json.dumps(made).encode(), 1)
        name = _hash(document)
        found = f"{name}-{_digest(content)}"
        published = self._place.published(self._folder)
        if found not in published or self._place.read_published(self._folder, found) != content:  # damaged
            before = [each for each in published if each.partition("-")[0] == name and each != found]
            self._place.publish(self._folder, found, content, before)
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO mirrored VALUES (?, ?, ?)", (name, found, document))
        return added

    def remove(self, document: str) -> int:
        """See ChunkIndex.remove. The document is withdrawn first."""
        name = _hash(document)
        published = [each for each in self._place.published(self._folder) if each.partition("-")[0] == name]
        if published:
            self._place.withdraw(self._folder, published)
        with self._transaction() as db:
            db.execute("DELETE FROM mirrored WHERE name = ?", (name,))
        return super().remove(document)

    def search(self, question: str, k: int = 4, around: int = 0) -> list[Hit]:
        """See ChunkIndex.search."""
        self._try_sync()
        return super().search(question, k, around)

    def counts(self) -> dict[str, int]:
        """See ChunkIndex.counts."""
        self._try_sync()
        return super().counts()


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()

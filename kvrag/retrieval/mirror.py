"""A chunk index shared by several machines: each has a copy, and every document is an object in a shared store."""

from __future__ import annotations

import base64
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from kvrag.errors import StoreError
from kvrag.retrieval.index import NO_PAGES, ChunkIndex, Hit, Pages
from kvrag.store import SharedStore

logger = logging.getLogger("kvrag")

_SCHEMA = "CREATE TABLE IF NOT EXISTS mirrored (name TEXT PRIMARY KEY, object TEXT NOT NULL, document TEXT NOT NULL)"


class SharedIndex(ChunkIndex):
    """A ChunkIndex to which other machines add documents, too. Vectors are shared: each is computed once."""

    def __init__(self, path: str | Path, embedder: str | None, store: SharedStore, namespace: str) -> None:
        """Open this machine's copy, and bring it up to date.

        Raises:
            StoreError: As ChunkIndex; or the store cannot be reached.
        """
        super().__init__(path, embedder)
        self._store, self._folder = store, _hash(namespace)
        self._seen: int | None = None
        self._db.execute(_SCHEMA)
        self._sync()

    def _sync(self) -> None:
        """Apply the changes by other machines."""
        publications = self._store.publications()
        with self._lock:
            if publications == self._seen:
                return
            latest = {name.partition("-")[0]: name for name in sorted(self._store.published(self._folder))}
            copies = {name: (version, document) for name, version, document in self._read("SELECT * FROM mirrored")}
            for document in [document for name, (_, document) in copies.items() if name not in latest]:
                self._drop(document)
            for name, version in latest.items():
                if name in copies and copies[name][0] == version:
                    continue
                content = self._store.read_published(self._folder, version)
                if content is None:  # replaced in the meantime
                    continue
                if version == _version(name, content):
                    self._copy(name, version, content)
                else:
                    logger.warning("%s in the index is damaged: add its document again", version)
            self._seen = publications

    def _drop(self, document: str) -> int:
        """Remove a document from this machine's copy; if that is interrupted, it is repeated."""
        removed = super().remove(document)
        with self._transaction():
            self._db.execute("DELETE FROM mirrored WHERE document = ?", (document,))
        return removed

    def _copy(self, name: str, version: str, content: bytes) -> None:
        record = json.loads(zlib.decompress(content))
        embedder, document = record["embedder"], record["document"]
        if embedder != self.embedder:
            raise StoreError(f"the documents were embedded with {embedder}: pass --embedder {embedder}")
        vectors = {text: np.frombuffer(base64.b64decode(vector), np.float32) for text, vector in record["chunks"]}
        pages = {text: (first, last) for text, first, last in record["pages"]}
        with self._transaction():
            self._enter(list(vectors), vectors, document, pages)
            self._db.execute("INSERT OR REPLACE INTO mirrored VALUES (?, ?, ?)", (name, version, document))

    def _try_sync(self) -> None:
        """Search this machine's copy if the store cannot be reached."""
        try:
            self._sync()
        except StoreError as error:
            logger.warning("%s; this machine's copy of the index is searched", error)

    def add(
        self,
        texts: Sequence[str],
        document: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
        pages: Pages = NO_PAGES,
    ) -> int:
        """See ChunkIndex.add. The document is published before this returns."""
        self._sync()
        added = super().add(texts, document, progress, pages)
        rows = self._read(
            "SELECT text, vector, first, last FROM documents JOIN chunks ON id = chunk "
            "LEFT JOIN pages USING (document, position) WHERE document = ? ORDER BY position",
            (document,),
        )
        chunks = [[text, base64.b64encode(vector).decode()] for text, vector, *_ in rows]
        in_pages = [[text, first, last] for text, _, first, last in rows if first is not None]
        record = {"embedder": self.embedder, "document": document, "chunks": chunks, "pages": in_pages}
        content = zlib.compress(json.dumps(record).encode(), 1)
        name = _hash(document)
        version = _version(name, content)
        published = self._published(name)
        if version not in published or self._store.read_published(self._folder, version) != content:  # damaged
            self._store.publish(self._folder, version, content, [other for other in published if other != version])
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO mirrored VALUES (?, ?, ?)", (name, version, document))
        return added

    def _published(self, name: str) -> list[str]:
        """Return the published versions of a document, by the hash of its name."""
        return [version for version in self._store.published(self._folder) if version.partition("-")[0] == name]

    def remove(self, document: str) -> int:
        """See ChunkIndex.remove. The document is withdrawn first."""
        if published := self._published(_hash(document)):
            self._store.withdraw(self._folder, published)
        return self._drop(document)

    def search(self, question: str, k: int = 4, around: int = 0) -> list[Hit]:
        """See ChunkIndex.search."""
        self._try_sync()
        return super().search(question, k, around)

    def counts(self) -> dict[str, int]:
        """See ChunkIndex.counts."""
        self._try_sync()
        return super().counts()


def _version(name: str, content: bytes) -> str:
    return f"{name}-{blake2b(content, digest_size=8).hexdigest()}"


def _hash(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()

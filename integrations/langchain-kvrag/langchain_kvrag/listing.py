"""Documents of a vector store. LangChain has no method to list them, so each store is listed in its own way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

_PAGE = 1000  # ids per request
_BATCH = 256  # documents per request
_CHROMA = "langchain_chroma.Chroma"
_PLACES = ("page", "page_number", "row", "seq_num", "chunk_number", "chunk_index", "chunk_id", "chunk", "start_index")


def listed_ids(store: VectorStore) -> list[Any] | None:
    """Return the ids of all documents, as `get_by_ids` takes them; None = this store cannot be listed."""
    list_ids = next((_LISTERS[name] for name in _names(store) if name in _LISTERS), None)
    return None if list_ids is None else list(list_ids(store))


def lists_in_order(store: VectorStore) -> bool:
    """Return whether `listed_ids` returns the ids in the order in which the documents were added."""
    return any(name in _IN_ORDER for name in _names(store))


def place(document: Document) -> tuple[float, ...]:
    """Return the place of a chunk in its source, from the metadata that loaders and splitters write."""
    values = (document.metadata.get(name) for name in _PLACES)
    return tuple(value if isinstance(value, (int, float)) else -1 for value in values)


def documents_by_id(store: VectorStore, ids: Sequence[Any]) -> list[Document]:
    """Return the documents with these ids, requested in batches."""
    return [document for batch in _batches(ids) for document in _documents(store, batch)]


async def adocuments_by_id(store: VectorStore, ids: Sequence[Any]) -> list[Document]:
    """Like `documents_by_id`, off the event loop."""
    if _CHROMA in _names(store):
        return await asyncio.to_thread(documents_by_id, store, ids)
    return [document for batch in _batches(ids) for document in await store.aget_by_ids(batch)]


def _batches(ids: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (ids[start : start + _BATCH] for start in range(0, len(ids), _BATCH))


def _documents(store: VectorStore, ids: Sequence[Any]) -> list[Document]:
    if _CHROMA not in _names(store):
        return store.get_by_ids(ids)
    # Chroma.get_by_ids fails on documents without metadata
    columns = store.get(list(ids))  # type: ignore[attr-defined]
    rows = zip(columns["ids"], columns["documents"], columns["metadatas"], strict=True)
    return [Document(text, id=document_id, metadata=metadata or {}) for document_id, text, metadata in rows]


def _names(store: VectorStore) -> list[str]:
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(store).__mro__]


def _by_get(store: Any) -> Iterator[str]:
    offset = 0
    while ids := store.get(limit=_PAGE, offset=offset, include=[])["ids"]:
        yield from ids
        offset += len(ids)


def _qdrant(store: Any) -> Iterator[Any]:
    offset = None
    while True:
        points, offset = store.client.scroll(
            store.collection_name, limit=_PAGE, offset=offset, with_payload=False, with_vectors=False
        )
        yield from (point.id for point in points)
        if offset is None:
            return


def _pgvector(store: Any) -> Iterator[str]:
    with store.session_maker() as session:
        collection, rows = store.get_collection(session), store.EmbeddingStore
        if collection is not None:
            yield from (
                document_id for (document_id,) in session.query(rows.id).filter(rows.collection_id == collection.uuid)
            )


# by name, since these packages need not be installed
_LISTERS: dict[str, Callable[[Any], Any]] = {
    "langchain_core.InMemoryVectorStore": lambda store: store.store,
    _CHROMA: _by_get,
    "langchain_community.Chroma": _by_get,
    "langchain_community.FAISS": lambda store: store.index_to_docstore_id.values(),
    "langchain_qdrant.QdrantVectorStore": _qdrant,
    "langchain_postgres.PGVector": _pgvector,
    "langchain_postgres.PGVectorStore": _by_get,
}
_IN_ORDER = (
    *("langchain_core.InMemoryVectorStore", "langchain_community.FAISS"),
    *(_CHROMA, "langchain_community.Chroma"),
)

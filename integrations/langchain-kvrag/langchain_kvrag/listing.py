"""Documents that a vector store holds. LangChain has no method to list them, so every store has a way of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.vectorstores import VectorStore

_PAGE = 1000  # ids per request
_CHROMA = "langchain_chroma.Chroma"


def listed_ids(store: VectorStore) -> list[Any] | None:
    """Return the ids of all documents as `get_by_ids` takes them; None if it is not known how to list this store."""
    ids = next((_WAYS[name] for name in _names(store) if name in _WAYS), None)
    return None if ids is None else list(ids(store))


def documents_by_id(store: VectorStore, ids: Sequence[Any]) -> list[Document]:
    """Return `store.get_by_ids(ids)`."""
    if _CHROMA not in _names(store):
        return store.get_by_ids(ids)
    # its own method fails on documents without metadata
    found = store.get(list(ids))  # type: ignore[attr-defined]
    rows = zip(found["ids"], found["documents"], found["metadatas"], strict=True)
    return [Document(text, id=one, metadata=metadata or {}) for one, text, metadata in rows]


async def adocuments_by_id(store: VectorStore, ids: Sequence[Any]) -> list[Document]:
    """Like `documents_by_id`, off the event loop."""
    if _CHROMA not in _names(store):
        return await store.aget_by_ids(ids)
    return await asyncio.to_thread(documents_by_id, store, ids)


def _names(store: VectorStore) -> list[str]:
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(store).__mro__]


def _by_get(store: Any) -> Iterator[str]:
    offset = 0
    while found := store.get(limit=_PAGE, offset=offset, include=[])["ids"]:
        yield from found
        offset += len(found)


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
            yield from (one for (one,) in session.query(rows.id).filter(rows.collection_id == collection.uuid))


# by name, since these packages need not be installed
_WAYS: dict[str, Callable[[Any], Any]] = {
    "langchain_core.InMemoryVectorStore": lambda store: store.store,
    _CHROMA: _by_get,
    "langchain_community.Chroma": _by_get,
    "langchain_community.FAISS": lambda store: store.index_to_docstore_id.values(),
    "langchain_qdrant.QdrantVectorStore": _qdrant,
    "langchain_postgres.PGVector": _pgvector,
    "langchain_postgres.PGVectorStore": _by_get,
}

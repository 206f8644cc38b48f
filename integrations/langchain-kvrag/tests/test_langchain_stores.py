"""KVWarmVectorStore around common vector stores."""

from __future__ import annotations

import copy
import pickle
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from frameworks import kept
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.structured_query import Comparator, Comparison, StructuredQuery
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvrag import ChatBlend, KVWarmVectorStore
from langchain_kvrag.listing import listed_ids

from kvrag import BlendEngine

EMBEDDING = DeterministicFakeEmbedding(size=16)
IDS = [str(uuid.UUID(int=number)) for number in range(4)]


def chroma() -> VectorStore:
    module = pytest.importorskip("langchain_chroma")
    return module.Chroma(f"c{uuid.uuid4().hex}", EMBEDDING)  # type: ignore[no-any-return]


def qdrant() -> VectorStore:
    module = pytest.importorskip("langchain_qdrant")
    made = module.QdrantVectorStore.from_texts(["to be deleted"], EMBEDDING, ids=[IDS[0]], location=":memory:")
    made.delete([IDS[0]])
    return made  # type: ignore[no-any-return]


def faiss() -> VectorStore:
    module = pytest.importorskip("langchain_community.vectorstores")
    return module.FAISS.from_documents([Document("to be deleted", id="x")], EMBEDDING)  # type: ignore[no-any-return]


STORES: dict[str, Callable[[], VectorStore]] = {
    "Chroma": chroma,
    "Qdrant": qdrant,
    "FAISS": faiss,
    "in memory": lambda: InMemoryVectorStore(EMBEDDING),
}


@pytest.fixture(params=STORES)
def existing(request: pytest.FixtureRequest, chunks: list[str]) -> VectorStore:
    """A vector store with the chunks, without KV."""
    store = STORES[request.param]()
    store.add_texts(chunks, [{"n": i} for i in range(4)], ids=IDS)
    if request.param == "FAISS":
        store.delete(["x"])
    return store


async def test_existing_documents_of_a_store_are_listed_and_warmed(
    existing: VectorStore, engine: BlendEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("langchain_kvrag.listing._PAGE", 3)  # more than one page
    store = KVWarmVectorStore(existing, engine)
    assert store.warm_existing().new == 4
    assert kept(engine) == sorted(chunks)
    existing.delete(IDS[:1])  # without the wrapper
    assert (await store.awarm_existing()).chunks == 3
    assert kept(engine) == sorted(chunks[1:])
    store.delete(IDS[1:])
    assert kept(engine) == []


@pytest.mark.parametrize("way", ["listed", "whole"])
def test_stale_kv_of_a_killed_program_is_dropped(way: str, engine: BlendEngine, chunks: list[str]) -> None:
    killed = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine)
    adding = killed._plan([Document(chunks[0])], None)
    killed._kv._warm(adding.texts, adding.names, adding.sources)  # and never added
    other = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine, collection="other")
    other.add_texts(chunks[2:3])
    store = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine)
    store.vectorstore.add_texts(chunks[1:2], ids=["one"])
    store.warm_existing(["one"])
    assert kept(engine) == sorted(chunks[:3])
    store.warm_existing() if way == "listed" else store.warm_existing(["one"], whole=True)
    assert kept(engine) == sorted(chunks[1:3])


def test_the_rows_of_pgvector_are_listed(chunks: list[str]) -> None:
    """With its documented attributes on SQLite: more would need a database server."""
    orm = pytest.importorskip("sqlalchemy.orm")
    sql = pytest.importorskip("sqlalchemy")
    base = orm.declarative_base()

    class EmbeddingStore(base):  # type: ignore[misc,valid-type]
        __tablename__ = "langchain_pg_embedding"
        id = sql.Column(sql.String, primary_key=True)
        collection_id = sql.Column(sql.String)

    class PGVector(InMemoryVectorStore):
        session_maker = orm.sessionmaker(sql.create_engine("sqlite://", poolclass=sql.StaticPool))
        collection: Any = type("Collection", (), {"uuid": "mine"})

        def get_collection(self, session: Any) -> Any:
            return self.collection

    PGVector.EmbeddingStore = EmbeddingStore  # type: ignore[attr-defined]
    PGVector.__module__ = "langchain_postgres.vectorstores"
    store = PGVector(EMBEDDING)
    with store.session_maker() as session:
        base.metadata.create_all(session.get_bind())
        session.add_all(EmbeddingStore(id=one, collection_id="mine" if one != "c" else "other") for one in "abc")
        session.commit()
    assert listed_ids(store) == ["a", "b"]
    store.collection = None  # deleted
    assert listed_ids(store) == []


# ---------------------------------------------------------------- methods of Chroma


@pytest.fixture
def store(engine: BlendEngine, chunks: list[str]) -> KVWarmVectorStore:
    store = KVWarmVectorStore(chroma(), engine)
    store.add_texts(chunks[:2], ids=["one", "two"])
    return store


async def test_chroma_returns_documents_without_metadata(store: KVWarmVectorStore, engine: BlendEngine) -> None:
    assert store.warm_existing().chunks == (await store.awarm_existing()).chunks == len(kept(engine)) == 2


def test_updates_of_chroma_are_followed(store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]) -> None:
    store.update_document("one", Document(chunks[2], metadata={"n": 1}))
    assert kept(engine) == sorted(chunks[1:3])
    updates = [Document(text, metadata={"n": 2}) for text in (chunks[3], chunks[0])]
    store.update_documents(["two", "unknown"], updates)  # Chroma ignores the latter
    assert kept(engine) == sorted(store.get()["documents"]) == sorted(chunks[2:])
    with pytest.raises(ValueError, match="metadata"):
        store.update_document("one", Document(chunks[0], metadata={"n": object()}))
    assert kept(engine) == sorted(chunks[2:])


@pytest.mark.parametrize("method", ["reset_collection", "delete_collection"])
def test_a_collection_that_is_cleared_has_no_kv(method: str, store: KVWarmVectorStore, engine: BlendEngine) -> None:
    getattr(store, method)()
    assert kept(engine) == []
    assert engine.documents() == []


def test_other_stores_do_not_get_these_methods(engine: BlendEngine) -> None:
    store = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine)
    assert not hasattr(store, "update_documents")
    assert not hasattr(store, "reset_collection")


# ---------------------------------------------------------------- what depends on the kind of store


@pytest.mark.parametrize("kind", ["Chroma", "Qdrant"])
def test_a_self_query_retriever_finds_its_translator(kind: str, engine: BlendEngine, chunks: list[str]) -> None:
    pytest.importorskip("langchain_community")
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    store = KVWarmVectorStore(STORES[kind](), engine)
    store.add_texts(chunks, [{"n": i} for i in range(4)], ids=IDS)
    # a model's query for "the one with the number 2"
    asked = StructuredQuery(query="?", filter=Comparison(comparator=Comparator.EQ, attribute="n", value=2), limit=None)
    retriever = retrievers.SelfQueryRetriever(vectorstore=store, query_constructor=RunnableLambda(lambda _: asked))
    assert [document.page_content for document in retriever.invoke("The one with the number 2")] == [chunks[2]]


def test_a_wrapper_is_an_instance_of_both_classes(engine: BlendEngine, chunks: list[str]) -> None:
    class Other(InMemoryVectorStore):
        pass

    store = KVWarmVectorStore(KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine, collection="inner"), engine)
    assert isinstance(store, KVWarmVectorStore)
    assert isinstance(store, InMemoryVectorStore)
    assert not isinstance(store, Other)
    assert type(store) is type(copy.copy(store)) is KVWarmVectorStore
    assert store.as_retriever().tags == ["InMemoryVectorStore", "DeterministicFakeEmbedding"]
    assert isinstance(object.__new__(KVWarmVectorStore), KVWarmVectorStore)


def test_a_wrapper_can_be_pickled(settings: dict[str, Any], chunks: list[str]) -> None:
    store = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), ChatBlend(**settings), collection="c")
    store.add_texts(chunks[:1], ids=["one"])
    again = pickle.loads(pickle.dumps(store))
    assert (type(again), again.collection) == (KVWarmVectorStore, "c")
    assert again.warm_existing().reused == 1

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
from kvrag.store import visible_variant
from kvrag.store.values import text_key

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
    made = module.FAISS.from_documents([Document("to be deleted", id="x")], EMBEDDING)
    made.delete(["x"])
    return made  # type: ignore[no-any-return]


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


# ---------------------------------------------------------------- sources, and the order of their chunks

SHUFFLED = [str(uuid.UUID(int=number)) for number in (6, 5, 0, 4, 2, 1, 3, 7)]  # Qdrant lists by id


def report(**places: list[int]) -> list[Document]:
    """The chunks of one source, in reading order, with these places in their metadata."""
    texts = [f"Part {number} of the report. She was born in Florton, and lives in Grelville." for number in range(8)]
    metadatas = [{"source": "report.txt"} | {name: places[name][i] for name in places} for i in range(8)]
    return [
        Document(text, id=one, metadata=metadata)
        for text, one, metadata in zip(texts, SHUFFLED, metadatas, strict=True)
    ]


def contexts(engine: BlendEngine, documents: list[Document]) -> list[str]:
    """The context that each text was encoded with, as prompts get it."""
    keys = [text_key("", engine.encode(document.page_content)) for document in documents]
    states = engine.store.look_up(keys)
    served = [visible_variant(states[key], alone_only=False) or "" for key in keys]
    return [engine.model.tokenizer.decode(engine.store.open(key).context.tolist()) for key in served]


@pytest.mark.parametrize("kind", STORES)
async def test_stored_kv_is_kept_in_any_order(kind: str, engine: BlendEngine) -> None:
    store, documents = KVWarmVectorStore(STORES[kind](), engine), report()
    store.add_documents(documents)
    before = contexts(engine, documents)
    assert len(set(before)) == 8, "each has its own context"
    for found in (store.warm_existing(), await store.awarm_existing(), store.warm_existing(SHUFFLED[2:5])):
        assert (found.new, found.reused) == (0, found.chunks)
    assert found.chunks == 3
    assert contexts(engine, documents) == before
    assert len(engine.documents()) == 8


@pytest.mark.parametrize(
    "places",
    [{"start_index": [*range(0, 800, 100)]}, {"page": [1, 1, 1, 2, 2, 2, 3, 3], "chunk": [1, 2, 3] * 2 + [1, 2]}],
)
@pytest.mark.parametrize("kind", STORES)
def test_existing_chunks_are_encoded_in_the_order_of_their_places(
    kind: str, places: dict[str, list[int]], engine: BlendEngine
) -> None:
    documents = report(**places)
    engine.warm([document.page_content for document in documents], document="in order")
    expected = contexts(engine, documents)
    engine.forget("in order")
    store = KVWarmVectorStore(STORES[kind](), engine)
    store.vectorstore.add_documents([documents[i] for i in (3, 1, 0, 7, 5, 4, 6, 2)])
    found = store.warm_existing()
    assert (found.new, found.warnings) == (8, ())
    assert contexts(engine, documents) == expected
    one = next(name for name in engine.documents() if SHUFFLED[4] in name)
    engine.forget(one)
    assert (store.warm_existing().new, contexts(engine, documents)) == (1, expected)


@pytest.mark.parametrize("kind", STORES)
def test_existing_chunks_in_an_unknown_order_are_encoded_alone(
    kind: str, engine: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    store, documents = KVWarmVectorStore(STORES[kind](), engine), report()
    store.vectorstore.add_documents(documents)
    found = store.warm_existing(SHUFFLED)  # ids in any order
    assert found.new == 8
    assert contexts(engine, documents) == [""] * 8
    assert found.warnings == (caplog.messages[-1],)
    assert "1 sources (such as langchain/default/report.txt) have chunks in an unknown order" in caplog.text
    again = store.warm_existing()
    assert (again.new, again.warnings) == (0, ())
    other = KVWarmVectorStore(store.vectorstore, engine, namespace="other")
    assert len(other.warm_existing().warnings) == (kind == "Qdrant"), "others list in the order of adding"


def test_evicted_kv_and_changed_sources_are_encoded_again(engine: BlendEngine) -> None:
    store, documents = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine), report()
    store.add_documents(documents)
    before = contexts(engine, documents)
    state = engine.store.look_up([text_key("", engine.encode(documents[3].page_content))])
    engine.store.remove(*[[*one.variants] for one in state.values()])
    assert (store.warm_existing().new, contexts(engine, documents)) == (1, before)
    documents[7].metadata["source"] = "letter.txt"
    store.vectorstore.add_documents(documents[7:])
    assert (store.warm_existing().new, contexts(engine, documents)) == (1, [*before[:7], ""])


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

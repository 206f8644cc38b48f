"""KVWarmVectorStore: LangChain's own suite and its indexing, with a real engine."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from frameworks import kept
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.indexing import aindex, index
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvrag import (
    BlendLLM,
    ChatBlend,
    KVWarmVectorStore,
    SQLiteRecordManager,
)

from kvrag import BlendEngine, ContextWindowError, KvragError, SettingError, StoreFullError
from kvrag.store import visible_variant
from kvrag.store.values import text_key

EMBEDDING = DeterministicFakeEmbedding(size=16)
OTHER = "Florton is a town by the sea. It has a harbour, a museum and two schools. Its mayor is Tran Hol."


class DeletesAll(InMemoryVectorStore):
    """Like vector stores of databases: without ids, it deletes all."""

    @property
    def ids(self) -> list[str]:
        return list(self.store)

    def delete(self, ids: Any = None, **kwargs: Any) -> bool:  # type: ignore[override]
        super().delete(self.ids if ids is None else ids)
        return True

    async def adelete(self, ids: Any = None, **kwargs: Any) -> bool:  # type: ignore[override]
        return self.delete(ids, **kwargs)

    def _select_relevance_score_fn(self) -> Any:
        return lambda score: min(max(score, 0.0), 1.0)


@pytest.fixture
def store(engine: BlendEngine) -> KVWarmVectorStore:
    return KVWarmVectorStore(DeletesAll(EMBEDDING), engine)


@pytest.fixture
def records(tmp_path: Path) -> Iterator[SQLiteRecordManager]:
    records = SQLiteRecordManager("here", tmp_path / "records.sqlite")
    yield records
    records.close()


def found(store: VectorStore) -> list[str]:
    """The texts in a vector store, sorted, each once."""
    return sorted({document.page_content for document in store.similarity_search("anything", k=99)})


def context(engine: BlendEngine, text: str) -> int:
    """Number of context tokens of the variant that prompts get."""
    key = text_key("", engine.model.tokenizer.encode(text))
    state = engine.store.look_up([key])[key]
    served = visible_variant(state, alone_only=False)
    assert served is not None
    return state.variants[served]


# ---------------------------------------------------------------- indexing


@pytest.fixture(params=["index", "aindex"])
def run(request: pytest.FixtureRequest, records: SQLiteRecordManager, store: KVWarmVectorStore) -> Any:
    def settings(cleanup: str, **other: Any) -> dict[str, Any]:
        return {"cleanup": cleanup, "source_id_key": "source", "key_encoder": "sha256", **other}

    async def run(documents: Iterable[Document], cleanup: str, **other: Any) -> Any:
        if request.param == "aindex":
            return await aindex(documents, records, store, **settings(cleanup, **other))
        return index(documents, records, store, **settings(cleanup, **other))

    return run


def sourced(texts: Iterable[str], **metadata: Any) -> list[Document]:
    return [Document(text, metadata={"source": f"{i // 2}.txt", **metadata}) for i, text in enumerate(texts)]


@pytest.mark.parametrize("cleanup", ["incremental", "full", "scoped_full"])
async def test_indexing_keeps_kv_and_vectors_in_step(
    cleanup: str,
    run: Any,
    store: KVWarmVectorStore,
    engine: BlendEngine,
    chunks: list[str],
    forwards: list[int],
) -> None:
    result = await run(sourced(chunks), cleanup)
    assert result["num_added"] == 4
    assert kept(engine) == found(store) == sorted(chunks)

    forwards.clear()
    assert (await run(sourced(chunks), cleanup))["num_skipped"] == 4
    assert forwards == []

    edited = [*chunks[:2], OTHER, chunks[3]]
    result = await run(sourced(edited), cleanup)
    assert (result["num_added"], result["num_deleted"]) == (1, 1)
    assert len(forwards) == 1
    assert kept(engine) == found(store) == sorted(edited)

    forwards.clear()
    result = await run(sourced(edited, version=2), cleanup)
    assert (result["num_added"], result["num_deleted"]) == (4, 4)
    # the chunk after the edited one, which was not added again: it has another context than under its old id, which is
    # deleted only later, so it is encoded alone too
    assert len(forwards) == 2
    forwards.clear()
    assert {document.metadata["version"] for document in store.similarity_search("anything", k=99)} == {2}
    assert kept(engine) == found(store) == sorted(edited)

    result = await run(sourced(edited, version=2)[:3], cleanup)  # 1.txt has one chunk less
    assert result["num_deleted"] == 1
    assert kept(engine) == found(store) == sorted(edited[:3])

    if cleanup == "full":
        await run([], cleanup)
        assert kept(engine) == found(store) == []
        assert engine.documents() == []
    else:
        await run(sourced(edited, version=2)[:1], cleanup)  # 1.txt is not listed
        assert kept(engine) == found(store) == sorted([edited[0], edited[2]])
    assert forwards == []


async def test_batches_smaller_than_a_source_keep_what_has_the_same_context(
    run: Any, store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str], forwards: list[int]
) -> None:
    documents = [Document(text, metadata={"source": "one.txt"}) for text in chunks]
    await run(documents, "incremental")
    forwards.clear()
    documents[0].metadata["version"] = 2
    # LangChain deletes the documents after the first batch, and adds them again
    assert (await run(documents, "incremental", batch_size=2))["num_deleted"] > 1
    assert len(forwards) == 1, "only the second batch, whose context differs without the first one"
    assert kept(engine) == found(store) == sorted(chunks)


async def test_a_chunk_in_two_sources_is_kept_until_the_second_one_is_gone(
    run: Any, store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    both = [Document(chunks[0], metadata={"source": source}) for source in ("a", "b")]
    await run(both, "full")
    assert engine.store.stats().chunks == 1
    await run(both[1:], "full")
    assert kept(engine) == found(store) == chunks[:1]
    await run([], "full")
    assert kept(engine) == []


# ---------------------------------------------------------------- adding and deleting


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
def test_added_documents_are_reused_in_answers(kind: Any, settings: dict[str, Any], chunks: list[str]) -> None:
    llm = kind(**settings)
    store = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), llm)
    store.add_documents([Document(text) for text in chunks])
    prompt = "\n\n".join(document.page_content for document in store.as_retriever().invoke("Who?"))
    report = ChatBlend(**settings).invoke(prompt).response_metadata["kvrag"]
    assert report["prompt_tokens"] - report["fresh_tokens"] >= 0.95 * sum(llm.get_num_tokens(text) for text in chunks)


def test_a_retriever_that_is_given_documents_warms_them(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    store.as_retriever().add_documents([Document(chunks[0])])
    assert kept(engine) == chunks[:1]


async def test_a_replaced_document_is_not_kept(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    store.add_texts(chunks[:2], ids=["one", "two"])
    store.add_documents([Document(chunks[2], id="one")])
    assert kept(engine) == found(store) == sorted(chunks[1:3])
    await store.aadd_texts([chunks[3], OTHER], ids=["two", "two"])  # of equal ids the last one counts
    assert kept(engine) == found(store) == sorted([chunks[2], OTHER])
    await store.adelete(["one"])
    assert kept(engine) == [OTHER]


def test_ids_that_the_wrapped_store_makes_are_the_ones_to_delete(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    class Renaming(DeletesAll):
        def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
            return super().add_documents(documents, [f"mine-{i}" for i in range(len(documents))])

    for each, ids in ((store, None), (KVWarmVectorStore(Renaming(EMBEDDING), engine), ["a", "b"])):
        added = each.add_texts(chunks[:2], ids=ids)
        assert added != ids
        assert kept(engine) == sorted(chunks[:2])
        assert len(engine.documents()) == 2
        each.delete(added[:1])
        assert kept(engine) == found(each) == chunks[1:2]
        each.delete()
        assert kept(engine) == []


def test_deleting_without_ids_drops_the_kv_of_documents_that_are_gone(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    store.add_texts(chunks)
    keeps_all = KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine, collection="other")
    keeps_all.add_texts(chunks[:1])
    keeps_all.delete()  # for which this store does nothing
    assert store.delete() is True
    assert kept(engine) == found(keeps_all) == chunks[:1]

    class Mute(DeletesAll):
        get_by_ids = VectorStore.get_by_ids  # type: ignore[assignment]

    mute = KVWarmVectorStore(Mute(EMBEDDING), engine, collection="mute")
    (added,) = mute.add_texts(chunks[1:2])
    with pytest.raises(SettingError, match="Mute cannot list its remaining documents: pass ids"):
        mute.delete()
    assert found(mute) == chunks[1:2]
    mute.delete([added])
    assert kept(engine) == chunks[:1]


def test_collections_keep_equal_ids_apart(engine: BlendEngine, chunks: list[str]) -> None:
    one, two, odd = (
        KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), engine, collection=name) for name in ("a", "b", "a/1")
    )
    one.add_texts(chunks[:2], ids=["1", "1/1"])
    two.add_texts(chunks[1:3], ids=["1", "2"])
    odd.add_texts(chunks[3:], ids=["1"])
    one.delete(["1"])
    assert kept(engine) == sorted(chunks[1:])
    one.delete(["1/1"])
    two.delete(["1"])
    assert kept(engine) == sorted(chunks[2:])


def test_similar_ids_are_kept_apart(store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]) -> None:
    ids = ["1", "1/1", "1%2F1", "10"]
    store.add_texts(chunks, ids=ids)
    for i, one in enumerate(ids):
        assert kept(engine) == sorted(chunks[i:])
        store.delete([one])
    assert kept(engine) == []


async def test_texts_may_be_any_iterable(store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]) -> None:
    store.add_texts(text for text in chunks[:1])
    await store.aadd_texts(iter(chunks[1:2]))
    assert found(store) == kept(engine) == sorted(chunks[:2])


async def test_ids_to_delete_may_be_any_iterable(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    ids: Any = store.add_texts(chunks)
    store.delete(one for one in ids[:1])  # type: ignore[arg-type]
    assert kept(engine) == found(store) == sorted(chunks[1:])
    await store.adelete(iter(ids[1:2]))  # type: ignore[arg-type]
    assert kept(engine) == found(store) == sorted(chunks[2:])


def test_threads_may_change_documents_of_their_own_at_once(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str]
) -> None:
    """The texts are the same: KV is dropped with the last document that has it."""

    def change(mine: int) -> None:
        for turn in range(4):
            store.add_texts([chunks[(mine + turn) % 4], chunks[turn]], ids=[f"{mine} a", f"{mine} b"])
            store.delete([f"{mine} {'ab'[turn % 2]}"])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(change, range(4))) == [None] * 4
    assert sorted(store.ids) == [f"{mine} a" for mine in range(4)]
    assert kept(engine) == found(store) == sorted(chunks)
    store.delete(store.ids)
    assert kept(engine) == []


def test_short_texts_are_added_with_a_warning_and_forgotten(
    store: KVWarmVectorStore, engine: BlendEngine, caplog: pytest.LogCaptureFixture
) -> None:
    (added,) = store.add_texts(["too short"])
    assert found(store) == ["too short"]
    assert "fewer than" in caplog.text
    prompt = "It is too short a name for Grelville, says Mira Brel, who lives there with a goat and a cat. Who says so?"
    engine.generate(prompt, max_new_tokens=1)
    assert engine.generate(f"{prompt} Why?", max_new_tokens=1).report.conversation_tokens > 16
    store.delete([added])
    assert engine.documents() == []
    assert engine.generate(f"{prompt} Why?", max_new_tokens=1).report.conversation_tokens == 0


# ---------------------------------------------------------------- failures


class Fragile(DeletesAll):
    """Fails on request, after half of the work."""

    failing = False

    def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        if self.failing:
            super().add_documents(documents[:1], ids and ids[:1])
            raise ConnectionError("lost while adding")
        return super().add_documents(documents, ids)

    async def aadd_documents(self, *args: Any, **kwargs: Any) -> list[str]:
        return self.add_documents(*args, **kwargs)

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        if self.failing and ids is not None:
            super().delete(ids[:1])
            raise ConnectionError("lost while deleting")
        return super().delete(ids)


class Gone(Fragile):
    """Cannot even return its documents after a failure."""

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        if self.failing:
            raise ConnectionError("still lost")
        return super().get_by_ids(ids)


@pytest.fixture(params=["sync", "async"])
def add(request: pytest.FixtureRequest) -> Any:
    async def add(store: VectorStore, texts: list[str], ids: list[str] | None = None) -> list[str]:
        documents = [Document(text) for text in texts]
        given = {} if ids is None else {"ids": ids}
        if request.param == "async":
            return await store.aadd_documents(documents, **given)
        return store.add_documents(documents, **given)

    return add


@pytest.fixture(params=["sync", "async"])
def delete(request: pytest.FixtureRequest) -> Any:
    async def delete(store: VectorStore, ids: list[str]) -> Any:
        return await store.adelete(ids) if request.param == "async" else store.delete(ids)

    return delete


async def test_an_add_that_fails_midway_leaves_only_kv_of_added_documents(
    engine: BlendEngine, chunks: list[str], add: Any
) -> None:
    store = KVWarmVectorStore(Fragile(EMBEDDING), engine)
    await add(store, [OTHER, chunks[3]], ["one", "three"])
    store.vectorstore.failing = True  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError, match="lost while adding"):
        await add(store, chunks[:3], ["one", "two", "three"])
    assert kept(engine) == found(store) == sorted([chunks[0], chunks[3]])
    assert len(engine.documents()) == 2
    store.vectorstore.failing = False  # type: ignore[attr-defined]
    await add(store, chunks[:3], ["one", "two", "three"])
    assert kept(engine) == found(store) == sorted(chunks[:3])


async def test_an_add_that_fails_in_a_store_without_listing_leaves_the_earlier_kv(
    engine: BlendEngine, chunks: list[str], add: Any
) -> None:
    store = KVWarmVectorStore(Gone(EMBEDDING), engine)
    await add(store, [OTHER], ["one"])
    store.vectorstore.failing = True  # type: ignore[attr-defined]
    for ids in (["one", "two"], None):
        with pytest.raises(ConnectionError, match="lost while adding"):
            await add(store, chunks[:2], ids)
        assert kept(engine) == [OTHER]
    store.vectorstore.failing = False  # type: ignore[attr-defined]
    store.delete(["one", "two"])
    assert engine.documents() == []


async def test_a_delete_that_fails_half_way_drops_the_kv_of_what_is_gone(
    engine: BlendEngine, chunks: list[str], delete: Any
) -> None:
    for kind, left in ((Fragile, chunks[1:2]), (Gone, chunks[:2])):
        store = KVWarmVectorStore(kind(EMBEDDING), engine)
        store.add_texts(chunks[:2], ids=["one", "two"])
        store.vectorstore.failing = True  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError, match="lost while deleting"):
            await delete(store, ["one", "two"])
        assert kept(engine) == left
        store.vectorstore.failing = False  # type: ignore[attr-defined]
        assert await delete(store, ["one", "two"]) is True
        assert kept(engine) == found(store) == []


async def test_a_delete_that_is_refused_drops_nothing(engine: BlendEngine, chunks: list[str], delete: Any) -> None:
    class Refusing(DeletesAll):
        def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
            return False

    store = KVWarmVectorStore(Refusing(EMBEDDING), engine)
    store.add_texts(chunks[:1], ids=["one"])
    assert await delete(store, ["one"]) is False
    assert kept(engine) == chunks[:1]


async def test_documents_that_cannot_be_encoded_or_stored_are_not_added(
    store: KVWarmVectorStore, engine: BlendEngine, chunks: list[str], add: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise StoreFullError("no room")

    await add(store, chunks[:1], ["one"])
    with pytest.raises(KvragError):
        await add(store, [chunks[1], "\ud800" + chunks[2]], ["one", "two"])
    monkeypatch.setattr(engine.store, "put", full)
    with pytest.raises(StoreFullError, match="no room"):
        await add(store, chunks[1:3], ["one", "two"])
    with pytest.raises(SettingError, match="got 1 ids for 2 documents"):
        await add(store, chunks[1:3], ["one"])
    assert kept(engine) == found(store) == chunks[:1]
    assert len(engine.documents()) == 1


async def test_a_store_that_returns_too_few_ids_is_detected(engine: BlendEngine, chunks: list[str], add: Any) -> None:
    class Losing(DeletesAll):
        def add_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
            return super().add_documents(documents, ids)[:1]

        async def aadd_documents(self, *args: Any, **kwargs: Any) -> list[str]:
            return self.add_documents(*args, **kwargs)

    with pytest.raises(KvragError, match="Losing returned 1 ids for 2 documents"):
        await add(KVWarmVectorStore(Losing(EMBEDDING), engine), chunks[:2])
    assert kept(engine) == []


def test_the_llm_must_be_one_that_can_encode() -> None:
    with pytest.raises(SettingError, match=r"llm must be a ChatBlend, .* or a RemoteEngine, got str"):
        KVWarmVectorStore(InMemoryVectorStore(EMBEDDING), "reader")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="pass llm="):
        KVWarmVectorStore.from_texts(["text"], EMBEDDING)


# ---------------------------------------------------------------- async


class Slow(DeletesAll):
    """Adds in the background, once it is released."""

    def __init__(self) -> None:
        super().__init__(EMBEDDING)
        self.adding, self.let = asyncio.Event(), asyncio.Event()

    async def aadd_documents(self, documents: list[Document], ids: list[str] | None = None, **kwargs: Any) -> list[str]:
        self.adding.set()
        await self.let.wait()
        return await super().aadd_documents(documents, ids)


async def test_async_methods_leave_the_loop_alone(
    engine: BlendEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def noting(original: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return original(*args, **kwargs)

        return method

    for name in ("warm", "forget", "documents"):
        monkeypatch.setattr(BlendEngine, name, noting(getattr(BlendEngine, name)))
    store = KVWarmVectorStore(Slow(), engine)
    adding = asyncio.create_task(store.aadd_documents([Document(chunks[0], id="one")]))
    await store.vectorstore.adding.wait()  # type: ignore[attr-defined]
    assert kept(engine) == chunks[:1]  # before the vectors
    store.vectorstore.let.set()  # type: ignore[attr-defined]
    assert await adding == ["one"]
    await store.awarm_existing()
    await store.adelete(["one"])
    assert kept(engine) == []
    assert len(threads) >= 5
    assert threading.get_ident() not in threads


async def test_a_cancelled_add_leaves_kv_and_vectors_in_step(engine: BlendEngine, chunks: list[str]) -> None:
    store = KVWarmVectorStore(Slow(), engine)
    adding = asyncio.create_task(store.aadd_documents([Document(text) for text in chunks], ids=list("abcd")))
    await store.vectorstore.adding.wait()  # type: ignore[attr-defined]
    adding.cancel()
    await asyncio.sleep(0)
    store.vectorstore.let.set()  # type: ignore[attr-defined]
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert kept(engine) == found(store) == sorted(chunks)  # running work was finished


async def test_an_add_that_is_cancelled_while_encoding_adds_nothing(
    engine: BlendEngine, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, let, warm = threading.Event(), threading.Event(), BlendEngine.warm

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoding.set()
        assert let.wait(60)
        return warm(self, *args, **kwargs)

    monkeypatch.setattr(BlendEngine, "warm", slow)
    store = KVWarmVectorStore(DeletesAll(EMBEDDING), engine)
    adding = asyncio.create_task(store.aadd_documents([Document(chunks[0], id="one")]))
    await asyncio.to_thread(encoding.wait, 60)
    adding.cancel()
    await asyncio.sleep(0)
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert kept(engine) == found(store) == []
    assert engine.documents() == []


# ---------------------------------------------------------------- what is there already, and the rest of the interface


class Nameless(InMemoryVectorStore):
    """Like Qdrant's: documents come back without their ids."""

    where: str | None = None

    def get_by_ids(self, ids: Any, /) -> list[Document]:
        for document in (documents := super().get_by_ids(ids)):
            if self.where:
                document.metadata[self.where] = document.id
            document.id = None
        return documents


def test_documents_that_have_their_ids_elsewhere(engine: BlendEngine, chunks: list[str]) -> None:
    store = KVWarmVectorStore(Nameless(EMBEDDING), engine)
    inner = store.vectorstore
    inner.add_texts(chunks[:2], ids=["one", "two"])
    with pytest.raises(SettingError, match=r"without ids: warm their texts with llm\.warm"):
        store.warm_existing(["one", "two"])
    inner.where = "_id"  # type: ignore[attr-defined]
    assert store.warm_existing(["one", "two"]).new == 2
    assert kept(engine) == sorted(chunks[:2])
    store.delete(["one"])
    assert kept(engine) == [chunks[1]]


async def test_existing_documents_of_a_store_can_be_warmed(engine: BlendEngine, chunks: list[str]) -> None:
    for kind in (DeletesAll, InMemoryVectorStore):
        existing = kind.from_texts(chunks, EMBEDDING, ids=list("abcd"))
        store = KVWarmVectorStore(existing, engine)
        assert store.warm_existing(["a", "unknown"]).new == 1
        assert kept(engine) == chunks[:1]
        report = store.warm_existing()
        assert (report.chunks, report.new) == (4, 3)
        existing.add_documents([Document(OTHER, id="a")])  # without the wrapper
        existing.delete(["b"])
        assert (await store.awarm_existing()).new == 1
        assert kept(engine) == found(store) == sorted([OTHER, *chunks[2:]])
        existing.delete(["c"])
        assert store.warm_existing(["c"]).chunks == 0
        assert kept(engine) == found(store)
        store.delete(list("abcd"))
        assert kept(engine) == []


async def test_a_document_that_cannot_be_encoded(engine: BlendEngine, chunks: list[str], add: Any) -> None:
    metadata = {"source": "a.pdf", "page": 6, "page_label": "7"}
    invalid = Document("word " * 5000, id="long", metadata=metadata)
    documents = [Document(chunks[0], id="one"), invalid, Document(chunks[1], id="two")]
    store, llm = KVWarmVectorStore(DeletesAll(EMBEDDING), engine), BlendLLM(engine=engine)
    place = r"from 'langchain/default/a\.pdf' .*\(id 'long', page_label '7', page 6\)"
    for work in (
        store.aadd_documents(documents),
        asyncio.to_thread(store.add_documents, documents),
        llm.awarm(documents),
        asyncio.to_thread(llm.warm, documents),
        asyncio.to_thread(KVWarmVectorStore.from_documents, documents, EMBEDDING, llm=engine),
        KVWarmVectorStore.afrom_documents(documents, EMBEDDING, llm=engine),
    ):
        with pytest.raises(ContextWindowError, match=f"chunk 1 .*{place}"):
            await work
    assert kept(engine) == found(store) == []
    inner: Any = store.vectorstore
    inner.add_documents(documents)
    inner.store["odd"] = {**inner.store["one"], "id": "odd", "text": "odd \ud800" * 20}  # cannot be embedded
    report = store.warm_existing()
    assert (report.new, len(report.warnings), kept(engine)) == (2, 2, sorted(chunks[:2]))
    assert llm.warm(documents, skip_invalid=True).reused == (await llm.awarm(documents, skip_invalid=True)).reused == 2


def test_a_store_that_cannot_be_listed_says_what_to_do(engine: BlendEngine, chunks: list[str]) -> None:
    class Unknown(VectorStore):
        def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
            return []

        @classmethod
        def from_texts(cls, *args: Any, **kwargs: Any) -> Unknown:
            return cls()

    class Known(Unknown):
        def get_by_ids(self, ids: Any, /) -> list[Document]:
            return [Document(chunks[0], id=one) for one in ids]

    with pytest.raises(SettingError, match=r"warm their texts with llm\.warm"):
        KVWarmVectorStore(Unknown(), engine).warm_existing()
    store = KVWarmVectorStore(Known(), engine)
    with pytest.raises(SettingError, match="cannot list the documents of Known: pass ids"):
        store.warm_existing()
    assert store.warm_existing(["one"]).new == 1


async def test_stores_are_made_of_texts_and_documents(engine: BlendEngine, chunks: list[str]) -> None:
    settings: dict[str, Any] = {"llm": engine, "vectorstore_class": DeletesAll}
    documents = [Document(text, metadata={"n": i}, id=str(i)) for i, text in enumerate(chunks)]
    for collection, store in {
        "a": KVWarmVectorStore.from_texts(chunks, EMBEDDING, [{"n": i} for i in range(4)], collection="a", **settings),
        "b": await KVWarmVectorStore.afrom_texts(chunks, EMBEDDING, ids=list("abcd"), collection="b", **settings),
        "c": KVWarmVectorStore.from_documents(documents, EMBEDDING, collection="c", **settings),
        "d": await KVWarmVectorStore.afrom_documents(documents, EMBEDDING, collection="d", llm=engine),
    }.items():
        assert type(store.vectorstore) is (InMemoryVectorStore if collection == "d" else DeletesAll)
        assert len(engine.documents(f"langchain/{collection}/")) == 4
        assert kept(engine) == found(store) == sorted(chunks)
        store.delete([document.id for document in store.similarity_search("", k=4)])
        assert engine.documents(f"langchain/{collection}/") == []
    assert kept(engine) == []


async def test_a_vector_store_that_cannot_be_created_leaves_no_kv(engine: BlendEngine, chunks: list[str]) -> None:
    class AlwaysFailing(Fragile):
        failing = True

    settings: dict[str, Any] = {"llm": engine, "vectorstore_class": AlwaysFailing}
    with pytest.raises(ConnectionError, match="lost while adding"):
        KVWarmVectorStore.from_texts(chunks, EMBEDDING, **settings)
    with pytest.raises(ConnectionError, match="lost while adding"):
        await KVWarmVectorStore.afrom_texts(chunks, EMBEDDING, **settings)
    assert kept(engine) == []


INHERITED = {
    *("from_documents", "afrom_documents"),  # end in from_texts
    "as_retriever",  # of this store, so that documents added through the retriever are warmed
}


def test_every_method_of_vector_stores_is_passed_on_or_our_own() -> None:
    public = {name for name in dir(VectorStore) if not name.startswith("_")}
    assert public - {*vars(KVWarmVectorStore)} == INHERITED


async def test_delegated_methods_return_the_wrapped_stores_results(
    store: KVWarmVectorStore, chunks: list[str], tmp_path: Path
) -> None:
    ids = store.add_texts(chunks, [{"n": i} for i in range(4)])
    wrapped, query, vector = store.vectorstore, "Who likes curry?", EMBEDDING.embed_query("Who likes curry?")
    calls: dict[str, tuple[Any, ...]] = {
        "similarity_search": (query, 2),
        "similarity_search_by_vector": (vector, 2),
        "similarity_search_with_score": (query, 2),
        "similarity_search_with_relevance_scores": (query, 2),
        "max_marginal_relevance_search": (query, 2),
        "max_marginal_relevance_search_by_vector": (vector, 2),
        "search": (query, "mmr"),
        "get_by_ids": (ids[1:3],),
    }
    for name, arguments in calls.items():
        expected = getattr(wrapped, name)(*arguments)
        assert len(expected) >= 2
        assert getattr(store, name)(*arguments) == expected
        assert inspect.iscoroutinefunction(getattr(store, f"a{name}"))
        assert await getattr(store, f"a{name}")(*arguments) == expected
    assert store.embeddings is EMBEDDING
    retriever = store.as_retriever(
        search_type="mmr", search_kwargs={"k": 2, "filter": lambda document: document.metadata["n"] == 3}
    )
    assert [document.page_content for document in retriever.invoke(query)] == chunks[3:]
    store.dump(str(tmp_path / "vectors"))  # not a method of every vector store
    assert found(InMemoryVectorStore.load(str(tmp_path / "vectors"), EMBEDDING)) == sorted(chunks)
    assert copy.copy(store).ids == ids
    with pytest.raises(AttributeError, match="no_such_method"):
        store.no_such_method()


def test_chunks_of_one_source_are_encoded_with_their_context(engine: BlendEngine, store: KVWarmVectorStore) -> None:
    texts = [f"{name} {OTHER}" for name in ("One.", "Two.", "Three.", "Four.")]
    sources = ["a.txt", "b.txt", "a.txt", None]
    metadatas = [{"source": source} if source else {} for source in sources]
    documents = [Document(text, metadata=metadata) for text, metadata in zip(texts, metadatas, strict=True)]
    ids = store.add_documents(documents)
    assert [context(engine, text) > 0 for text in texts] == [False, False, True, False]
    store.delete(ids)
    made = KVWarmVectorStore.from_texts(texts, EMBEDDING, metadatas, llm=engine, vectorstore_class=DeletesAll)
    assert [context(engine, text) > 0 for text in texts] == [False, False, True, False]
    engine.forget(engine.documents()[0])
    made.warm_existing()
    KVWarmVectorStore(DeletesAll(EMBEDDING), engine, collection="b").add_documents(documents)
    assert not any(context(engine, text) for text in texts), "another collection's source is another one"


def test_the_llm_takes_documents_as_they_are(engine: BlendEngine, store: KVWarmVectorStore) -> None:
    first, second = (
        Document(f"One. {OTHER}", metadata={"source": "a"}),
        Document(f"Two. {OTHER}", metadata={"source": "a"}),
    )
    llm = ChatBlend(engine=engine)
    assert llm.warm(iter([first, second])).new == 2
    assert [context(engine, one.page_content) > 0 for one in (first, second)] == [False, True]
    store.add_documents([first, second])
    assert context(engine, second.page_content) > 0, "one source, for each way to pass it"
    assert llm.warm([first.page_content, OTHER]).new == 1
    with pytest.raises(SettingError, match="got one str"):
        llm.warm(OTHER)

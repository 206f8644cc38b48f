"""KVWarmVectorStore: KV follows the vectors through all operations."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex, load_index_from_storage
from llama_index.core.bridge.pydantic import Field
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import TextSplitter
from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    MetadataFilter,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.llms.kvrag import BlendLLM
from llama_index.vector_stores.kvrag import KVWarmVectorStore

from kvrag import ContextWindowError, FileStore, SettingError
from kvrag.ingest import ingest
from kvrag.store import visible_variant
from kvrag.store.values import text_key

MIRA, TRAN, KAN, ZEL = CHUNKS
EMBEDDING = MockEmbedding(embed_dim=4)


class Paragraphs(TextSplitter):
    """One node for each paragraph."""

    def split_text(self, text: str) -> list[str]:
        return text.split("\n\n")


class KeepsText(SimpleVectorStore):
    """Like vector stores of databases: it stores the nodes, too."""

    stores_text: bool = True
    nodes: dict[str, Any] = Field(default_factory=dict)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        self.nodes |= {node.node_id: node for node in nodes}
        return super().add(nodes, **kwargs)

    def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
        (wanted,) = filters.filters
        return [node for node in self.nodes.values() if node.metadata.get(wanted.key) == wanted.value]

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        found = super().query(replace(query, node_ids=None), **kwargs)  # the index does not know their ids
        return VectorStoreQueryResult(
            nodes=[self.nodes[node_id] for node_id in found.ids or []], similarities=found.similarities, ids=found.ids
        )


class Failing(SimpleVectorStore):
    """Fails after adding one node, or before deleting any."""

    is_failing: bool = True

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        if self.is_failing:
            super().add(nodes[:1], **kwargs)
            raise ConnectionError("the database is gone")
        return super().add(nodes, **kwargs)

    def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
        if self.is_failing:
            raise ConnectionError("the database is gone")
        super().delete(ref_doc_id, **kwargs)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of chunks in each run of the encoder."""
    counts: list[int] = []
    encode = ingest.encode

    def counting(model: Any, chunks: Any, contexts: Any) -> Any:
        counts.append(len(chunks))
        return encode(model, chunks, contexts)

    monkeypatch.setattr(ingest, "encode", counting)
    return counts


@pytest.fixture
def vector_store(llm: BlendLLM) -> KVWarmVectorStore:
    return KVWarmVectorStore(SimpleVectorStore(), llm)


def document(name: str, *paragraphs: str, **metadata: Any) -> Document:
    return Document(text="\n\n".join(paragraphs), id_=name, metadata={"file_path": f"/data/{name}", **metadata})


def node(name: str, text: str, document: str = "d", **metadata: Any) -> TextNode:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=document)}
    return TextNode(id_=name, text=text, embedding=[0.5] * 4, relationships=source, metadata=metadata)


def index_of(vector_store: KVWarmVectorStore, *documents: Document) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        list(documents),
        storage_context=StorageContext.from_defaults(vector_store=vector_store),
        transformations=[Paragraphs()],
        embed_model=EMBEDDING,
    )


def stored(llm: BlendLLM) -> int:
    """Number of chunks with KV, which is the number of files."""
    stats = llm._open().store.stats()
    assert len(list(Path(stats.path).rglob("*.safetensors"))) == stats.chunks
    return stats.chunks


# ---------------------------------------------------------------- the ways of LlamaIndex


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("wrapped", [SimpleVectorStore, KeepsText])
async def test_every_retrieved_node_has_its_kv(wrapped: type[SimpleVectorStore], llm: BlendLLM) -> None:
    vector_store = KVWarmVectorStore(wrapped(), llm)
    assert vector_store.stores_text == wrapped().stores_text
    assert vector_store.is_embedding_query
    index = index_of(vector_store, document("a", MIRA, TRAN), document("b", KAN))
    for nodes in (
        index.as_retriever(similarity_top_k=3).retrieve("Who?"),
        await index.as_retriever().aretrieve("Who?"),
    ):
        contents = [found.node.get_content(MetadataMode.LLM) for found in nodes]
        report: Any = llm.complete("\n\n".join(contents), max_tokens=1).raw
        stored = report["kvrag"]["prompt_tokens"] - report["kvrag"]["fresh_tokens"]
        assert stored >= sum(len(llm.encode(content)) for content in contents) - len(nodes)
        assert len(nodes) > 1


def test_documents_come_and_change_and_go(llm: BlendLLM, vector_store: KVWarmVectorStore, encoded: list[int]) -> None:
    index = index_of(vector_store, document("a", MIRA, TRAN, KAN))
    index.insert(document("b", ZEL))
    assert (stored(llm), encoded) == (4, [3, 1])
    encoded.clear()
    changed = document("a", MIRA, TRAN + " It grows.", KAN)
    assert index.refresh_ref_docs([changed, document("b", ZEL)]) == [True, False]
    assert (stored(llm), encoded) == (4, [3]), "LlamaIndex deletes a changed document before it adds it"
    assert index.refresh_ref_docs([changed, document("b", ZEL)]) == [False, False]
    assert (stored(llm), encoded) == (4, [3])
    index.delete_ref_doc("a")
    assert stored(llm) == 1
    index.delete_ref_doc("b")
    assert stored(llm) == 0
    assert llm.documents() == []


@pytest.mark.parametrize("strategy", [DocstoreStrategy.UPSERTS, DocstoreStrategy.UPSERTS_AND_DELETE])
@pytest.mark.parametrize("is_async", [False, True])
async def test_pipelines_encode_new_nodes_and_drop_deleted_ones(
    strategy: DocstoreStrategy, is_async: bool, llm: BlendLLM, vector_store: KVWarmVectorStore, encoded: list[int]
) -> None:
    pipeline = IngestionPipeline(
        transformations=[Paragraphs(), EMBEDDING],
        vector_store=vector_store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=strategy,
    )

    async def run(*documents: Document) -> None:
        await pipeline.arun(documents=list(documents)) if is_async else pipeline.run(documents=list(documents))

    await run(document("a", MIRA, TRAN), document("b", KAN, ZEL))
    assert (stored(llm), encoded) == (4, [4])
    await run(document("a", MIRA, TRAN), document("b", KAN, ZEL))
    assert (stored(llm), encoded) == (4, [4])
    await run(document("a", MIRA, TRAN), document("b", KAN, ZEL + " She sings."))
    assert (stored(llm), encoded) == (4, [4, 2])
    await run(document("b", KAN, ZEL + " She sings."))
    is_gone = strategy == DocstoreStrategy.UPSERTS_AND_DELETE
    assert (stored(llm), encoded) == (2 if is_gone else 4, [4, 2])
    assert len(vector_store.vector_store.data.embedding_dict) == stored(llm)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("endless")
def test_a_saved_index_can_be_continued(llm: BlendLLM, vector_store: KVWarmVectorStore, tmp_path: Path) -> None:
    index = index_of(vector_store, document("a", MIRA), document("b", KAN))
    index.storage_context.persist(tmp_path / "saved")
    again = KVWarmVectorStore(SimpleVectorStore.from_persist_dir(str(tmp_path / "saved")), llm)
    context = StorageContext.from_defaults(vector_store=again, persist_dir=str(tmp_path / "saved"))
    loaded: Any = load_index_from_storage(context, embed_model=EMBEDDING)
    assert len(loaded.as_retriever().retrieve("Who?")) == 2
    loaded.delete_ref_doc("a")
    assert stored(llm) == 1


# ---------------------------------------------------------------- one call at a time


@pytest.mark.parametrize("is_async", [False, True])
async def test_nodes_are_deleted_with_their_kv(is_async: bool, llm: BlendLLM, vector_store: KVWarmVectorStore) -> None:
    nodes = [node("1", MIRA), node("2", TRAN), node("3", KAN, "e/f"), node("4", MIRA, "e/f")]
    assert await vector_store.async_add(nodes) if is_async else vector_store.add(nodes) == ["1", "2", "3", "4"]
    assert stored(llm) == 3
    await vector_store.adelete_nodes(["1"]) if is_async else vector_store.delete_nodes(["1"])
    assert stored(llm) == 3  # node 4 has the same text
    await vector_store.adelete("e") if is_async else vector_store.delete("e")
    assert stored(llm) == 3  # that is another document
    await vector_store.adelete("e/f") if is_async else vector_store.delete("e/f")
    assert stored(llm) == 1
    await vector_store.aclear() if is_async else vector_store.clear()
    assert stored(llm) == 0


@pytest.mark.parametrize("is_async", [False, True])
async def test_nodes_are_deleted_by_what_a_filter_finds(is_async: bool, llm: BlendLLM) -> None:
    vector_store = KVWarmVectorStore(KeepsText(), llm)
    vector_store.add([node("1", MIRA, year=1), node("2", TRAN, year=2)])
    old = MetadataFilters(filters=[MetadataFilter(key="year", value=1)])
    if is_async:
        await vector_store.adelete_nodes(filters=old)
    else:
        vector_store.delete_nodes(filters=old)
    assert [name.split("/")[3] for name in llm.documents()] == ["2"]
    simple = KVWarmVectorStore(SimpleVectorStore(), llm)
    with pytest.raises(SettingError, match="SimpleVectorStore has no get_nodes"):
        await simple.adelete_nodes(filters=old) if is_async else simple.delete_nodes(filters=old)


def test_a_node_that_changes_is_encoded_again_and_its_old_kv_is_dropped(
    llm: BlendLLM, vector_store: KVWarmVectorStore, encoded: list[int]
) -> None:
    vector_store.add([node("1", MIRA), node("2", TRAN)])
    vector_store.add([node("1", MIRA), node("2", KAN, "another document")])
    assert (stored(llm), encoded) == (2, [2, 1])
    vector_store.delete("d")
    assert stored(llm) == 1


@pytest.mark.parametrize("wrapped", [SimpleVectorStore, KeepsText])
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_add_lists_the_kv_of_its_own_nodes_only(
    wrapped: type[SimpleVectorStore], is_async: bool, llm: BlendLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector_store, listed = KVWarmVectorStore(wrapped(), llm), []
    documents = FileStore.documents

    def counting(self: FileStore, *args: Any) -> dict[str, list[str]]:
        found = documents(self, *args)
        listed.append(len(found))
        return found

    monkeypatch.setattr(FileStore, "documents", counting)
    asked = []
    for number in range(12):
        nodes = [node(f"{number}", f"{MIRA} {number}", "one document"), node("changed", f"{ZEL} {number}", "another")]
        await vector_store.async_add(nodes) if is_async else vector_store.add(nodes)
        asked.append((sum(listed), len(listed)))
        listed.clear()
    assert {*asked[1:]} == {(1, 2)}, "queries per node, and one of them finds the text that the changed node had"
    assert len(llm.documents()) == 13


def test_the_replacement_of_a_nodes_text_can_be_encoded(llm: BlendLLM) -> None:
    vector_store = KVWarmVectorStore(SimpleVectorStore(), llm, target_metadata_key="window")
    sentence = node("1", "She lives in Grelville.", window=MIRA)
    sentence.excluded_llm_metadata_keys = ["window"]
    vector_store.add([sentence, node("2", KAN)])
    engine = llm._open()
    keys = [text_key("", engine.model.tokenizer.encode(text)) for text in (MIRA, KAN)]
    assert all(state.variants for state in engine.store.look_up(keys).values())
    assert sentence.text == "She lives in Grelville."


def test_nodes_that_a_vector_store_has_already_can_be_encoded(llm: BlendLLM, vector_store: KVWarmVectorStore) -> None:
    nodes = [node("1", MIRA), node("2", "short"), node("3", "")]
    vector_store.vector_store.add(nodes)
    report = vector_store.warm(nodes)
    assert (report.new, report.skipped) == (1, 2)
    vector_store.delete_nodes(["1", "2"])
    assert stored(llm) == 0


@pytest.mark.parametrize("has_places", [True, False])
def test_existing_nodes_keep_their_kv_and_are_encoded_in_reading_order(has_places: bool, llm: BlendLLM) -> None:
    texts = [f"Part {number} of the report. {MIRA}" for number in range(6)]
    nodes = [node(str(number), text) for number, text in enumerate(texts)]
    for number, one in enumerate(nodes):
        one.start_char_idx = number * 200 if has_places else None
    shuffled, engine = [nodes[number] for number in (3, 1, 0, 5, 4, 2)], llm._open()

    def num_with_context(namespace: str) -> int:
        keys = [text_key(namespace, engine.encode(text)) for text in texts]
        states = engine.store.look_up(keys)
        return sum(states[key].variants[visible_variant(states[key], alone_only=False) or ""] > 0 for key in keys)

    vector_store = KVWarmVectorStore(SimpleVectorStore(), llm)
    vector_store.add(nodes)
    assert (vector_store.warm(shuffled).new, num_with_context("")) == (0, 5)
    expected = sorted(tuple(entry) for entry in engine.store.documents().values())
    other = KVWarmVectorStore(SimpleVectorStore(), llm, namespace="other")
    report = other.warm(shuffled)
    assert (report.new, len(report.warnings), num_with_context("other")) == (6, not has_places, 5 * has_places)
    assert other.warm(shuffled).warnings == ()
    vector_store.clear()
    vector_store.warm(shuffled)
    assert (sorted(tuple(entry) for entry in engine.store.documents().values()) == expected) is has_places


def test_kv_of_earlier_vector_stores_in_memory_can_be_dropped(llm: BlendLLM) -> None:
    KVWarmVectorStore(SimpleVectorStore(), llm, collection="other").add([node("9", ZEL)])
    KVWarmVectorStore(SimpleVectorStore(), llm).add([node("1", MIRA), node("2", TRAN)])
    later, nodes = KVWarmVectorStore(SimpleVectorStore(), llm), [node("3", MIRA), node("4", KAN)]
    later.add(nodes)
    assert later.warm(nodes).new == 0
    assert stored(llm) == 4
    assert later.warm(nodes, whole=True).new == 0
    assert stored(llm) == 3
    assert {name.split("/")[3] for name in llm.documents()} == {"3", "4", "9"}


# ---------------------------------------------------------------- when the vector store fails


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_add_that_fails_leaves_the_earlier_kv(is_async: bool, llm: BlendLLM) -> None:
    failing = Failing()
    vector_store = KVWarmVectorStore(failing, llm)

    async def add(*nodes: BaseNode) -> None:
        await vector_store.async_add(list(nodes)) if is_async else vector_store.add(list(nodes))

    with pytest.raises(ConnectionError):
        await add(node("1", MIRA), node("2", TRAN))
    assert (stored(llm), llm.documents()) == (0, [])
    failing.is_failing = False
    with pytest.raises(ContextWindowError, match=r"'llama_index/default/d/' .*\(id '3', page_label '7'\)"):
        await add(node("1", MIRA), node("3", "word " * 5000, page_label="7"))
    assert (stored(llm), llm.documents()) == (0, [])
    await add(node("1", MIRA), node("2", TRAN))
    before = llm.documents()
    assert (stored(llm), len(before)) == (2, 2)
    failing.is_failing = True
    with pytest.raises(ConnectionError):  # it cannot return its nodes
        await add(node("1", KAN), node("2", ZEL))
    assert (stored(llm), llm.documents()) == (2, before)
    with pytest.raises(ConnectionError):
        await vector_store.adelete("d") if is_async else vector_store.delete("d")
    assert stored(llm) == 2
    failing.is_failing = False
    await add(node("1", KAN), node("2", ZEL))
    assert stored(llm) == 2
    await vector_store.adelete("d") if is_async else vector_store.delete("d")
    assert (stored(llm), failing.data.embedding_dict, llm.documents()) == (0, {}, [])


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_add_that_fails_midway_leaves_the_kv_of_added_nodes(is_async: bool, llm: BlendLLM) -> None:
    class Telling(Failing):
        nodes: dict[str, Any] = Field(default_factory=dict)

        def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
            self.nodes[nodes[0].node_id] = nodes[0]
            return super().add(nodes, **kwargs)

        def get_nodes(self, node_ids: Any = None, filters: Any = None) -> list[BaseNode]:
            return list(self.nodes.values())

    vector_store = KVWarmVectorStore(Telling(), llm)
    other = KVWarmVectorStore(SimpleVectorStore(), llm, collection="other")
    other.add([node("1", ZEL)])
    for nodes in ([node("1", MIRA), node("2", TRAN)], [node("1", KAN), node("2", TRAN)]):
        with pytest.raises(ConnectionError):
            await vector_store.async_add(nodes) if is_async else vector_store.add(nodes)
        assert stored(llm) == 2
    texts = {llm._open().model.tokenizer.decode(entry.ids.tolist()) for entry in llm._open().store.entries(0)}
    assert texts == {KAN, ZEL}


def test_kv_is_written_before_the_vectors_and_dropped_after_them(llm: BlendLLM) -> None:
    seen: list[int] = []

    class Watching(SimpleVectorStore):
        def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
            seen.append(stored(llm))
            return super().add(nodes, **kwargs)

        def delete(self, ref_doc_id: str, **kwargs: Any) -> None:
            seen.append(stored(llm))
            super().delete(ref_doc_id, **kwargs)

    vector_store = KVWarmVectorStore(Watching(), llm)
    vector_store.add([node("1", MIRA)])
    vector_store.add([node("1", KAN)])
    vector_store.delete("d")
    assert seen == [1, 2, 1]
    assert stored(llm) == 0


def test_it_can_be_pickled_and_has_a_repr(llm: BlendLLM, vector_store: KVWarmVectorStore) -> None:
    vector_store.add([node("1", MIRA)])
    again: KVWarmVectorStore = pickle.loads(pickle.dumps(vector_store))
    again.delete("d")
    assert stored(llm) == 0
    assert vector_store.to_dict()["llm"]["class_name"] == "kvrag_blend_llm"
    assert vector_store.client is None


def test_nodes_of_one_document_are_encoded_with_their_context(llm: BlendLLM, vector_store: KVWarmVectorStore) -> None:
    first = "Florton is a town by the sea. It has a harbour, a museum and two schools."
    second = "Every other year, the river takes a bridge with it, and the people build it again."
    third = "Its mayor is Tran Hol, who was a teacher there and has written two books on mushrooms."
    nodes = [node("1", first, "d"), node("2", second, "e"), node("3", third, "d")]
    engine = llm._open()

    def contexts() -> list[bool]:
        keys = [text_key("", engine.model.tokenizer.encode(text)) for text in (first, second, third)]
        states = engine.store.look_up(keys)
        return [states[key].variants[visible_variant(states[key], alone_only=False) or ""] > 0 for key in keys]

    vector_store.add(nodes)
    assert contexts() == [False, False, True]
    assert llm.warm(nodes).new == 0, "one source, for each way to pass it"
    assert contexts() == [False, False, True]
    with pytest.raises(SettingError, match="got one str"):
        llm.warm(first)


# ---------------------------------------------------------------- namespaces


@pytest.mark.parametrize(("given", "expected"), [(None, "alice"), ("bob", "bob")])
def test_a_vector_store_warms_into_its_namespace(
    given: str | None, expected: str, settings: dict[str, Any], seen: list[tuple[str, str]]
) -> None:
    store = KVWarmVectorStore(SimpleVectorStore(), BlendLLM(**settings, namespace="alice"), namespace=given)
    store.add([TextNode(text=ZEL, id_="1", embedding=[1.0])])
    store.delete_nodes(["1"])
    assert {name for name, _ in seen} == {"warm", "documents", "forget"}
    assert {namespace for _, namespace in seen} == {expected}

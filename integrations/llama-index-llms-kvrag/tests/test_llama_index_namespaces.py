"""A namespace reaches the engine from the LLM, as a field and per call."""

from __future__ import annotations

from typing import Any

import pytest
from blending import CHUNKS
from llama_index.llms.kvrag import BlendLLM

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

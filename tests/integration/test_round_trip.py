"""What a door returns can be sent back: engine, LangChain, LlamaIndex, chats and responses, cut off anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_kvrag import ChatBlend
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.llms.kvrag import BlendLLM
from serving import NAME, Served, serving

from kvrag import BlendEngine, Model

WORD = {"type": "object", "properties": {"word": {"type": "string", "minLength": 9}}, "required": ["word"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": WORD}
TOOL = {"type": "function", "function": FUNCTION}
LENGTHS = [1, 4, 9, 16, 60]
MODES: dict[str, dict[str, Any]] = {"text": {}, "call": {"tools": [TOOL], "tool_choice": "required"}}
ASK: Any = {"role": "user", "content": "Who plays the harp?"}


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(model, tmp_path / "kv") as engine:
        yield engine


@pytest.fixture
def served(engine: BlendEngine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


def from_engine(engine: BlendEngine, served: Served, options: dict[str, Any], length: int) -> None:
    answer = engine.generate([ASK], **options, max_new_tokens=length, temperature=0)
    calls = [
        {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in [*answer.tool_calls, *answer.invalid_calls]
    ]
    said = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "No."} for call in calls]
    engine.generate([ASK, said, *results, ASK], **options, max_new_tokens=1)


def from_langchain(engine: BlendEngine, served: Served, options: dict[str, Any], length: int) -> None:
    chat = ChatBlend(engine=engine, max_tokens=length, temperature=0)
    *_, streamed = accumulated(chat.stream([HumanMessage(ASK["content"])], **options))
    for said in (chat.invoke([HumanMessage(ASK["content"])], **options), streamed):
        calls = [*said.tool_calls, *said.invalid_tool_calls]
        results = [ToolMessage("No.", tool_call_id=call["id"]) for call in calls]
        again = chat.invoke([HumanMessage("a"), said, *results, HumanMessage("b")], **options)
        assert all(again.response_metadata["kvrag"]["prompt_tokens"] > len(call["args"]) / 8 for call in calls)


def accumulated(pieces: Any) -> Iterator[Any]:
    whole: Any = None
    for piece in pieces:
        whole = piece if whole is None else whole + piece
        yield whole


def from_llama_index(engine: BlendEngine, served: Served, options: dict[str, Any], length: int) -> None:
    llm = BlendLLM(engine=engine, max_tokens=length, temperature=0)
    ask = ChatMessage(role="user", content=ASK["content"])
    *_, streamed = llm.stream_chat([ask], **options)
    for response in (llm.chat([ask], **options), streamed):
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        results = [
            ChatMessage(role="tool", content="No.", additional_kwargs={"tool_call_id": call.tool_call_id})
            for call in calls
        ]
        llm.chat([ask, response.message, *results, ask], **options)


def from_chats(engine: BlendEngine, served: Served, options: dict[str, Any], length: int) -> None:
    body = {"model": NAME, "messages": [ASK], "max_tokens": length, "temperature": 0, **options}
    said = served.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "No."} for call in said.get("tool_calls", ())]
    body["messages"] = [ASK, said, *results, ASK]
    served.http.post("/v1/chat/completions", json=body).raise_for_status()


def from_responses(engine: BlendEngine, served: Served, options: dict[str, Any], length: int) -> None:
    options = {**options, "tools": [{"type": "function", **FUNCTION}]} if options else {}
    body = {"model": NAME, "input": [ASK], "max_output_tokens": length, "temperature": 0, **options}
    streamed = served.http.post("/v1/responses", json={**body, "stream": True}).raise_for_status().text
    last = json.loads(streamed.rstrip().rpartition("data: ")[2])["response"]
    for response in (served.http.post("/v1/responses", json=body).raise_for_status().json(), last):
        said = response["output"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "No."}
            for item in said
            if item["type"] == "function_call"
        ]
        served.http.post("/v1/responses", json={**body, "input": [ASK, *said, *results, ASK]}).raise_for_status()


DOORS: list[Callable[..., None]] = [from_engine, from_langchain, from_llama_index, from_chats, from_responses]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_can_be_sent_back(engine: BlendEngine, served: Served, door: Callable[..., None], mode: str) -> None:
    for length in LENGTHS:
        door(engine, served, MODES[mode], length)

"""BlendLLM: tools and objects, and answers that are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ToolCallBlock
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvrag import BlendLLM
from llama_index.llms.kvrag.messages import template_messages
from llm_conformance import Events
from pydantic import BaseModel, Field

from kvrag import BlendEngine, Model

QUESTION = "Who plays the harp?"
USER = [ChatMessage(role="user", content=QUESTION)]
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Mira", "Kan"]}}, "required": ["name"]}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": SCHEMA}}


class Wanted(BaseModel):
    name: Literal["Mira", "Kan"]


def look_up(name: str) -> str:
    """Look somebody up."""
    return f"{name} plays."


TOOL = FunctionTool.from_defaults(look_up, fn_schema=Wanted)


@pytest.fixture
def llm(tiny: Path, tmp_path: Path) -> BlendLLM:
    return BlendLLM(model=tiny, store=tmp_path / "kv", dtype="float32", temperature=0, max_tokens=160)


@pytest.fixture
def events() -> Iterator[Events]:
    handler, dispatcher = Events(), get_dispatcher()
    dispatcher.add_event_handler(handler)
    yield handler
    dispatcher.event_handlers.remove(handler)


# ---------------------------------------------------------------- tools


async def test_a_call_is_a_block_of_the_message(llm: BlendLLM) -> None:
    call: dict[str, Any] = {"tools": [LOOK_UP], "tool_choice": "look_up"}
    responses = [
        llm.chat(USER, **call),
        await llm.achat(USER, **call),
        list(llm.stream_chat(USER, **call))[-1],
        [piece async for piece in await llm.astream_chat(USER, **call)][-1],
    ]
    for response in responses:
        (block,) = response.message.blocks
        assert isinstance(block, ToolCallBlock)
        assert (block.tool_name, list(block.tool_kwargs)) == ("look_up", ["name"])
        assert not response.message.content
        (openai,) = response.message.additional_kwargs["tool_calls"]
        assert openai["function"] == {"name": "look_up", "arguments": block.tool_kwargs}
        assert openai["id"] == block.tool_call_id
        assert response.raw["usage"]["completion_tokens"] > 1
        # and back, as the next prompt will have it
        assert template_messages([response.message])[0]["tool_calls"] == [openai]


def test_answers_without_a_call_are_text(llm: BlendLLM) -> None:
    plain = llm.chat(USER, max_tokens=4)
    response = llm.chat_with_tools([TOOL], user_msg=QUESTION, tool_choice="none", max_tokens=4)
    assert response.message.blocks == plain.message.blocks == [TextBlock(text=plain.message.content or "")]
    assert response.message.additional_kwargs == {}
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match="called no tool"):
        llm.get_tool_calls_from_response(response)


@pytest.mark.parametrize("parallel", [False, True])
def test_one_call_at_a_time_unless_more_are_wanted(
    parallel: bool, llm: BlendLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    generate = BlendEngine.generate

    def recording(*args: Any, **settings: Any) -> Any:
        asked.append(settings["parallel_tool_calls"])
        return generate(*args, **settings)

    monkeypatch.setattr(BlendEngine, "generate", recording)
    llm.chat_with_tools([TOOL], user_msg=QUESTION, allow_parallel_tool_calls=parallel, max_tokens=4)
    assert asked == [parallel]


def test_the_history_precedes_the_user_message(llm: BlendLLM) -> None:
    prepared = llm._prepare_chat_with_tools([TOOL], user_msg="b", chat_history=[ChatMessage(content="a")])
    assert [message.content for message in prepared["messages"]] == ["a", "b"]
    assert prepared["tool_choice"] is None
    assert prepared["tools"][0]["function"]["name"] == "look_up"
    assert llm._prepare_chat_with_tools([TOOL], tool_required=True)["tool_choice"] == "required"


# ---------------------------------------------------------------- objects


def test_an_object_that_gets_too_long_is_an_error(llm: BlendLLM) -> None:
    with pytest.raises(ValueError, match=r"the tool 'Wanted' was cut off: raise max_tokens"):
        llm.structured_predict(Wanted, PromptTemplate("Who?"), llm_kwargs={"max_tokens": 3})


# ---------------------------------------------------------------- answers that break off


@pytest.mark.parametrize("method", ["stream_chat", "stream_complete"])
async def test_events_end_when_the_model_fails_in_the_middle(
    method: str, llm: BlendLLM, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt: Any = USER if "chat" in method else QUESTION
    pieces = getattr(llm, method)(prompt)
    apieces = await getattr(llm, f"a{method}")(prompt)
    next(pieces), await anext(apieces)

    def failing(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(Model, "forward_each", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            list(pieces)
        with pytest.raises(RuntimeError, match="out of memory"):
            [piece async for piece in apieces]
    events.check_balance(2)
    assert events.answers() == []
    assert llm.complete(QUESTION, max_tokens=2).text


async def test_a_cancelled_answer_stops_the_work(
    llm: BlendLLM, events: Events, forwards: list[int], closed: list[str]
) -> None:
    answering = asyncio.create_task(llm.achat(USER))
    while not forwards:  # noqa: ASYNC110  counted in another thread
        await asyncio.sleep(0)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    assert closed == ["closed"]
    assert len(forwards) < 160
    events.check_balance(1)


class Branch(BaseModel):
    leaf: bool
    branches: list[Branch] = Field(max_length=1)


def test_a_recursive_class_is_enforced(llm: BlendLLM) -> None:
    sampled = {"temperature": 2.0, "seed": 1}  # the greedy answer has no end
    branch = llm.structured_predict(Branch, PromptTemplate("A tree."), llm_kwargs=sampled)
    assert isinstance(branch, Branch)
    *_, last = llm.stream_structured_predict(Branch, PromptTemplate("A tree."), llm_kwargs=sampled)
    assert last == branch
    prepared = llm._prepare_chat_with_tools([FunctionTool.from_defaults(Branch, fn_schema=Branch)])
    parameters = prepared["tools"][0]["function"]["parameters"]
    assert parameters["properties"]["branches"]["items"] == {"$ref": "#/$defs/Branch"}
    assert parameters["required"] == ["leaf", "branches"]

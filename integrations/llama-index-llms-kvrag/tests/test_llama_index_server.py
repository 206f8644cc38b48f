"""BlendLLM against `kvrag serve`: the same answers and reports as with a local engine."""

from __future__ import annotations

import asyncio
import json
import pickle
from typing import Any

import pytest
from blending import CHUNKS as PEOPLE
from frameworks import TIMES
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvrag import BlendLLM
from pydantic import BaseModel, Field
from serving import NAME, Served, serving

from kvrag import BlendEngine
from kvrag.server.settings import ApiKey

pytestmark = pytest.mark.slow  # starts servers

CHUNKS = PEOPLE[:3]
QUESTION = "\n\n".join([CHUNKS[2], CHUNKS[0], "Question: Who plays the harp?"])
USER = [ChatMessage(role="user", content=QUESTION)]
FIXED: dict[str, Any] = {"temperature": 0, "max_tokens": 16}


class Note(BaseModel):
    """A note."""

    text: str = Field(max_length=20)


def take_note(text: str) -> str:
    """Take a note."""
    return text


NOTE = FunctionTool.from_defaults(take_note, fn_schema=Note)


@pytest.fixture
def local(here: BlendEngine) -> BlendLLM:
    return BlendLLM(engine=here, **FIXED)


@pytest.fixture
def remote(served: Served) -> BlendLLM:
    return BlendLLM(base_url=served.url, model=NAME, **FIXED)


def told(response: Any) -> dict[str, Any]:
    """Everything that must be equal for a server and a local engine."""
    raw = response.raw
    report = {name: value for name, value in raw["kvrag"].items() if name not in TIMES}
    said = response.message.content if hasattr(response, "message") else response.text
    return {"text": said or "", "usage": raw["usage"], "finish_reason": raw["finish_reason"], "report": report}


async def test_answers_and_reports_are_the_same(local: BlendLLM, remote: BlendLLM) -> None:
    nodes = [TextNode(text=text) for text in CHUNKS]
    ours, theirs = (llm.warm(nodes, document="d") for llm in (local, remote))
    assert (theirs.chunks, theirs.new, theirs.tokens) == (ours.chunks, ours.new, ours.tokens)
    assert remote.documents() == ["d"]
    assert remote.encode("One two") == local.encode("One two")
    ways: list[Any] = [
        lambda llm: llm.complete(QUESTION),
        lambda llm: llm.complete(QUESTION, formatted=True),
        lambda llm: llm.chat(USER),
        lambda llm: list(llm.stream_chat(USER))[-1],
        lambda llm: list(llm.stream_complete(QUESTION, formatted=True))[-1],
        lambda llm: asyncio.run(llm.achat(USER)),
        lambda llm: asyncio.run(llm.acomplete(QUESTION, max_tokens=4)),
        lambda llm: llm.complete(QUESTION, ratio=1.0, stop=["e"]),
        lambda llm: llm.complete("\n\n".join(["A new text of more than sixteen tokens about a tower."] * 2),
                                 documents=["A new text of more than sixteen tokens about a tower."] * 2),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        expected = told(await asyncio.to_thread(way, local))
        assert told(await asyncio.to_thread(way, remote)) == expected, number
        assert number or expected["report"]["reused_tokens"] > 40
    streamed = [[piece async for piece in await llm.astream_chat(USER)] for llm in (local, remote)]
    assert told(streamed[1][-1]) == told(streamed[0][-1])
    assert len(streamed[1]) > 2
    assert remote.forget("d") == local.forget("d") == 3


@pytest.mark.parametrize("length", [1, 20])
async def test_a_call_cut_off_is_an_error(local: BlendLLM, remote: BlendLLM, length: int) -> None:
    for llm in (local, remote):
        call: dict[str, Any] = {"user_msg": "Who?", "tool_required": True, "max_tokens": length}
        cut = pytest.raises(ValueError, match=r"the tool '(take_note|Note)' was cut off: raise max_tokens")
        with cut:
            await llm.achat_with_tools([NOTE], **call)
        with cut:
            await asyncio.to_thread(llm.chat_with_tools, [NOTE], **call)
        seen = []
        with cut:
            async for response in await llm.astream_chat_with_tools([NOTE], **call):
                seen.append(response)
        assert seen[-1].raw["finish_reason"] == "length"
        assert not any(response.message.content for response in seen)
        asked: dict[str, Any] = {"tools": [NOTE.metadata.to_openai_tool()], "tool_choice": "required"}
        response = await llm.achat(USER, max_tokens=length, **asked)
        assert response.raw["finish_reason"] == "length"
        assert not response.message.content
        with cut:
            llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        with cut:
            pieces = await llm.astream_structured_predict(
                Note, PromptTemplate("Write."), llm_kwargs={"max_tokens": length}
            )
            [piece async for piece in pieces]


async def test_a_streamed_call_is_complete(local: BlendLLM, remote: BlendLLM) -> None:
    for llm in (local, remote):
        call: dict[str, Any] = {"user_msg": "Who?", "tool_required": True, "max_tokens": 80}
        seen = []
        async for response in await llm.astream_chat_with_tools([NOTE], **call):
            for block in response.message.blocks:
                if isinstance(block, ToolCallBlock):
                    assert llm.get_tool_calls_from_response(response)[0].tool_name == "take_note"
                    seen.append(block.tool_kwargs)
        assert seen
        assert all(list(given) == ["text"] for given in seen)


def test_keys_are_kept_secret(there: BlendEngine) -> None:
    with serving(there, api_keys=(ApiKey("secret-1"),)) as served:
        llm = BlendLLM(base_url=served.url, model=NAME, api_key="secret-1", **FIXED)
        assert llm.complete("Who?").text
        for shown in (llm.to_json(), repr(llm), json.dumps(llm.to_payload()), str(llm.to_dict())):
            assert "secret-1" not in shown
        assert pickle.loads(pickle.dumps(llm)).complete("Who?").text == llm.complete("Who?").text

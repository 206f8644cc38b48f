"""Thoughts: blocks of a message, deltas of a stream, and parts of a history that templates may use."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, TextBlock, ThinkingBlock, ToolCallBlock
from llama_index.llms.kvrag import BlendLLM
from llama_index.llms.kvrag.messages import assistant_message, template_messages

QUESTION = "Question: Who likes curry?"
THOUGHT, TEXT = "Who eats it?", "Zel Vinford."  # of the fixture `thinking`
USER = [ChatMessage(role="user", content=QUESTION)]


@pytest.mark.usefixtures("thinking")
async def test_a_thought_is_a_block_before_the_text(llm: BlendLLM) -> None:
    response: Any = llm.chat(USER)
    assert response.message.blocks == [ThinkingBlock(content=THOUGHT, num_tokens=3), TextBlock(text=TEXT)]
    assert response.message.content == TEXT
    assert response.raw["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert (await llm.achat(USER)).message == response.message
    for pieces in (list(llm.stream_chat(USER)), [piece async for piece in await llm.astream_chat(USER)]):
        assert pieces[-1].message == response.message
        assert pieces[-1].raw["usage"] == response.raw["usage"]  # type: ignore[index]
        deltas = [piece.additional_kwargs.get("thinking_delta") for piece in pieces]
        assert deltas[:7] == [None, "Who ", "eats ", "it?", None, None, None]
        assert "".join(piece.delta or "" for piece in pieces) == TEXT
        assert pieces[2].message.blocks == [ThinkingBlock(content="Who eats ", num_tokens=2), TextBlock(text="")]


@pytest.mark.usefixtures("thinking")
async def test_completions_are_the_text_alone_with_the_thought_beside_it(llm: BlendLLM) -> None:
    for response in (llm.complete(QUESTION), await llm.acomplete(QUESTION)):
        assert response.text == TEXT
        assert response.additional_kwargs == {"thinking": THOUGHT}
    for pieces in (list(llm.stream_complete(QUESTION)), [p async for p in await llm.astream_complete(QUESTION)]):
        assert pieces[-1].text == TEXT
        assert pieces[-1].additional_kwargs == {"thinking": THOUGHT}
        assert pieces[2].additional_kwargs == {"thinking": "Who eats ", "thinking_delta": "eats "}


@pytest.mark.usefixtures("endless")
def test_answers_without_a_thought_are_as_before(llm: BlendLLM) -> None:
    response: Any = llm.chat(USER)
    assert response.message.blocks == [TextBlock(text=response.message.content)]
    assert response.raw["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert all(not piece.additional_kwargs for piece in llm.stream_chat(USER))
    assert llm.complete(QUESTION).additional_kwargs == {}


@pytest.mark.usefixtures("thinking")
async def test_agents_stream_the_thought(llm: BlendLLM) -> None:
    agent = FunctionAgent(llm=llm, tools=[], streaming=True)
    handler = agent.run(QUESTION)
    events = [event async for event in handler.stream_events() if isinstance(event, AgentStream)]
    output = await handler
    assert output.response.blocks == [ThinkingBlock(content=THOUGHT, num_tokens=3), TextBlock(text=TEXT)]
    assert "".join(event.thinking_delta or "" for event in events) == THOUGHT
    assert events[-1].response == TEXT


def test_thoughts_in_a_history_are_no_text_but_a_field_for_templates() -> None:
    call = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={})
    said = assistant_message("I look.", [call], [ThinkingBlock(content="Hm.")])
    (message,) = template_messages([said])
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Hm.")
    (plain,) = template_messages([ChatMessage(role="assistant", content="I look.")])
    assert plain == {"role": "assistant", "content": "I look."}

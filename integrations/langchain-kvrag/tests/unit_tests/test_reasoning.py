"""Thoughts: blocks of an answer, and parts of a history that templates may use."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from frameworks import merged
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGenerationChunk
from langchain_kvrag import BlendLLM, ChatBlend
from langchain_kvrag.chat_models import ChatChunkBuilder
from langchain_kvrag.messages import template_messages

from kvrag import BlendEngine, Delta, Model, SettingError, ToolCall
from kvrag.backend.transformers import Tokenizer
from kvrag.generate.prompt import thinks

QUESTION = "Question: Who likes curry?"
THOUGHT, TEXT = "Who eats it?", "Zel Vinford."  # of the fixture `thinking`
HIDDEN = ("index", "id")  # of blocks: only for merging chunks


def blocks(message: AIMessage) -> list[dict[str, Any]]:
    return [{key: value for key, value in dict(block).items() if key not in HIDDEN} for block in message.content_blocks]


@pytest.mark.usefixtures("thinking")
async def test_a_thought_is_a_block_before_the_text(chat: ChatBlend) -> None:
    message = chat.invoke(QUESTION)
    assert message.content == [{"type": "reasoning", "reasoning": THOUGHT}, {"type": "text", "text": TEXT}]
    assert message.text == TEXT
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_token_details"] == {"reasoning": 3}
    assert message.usage_metadata["output_tokens"] == 16
    assert (await chat.ainvoke(QUESTION)).content == message.content
    for pieces in (list(chat.stream(QUESTION)), [piece async for piece in chat.astream(QUESTION)]):
        whole = merged(pieces)
        assert blocks(whole) == message.content
        assert len(whole.content) == 2
        assert whole.usage_metadata == message.usage_metadata
        assert "".join(piece.text for piece in pieces) == TEXT
    assert (chat | StrOutputParser()).invoke(QUESTION) == TEXT
    assert "".join((chat | StrOutputParser()).stream(QUESTION)) == TEXT


@pytest.mark.usefixtures("thinking")
def test_events_and_standard_content_have_the_thought_as_one_block(chat: ChatBlend, settings: dict[str, Any]) -> None:
    expected = [{"type": "reasoning", "reasoning": THOUGHT}, {"type": "text", "text": TEXT}]
    v1 = ChatBlend(**settings, output_version="v1")
    assert blocks(v1.invoke(QUESTION)) == expected
    assert blocks(merged(list(v1.stream(QUESTION)))) == expected
    events = chat.stream_events(QUESTION, version="v3")
    assert blocks(events.output) == expected


@pytest.mark.usefixtures("endless")
def test_answers_without_a_thought_are_plain_strings(chat: ChatBlend) -> None:
    message, pieces = chat.invoke(QUESTION), list(chat.stream(QUESTION))
    assert isinstance(message.content, str)
    assert all(isinstance(piece.content, str) for piece in pieces)
    assert message.usage_metadata is not None
    assert "output_token_details" not in message.usage_metadata


def test_a_call_after_a_thought_is_not_merged_into_it() -> None:
    builder = ChatChunkBuilder("m", as_blocks=False)
    deltas = [
        Delta(""),
        Delta("", reasoning="Hm, "),
        Delta("", reasoning="look."),
        Delta("I look."),
        Delta("", tool_calls=(ToolCall("look", {"a": 1}, "1"),)),
        Delta("", reasoning="And then?"),
        Delta("Done."),
    ]
    found = [builder.add(delta) for delta in deltas]
    assert found[0] is None  # LangChain would keep an empty text before the thought
    whole = merged([chunk for chunk in found if chunk is not None])
    assert isinstance(whole, ChatGenerationChunk)
    message = whole.message
    assert isinstance(message, AIMessageChunk)
    assert [block["type"] for block in message.content] == ["reasoning", "text", "reasoning", "text"]  # type: ignore[index]
    assert message.content[0]["reasoning"] == "Hm, look."  # type: ignore[index]
    assert message.text == "I look.Done."
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("look", {"a": 1})


@pytest.mark.parametrize("kind", ["reasoning", "text"])
def test_calls_are_not_merged_into_the_block_before(
    kind: str, chat: ChatBlend, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (end,) = (delta for delta in chat._open().stream(QUESTION, max_new_tokens=1) if delta.report)
    call = ToolCall("look", {"a": 1}, "1")  # its index is that of the first block of a message
    said = [replace(Delta(""), **{kind: "Hm."}), Delta("", tool_calls=(call,)), replace(end, text="")]
    monkeypatch.setattr(BlendEngine, "stream", lambda *args, **options: (delta for delta in said))
    expected = [
        {"type": kind, kind: "Hm."},
        {"type": "tool_call", "name": "look", "args": {"a": 1}},
    ]
    assert blocks(chat.stream_events(QUESTION, version="v3").output) == expected
    assert blocks(merged(list(ChatBlend(**settings, output_version="v1").stream(QUESTION)))) == expected


def test_thoughts_in_a_history_are_no_text_but_a_field_for_templates(chat: ChatBlend) -> None:
    call = {"name": "look", "args": {}, "id": "1", "type": "tool_call"}
    thought: dict[str, Any] = {"type": "reasoning", "reasoning": "Hm.", "index": "lc_reasoning_1"}
    text: dict[str, Any] = {"type": "text", "text": "I look.", "index": "lc_text_2"}
    history = [
        HumanMessage(QUESTION),
        AIMessage([thought, text], tool_calls=[call]),
        ToolMessage([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}], tool_call_id="1"),
        AIMessage("Zel.", additional_kwargs={"reasoning_content": "By Ollama."}),
        AIMessage([{"type": "redacted_thinking", "data": "AA"}, {"type": "reasoning_content"}, "Zel."]),
        AIMessage("Zel."),
    ]
    _, said, _, others, hidden, plain = template_messages(history)
    assert said["content"] == [{"type": "text", "text": "I look."}]
    assert (said["reasoning_content"], others["reasoning_content"]) == ("Hm.", "By Ollama.")
    assert hidden == {"role": "assistant", "content": ["Zel."]}
    assert plain == {"role": "assistant", "content": "Zel."}
    tokenizer = chat._open().model.tokenizer
    rendered = tokenizer.decode(tokenizer.render(template_messages(history[:3])))
    assert "Hm." not in rendered
    assert "One.\nTwo." in rendered


@pytest.mark.usefixtures("thinking")
def test_text_models_return_the_text_alone_and_the_thought_beside_it(chat: ChatBlend, llm: BlendLLM) -> None:
    message = chat.invoke(QUESTION)
    (generation,) = llm.generate([QUESTION]).generations[0]
    assert generation.text == TEXT
    assert generation.generation_info is not None
    assert generation.generation_info["reasoning"] == THOUGHT
    assert generation.generation_info["usage_metadata"] == message.usage_metadata
    whole = merged(list(llm._stream(QUESTION)))
    assert whole.text == TEXT
    assert whole.generation_info["reasoning"] == THOUGHT


def test_the_switch_is_a_setting_and_an_argument(settings: dict[str, Any]) -> None:
    chat = ChatBlend(**settings, reasoning=False)
    assert chat._request(None, {})[1]["reasoning"] is False
    assert chat._request(None, {"reasoning": True})[1]["reasoning"] is True
    assert ChatBlend(**settings)._request(None, {})[1]["reasoning"] is None
    assert chat._get_llm_string() != ChatBlend(**settings)._get_llm_string()
    with pytest.raises(SettingError, match="reasoning must be True, False or None, got 'high'"):
        chat.invoke(QUESTION, reasoning="high")


def test_the_profile_reports_whether_the_model_thinks(
    chat: ChatBlend, model: Model, settings: dict[str, Any], tmp_path: Any
) -> None:
    assert chat.profile is not None
    assert chat.profile["reasoning_output"] is False
    model.tokenizer.hf.save_pretrained(tmp_path / "thinker")
    (tmp_path / "thinker" / "config.json").write_text(model.hf.config.to_json_string())
    (tmp_path / "thinker" / "chat_template.jinja").write_text("{{ '<think>' }}")
    thinker = ChatBlend(**{**settings, "model": tmp_path / "thinker"})
    assert thinker.profile is not None
    assert thinker.profile["reasoning_output"] is True
    tokenizer = copy.deepcopy(model.tokenizer.hf)
    tokenizer.add_tokens("[THINK]")
    assert ChatBlend(engine=chat._open()).profile["reasoning_output"] is False  # type: ignore[index, arg-type]
    assert not thinks(Tokenizer(tokenizer, "other"))  # some models that do not think have the token
    remote = ChatBlend(model="m", base_url="http://localhost:1")
    assert remote.profile is not None
    assert "reasoning_output" not in remote.profile  # unknown


@pytest.mark.parametrize("call", [{"stream_usage": True}, {"stream_options": {"include_usage": True}}, {"n": 1}])
def test_arguments_of_other_chat_models_are_accepted(call: dict[str, Any], chat: ChatBlend) -> None:
    expected = chat.invoke(QUESTION)
    assert chat.invoke(QUESTION, **call, strict=True, user="me").content == expected.content
    with pytest.raises(SettingError, match="n must be 1"):
        chat.invoke(QUESTION, n=2)

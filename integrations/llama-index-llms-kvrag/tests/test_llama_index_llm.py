"""BlendLLM: arguments and responses of LlamaIndex's eight methods."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.kvrag import BlendLLM
from llama_index.llms.kvrag.messages import template_messages

from kvrag import BlendEngine, Model, ModelLoadError, PromptError, SettingError

QUESTION = "Question: Who likes curry?"
USER = [ChatMessage(role="user", content=QUESTION)]
AFTER_THIS = CachePoint(cache_control=CacheControl(type="ephemeral"))  # for services: no content


# ---------------------------------------------------------------- answers


@pytest.mark.usefixtures("endless")
async def test_every_response_reports_its_usage_and_reuse(llm: BlendLLM) -> None:
    chunk = CHUNKS[3]
    llm.warm([chunk])
    prompt = f"{chunk}\n\n{QUESTION}"
    responses: list[Any] = [
        llm.complete(prompt),
        llm.chat([ChatMessage(content=prompt)]),
        list(llm.stream_complete(prompt))[-1],
        [piece async for piece in await llm.astream_chat([ChatMessage(content=prompt)])][-1],
    ]
    for response in responses:
        raw = response.raw
        assert raw["usage"]["completion_tokens"] == 16
        assert raw["usage"]["total_tokens"] == raw["usage"]["prompt_tokens"] + 16
        assert raw["usage"]["prompt_tokens_details"]["cached_tokens"] == raw["kvrag"]["reused_tokens"] > 16
        assert raw["finish_reason"] == "length"
        assert json.loads(json.dumps(raw)) == raw
    assert [piece.raw for piece in llm.stream_complete(prompt)][:-1] == [None] * 15


@pytest.mark.usefixtures("endless")
def test_the_next_turn_continues_from_the_last(llm: BlendLLM) -> None:
    chunk = CHUNKS[3]
    llm.warm([chunk])
    history = [ChatMessage(content=f"{chunk}\n\n{QUESTION}")]
    first: Any = llm.chat(history)
    second: Any = llm.chat([*history, first.message, ChatMessage(content=f"{QUESTION} And again: {chunk}")])
    kept = second.raw["kvrag"]["conversation_tokens"]
    assert kept >= first.raw["usage"]["prompt_tokens"] - 5
    cached = second.raw["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second.raw["kvrag"]["reused_tokens"] > kept + 16


async def test_a_model_without_a_chat_template_gets_texts_as_they_are(
    settings: dict[str, Any], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer.hf, "chat_template", None)
    llm = BlendLLM(engine=BlendEngine(model, settings["store"]), max_tokens=4)
    assert not llm.metadata.is_chat_model
    said = llm.complete(QUESTION, formatted=True)
    assert said.raw is not None
    assert said.raw["usage"]["prompt_tokens"] == len(model.tokenizer.render(QUESTION))
    assert llm.complete(QUESTION).text == (await llm.acomplete(QUESTION)).text == said.text
    assert list(llm.stream_complete(QUESTION))[-1].text == said.text
    assert [piece.text async for piece in await llm.astream_complete(QUESTION)][-1] == said.text
    with pytest.raises(PromptError, match="has no chat template"):
        llm.chat(USER)


def test_the_metadata_needs_no_weights(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    llm = BlendLLM(model=str(tmp_path), store=tmp_path / "kv")
    assert llm.metadata.context_window == json.loads((tiny / "config.json").read_text())["max_position_embeddings"]
    assert llm.metadata.is_chat_model
    with pytest.raises(ModelLoadError):
        llm.complete("Hello.")
    with pytest.raises(ModelLoadError):
        BlendLLM(model=str(tmp_path / "nowhere")).metadata  # noqa: B018


# ---------------------------------------------------------------- settings


@pytest.mark.usefixtures("endless")
def test_settings_of_a_call_override_the_objects(llm: BlendLLM) -> None:
    raw: Any = llm.complete(QUESTION, max_tokens=3, ratio=0.5).raw
    assert raw["usage"]["completion_tokens"] == 3
    assert raw["kvrag"]["ratio"] == 0.5
    assert llm.chat(USER, policy="full").raw["kvrag"]["policy"] == "full"  # type: ignore[index]
    drawn = [llm.complete(QUESTION, temperature=2.0, seed=seed).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.usefixtures("endless")
def test_documents_of_a_call_may_be_a_retrievers_results(llm: BlendLLM) -> None:
    texts = [f"{name} was born in Florton. She drives a red car and plays the harp every day." for name in "ABC"]
    nodes = [TextNode(text=text, metadata={"file_path": "here.txt"}) for text in texts]
    found = NodeWithScore(node=nodes[1], score=0.5)
    llm.complete("Who?", documents=[nodes[0], found, texts[2]])
    assert llm.warm([*nodes[:2], texts[2]]).new == 0
    assert llm.warm(texts).new == 2


async def test_unknown_settings_of_a_call_are_refused(llm: BlendLLM) -> None:
    with pytest.raises(SettingError, match="unknown setting temprature"):
        llm.complete(QUESTION, temprature=0)
    with pytest.raises(SettingError, match="unknown setting temprature"):
        llm.stream_chat(USER, temprature=0)
    with pytest.raises(SettingError, match="unknown setting temprature"):
        await llm.astream_complete(QUESTION, temprature=0)
    with pytest.raises(ValueError, match="temprature"):
        BlendLLM(model="reader", temprature=0)
    with pytest.raises(SettingError, match=r"^max_tokens must be an integer of at least 1, got 0"):
        llm.complete(QUESTION, max_tokens=0)


# ---------------------------------------------------------------- the engine


def test_creating_an_object_loads_nothing(settings: dict[str, Any], built: list[Any]) -> None:
    one, other = BlendLLM(**settings), BlendLLM(**{**settings, "store": str(settings["store"]), "seed": 1})
    repr(one), one.to_payload(), one.to_dict()
    assert built == []
    one.complete(QUESTION)
    other.complete(QUESTION)
    assert len(built) == 1


def test_serialised_forms_leave_the_engine_out(llm: BlendLLM) -> None:
    llm._open()
    assert len(pickle.dumps(llm)) < 10_000
    data = json.loads(llm.to_json())
    assert "engine" not in data
    assert data["store"] == llm.store
    json.dumps(llm.to_payload())


# ---------------------------------------------------------------- messages


def test_every_kind_of_message_becomes_a_template_message() -> None:
    call = ToolCallBlock(tool_call_id="1", tool_name="look", tool_kwargs={"where": "here"})
    said = template_messages(
        [
            ChatMessage(role="developer", content="be brief"),
            ChatMessage(role="user", blocks=[TextBlock(text="a"), AFTER_THIS, TextBlock(text="b")]),
            ChatMessage(role="assistant", blocks=[TextBlock(text="c"), call]),
            ChatMessage(role="tool", content="found", additional_kwargs={"tool_call_id": "1", "other": 2}),
            ChatMessage(role="chatbot", content="d"),
        ]
    )
    assert [message["role"] for message in said] == ["developer", "user", "assistant", "tool", "assistant"]
    assert said[1]["content"] == "a\nb"
    assert said[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"where": "here"}}
    assert said[3] == {"role": "tool", "content": "found", "tool_call_id": "1"}


# ---------------------------------------------------------------- threads and the event loop


@pytest.mark.parametrize("method", ["achat", "acomplete", "astream_chat", "astream_complete"])
async def test_the_event_loop_runs_while_the_model_loads_and_computes(
    method: str, settings: dict[str, Any], loop_ran: list[bool]
) -> None:
    answer = await getattr(BlendLLM(**settings), method)(USER if "chat" in method else QUESTION)
    if "stream" in method:
        assert [piece async for piece in answer]
    assert len(loop_ran) > 1
    assert all(loop_ran)


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("method", ["stream_chat", "stream_complete"])
def test_a_dropped_stream_stops_the_work(method: str, llm: BlendLLM, forwards: list[int], closed: list[str]) -> None:
    pieces = getattr(llm, method)(USER if "chat" in method else QUESTION)
    next(pieces), next(pieces)
    assert closed == []
    del pieces
    assert closed == ["closed"]
    assert len(forwards) < 4


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("method", ["astream_chat", "astream_complete"])
async def test_a_dropped_async_stream_stops_the_work(
    method: str, llm: BlendLLM, forwards: list[int], closed: list[str]
) -> None:
    pieces = await getattr(llm, method)(USER if "chat" in method else QUESTION)
    await anext(pieces), await anext(pieces)
    assert closed == []
    await pieces.aclose()
    del pieces
    async with asyncio.timeout(60):
        while not closed:  # noqa: ASYNC110  the event loop closes dropped generators, with a thread's help
            await asyncio.sleep(0.001)
    assert closed == ["closed"]
    assert len(forwards) < 4

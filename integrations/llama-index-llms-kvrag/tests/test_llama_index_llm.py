"""BlendLLM: arguments and responses of LlamaIndex's eight methods."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.llms import CustomLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.kvrag import BlendLLM
from llama_index.llms.kvrag.messages import template_messages

from kvrag import BlendEngine, Model, ModelLoadError, PromptError, SettingError

QUESTION = "Question: Who likes curry?"
USER = [ChatMessage(role="user", content=QUESTION)]
AFTER_THIS = CachePoint(cache_control=CacheControl(type="ephemeral"))  # for services: no content


# ---------------------------------------------------------------- answers


@pytest.mark.usefixtures("endless")
async def test_all_eight_methods_give_the_same_answer(llm: BlendLLM) -> None:
    chat, complete = llm.chat(USER), llm.complete(QUESTION)
    assert complete.text
    assert chat.message.content == complete.text
    assert chat.message.role == MessageRole.ASSISTANT
    assert (await llm.achat(USER)).message.content == complete.text
    assert (await llm.acomplete(QUESTION)).text == complete.text
    streams = [
        [(piece.message.content, piece.delta) for piece in llm.stream_chat(USER)],
        [(piece.message.content, piece.delta) async for piece in await llm.astream_chat(USER)],
        [(piece.text, piece.delta) for piece in llm.stream_complete(QUESTION)],
        [(piece.text, piece.delta) async for piece in await llm.astream_complete(QUESTION)],
    ]
    for pieces in streams:
        said = ""
        for text, delta in pieces:
            said += delta or ""
            assert text == said
        assert said == complete.text
        assert len(pieces) > 3


@pytest.mark.usefixtures("endless")
async def test_every_response_reports_its_usage_and_reuse(llm: BlendLLM) -> None:
    chunk = "Zel Vinford lives in Stinmouth. She studied music. She likes to eat curry and apples. She owns a snake."
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
    chunk = "Zel Vinford lives in Stinmouth. She studied music. She likes to eat curry and apples. She owns a snake."
    llm.warm([chunk])
    history = [ChatMessage(content=f"{chunk}\n\n{QUESTION}")]
    first: Any = llm.chat(history)
    second: Any = llm.chat([*history, first.message, ChatMessage(content=f"{QUESTION} And again: {chunk}")])
    kept = second.raw["kvrag"]["conversation_tokens"]
    assert kept >= first.raw["usage"]["prompt_tokens"] - 5
    cached = second.raw["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == second.raw["kvrag"]["reused_tokens"] > kept + 16


def test_a_prompt_is_one_user_message_unless_it_is_formatted(llm: BlendLLM) -> None:
    tokenizer = llm._open().model.tokenizer
    as_message = llm.complete(QUESTION).raw["usage"]["prompt_tokens"]  # type: ignore[index]
    as_it_is = llm.complete(QUESTION, formatted=True).raw["usage"]["prompt_tokens"]  # type: ignore[index]
    assert as_message == len(tokenizer.render([{"role": "user", "content": QUESTION}]))
    assert as_it_is == len(tokenizer.render(QUESTION)) != as_message


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


def test_predict_sends_the_system_prompt_as_a_message(settings: dict[str, Any]) -> None:
    llm = BlendLLM(**settings, system_prompt="You are brief.", policy="full")
    expected = llm.chat([ChatMessage(role="system", content="You are brief."), *USER]).message.content
    assert llm.predict(PromptTemplate("{q}"), q=QUESTION) == expected


def test_the_metadata_is_the_models_own(llm: BlendLLM) -> None:
    assert llm.metadata.context_window == llm._open().model.context_window
    assert llm.metadata.num_output == 16
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == "reader"
    assert isinstance(llm, BaseLLM)
    assert not isinstance(llm, CustomLLM)  # whose async methods block the event loop


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


@pytest.mark.parametrize("drop", [False, True])
def test_every_start_of_a_callback_has_its_end(settings: dict[str, Any], drop: bool) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm = BlendLLM(**settings, callback_manager=CallbackManager([debug]))
    llm.complete(QUESTION)
    pieces = llm.stream_chat(USER)
    next(pieces)
    if drop:
        pieces.close()
    else:
        list(pieces)
    with pytest.raises(PromptError):
        llm.complete("")
    pairs = debug.get_event_pairs(CBEventType.LLM)
    assert [len(pair) for pair in pairs] == [2, 2, 2]


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
    (told,) = llm.explain(retrieved=[found]).chunks
    assert told.text == "file_path: here.txt\n\n" + texts[1]


def test_the_stop_strings_of_a_call_are_added_to_the_objects(settings: dict[str, Any]) -> None:
    asked = (
        "It is said that Ingla has learned to play a leather drum.\n\nQuestion: What does Ingla play?"  # a long answer
    )
    text = BlendLLM(**settings).complete(asked).text
    early, late = text[4:7], text[-5:-2]
    for llm, stop in ((BlendLLM(**settings, stop=[early]), [late]), (BlendLLM(**settings, stop=[late]), [early])):
        answer = llm.complete(asked, stop=stop)
        assert answer.text == text[: min(text.find(early), text.find(late))]
        assert answer.raw["finish_reason"] == "stop"  # type: ignore[index]


async def test_unknown_settings_of_a_call_are_refused(llm: BlendLLM) -> None:
    with pytest.raises(SettingError, match="unknown setting temprature"):
        llm.complete(QUESTION, temprature=0)
    with pytest.raises(SettingError, match="unknown setting temprature"):
        llm.stream_chat(USER, temprature=0)
    with pytest.raises(SettingError, match="unknown setting temprature"):
        await llm.astream_complete(QUESTION, temprature=0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": "reader", "temprature": 0}, "temprature"),
        ({"model": "reader", "ratio": 1.5}, "ratio must be a number in"),
        ({"model": "reader", "policy": "best"}, "unknown policy 'best'"),
        ({"model": "reader", "stop": [""]}, "stop strings must not be empty"),
        ({}, "no model"),
    ],
)
def test_wrong_settings_are_refused_when_the_object_is_created(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        BlendLLM(**wrong)


def test_no_max_tokens_is_the_default(settings: dict[str, Any]) -> None:
    assert BlendLLM(**{**settings, "max_tokens": None}).max_tokens == 256


async def test_a_wrong_length_is_reported_under_the_name_that_was_given(llm: BlendLLM) -> None:
    with pytest.raises(ValueError, match=r"\bmax_tokens must be an integer of at least 1, got 0"):
        BlendLLM(model="reader", max_tokens=0)
    with pytest.raises(SettingError, match=r"^max_tokens must be an integer of at least 1, got 0"):
        llm.complete(QUESTION, max_tokens=0)
    with pytest.raises(SettingError, match="unknown setting max_new_tokens"):
        await llm.acomplete(QUESTION, max_new_tokens=0)


async def test_warming_and_forgetting_have_async_methods(llm: BlendLLM) -> None:
    texts = ["Mira Brel was born in Florton. She lives in Grelville, and plays the harp every day of the year."]
    assert (await llm.awarm(texts, document="d")).new == 1
    assert await llm.adocuments() == llm.documents() == ["d"]
    assert await llm.aforget("d") == 1


def test_an_engine_already_built_excludes_settings_of_the_model(tmp_path: Path) -> None:
    engine = BlendEngine.from_pretrained("reader", store=tmp_path, dtype="float32")
    assert BlendLLM(engine=engine, max_tokens=4).complete(QUESTION).raw["kvrag"]["prompt_tokens"] > 4  # type: ignore[index]
    with pytest.raises(ValueError, match="leave out model="):
        BlendLLM(engine=engine, model="reader")


# ---------------------------------------------------------------- the engine


def test_creating_an_object_loads_nothing(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    from_pretrained = BlendEngine.from_pretrained

    def counting(*args: Any, **kwargs: Any) -> BlendEngine:
        built.append(args)
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(BlendEngine, "from_pretrained", counting)
    one, other = BlendLLM(**settings), BlendLLM(**{**settings, "store": str(settings["store"]), "seed": 1})
    repr(one), one.to_payload(), one.to_dict()
    assert built == []
    one.complete(QUESTION)
    other.complete(QUESTION)
    assert len(built) == 1


def test_serialised_forms_leave_the_engine_out(llm: BlendLLM) -> None:
    text = llm.complete(QUESTION).text
    pickled = pickle.dumps(llm)
    assert len(pickled) < 10_000
    assert pickle.loads(pickled).complete(QUESTION).text == text
    data = json.loads(llm.to_json())
    assert "engine" not in data
    assert data["store"] == llm.store
    assert BlendLLM.from_dict(data).complete(QUESTION).text == text
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
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "assistant"]
    assert said[1]["content"] == "a\nb"
    assert said[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"where": "here"}}
    assert said[3] == {"role": "tool", "content": "found", "tool_call_id": "1"}


def test_images_are_refused(llm: BlendLLM) -> None:
    message = ChatMessage(role="user", blocks=[TextBlock(text="What is this?"), ImageBlock(image=b"png")])
    with pytest.raises(PromptError, match="content of type 'image'"):
        llm.chat([message])


# ---------------------------------------------------------------- threads and the event loop


@pytest.mark.parametrize("method", ["achat", "acomplete", "astream_chat", "astream_complete"])
async def test_the_event_loop_runs_while_the_model_loads_and_computes(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    seen: list[bool] = []

    def after_the_loop_has_run(function: Any) -> Any:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            ran = threading.Event()
            loop.call_soon_threadsafe(ran.set)
            seen.append(ran.wait(10))
            return function(*args, **kwargs)

        return waiting

    monkeypatch.setattr(BlendEngine, "from_pretrained", after_the_loop_has_run(BlendEngine.from_pretrained))
    monkeypatch.setattr(Model, "forward", after_the_loop_has_run(Model.forward))
    answer = await getattr(BlendLLM(**settings), method)(USER if "chat" in method else QUESTION)
    if "stream" in method:
        assert [piece async for piece in answer]
    assert len(seen) > 1
    assert all(seen)


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
    for _ in range(10):  # the event loop closes dropped generators
        await asyncio.sleep(0)
    assert closed == ["closed"]
    assert len(forwards) < 4

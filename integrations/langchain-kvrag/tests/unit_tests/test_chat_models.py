"""ChatBlend: messages, settings and answers of the chat model."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from frameworks import merged
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumps, load
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import ConfigurableField
from langchain_kvrag import BlendLLM, ChatBlend
from langchain_kvrag.messages import template_messages

from kvrag import (
    AnswerTimeoutError,
    BlendConfig,
    BlendEngine,
    ContextWindowError,
    Delta,
    Grammar,
    Model,
    PromptError,
    SettingError,
)

QUESTION = "Question: Who likes curry?"
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)


# ---------------------------------------------------------------- answers


@pytest.mark.usefixtures("endless")
async def test_streams_and_async_give_the_same_answer_as_invoke(chat: ChatBlend, chunks: list[str]) -> None:
    chat.warm(chunks)
    prompt = "\n\n".join([*chunks, QUESTION])
    chat.invoke(prompt)  # the others begin like it
    message = chat.invoke(prompt)
    assert message.content
    for pieces in (list(chat.stream(prompt)), [piece async for piece in chat.astream(prompt)]):
        assert len(pieces) > 3
        assert "".join(str(piece.content) for piece in pieces) == message.content
        assert merged(pieces).usage_metadata == message.usage_metadata
    answer = await chat.ainvoke(prompt)
    assert (answer.content, answer.usage_metadata) == (message.content, message.usage_metadata)


@pytest.mark.usefixtures("endless")
def test_usage_counts_the_prompt_the_answer_and_what_was_reused(chat: ChatBlend, chunks: list[str]) -> None:
    prompt = "\n\n".join([*chunks, QUESTION])
    cold = chat.invoke(prompt)
    chat.warm(chunks)
    warm = chat.invoke(prompt)
    assert cold.usage_metadata is not None
    assert warm.usage_metadata is not None
    assert cold.usage_metadata["input_tokens"] == warm.usage_metadata["input_tokens"] > 100
    assert cold.usage_metadata["output_tokens"] == 16
    assert cold.usage_metadata["total_tokens"] == cold.usage_metadata["input_tokens"] + 16
    assert cold.usage_metadata["input_token_details"]["cache_read"] == 0
    reused = warm.usage_metadata["input_token_details"]["cache_read"]
    assert reused == warm.response_metadata["kvrag"]["reused_tokens"] > 90


@pytest.mark.usefixtures("endless")
def test_the_next_turn_continues_from_the_last(chat: ChatBlend, chunks: list[str]) -> None:
    chat.warm(chunks)
    history = [HumanMessage("\n\n".join([*chunks[:2], QUESTION]))]
    first = chat.invoke(history)
    second = chat.invoke([*history, first, HumanMessage("\n\n".join([chunks[2], "Question: And who is that?"]))])
    assert first.usage_metadata is not None
    assert second.usage_metadata is not None
    report = second.response_metadata["kvrag"]
    assert report["conversation_tokens"] >= first.usage_metadata["input_tokens"] - 5
    assert len(report["runs"]) == 1
    read = second.usage_metadata["input_token_details"]["cache_read"]
    assert read == report["reused_tokens"] > report["conversation_tokens"] + 16


@pytest.mark.usefixtures("endless")
def test_only_the_last_piece_of_a_stream_has_usage_and_report(chat: ChatBlend) -> None:
    *pieces, last = list(chat.stream(QUESTION))
    assert not any(piece.usage_metadata or piece.response_metadata or piece.chunk_position for piece in pieces)
    assert last.chunk_position == "last"
    assert last.usage_metadata is not None
    metadata = last.response_metadata
    assert (metadata["model_name"], metadata["model_provider"], metadata["finish_reason"]) == (
        "reader",
        "kvrag",
        "length",
    )
    assert json.loads(json.dumps(metadata)) == metadata


def test_invoke_sends_no_tokens_to_callbacks_and_stream_sends_all(chat: ChatBlend, settings: dict[str, Any]) -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.said: list[str] = []

        def on_llm_new_token(self, token: str, **_: Any) -> None:
            self.said.append(token)

    tokens = Tokens()
    message = chat.invoke(QUESTION, {"callbacks": [tokens]})
    assert tokens.said == []
    list(chat.stream(QUESTION, {"callbacks": [tokens]}))
    assert "".join(tokens.said) == message.content
    tokens.said.clear()
    assert chat.invoke(QUESTION, {"callbacks": [tokens]}, stream=True).content == message.content
    assert "".join(tokens.said) == message.content
    assert len(list(ChatBlend(**settings, streaming=False).stream(QUESTION))) == 1


@pytest.mark.usefixtures("endless")
async def test_a_text_llm_in_a_chain_gives_the_same_answer_in_every_way(llm: BlendLLM, chunks: list[str]) -> None:
    llm.warm(chunks)
    rag = PromptTemplate.from_template("\n\n".join([*chunks, "Question: {question}"])) | llm | StrOutputParser()
    asked = [{"question": question} for question in ("Who likes curry?", "Where was Kan Dror born?")]
    answers = [rag.invoke(question) for question in asked]
    assert len(set(answers)) == 2
    assert all(answers)
    pieces = list(rag.stream(asked[0]))
    assert len(pieces) > 3
    assert "".join(pieces) == answers[0]
    assert rag.batch(asked) == answers
    assert await rag.abatch(asked) == answers
    assert "".join([piece async for piece in rag.astream(asked[0])]) == answers[0]


# ---------------------------------------------------------------- settings


@pytest.mark.usefixtures("endless")
def test_settings_of_a_call_override_the_objects(chat: ChatBlend, chunks: list[str]) -> None:
    chat.warm(chunks)
    prompt = "\n\n".join([*chunks, QUESTION])
    short = chat.invoke(prompt, max_tokens=3)
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 3
    assert chat.bind(ratio=0.5).invoke(prompt).response_metadata["kvrag"]["ratio"] == 0.5
    assert chat.invoke(prompt, policy="full").response_metadata["kvrag"]["policy"] == "full"
    drawn = [chat.invoke(prompt, temperature=2.0, seed=seed).content for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.usefixtures("endless")
def test_the_stop_strings_of_a_call_are_added_to_the_objects(settings: dict[str, Any]) -> None:
    asked = (
        "It is said that Ingla has learned to play a leather drum.\n\nQuestion: What does Ingla play?"  # a long answer
    )
    text = str(ChatBlend(**settings).invoke(asked).content)
    early, late = text[4:7], text[-5:-2]
    stopping = ChatBlend(**settings, stop=[early])
    assert stopping.invoke(asked).content == text[: text.find(early)]
    first = min(text.find(early), text.find(late))
    for answer in (
        stopping.invoke(asked, stop=[late]),
        ChatBlend(**settings, stop=[late]).invoke(asked, stop=[early]),
    ):
        assert answer.content == text[:first]
        assert answer.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("unknown", [{"max_new_tokens": 3}, {"temprature": 0}, {"engine": None}])
def test_unknown_settings_of_a_call_are_refused(chat: ChatBlend, unknown: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=f"unknown setting {next(iter(unknown))}"):
        chat.invoke(QUESTION, **unknown)
    with pytest.raises(SettingError, match="unknown setting"):
        list(chat.stream(QUESTION, **unknown))


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
async def test_a_prompt_that_does_not_fit_raises_langchains_error(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any]
) -> None:
    chat = cls(**settings)
    long = "harp " * chat._open().model.context_window
    ways = [lambda: chat.invoke(long), lambda: list(chat.stream(long))]
    aways = [lambda: chat.ainvoke(long), lambda: anext(chat.astream(long))]
    for way in ways:
        with pytest.raises(ContextOverflowError, match="too many for the window") as raised:
            way()
        assert isinstance(raised.value, ContextWindowError)
    for away in aways:
        with pytest.raises(ContextOverflowError, match="too many for the window"):
            await away()


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
async def test_an_answer_that_takes_too_long_fails(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    patient, slow = cls(**settings, timeout=1e6), cls(**settings, timeout=1e-9)
    assert patient.invoke(QUESTION)
    ways = [lambda: slow.invoke(QUESTION), lambda: list(slow.stream(QUESTION))]
    ways.append(lambda: patient.invoke(QUESTION, timeout=1e-9))
    for way in ways:
        with pytest.raises(TimeoutError, match=r"longer than its timeout of 1e-09 s: raise timeout="):
            way()
    with pytest.raises(AnswerTimeoutError):
        await slow.ainvoke(QUESTION)
    assert slow.invoke(QUESTION, timeout=1e6)
    for wrong in (0, -1.0):
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            cls(**settings, timeout=wrong)
        with pytest.raises(SettingError, match="timeout must be a positive number of seconds"):
            patient.invoke(QUESTION, timeout=wrong)


@pytest.mark.usefixtures("endless")
async def test_a_text_llm_reports_usage_and_reuse(llm: BlendLLM, chunks: list[str]) -> None:
    llm.warm(chunks)
    prompts = ["\n\n".join([*chunks, QUESTION]), QUESTION]
    message = ChatBlend(engine=llm._open(), temperature=0, max_tokens=16).invoke(prompts[0])
    for result in (llm.generate(prompts), await llm.agenerate(prompts)):
        [[first], [second]] = result.generations
        assert first.text == message.content
        info = first.generation_info
        assert info is not None
        assert info["usage_metadata"]["input_tokens"] == message.usage_metadata["input_tokens"]  # type: ignore[index]
        assert info["usage_metadata"]["input_token_details"]["cache_read"] > 90
        assert info["kvrag"]["reused_tokens"] > 90
        assert (info["finish_reason"], info["model_name"]) == ("length", "reader")
        assert result.llm_output is not None
        used = [one.generation_info["usage_metadata"] for one in (first, second)]  # type: ignore[index]
        usage = result.llm_output["token_usage"]
        assert usage["prompt_tokens"] == used[0]["input_tokens"] + used[1]["input_tokens"]
        assert usage["completion_tokens"] == 32
        assert usage["total_tokens"] == used[0]["total_tokens"] + used[1]["total_tokens"]

    class Ends(BaseCallbackHandler):
        def __init__(self) -> None:
            self.infos: list[Any] = []

        def on_llm_end(self, response: Any, **_: Any) -> None:
            self.infos.append(response.generations[0][0].generation_info)

    ends = Ends()
    list(llm.stream(prompts[0], {"callbacks": [ends]}))
    assert ends.infos[0]["usage_metadata"]["output_tokens"] == 16
    assert ends.infos[0]["kvrag"]["reused_tokens"] > 90


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
def test_documents_of_a_call_may_be_a_retrievers_results(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any], chunks: list[str]
) -> None:
    llm = cls(**settings)
    llm.invoke("\n\n".join(chunks), documents=[Document(chunks[0]), chunks[1]])
    done: list[tuple[int, int]] = []
    report = llm.warm(chunks[:3], progress=lambda number, total: done.append((number, total)))
    assert report.new == 1
    assert (done[0], done[-1]) == ((0, report.tokens), (report.tokens, report.tokens))
    with pytest.raises(SettingError, match="not one string"):
        llm.invoke(QUESTION, documents=chunks[0])
    for one in (Document(chunks[0]), {"page_content": chunks[0]}, chunks[0], None):
        with pytest.raises(SettingError, match=f"must be a list of documents or texts, got one {type(one).__name__}"):
            llm.warm(one)


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
async def test_warming_and_forgetting_leave_the_loop_alone(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any], chunks: list[str]
) -> None:
    llm = cls(**settings, namespace="mine")
    loop_thread, used, warm = threading.get_ident(), set(), BlendEngine.warm

    def noting(self: BlendEngine, *args: Any, **kwargs: Any) -> Any:
        used.add(threading.get_ident())
        return warm(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlendEngine, "warm", noting)
        documents = [Document(text, metadata={"source": "a"}) for text in chunks]
        assert (await llm.awarm(documents, document="d")).new == 4
    assert loop_thread not in used
    assert llm.warm(documents, document="d").new == 0, "with the same sources"
    assert llm.documents() == ["d"]
    assert llm.documents("e") == llm.documents(namespace="") == []
    assert llm.forget("d") == 4
    with pytest.raises(SettingError, match="must be a list of documents or texts, got one str"):
        await llm.awarm(chunks[0])


@pytest.mark.parametrize("call", [{"max_tokens": 0}, {"max_tokens": True}, {"max_new_tokens": 0}])
def test_a_wrong_length_is_reported_under_the_name_that_was_given(chat: ChatBlend, call: dict[str, Any]) -> None:
    (name,) = call
    with pytest.raises(SettingError, match=rf"(^|unknown setting ){name}\b"):
        chat.invoke(QUESTION, **call)


@pytest.mark.parametrize("stop", ["ab", "", 5])
def test_stop_strings_of_a_call_are_a_list(chat: ChatBlend, stop: Any) -> None:
    with pytest.raises(SettingError, match=f"stop must be a list of strings, got {stop!r}"):
        chat.invoke(QUESTION, stop=stop)


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"model": "reader", "temprature": 0}, "temprature"),
        ({"model": "reader", "ratio": 1.5}, "ratio must be a number in"),
        ({"model": "reader", "policy": "best"}, "unknown policy 'best'"),
        ({"model": "reader", "max_tokens": 0}, r"\bmax_tokens must be an integer of at least 1"),
        ({"model": "reader", "max_new_tokens": 0}, "max_new_tokens\n"),
        ({}, "no model"),
        ({"store": "kv"}, "no model"),
    ],
)
def test_wrong_settings_are_refused_when_the_object_is_created(cls: type, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        cls(**wrong)


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
def test_no_max_tokens_is_the_default(cls: type, settings: dict[str, Any]) -> None:
    assert cls(**{**settings, "max_tokens": None}).max_tokens == 256


def test_an_engine_already_built_excludes_settings_of_the_model(tmp_path: Path) -> None:
    engine = BlendEngine.from_pretrained("reader", store=tmp_path, dtype="float32")
    chat = ChatBlend(engine=engine, max_tokens=4)
    assert chat.invoke(QUESTION).response_metadata["model_name"] == "reader"
    for wrong in ({"model": "reader"}, {"store": "kv"}, {"dtype": "float32"}, {"base_url": "http://localhost:1"}):
        with pytest.raises(ValueError, match=f"leave out {next(iter(wrong))}="):
            ChatBlend(engine=engine, **wrong)


# ---------------------------------------------------------------- the engine


def test_creating_an_object_loads_nothing_and_equal_settings_share_an_engine(
    settings: dict[str, Any], built: list[Any]
) -> None:
    chat, llm = ChatBlend(**settings), BlendLLM(**{**settings, "store": str(settings["store"]), "max_tokens": 2})
    copies = [chat.model_copy(update={"seed": 3}), copy.deepcopy(chat), pickle.loads(pickle.dumps(chat))]
    repr([chat, llm, chat._identifying_params, chat._get_ls_params()])
    assert built == []
    for one in (chat, llm, *copies):
        one.invoke(QUESTION)
    assert len(built) == 1


def test_pickles_and_copies_leave_the_engine_out(chat: ChatBlend) -> None:
    answer = chat.invoke(QUESTION).content
    pickled = pickle.dumps(chat)
    assert len(pickled) < 10_000
    again = pickle.loads(pickled)
    assert again == chat == copy.deepcopy(chat)
    assert again.invoke(QUESTION).content == answer
    engine = chat._open()
    assert copy.deepcopy(ChatBlend(engine=engine)).engine is engine


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
def test_settings_can_be_written_and_read(cls: type[ChatBlend | BlendLLM], settings: dict[str, Any]) -> None:
    llm = cls(**settings, stop=["x"], device_map={"": "cpu"})
    written = dumps(llm)
    assert json.loads(written)["id"] == ["langchain_kvrag", cls.__name__], "no module, which may change"
    again = load(json.loads(written), allowed_objects=[cls], valid_namespaces=["langchain_kvrag"])
    assert type(again) is cls
    assert again._identifying_params == llm._identifying_params
    own = type("Own", (cls,), {"__module__": "my.package"})
    assert own.lc_id() == ["my", "package", "Own"]
    if cls is ChatBlend:
        assert "secret" not in dumps(ChatBlend(**settings, api_key="secret", timeout=3, max_retries=1))


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
def test_traces_have_the_versions(cls: type[ChatBlend | BlendLLM], settings: dict[str, Any]) -> None:
    versions = (cls(**settings).metadata or {})["lc_versions"]
    assert {"langchain-core", "langchain-kvrag"} <= set(versions)


def test_configurable_fields_keep_an_engine_given(tmp_path: Path) -> None:
    engine = BlendEngine.from_pretrained("reader", store=tmp_path, dtype="float32")
    chat = ChatBlend(engine=engine).configurable_fields(ratio=ConfigurableField(id="ratio"))
    message = chat.with_config(configurable={"ratio": 0.7}).invoke(QUESTION)
    assert message.response_metadata["kvrag"]["ratio"] == 0.7


def test_everything_that_changes_the_answer_changes_the_cache_key(settings: dict[str, Any], tmp_path: Path) -> None:
    base = ChatBlend(**settings)
    changes: list[dict[str, Any]] = [
        {"ratio": 0.9}, {"policy": "none"}, {"temperature": 1}, {"max_tokens": 5}, {"seed": 1}, {"stop": ["x"]},
        {"dtype": "bfloat16"}, {"revision": "v2"}, {"store": tmp_path / "other"}, {"top_k": 3}, {"top_p": 0.5},
        {"repetition_penalty": 1.2}, {"model": "other"},
    ]  # fmt: skip
    keys = [base._get_llm_string(), *(ChatBlend(**{**settings, **change})._get_llm_string() for change in changes)]
    keys.append(ChatBlend(engine=base._open())._get_llm_string())
    with BlendEngine(base._open().model, tmp_path / "engine", BlendConfig(min_run=20)) as other:
        keys.append(ChatBlend(engine=other)._get_llm_string())
    assert len(set(keys)) == len(keys)
    assert base._get_llm_string() == ChatBlend(**settings)._get_llm_string()
    json.dumps(base._identifying_params)
    json.dumps(ChatBlend(engine=base._open())._identifying_params)


@pytest.mark.usefixtures("endless")
async def test_settings_of_a_call_are_in_the_cache_key_of_text_models(settings: dict[str, Any]) -> None:
    settings |= {"cache": InMemoryCache(), "max_tokens": 8}
    llm, plain = BlendLLM(**settings), BlendLLM(**{**settings, "cache": False})
    for call in ({}, {"max_tokens": 2}, {"max_tokens": 4}, {"grammar": Grammar(regex="yes")}):
        expected = plain.invoke(QUESTION, **call)
        assert llm.invoke(QUESTION, **call) == expected
        assert await llm.ainvoke(QUESTION, {"tags": ["again"], "run_name": "it"}, **call) == expected
        assert llm.batch([QUESTION] * 2, **call) == [expected] * 2
    assert llm.max_tokens == 8
    assert len(settings["cache"]._cache) == 4


# ---------------------------------------------------------------- messages


def test_every_kind_of_message_becomes_a_template_message() -> None:
    call = {"name": "look", "args": {"where": "here"}, "id": "1", "type": "tool_call"}
    said = template_messages(
        [
            SystemMessage("be brief"),
            HumanMessage(["a ", {"type": "text", "text": "b"}]),
            AIMessage([{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "c"}], tool_calls=[call]),
            ToolMessage("found", tool_call_id="1", name="look"),
            FunctionMessage("old", name="look"),
            AIMessageChunk(content="d"),
        ]
    )
    assert [message["role"] for message in said] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert said[2]["content"] == [{"type": "text", "text": "c"}]
    assert said[2]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"where": "here"}}
    assert said[3] == {"role": "tool", "content": "found", "tool_call_id": "1", "name": "look"}


def test_text_in_parts_is_the_same_prompt(chat: ChatBlend) -> None:
    whole = chat.invoke([HumanMessage("one two three")])
    parts = chat.invoke([HumanMessage(["one ", {"type": "text", "text": "two three"}])])
    assert parts.content == whole.content
    assert parts.usage_metadata == whole.usage_metadata


def test_messages_that_prompts_cannot_contain_are_refused(chat: ChatBlend) -> None:
    with pytest.raises(PromptError, match="cannot contain a RemoveMessage"):
        chat.invoke([HumanMessage(QUESTION), RemoveMessage(id="1")])


def test_templates_that_refuse_a_system_or_neighbours_of_one_role_get_the_same_text(
    chat: ChatBlend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat._open().model.tokenizer
    monkeypatch.setattr(tokenizer.hf, "chat_template", STRICT)
    messages = [
        SystemMessage("s1"), HumanMessage("u1"), SystemMessage("s2"), HumanMessage("u2"),
        AIMessage("a1"), AIMessage([{"type": "reasoning", "reasoning": "hm"}, "a2"]), HumanMessage("u3"),
    ]  # fmt: skip
    ids = tokenizer.render(template_messages(messages))
    expected = "user: s1\n\ns2\n\nu1\n\nu2\nassistant: a1\n\na2\nuser: u3\n"
    assert tokenizer.decode(ids) == expected
    assert chat.invoke(messages).usage_metadata["input_tokens"] == len(ids)  # type: ignore[index]
    with pytest.raises(PromptError, match="roles must alternate"):
        chat.invoke([AIMessage("nobody asked")])


# ---------------------------------------------------------------- counting tokens


def test_tokens_are_counted_by_the_models_own_tokenizer(chat: ChatBlend, llm: BlendLLM) -> None:
    message = chat.invoke(QUESTION)
    assert message.usage_metadata is not None
    assert chat.get_num_tokens_from_messages([HumanMessage(QUESTION)]) == message.usage_metadata["input_tokens"]
    assert chat.get_token_ids(QUESTION) == llm.get_token_ids(QUESTION) == chat._open().model.tokenizer.encode(QUESTION)
    assert llm.get_num_tokens(QUESTION) == len(llm.get_token_ids(QUESTION))


def test_trim_messages_keeps_what_fits(chat: ChatBlend) -> None:
    history = [HumanMessage(f"{number} " + "word " * 40) for number in range(5)]
    room = chat.get_num_tokens_from_messages(history[-2:]) + 3
    assert trim_messages(history, max_tokens=room, token_counter=chat, strategy="last") == history[-2:]


# ---------------------------------------------------------------- threads and the event loop


@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
async def test_the_event_loop_runs_while_the_model_loads_and_computes(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any], loop_ran: list[bool]
) -> None:
    llm = cls(**settings)
    await llm.ainvoke(QUESTION)
    [piece async for piece in llm.astream(QUESTION)]
    assert len(loop_ran) > 2
    assert all(loop_ran)


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
def test_a_dropped_stream_stops_the_work(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any], forwards: list[int], closed: list[str]
) -> None:
    pieces: Any = cls(**settings).stream(QUESTION)
    next(pieces), next(pieces)
    assert closed == []
    pieces.close()
    assert closed == ["closed"]
    assert len(forwards) < 4


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("cls", [ChatBlend, BlendLLM])
async def test_a_dropped_async_stream_stops_the_work(
    cls: type[ChatBlend | BlendLLM], settings: dict[str, Any], forwards: list[int], closed: list[str]
) -> None:
    pieces: Any = cls(**settings).astream(QUESTION)
    await anext(pieces), await anext(pieces)
    assert closed == []
    await pieces.aclose()
    del pieces
    async with asyncio.timeout(60):
        while not closed:  # noqa: ASYNC110  the event loop closes dropped generators, with a thread's help
            await asyncio.sleep(0.001)
    assert closed == ["closed"]
    assert len(forwards) < 4


@pytest.mark.usefixtures("endless")
async def test_a_cancelled_answer_stops_after_the_step_under_way(
    chat: ChatBlend, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    cancelled, forward = threading.Event(), Model.forward

    def waiting(self: Model, *args: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        cancelled.wait(60)
        return forward(self, *args)

    monkeypatch.setattr(Model, "forward", waiting)
    task = asyncio.create_task(chat.ainvoke(QUESTION))
    await begun.wait()
    task.cancel()
    loop.call_later(0.2, cancelled.set)  # after the task has been cancelled
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(forwards) <= 2


async def test_the_prompts_of_a_text_llm_are_answered_together(
    llm: BlendLLM, chunks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"{chunks[0]} {word}?" for word in ("Who", "When", "Where")]
    alone = [llm.invoke(prompt) for prompt in prompts]
    all_begun, stream = threading.Barrier(len(prompts), timeout=60), BlendEngine.stream

    def waiting(self: BlendEngine, prompt: Any, **options: Any) -> Iterator[Delta]:
        all_begun.wait()
        yield from stream(self, prompt, **options)

    monkeypatch.setattr(BlendEngine, "stream", waiting)
    assert llm.batch(prompts) == alone
    assert await llm.abatch(prompts) == alone
    for result in (llm.generate(prompts), await llm.agenerate(prompts)):
        assert [answer.text for [answer] in result.generations] == alone


async def test_an_error_in_one_prompt_of_a_text_llm_ends_the_others(
    llm: BlendLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def failing(self: BlendEngine, prompt: Any, **options: Any) -> Iterator[Delta]:
        if "bad" in str(prompt):
            assert begun.wait(60)
            raise PromptError("bad")
        try:
            begun.set()
            while True:
                yield Delta("a", (1,))
        finally:
            ended.set()

    monkeypatch.setattr(BlendEngine, "stream", failing)
    for answers in (lambda: llm.abatch(["bad", "good"]), lambda: asyncio.to_thread(llm.batch, ["bad", "good"])):
        begun.clear()
        ended.clear()
        with pytest.raises(PromptError, match="bad"):
            await answers()
        assert await asyncio.to_thread(ended.wait, 60)

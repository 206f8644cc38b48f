"""The LangChain classes against `kvrag serve`: the same answers and reports as with a local engine."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from typing import Any, Literal

import pytest
from blending import CHUNKS as PEOPLE
from frameworks import TIMES
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import BlendLLM, ChatBlend, KVWarmVectorStore
from langchain_tests.integration_tests.vectorstores import EMBEDDING_SIZE
from serving import NAME, Served, serving

from kvrag import BlendEngine, RemoteEngine, ServerError, SettingError
from kvrag.server.settings import ApiKey

pytestmark = pytest.mark.slow  # starts servers

CHUNKS = PEOPLE[:3]
QUESTION = "\n\n".join([CHUNKS[2], CHUNKS[0], "Question: Who plays the harp?"])
FIXED = {"temperature": 0, "max_tokens": 16}


def look_up(name: Literal["Mira", "Kan"]) -> str:
    """Look a person up."""
    return name


WRITTEN = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 20}}, "required": ["text"]}
write = {"type": "function", "function": {"name": "write", "parameters": WRITTEN}}


@pytest.fixture
def local(here: BlendEngine) -> ChatBlend:
    return ChatBlend(engine=here, **FIXED)


@pytest.fixture
def remote(served: Served) -> ChatBlend:
    return ChatBlend(base_url=served.url, model=NAME, **FIXED)


def told(message: Any) -> dict[str, Any]:
    """Everything that must be equal for a server and a local engine."""
    said = message.model_dump()
    metadata = said["response_metadata"]
    report = {name: value for name, value in metadata["kvrag"].items() if name not in TIMES}
    assert metadata["kvrag"]["ttft_s"] > 0
    return {
        "content": said["content"],
        "usage": said["usage_metadata"],
        "finish_reason": metadata["finish_reason"],
        "calls": [(call["name"], call["args"]) for call in said["tool_calls"]],
        "report": report,
    }


def whole(pieces: list[Any]) -> Any:
    assert pieces[-1].chunk_position == "last"
    return sum(pieces[1:], pieces[0])


async def test_answers_and_reports_are_the_same(local: ChatBlend, remote: ChatBlend) -> None:
    reports = [llm.warm([*CHUNKS, "short"], document="d") for llm in (local, remote)]
    ours, theirs = ((each.chunks, each.new, each.skipped, each.tokens, each.warnings) for each in reports)
    assert theirs == ours
    assert local.documents() == remote.documents() == ["d"]
    expected = told(local.invoke(QUESTION))
    assert expected["report"]["reused_tokens"] > 40
    assert expected["content"]
    assert told(remote.invoke(QUESTION)) == expected
    # later ones reuse the conversation of the first
    ways = [
        lambda llm: whole(list(llm.stream(QUESTION))),
        lambda llm: asyncio.run(llm.ainvoke(QUESTION)),
        lambda llm: llm.batch([QUESTION])[0],
    ]
    for way in ways:
        theirs, ours = await asyncio.to_thread(way, remote), await asyncio.to_thread(way, local)
        assert told(theirs) == told(ours)
    pieces = [piece async for piece in remote.astream(QUESTION)]
    assert len(pieces) > 2
    assert told(whole(pieces)) == told(whole([piece async for piece in local.astream(QUESTION)]))
    assert remote.forget("d") == local.forget("d") == 4


def test_settings_of_a_call_reach_the_server(local: ChatBlend, remote: ChatBlend) -> None:
    for llm in (local, remote):
        llm.warm(CHUNKS)
    for call in (
        {"policy": "full"},
        {"ratio": 1.0},
        {"ratio": 0.0, "policy": "none"},
        {"max_tokens": 3},
        {"stop": ["e"]},
        {"temperature": 1.5, "seed": 7, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1},
        {"seed": (1 << 64) - 1, "temperature": 1.5},
        {"documents": ["Ada Quist built the tower of Ormund in her ninth year there, with a crane of her own."]},
        {"template": {"enable_thinking": False}},
    ):
        text = QUESTION if "documents" not in call else f"{call['documents'][0]}\n\nQuestion: Who?"
        assert told(remote.invoke(text, **call)) == told(local.invoke(text, **call)), call
    assert remote.invoke(text, documents=call.get("documents")).response_metadata["kvrag"]["policy"]


@pytest.mark.parametrize("length", [1, 12, 20])
async def test_a_call_cut_off_is_invalid(local: ChatBlend, remote: ChatBlend, length: int) -> None:
    for llm in (local, remote):
        bound = llm.bind_tools([write], tool_choice="write", max_tokens=length)
        answers = [
            await bound.ainvoke(QUESTION),
            await asyncio.to_thread(bound.invoke, QUESTION),
            whole([piece async for piece in bound.astream(QUESTION)]),
        ]
        for answer in answers:
            assert (answer.text, answer.tool_calls) == ("", [])
            assert answer.response_metadata["finish_reason"] == "length"
            [call] = answer.invalid_tool_calls
            assert call["name"] == "write"
            assert call["id"]
        assert "cut off: raise max_tokens" in answers[0].invalid_tool_calls[0]["error"]
        assert answers[2].invalid_tool_calls[0]["args"].startswith(answers[0].invalid_tool_calls[0]["args"])


def test_tools_are_called(local: ChatBlend, remote: ChatBlend) -> None:
    for choice in ("look_up", "any", "required"):
        answers = []
        for llm in (local, remote):
            bound = llm.bind_tools([look_up], tool_choice=choice).bind(max_tokens=80)
            answers += [told(bound.invoke("Who is Mira?")), told(whole(list(bound.stream("Who is Mira?"))))]
        assert [each["calls"] for each in answers] == [answers[0]["calls"]] * 4
        assert answers[0]["calls"][0][0] == "look_up"
        assert {each["finish_reason"] for each in answers} == {"tool_calls"}
    history = [
        SystemMessage("Be brief."),
        HumanMessage("Who is Mira?"),
        AIMessage("", tool_calls=[{"name": "look_up", "args": {"name": "Mira"}, "id": "123456789"}]),
        ToolMessage("She plays the harp.", tool_call_id="123456789"),
    ]
    tools = [look_up]
    ours, theirs = (llm.bind_tools(tools).invoke(history) for llm in (local, remote))
    assert told(theirs) == told(ours)
    counts = [llm.get_num_tokens_from_messages(history, tools=tools) for llm in (local, remote)]
    assert counts[0] == counts[1] > 20


def test_a_text_llm(served: Served, here: BlendEngine) -> None:
    ours, theirs = BlendLLM(engine=here, **FIXED), BlendLLM(base_url=f"{served.url}/v1/", model=NAME, **FIXED)
    wanted = ours.invoke(QUESTION)
    assert theirs.invoke(QUESTION) == wanted
    assert "".join(theirs.stream(QUESTION)) == wanted
    assert asyncio.run(theirs.ainvoke(QUESTION)) == wanted
    assert theirs.get_token_ids("One two") == ours.get_token_ids("One two")


def test_a_vector_store_warms_the_server(remote: ChatBlend, there: BlendEngine, served: Served) -> None:
    documents = [Document(text, id=str(number), metadata={"source": "s"}) for number, text in enumerate(CHUNKS)]
    for llm in (remote, RemoteEngine(served.url, NAME)):
        store = KVWarmVectorStore(InMemoryVectorStore(DeterministicFakeEmbedding(size=EMBEDDING_SIZE)), llm)
        store.add_documents(documents)
        assert len(there.documents("langchain/default/")) == 3
        store.delete(["0"])
        assert len(there.documents("langchain/default/")) == 2
        asyncio.run(store.aadd_documents(documents[:1]))
        found = store.warm_existing()
        assert (found.new, found.reused) == (0, 3)
        assert remote.invoke(QUESTION).usage_metadata["input_token_details"]["cache_read"] > 40  # type: ignore[index]
        store.delete(["0", "1", "2"])
        assert there.documents() == []


def test_a_call_can_have_a_timeout(remote: ChatBlend, served: Served) -> None:
    text = BlendLLM(model=NAME, base_url=served.url, max_retries=0)
    for llm in (remote.model_copy(update={"max_retries": 0}), text):
        with pytest.raises(ServerError, match="did not answer in time: raise timeout="):
            llm.invoke(QUESTION, timeout=1e-3)
        with pytest.raises(ServerError, match="did not answer in time"):
            list(llm.stream(QUESTION, timeout=1e-3))
        assert llm.invoke(QUESTION, timeout=60, max_tokens=1) is not None


def test_the_namespace_is_the_keys(remote: ChatBlend) -> None:
    with pytest.raises(SettingError, match="takes the namespace from the API key"):
        remote.invoke("Who?", namespace="tenant")
    with pytest.raises(SettingError, match="takes the namespace from the API key"):
        remote.warm(CHUNKS, namespace="tenant")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"store": "kv"}, "leave out store="),
        ({"codec": "int8", "dtype": "float32"}, "leave out codec=, dtype="),
        ({"device": "cuda", "trust_remote_code": True}, "leave out device=, trust_remote_code="),
        ({"model": None}, "no model"),
        ({"base_url": "localhost:8000"}, "must be the URL"),
        ({"base_url": "ftp://localhost"}, "must be the URL"),
        ({"base_url": "http://user:secret@localhost"}, "pass api_key="),
        ({"base_url": ""}, "must be the URL"),
        ({"ratio": 2}, "ratio must be"),
    ],
)
def test_wrong_settings_are_refused_at_once(wrong: dict[str, Any], reason: str) -> None:
    for kind in (ChatBlend, BlendLLM):
        with pytest.raises(ValueError, match=reason):
            kind(**{"base_url": "http://localhost:1", "model": NAME, **wrong})


def test_creating_sends_nothing_and_a_missing_server_is_named() -> None:
    llm = ChatBlend(base_url="http://127.0.0.1:9", model=NAME, max_retries=0)
    for ask in (llm.invoke, llm.get_num_tokens, lambda text: llm.warm([text])):
        with pytest.raises(ServerError, match=r"cannot reach http://127\.0\.0\.1:9 .*start the server, or check"):
            ask("Who?")  # type: ignore[operator]
    with pytest.raises(ServerError, match="cannot reach"):
        asyncio.run(llm.ainvoke("Who?"))


def test_keys_are_needed_and_kept_secret(there: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = (ApiKey("secret-1", "one"), ApiKey("secret-2", "two"))
    with serving(there, api_keys=keys) as served:
        one, two, none, wrong = (
            ChatBlend(base_url=served.url, model=NAME, max_retries=0, api_key=key, **FIXED)
            for key in ("secret-1", "secret-2", None, "wrong")
        )
        for llm in (none, wrong):
            with pytest.raises(ServerError, match="pass the server's key as api_key=") as caught:
                llm.invoke("Who?")
            assert caught.value.status == 401
        one.warm(CHUNKS)
        assert one.invoke(QUESTION).response_metadata["kvrag"]["reused_tokens"] > 40
        assert two.invoke(QUESTION).response_metadata["kvrag"]["reused_tokens"] == 0
        monkeypatch.setenv("KVRAG_API_KEY", "secret-1")
        assert none.invoke(QUESTION).content
        identities = [str(llm._identifying_params) for llm in (one, two, none)]
        assert identities[0] == identities[2] != identities[1]
        for shown in (*identities, dumps(one), repr(one), str(one.to_json()), json.dumps(one._identifying_params)):
            assert "secret" not in shown.replace("SecretStr", "")
        for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one.with_config(tags=["a"])):
            assert again.invoke(QUESTION).content == one.invoke(QUESTION).content


def test_an_unknown_model_is_named(served: Served) -> None:
    assert ChatBlend(base_url=served.url, model=NAME).invoke("Who?", model=NAME, max_tokens=1)
    with pytest.raises(ServerError, match="unknown model 'gpt'"):
        ChatBlend(base_url=served.url, model=NAME).invoke("Who?", model="gpt")


def test_an_abandoned_stream_ends_on_the_server(remote: ChatBlend, served: Served, endless: None) -> None:
    from serving import until

    stream = remote.bind(max_tokens=1500).stream("Who?")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    until(lambda: served.running() == (0, 0), 60)
    assert served.metric('kvrag_request_failure_total{status="499"}') == 1


def test_the_profile_has_the_servers_window(remote: ChatBlend, there: BlendEngine) -> None:
    assert remote.profile is not None
    assert "max_input_tokens" not in remote.profile
    assert remote.profile["structured_output"]
    remote.get_num_tokens("a")
    assert remote.profile["max_input_tokens"] == there.context_window

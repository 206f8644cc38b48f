"""BlendLLM against `kvrag serve`: the same answers and reports as with a local engine."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvrag import BlendLLM
from llama_index.vector_stores.kvrag import KVWarmVectorStore
from pydantic import BaseModel, Field
from serving import NAME, Served, serving

from kvrag import BlendConfig, BlendEngine, ContextWindowError, FileStore, Model, ServerError, SettingError
from kvrag.server.settings import ApiKey

pytestmark = pytest.mark.slow  # starts servers

CHUNKS = [
    "Mira Brel was born in Florton. She lives in Grelville. She drives a red car and plays the harp every day.",
    "Tran Works was founded by Mira Brel. The company sells chairs. Its logo is blue. It employs Kan Dror.",
    "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology.",
]
QUESTION = "\n\n".join([CHUNKS[2], CHUNKS[0], "Question: Who plays the harp?"])
USER = [ChatMessage(role="user", content=QUESTION)]
FIXED: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
TIMES = ("match_s", "load_s", "load_stall_s", "stitch_s", "select_s", "blend_s", "ttft_s", "tier", "bytes_loaded")


class Wanted(BaseModel):
    """A person."""

    name: Literal["Mira", "Kan"]


def look_up(name: str) -> str:
    """Look somebody up."""
    return f"{name} plays."


class Note(BaseModel):
    """A note."""

    text: str = Field(max_length=20)


def take_note(text: str) -> str:
    """Take a note."""
    return text


NOTE = FunctionTool.from_defaults(take_note, fn_schema=Note)
TOOL = FunctionTool.from_defaults(look_up, fn_schema=Wanted)


def an_engine(model: Model, folder: Path) -> BlendEngine:
    return BlendEngine(model, FileStore(folder, min_free_bytes=0), BlendConfig(controller="off"))


@pytest.fixture
def there(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with an_engine(model, tmp_path / "there") as engine:
        yield engine


@pytest.fixture
def served(there: BlendEngine) -> Iterator[Served]:
    with serving(there) as served:
        yield served


@pytest.fixture
def local(model: Model, tmp_path: Path) -> Iterator[BlendLLM]:
    with an_engine(model, tmp_path / "here") as engine:
        yield BlendLLM(engine=engine, **FIXED)


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


def test_the_metadata_is_the_servers(local: BlendLLM, remote: BlendLLM) -> None:
    theirs = remote.metadata
    assert theirs.context_window == local.metadata.context_window
    assert theirs.is_chat_model
    assert theirs.is_function_calling_model
    assert theirs.model_name == NAME
    assert remote.encode("One two") == local.encode("One two")


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


async def test_arguments_are_streamed_in_pieces(local: BlendLLM, remote: BlendLLM) -> None:
    for llm in (local, remote):
        call: dict[str, Any] = {"user_msg": "Who?", "tool_required": True, "max_tokens": 80}
        seen = []
        async for response in await llm.astream_chat_with_tools([NOTE], **call):
            for block in response.message.blocks:
                if isinstance(block, ToolCallBlock):
                    assert llm.get_tool_calls_from_response(response)[0].tool_name == "take_note"
                    seen.append(block.tool_kwargs)
        *pieces, last = seen
        assert list(last) == ["text"]
        texts = [piece for piece in pieces if isinstance(piece, str)]
        assert len(set(texts)) > 3
        assert all(after.startswith(before) for before, after in pairwise(texts))


def test_tools_are_called(local: BlendLLM, remote: BlendLLM) -> None:
    answers = []
    for llm in (local, remote):
        call: dict[str, Any] = {"user_msg": "Who is Mira?", "tool_required": True, "max_tokens": 80}
        whole = llm.chat_with_tools([TOOL], **call)
        last = list(llm.stream_chat_with_tools([TOOL], **call))[-1]
        answers += [llm.get_tool_calls_from_response(response)[0] for response in (whole, last)]
    assert [each.tool_name for each in answers] == ["look_up"] * 4
    assert all(each.tool_kwargs == answers[0].tool_kwargs for each in answers)
    assert len({each.tool_id for each in answers}) == 4
    history = [*USER, remote.chat_with_tools([TOOL], user_msg="Who?", tool_required=True, max_tokens=80).message]
    history.append(ChatMessage(role="tool", content="Mira plays.", additional_kwargs={"tool_call_id": "a"}))
    assert remote.chat(history).message.content == local.chat(history).message.content


def test_objects_of_a_class(local: BlendLLM, remote: BlendLLM) -> None:
    prompt = PromptTemplate("Describe {name}.")
    ours, theirs = (llm.structured_predict(Wanted, prompt, {"max_tokens": 80}, name="Mira") for llm in (local, remote))
    assert theirs == ours
    assert isinstance(theirs, Wanted)
    last = list(remote.stream_structured_predict(Wanted, prompt, {"max_tokens": 80}, name="Mira"))[-1]
    assert last == ours


def test_a_query_engine_on_a_server(remote: BlendLLM, there: BlendEngine) -> None:
    vectors = KVWarmVectorStore(SimpleVectorStore(), remote)
    context = StorageContext.from_defaults(vector_store=vectors)
    nodes = [TextNode(text=text, id_=str(number)) for number, text in enumerate(CHUNKS)]
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=MockEmbedding(embed_dim=4))
    assert len(there.documents("llama_index/default/")) == 3
    response = index.as_query_engine(llm=remote, similarity_top_k=2).query("Who plays the harp?")
    assert str(response)
    vectors.delete_nodes(["0", "1", "2"])
    assert there.documents() == []


def test_wrong_settings_are_refused(remote: BlendLLM) -> None:
    for wrong, reason in (({"store": "kv"}, "leave out store="), ({"base_url": "nowhere"}, "must be the URL")):
        with pytest.raises(ValueError, match=reason):
            BlendLLM(**{"base_url": "http://localhost:1", "model": NAME, **wrong})
    with pytest.raises(SettingError, match="API key"):
        remote.complete("Who?", namespace="tenant")
    with pytest.raises(ContextWindowError):
        remote.complete("word " * 5000)
    with pytest.raises(SettingError, match="run it where they are"):
        remote.explain("Who?")
    with pytest.raises(ServerError, match="cannot reach"):
        BlendLLM(base_url="http://127.0.0.1:9", model=NAME, max_retries=0).complete("Who?")


def test_keys_are_kept_secret(there: BlendEngine) -> None:
    with serving(there, api_keys=(ApiKey("secret-1"),)) as served:
        llm = BlendLLM(base_url=served.url, model=NAME, api_key="secret-1", **FIXED)
        assert llm.complete("Who?").text
        for shown in (llm.to_json(), repr(llm), json.dumps(llm.to_payload()), str(llm.to_dict())):
            assert "secret-1" not in shown
        assert pickle.loads(pickle.dumps(llm)).complete("Who?").text == llm.complete("Who?").text

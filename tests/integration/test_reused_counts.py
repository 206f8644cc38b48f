"""Reused are prompt tokens whose KV was never computed for an answer: in every report, usage, metric and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, messages
from langchain_core.messages import AIMessageChunk
from langchain_kvrag import ChatBlend
from llama_index.core.llms import ChatMessage
from llama_index.llms.kvrag import BlendLLM
from openai import OpenAI
from serving import NAME, Served, serving

from kvrag import Answer, BlendConfig, BlendEngine, BlendReport, Model, RemoteEngine
from kvrag.inspect.explanation import summary_of
from kvrag.reuse.blend import LateRecompute
from kvrag.server.response import openai_usage
from kvrag.types import join

PROMPT = messages(
    "What is known:", *(CHUNKS[number] for number in (2, 0, 3, 1))
)  # no chunk is right after the preamble
TEXT = PROMPT[0]["content"]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_new_tokens": 4}
WIRE: dict[str, Any] = {"model": NAME, "temperature": 0}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}

Place = Callable[[BlendEngine, Served], object]


def _client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def _abandoned(engine: BlendEngine) -> int:
    with closing(engine.stream(PROMPT, **OPTIONS)) as deltas:
        for _ in range(3):
            next(deltas)
    return engine.explain().report.reused_tokens


def _line(engine: BlendEngine) -> object:
    report = engine.generate(PROMPT, **OPTIONS).report
    [reused] = re.findall(r"(\d+) reused", "\n".join(summary_of(report)))
    return int(reused)


def _metric(engine: BlendEngine, served: Served, source: str) -> int:
    served.ask(TEXT, max_tokens=4)
    return int(served.metric(f'kvrag_prompt_tokens_total{{source="{source}"}}'))


def _langchain(engine: BlendEngine, is_stream: bool) -> object:
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=4)
    said: Any = sum(llm.stream(TEXT), start=AIMessageChunk("")) if is_stream else llm.invoke(TEXT)
    return said.usage_metadata["input_token_details"]["cache_read"]


def _llama_index(engine: BlendEngine, is_stream: bool) -> object:
    llm, asked = BlendLLM(engine=engine, temperature=0, max_tokens=4), [ChatMessage(content=TEXT)]
    said: Any = [*llm.stream_chat(asked)][-1] if is_stream else llm.chat(asked)
    return said.raw["usage"]["prompt_tokens_details"]["cached_tokens"]


def _chat(served: Served, **more: Any) -> Any:
    said: Any = _client(served).chat.completions.create(messages=PROMPT, max_tokens=4, **WIRE, **more)  # type: ignore[arg-type]
    return [*said][-1].usage if more else said.usage


def _completion(served: Served, **more: Any) -> Any:
    said: Any = _client(served).completions.create(prompt=TEXT, max_tokens=4, **WIRE, **more)
    return [*said][-1].usage if more else said.usage


def _response(served: Served, **more: Any) -> Any:
    said: Any = _client(served).responses.create(input=TEXT, max_output_tokens=4, **WIRE, **more)
    return [*said][-1].response.usage if more else said.usage


PLACES: dict[str, Place] = {
    "generate": lambda engine, served: engine.generate(PROMPT, **OPTIONS).report.reused_tokens,
    "stream": lambda engine, served: join(engine.stream(PROMPT, **OPTIONS)).report.reused_tokens,
    "an abandoned stream": lambda engine, served: _abandoned(engine),
    "the command line": lambda engine, served: _line(engine),
    "LangChain": lambda engine, served: _langchain(engine, False),
    "LangChain, streamed": lambda engine, served: _langchain(engine, True),
    "LlamaIndex": lambda engine, served: _llama_index(engine, False),
    "LlamaIndex, streamed": lambda engine, served: _llama_index(engine, True),
    "a client": lambda engine, served: RemoteEngine(served.url).generate(PROMPT, **OPTIONS).report.reused_tokens,
    "a report": lambda engine, served: served.ask(TEXT).json()["kvrag"]["reused_tokens"],
    "a chat": lambda engine, served: _chat(served).prompt_tokens_details.cached_tokens,
    "a streamed chat": lambda engine, served: _chat(served, **STREAM).prompt_tokens_details.cached_tokens,
    "a completion": lambda engine, served: _completion(served).prompt_tokens_details.cached_tokens,
    "a streamed completion": lambda engine, served: _completion(served, **STREAM).prompt_tokens_details.cached_tokens,
    "a response": lambda engine, served: _response(served).input_tokens_details.cached_tokens,
    "a streamed response": lambda engine, served: _response(served, stream=True).input_tokens_details.cached_tokens,
    "a metric": lambda engine, served: _metric(engine, served, "cached"),
}


@pytest.fixture
def answering(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BlendEngine, Served]]:
    """An engine that keeps no conversations, in a server."""
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    config = BlendConfig(margin=1e8, controller="off")
    with BlendEngine(model, tmp_path, config, conversation_bytes=0) as engine, serving(engine) as served:
        engine.warm(CHUNKS)
        yield engine, served


@pytest.mark.parametrize("unsure_at", [None, 0, 2])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_recomputed_on_doubt_is_not_reused(
    answering: Any, place: str, unsure_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateRecompute, "is_unsure", lambda late, token, margin: token == unsure_at)
    reused = PLACES[place](*answering)
    assert reused > 50 if unsure_at is None else reused == 0


def test_each_token_is_counted_once(answering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, served = answering
    for number, unsure_at in enumerate((None, 0, 2), 1):
        monkeypatch.setattr(LateRecompute, "is_unsure", lambda late, token, margin, at=unsure_at: token == at)
        report = served.ask(TEXT, max_tokens=4).json()["kvrag"]
        counts = [report[f"{name}_tokens"] for name in ("reused", "recomputed", "fresh")]
        assert sum(counts) == report["prompt_tokens"]
        sources = ("cached", "recomputed", "computed")
        metrics = [served.metric(f'kvrag_prompt_tokens_total{{source="{name}"}}') for name in sources]
        assert sum(metrics) == number * report["prompt_tokens"]


def test_a_prompt_with_several_answers_counts_what_was_computed_for_any() -> None:
    answers = [
        Answer("x", (1,), "stop", BlendReport.unblended(100, reused)) for reused in (80, 0, 80, 70)
    ]  # two of each prompt
    usage = openai_usage(answers, 2)
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (200, 70)


def test_what_was_kept_of_the_conversation_is_not_reused_once_it_is_recomputed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubts: list[bool] = []
    monkeypatch.setattr(LateRecompute, "is_unsure", lambda late, token, margin: bool(doubts))
    with BlendEngine(model, tmp_path, BlendConfig(margin=1e8, controller="off")) as engine:
        engine.warm(CHUNKS)
        said = engine.generate(PROMPT, **OPTIONS).text
        turn = [*PROMPT, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
        report = engine.generate(turn, **OPTIONS).report
        assert report.reused_tokens == report.conversation_tokens > 100
        doubts.append(True)
        turn[-1] = {"role": "user", "content": "Who?"}
        report = engine.generate(turn, **OPTIONS).report
        assert report.completed is not None
        assert report.conversation_tokens > 100
        assert report.reused_tokens < 20, "what precedes the first chunk"
        assert report.reused_tokens + report.recomputed_tokens + report.fresh_tokens == report.prompt_tokens


def test_what_was_encoded_for_the_answer_is_not_reused(answering: Any) -> None:
    engine, served = answering
    new = "Dran Tolk lives in Marfield. He collects stamps and plays the flute. He owns a parrot and a horse."
    body = {**WIRE, "messages": messages(new, CHUNKS[0]), "max_tokens": 4, "chunks": [new], "margin": 0}
    said = served.http.post("/v1/chat/completions", json=body).json()
    report, details = said["kvrag"], said["usage"]["prompt_tokens_details"]
    assert report["created_tokens"] > 16
    assert 0 < report["reused_tokens"] <= len(engine.model.tokenizer.encode(CHUNKS[0]))
    assert details == {"cached_tokens": report["reused_tokens"], "cache_write_tokens": report["created_tokens"]}

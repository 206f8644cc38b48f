"""Every answer of OpenAI's endpoints is of the installed SDK's own type, strictly: no field missing or of another type.

The SDK itself builds its objects without validation. The engine's answers are scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import httpx
import pytest
from openai.types import Completion, ErrorObject
from openai.types import Model as ListedModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import Field, TypeAdapter
from serving import NAME, Served, make_corpus, serving

from kvrag import BlendEngine, BlendReport, Delta, InvalidCall, ModelError, ToolCall
from kvrag.types import TokenLogprob

REPORT = BlendReport.unblended(5, 2)
LOGPROBS = tuple(TokenLogprob(token, -0.5, ((token, -0.5), (5, -1.0))) for token in (3, 4))
THOUGHT = (
    Delta("", (1, 2), reasoning="Mira, ", reasoning_tokens=2, logprobs=LOGPROBS),
    Delta(" Mi", (3, 4), reasoning="surely.", reasoning_tokens=1, logprobs=LOGPROBS),
    Delta("ra.", (5,), finish_reason="stop", report=REPORT, logprobs=LOGPROBS[:1]),
)
CALLS = (
    Delta("Look: ", (1,)),
    Delta("", (3,), tool_calls=(ToolCall("look", {}, "c1"),)),
    Delta("", (5,), "length", REPORT, invalid_calls=(InvalidCall("lo", "{", "c2"),)),
)
SCRIPTS = {"thought": THOUGHT, "calls": CALLS, "empty": (Delta("", (), "stop", REPORT),), "failing": THOUGHT[:2]}
MESSAGES = [{"role": "user", "content": "Who?"}]
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
SCHEMA = {"name": "x", "schema": {"type": "object"}}
CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}},
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False},
]
COMPLETIONS: list[dict[str, Any]] = [{}, {"logprobs": 2, "n": 2, "stream_options": {"include_usage": True}}]
RESPONSES: list[dict[str, Any]] = [
    {},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0.5, "top_p": 0.5},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "look"}},
    {"tools": [{"type": "function", "name": "look"}], "tool_choice": "none", "parallel_tool_calls": False},
    {"text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "low"}, "reasoning": {"effort": "low"}},
    {"text": {"format": {"type": "json_object"}}, "instructions": "Be short.", "metadata": {"a": "b"}},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "function": {"name": "look"}}},
    {"tools": [{"type": "function", **FUNCTION, "strict": True, "description": "Look."}], "tool_choice": "required"},
    {"metadata": {"a": 1, "b": {}}, "reasoning": {"effort": "none", "summary": "auto"}},
    {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "xhigh"}, "truncation": "disabled", "store": True},
    {"text": {"verbosity": "low"}, "reasoning": {}, "max_output_tokens": 4, "user": "a", "service_tier": "auto"},
]
EVENT = Annotated[get_args(ResponseStreamEvent)[0], Field(discriminator="type")]  # else an error names all types
ENDPOINTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Any, Any]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, CHATS, ChatCompletion, ChatCompletionChunk),
    "/v1/completions": ({"prompt": "Who?"}, COMPLETIONS, Completion, Completion),
    "/v1/responses": ({"input": "Who?"}, RESPONSES, Response, EVENT),
}


ADAPTERS: dict[int, TypeAdapter[Any]] = {}  # by the type's identity; making one takes a second


def check(kind: Any, content: str) -> None:
    """Fails unless JSON is of this type, without any conversion."""
    if id(kind) not in ADAPTERS:
        ADAPTERS[id(kind)] = TypeAdapter(kind)
    ADAPTERS[id(kind)].validate_json(content, strict=True)


def check_error(said: httpx.Response, status: int) -> None:
    assert said.status_code == status
    check(ErrorObject, json.dumps(said.json()["error"]))


@pytest.fixture(params=SCRIPTS)
def script(request: pytest.FixtureRequest, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> str:
    def stream(prompt: Any, **options: Any) -> Iterator[Delta]:
        yield from SCRIPTS[request.param]
        if request.param == "failing":
            raise ModelError("the logits are NaN")

    monkeypatch.setattr(engine, "stream", stream)
    return str(request.param)


@pytest.fixture
def served(engine: BlendEngine, tmp_path: Path) -> Iterator[Served]:
    corpus = make_corpus(engine, tmp_path)
    with serving(engine, corpus) as served:
        yield served
    corpus.index.close()


def test_answers_are_of_openais_types(served: Served, script: str) -> None:
    for path, (body, variants, kind, event_kind) in ENDPOINTS.items():
        for changes in variants:
            sent = {"model": NAME, **body, **changes}
            whole = {name: value for name, value in sent.items() if name != "stream_options"}
            said = served.http.post(path, json=whole)
            if script == "failing":
                check_error(said, 500)
            else:
                assert said.status_code == 200, said.text
                check(kind, said.text)
            lines = served.http.post(path, json=sent | {"stream": True}).text.splitlines()
            events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
            if script == "failing" and path != "/v1/responses":
                check(ErrorObject, json.dumps(json.loads(events.pop())["error"]))
            assert events
            for event in events:
                if path == "/v1/completions":  # OpenAI's own unfinished pieces have null, which the type lacks
                    event = event.replace('"finish_reason": null', '"finish_reason": "stop"')
                check(event_kind, event)


def test_models_are_of_openais_types(served: Served) -> None:
    listed = served.http.get("/v1/models").json()
    assert listed["object"] == "list"
    for model in listed["data"]:
        check(ListedModel, json.dumps(model))
        check(ListedModel, served.http.get(f"/v1/models/{model['id']}").text)


def test_errors_are_of_openais_type(engine: BlendEngine, served: Served) -> None:
    http = served.http
    for path, (body, *_) in ENDPOINTS.items():
        check_error(http.post(path, json={"model": "other", **body}), 404)
        check_error(http.post(path, json={"model": NAME, **body, "colour": "red"}), 400)
        check_error(http.post(path, json={"model": NAME}), 400)
        check_error(http.post(path, content=b"{", headers={"Content-Type": "application/json"}), 400)
        check_error(http.post(path, content=b"Who?"), 400)
        check_error(http.get(path), 405)
    check_error(http.get("/v1/models/other"), 404)
    check_error(http.get("/v1/nowhere"), 404)

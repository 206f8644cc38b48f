"""Hostile and odd bodies: every endpoint refuses them with a status below 500, and null is absent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from serving import NAME, make_corpus

from kvrag import BlendEngine
from kvrag.server import app as server
from kvrag.server import schemas
from kvrag.server.api_errors import ApiError
from kvrag.server.app import create_app
from kvrag.server.guard import Guard
from kvrag.server.queue import AdmissionQueue
from kvrag.server.responses import ResponsesRequest
from kvrag.server.schemas import parse
from kvrag.server.settings import ServerSettings

USER = [{"role": "user", "content": "Who?"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
BODIES: dict[str, tuple[type[schemas.Request], dict[str, Any]]] = {
    "/v1/chat/completions": (schemas.ChatRequest, {"messages": USER, "max_tokens": 1}),
    "/v1/completions": (schemas.CompletionRequest, {"prompt": "Who?", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "Who?", "max_output_tokens": 1}),
    "/v1/chunks": (schemas.NewChunks, {"texts": ["Mira"], "document": "d"}),
    "/tokenize": (schemas.TokenizeRequest, {"prompt": "Who?"}),
}


def nested(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = {"a": [inner]}
    return inner


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"}]


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ODD: dict[str, Any] = {
    "deep": nested(45),
    "too deep": nested(60),
    "far too deep": nested(240),
    "a huge number": 10**4000,
    "negative": -(10**400),
    "infinite": float("inf"),
    "no number": float("nan"),
    "a surrogate": "\ud800",
    "surrogates": ["\ud800"],
    "a surrogate as a name": {"\ud800": "\ud800"},
    "a NUL": "\0",
    "true": True,
    "mixed": [1, "a", None, 1.5],
    "nothing": "",
    "huge ids": [10**12],
    "lists of huge ids": [[2**63]],
    "objects": [{}] * 3,
}
SCHEMAS = {
    "a loop": LOOP,
    "itself": {"$ref": "#"},
    "deep": nested(45, {}),
    "a surrogate": {"const": "\ud800"},
    "a huge bound": {"type": "integer", "minimum": 10**400},
    "huge lengths": {"type": "string", "minLength": 10**9, "maxLength": 10**10},
    "a huge pattern": {"type": "string", "pattern": "(a{1000}){1000}"},
}
ARGUMENTS = ["[" * 5000, '{"a":' * 600 + "1" + "}" * 600, '{"a":' + "9" * 5000 + "}", '{"a": "\\ud800"}', "\ud800"]


@pytest.fixture
def app(engine: BlendEngine, tmp_path: Path) -> FastAPI:
    return create_app(engine, ServerSettings(name=NAME), [make_corpus(engine, tmp_path)])


@pytest.fixture
def client(app: FastAPI) -> Iterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)


def body_of(path: str, **changes: Any) -> bytes:
    kind, body = BODIES[path]
    named = {"model": NAME} if "model" in kind.model_fields else {}
    return json.dumps(named | body | changes).encode()


async def refused(client: httpx.AsyncClient, path: str, content: bytes) -> int:
    response = await client.post(path, content=content, headers={"content-type": "application/json"})
    said = response.json()
    assert response.status_code < 500, said
    if response.status_code >= 400:
        assert "\n" not in said["error"]["message"]
        assert len(said["error"]["message"]) < 1000
    return response.status_code


def test_every_endpoint_with_a_body_is_here() -> None:
    bodies = {route.path for route in server.router.routes if isinstance(route, APIRoute) and "POST" in route.methods}
    assert bodies == {*BODIES}


@pytest.mark.parametrize("path", BODIES)
async def test_no_odd_value_in_any_field_is_a_failure_of_the_server(
    path: str, app: FastAPI, client: httpx.AsyncClient
) -> None:
    kind, _ = BODIES[path]
    for field in [*kind.model_fields, "unknown"]:
        for name, value in ODD.items():
            if field in ("max_tokens", "max_completion_tokens", "max_output_tokens", "stream") and value is not True:
                continue  # an ordinary long answer
            if field != "stream":
                assert await refused(client, path, body_of(path, **{field: value})), name


@pytest.mark.parametrize("path", BODIES)
async def test_json_beyond_pythons_recursion_limit_is_refused(path: str, client: httpx.AsyncClient) -> None:
    assert await refused(client, path, b'{"metadata":' * 50_000 + b"1" + b"}" * 50_000) == 400


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_no_odd_schema_is_a_failure_of_the_server(
    schema: dict[str, Any], app: FastAPI, client: httpx.AsyncClient
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"name": "f", "parameters": schema}
    await refused(client, "/v1/completions", body_of("/v1/completions", response_format=wanted))
    for path, tools in (("chat/completions", {"type": "function", "function": tool}), ("responses", tool)):
        given = {"tools": [{"type": "function", **tools}], "tool_choice": "required"}
        await refused(client, f"/v1/{path}", body_of(f"/v1/{path}", **given))


async def test_what_never_ends_is_an_error_of_the_client(app: FastAPI, client: httpx.AsyncClient) -> None:
    for schema in (LOOP, nested(240)):
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        content = body_of("/v1/chat/completions", response_format=wanted)
        assert await refused(client, "/v1/chat/completions", content) == 400


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
async def test_no_odd_call_in_a_history_is_a_failure_of_the_server(
    arguments: str, app: FastAPI, client: httpx.AsyncClient
) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        extra = {"prompt": None} if path == "/tokenize" else {}
        await refused(client, path, body_of(path, messages=called(arguments), **extra))


@pytest.mark.parametrize("path", BODIES)
def test_null_is_absent_in_known_and_unknown_fields(path: str) -> None:
    kind, body = BODIES[path]
    named = {"model": NAME} if "model" in kind.model_fields else {}
    plain = kind.model_validate(named | body)
    optional = [
        name for name, field in kind.model_fields.items() if not field.is_required() and name not in named | body
    ]
    assert kind.model_validate(named | body | dict.fromkeys([*optional, "audio", "best_of_all"])) == plain
    for field in (name for name, field in kind.model_fields.items() if field.is_required()):
        with pytest.raises(ApiError, match=f"^{field}: Field required"):
            parse(json.dumps(named | body | {field: None}).encode(), kind)
    with pytest.raises(ApiError, match="audio: Extra inputs are not permitted"):
        parse(json.dumps(named | body | {"audio": {}}).encode(), kind)


def test_null_is_absent_in_parts_of_requests() -> None:
    parts = {
        "messages": [{"role": "user", "content": "Who?", "audio": None, "name": None}],
        "stream": True,
        "stream_options": {"include_usage": None, "include": None},
        "documents": [{"text": "Mira", "id": None, "score": None}],
        "chat_template_kwargs": {"other": None},
    }
    read = schemas.ChatRequest.model_validate({"model": NAME, **parts})
    assert read.stream_options == schemas.StreamOptions()
    assert read.documents == [schemas.Document(text="Mira")]
    item = ResponsesRequest.model_validate({"model": NAME, "input": [{"type": None, "role": "user", "content": "a"}]})
    assert item.chat().messages == [schemas.Message(role="user", content="a")]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (schemas.ChatRequest, {"messages": [{}] * 1000}),
        (schemas.ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (schemas.ChatRequest, {"tools": [1] * 1000}),
        (schemas.CompletionRequest, {"prompt": [[], *[{}] * 1000]}),
        (schemas.CompletionRequest, {"prompt": [["a"] * 1000] * 1000}),
        (schemas.CompletionRequest, {"prompt": [[1]] * 5000}),
        (schemas.NewChunks, {"texts": [1] * 1000, "document": [1] * 1000}),
        (ResponsesRequest, {"input": [{"content": [1] * 1000}] * 1000}),
    ],
)
def test_many_mistakes_cost_as_much_as_one(kind: type[schemas.Request], changes: dict[str, Any]) -> None:
    _, body = next(value for value in BODIES.values() if value[0] is kind)
    with pytest.raises(ValueError) as wrong:  # noqa: PT011
        kind.model_validate({"model": NAME} | body | changes)
    assert len(wrong.value.errors()) < 16  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_lacks_are_refused(number: str) -> None:
    with pytest.raises(ApiError, match="not valid JSON"):
        parse(f'{{"model": "m", "input": "a", "metadata": {{"a": {number}}}}}'.encode(), ResponsesRequest)


# -------------------------------------------------------------------- queues


def _inside(thread: threading.Thread) -> str:
    return thread.name.split("_")[0]


async def test_no_body_is_read_and_no_work_done_on_the_event_loop_or_in_shared_threads(
    app: FastAPI, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio, "to_thread", None)
    threads: dict[str, str] = {}

    def watch(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            threads.setdefault(name, _inside(threading.current_thread()))
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    corpus = app.state.kvrag.corpora[0]
    for name in ("add", "status", "statuses", "remove"):
        watch(corpus, name)
    for name in ("tokenize", "documents", "forget"):
        watch(app.state.kvrag.engine, name)
    watch(ResponsesRequest, "chat")
    for kind, _ in BODIES.values():
        validate = kind.model_validate

        def watched(sent: Any, kind: Any = kind, validate: Any = validate) -> Any:
            threads[kind.__name__] = _inside(threading.current_thread())
            return validate(sent)

        monkeypatch.setattr(kind, "model_validate", watched)
    for path in BODIES:
        assert await refused(client, path, body_of(path)) < 300, path
    assert (await client.put("/v1/corpus/d", content=b"Mira")).status_code == 200
    assert {threads.pop(name) for name in ("add", "status", "statuses")} == {"kvrag-encode"}
    for method, path in (
        ("GET", "/v1/corpus"),
        ("GET", "/v1/corpus/d"),
        ("DELETE", "/v1/corpus/d"),
        ("GET", "/v1/chunks"),
        ("DELETE", "/v1/chunks/d"),
        ("GET", "/v1/checks"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
    ):
        answer = await client.request(method, path)
        assert answer.status_code == 200, (path, answer.text)
    # `chat` validates the chat that it makes of a response
    parsing = {kind.__name__ for kind, _ in BODIES.values()} | {"chat"}
    assert {name: threads.pop(name) for name in parsing} == dict.fromkeys(parsing, "kvrag-parse")
    assert threads == dict.fromkeys(["status", "statuses", "remove", "tokenize", "documents", "forget"], "kvrag-work")


async def test_health_and_others_are_answered_while_a_namespace_fills_all_queues(
    app: FastAPI, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    let, engine, state = threading.Event(), app.state.kvrag.engine, app.state.kvrag
    tokenize = engine.tokenize
    monkeypatch.setattr(engine, "tokenize", lambda *a, **k: (let.wait(60), tokenize(*a, **k))[1])
    state.working = AdmissionQueue(4, 99, "work", 2)
    content = body_of("/tokenize")
    asked = [asyncio.ensure_future(refused(client, "/tokenize", content)) for _ in range(24)]
    while state.working.running("") < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    try:
        assert (await client.get("/health")).status_code == 200
        other = state.working.run(lambda: (number for number in [1]), 60, "b")
        assert [piece async for piece in other] == [1]
        assert state.working.running("") == 3
    finally:
        let.set()
    assert await asyncio.gather(*asked) == [200] * 24


async def test_tokenize_has_a_size_limit(app: FastAPI, client: httpx.AsyncClient) -> None:
    content = body_of("/tokenize", prompt="Who? " * 300_000)
    assert await refused(client, "/tokenize", content) == 413
    assert await refused(client, "/tokenize", body_of("/tokenize", prompt="Who? " * 3000)) == 200


async def test_a_body_must_arrive_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that stalls is given up after seconds, and one that arrives is not."""
    waited: list[float] = []
    loop = asyncio.get_running_loop()
    timeout_at = asyncio.timeout_at

    def noted(when: float | None) -> Any:
        waited.append(0 if when is None else when - loop.time())
        return timeout_at(when)

    monkeypatch.setattr(asyncio, "timeout_at", noted)
    parts = iter([b"a" * (1 << 20), b"b" * (1 << 20)])

    async def receive() -> Any:
        return {"type": "http.request", "body": next(parts), "more_body": True}

    async def read_all(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()

    scope = {"type": "http", "path": "/v1/chat/completions", "method": "POST", "headers": []}
    await Guard(read_all, ServerSettings(name=NAME))(scope, receive, receive)
    assert 5 < waited[0] < 15
    assert 60 < waited[1] < 90, "16 KiB/s are enough"

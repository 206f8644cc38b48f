"""Chunks over HTTP: /v1/chunks, /tokenize, and the chunks of a request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from blending import CHUNKS, QUESTION, messages
from serving import NAME, Served, serving, until

from kvrag import BlendEngine, BlendReport, WarmReport
from kvrag.scheduling.waiting import check_cancelled
from kvrag.server.settings import ApiKey

NASTY = ["a/b", "..", ".", "a//b", "100%25 & more?#", "Ünï çödé 漢", "/abs/docs/a.txt", "a/../b", " "]


@pytest.fixture
def served(engine: BlendEngine) -> Iterator[Served]:
    with serving(engine) as served:
        yield served


def forget(served: Served, document: str) -> httpx.Response:
    return served.http.delete(f"/v1/chunks/{quote(document, safe='').replace('.', '%2E')}")


def test_chunks_are_warmed_listed_and_forgotten(served: Served, engine: BlendEngine) -> None:
    body = {"texts": CHUNKS[:2], "document": ["a", "b"], "sources": "s"}
    report = WarmReport.from_dict(served.http.post("/v1/chunks", json=body).raise_for_status().json())
    assert (report.chunks, report.new, report.reused) == (2, 2, 0)
    again = engine.warm(CHUNKS[:2], document=["a", "b"], sources="s")
    assert (again.new, again.reused) == (0, 2)  # the same variants as those of a local call
    assert served.http.get("/v1/chunks").json() == {"documents": ["a", "b"]}
    assert served.http.get("/v1/chunks", params={"prefix": "b"}).json()["documents"] == ["b"]
    assert served.ask("\n\n".join(CHUNKS[:2])).json()["kvrag"]["reused_tokens"] > 40
    assert forget(served, "a").json() == {"document": "a", "removed": 1}
    assert forget(served, "a").json()["removed"] == 0
    assert engine.documents() == ["b"]


def test_a_document_is_replaced(served: Served, engine: BlendEngine) -> None:
    for texts in (CHUNKS[:2], CHUNKS[1:3], []):
        served.http.post("/v1/chunks", json={"texts": texts, "document": "a"}).raise_for_status()
        assert len(list(engine.store.entries(0))) == len(texts)
    assert engine.documents() == []


@pytest.mark.parametrize("name", NASTY)
def test_any_name_can_be_forgotten(served: Served, engine: BlendEngine, name: str) -> None:
    served.http.post("/v1/chunks", json={"texts": CHUNKS[:1], "document": name}).raise_for_status()
    assert engine.documents() == [name]
    assert forget(served, name).json() == {"document": name, "removed": 1}
    assert engine.documents() == []


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"texts": "one"},
        {"texts": [1]},
        {"texts": CHUNKS, "document": ["one"]},
        {"texts": CHUNKS, "sources": ["one"]},
        {"texts": ["\ud800 is half a character, which no tokenizer can encode at all, whatever follows"]},
        {"texts": CHUNKS, "document": "\ud800"},
        {"texts": CHUNKS, "namespace": "another"},
        {"texts": ["word " * 5000]},
    ],
)
def test_wrong_chunks_are_refused(served: Served, engine: BlendEngine, body: dict[str, Any]) -> None:
    # httpx cannot send lone surrogates
    sent: dict[str, Any] = {"content": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}
    response = served.http.post("/v1/chunks", **sent)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert engine.documents() == []


def test_namespaces_see_their_own_chunks_only(engine: BlendEngine) -> None:
    with serving(engine, key="k1", api_keys=(ApiKey("k1", "one"), ApiKey("k2", "two"))) as served:
        other = {"Authorization": "Bearer k2"}
        served.http.post("/v1/chunks", json={"texts": CHUNKS, "document": "a"}).raise_for_status()
        assert served.http.get("/v1/chunks", headers=other).json()["documents"] == []
        assert served.http.delete("/v1/chunks/a", headers=other).json()["removed"] == 0
        assert served.http.get("/v1/chunks").json()["documents"] == ["a"]
        assert engine.documents(namespace="one") == ["a"]
        for method, path in (("GET", "/v1/chunks"), ("POST", "/v1/chunks"), ("POST", "/tokenize")):
            assert served.http.request(method, path, headers={"Authorization": "Bearer no"}).status_code == 401


def test_a_client_that_disconnects_ends_the_encoding(
    served: Served, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def endless(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        try:
            while True:
                check_cancelled()
        finally:
            ended.set()

    monkeypatch.setattr(engine, "warm", endless)
    body = json.dumps({"texts": CHUNKS, "document": "a"}).encode()
    head = (
        f"POST /v1/chunks HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(served.address, timeout=60) as client:
        client.sendall(head.encode() + body)
        assert begun.wait(60)
    assert ended.wait(60)
    until(lambda: served.running() == (0, 0))


def test_chunks_of_a_request_are_encoded_first(served: Served, engine: BlendEngine) -> None:
    prompt = "\n\n".join([CHUNKS[0], QUESTION])
    said = served.ask(prompt, chunks=[CHUNKS[0]]).json()["kvrag"]
    assert said["created_tokens"] > 16
    body = {"model": NAME, "prompt": CHUNKS[1] + "\n\nYes", "chunks": [CHUNKS[1]], "max_tokens": 2}
    assert served.http.post("/v1/completions", json=body).json()["kvrag"]["created_tokens"] > 16
    refused = served.http.post("/v1/completions", json={**body, "chunks": "one"})
    assert refused.status_code == 400


def test_a_completion_follows_a_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    body = {"model": NAME, "prompt": "Say it: ", "response_format": wanted, "max_tokens": 64, "temperature": 0}
    assert served.http.post("/v1/completions", json=body).json()["choices"][0]["text"].startswith('{"far"')


def test_prompts_are_tokenized(served: Served, engine: BlendEngine) -> None:
    def tokens(**body: Any) -> list[int]:
        found = served.http.post("/tokenize", json={"model": NAME, **body}).raise_for_status().json()
        assert found["count"] == len(found["tokens"])
        assert found["max_model_len"] == engine.context_window
        return list(found["tokens"])

    assert len(tokens(messages=messages(*CHUNKS))) == engine.count_tokens(messages(*CHUNKS))
    assert tokens(prompt="One two") == engine.tokenize("One two")
    assert tokens(prompt="One two", add_special_tokens=False) == engine.encode("One two")
    for wrong in ({}, {"prompt": "a", "messages": messages("b")}, {"prompt": "a", "tools": [{}]}, {"prompt": ""}):
        assert served.http.post("/tokenize", json=wrong).status_code == 400, wrong


def test_reports_survive_json(engine: BlendEngine) -> None:
    warmed = engine.warm([*CHUNKS, "short"])
    assert warmed.warnings
    assert WarmReport.from_dict({**warmed.to_dict(), "newer": 1}) == warmed
    report = engine.generate(messages(*CHUNKS), max_new_tokens=1).report
    assert report.runs
    content = report.to_dict()
    content["runs"][0]["newer"] = content["newer"] = 1
    assert BlendReport.from_dict(content) == report

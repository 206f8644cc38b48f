"""Sampling options of requests: limits and extensions, as vLLM's clients send them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import NAME, Served, serving

from kvrag import BlendEngine, BlendReport, Delta

MESSAGES = [{"role": "user", "content": "Who plays the harp?"}]
PROMPTS = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "?"}, "responses": {"input": "?"}}
REPORT = BlendReport.unblended(5, 2)


@pytest.fixture
def asked(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of the last answer."""
    asked: dict[str, Any] = {}

    def stream(prompt: Any, **options: Any) -> Iterator[Delta]:
        asked.update(options)
        yield Delta("Mira", (1,) * 1000, finish_reason="length", report=REPORT)

    monkeypatch.setattr(engine, "stream", stream)
    return asked


@pytest.fixture
def served(engine: BlendEngine, asked: dict[str, Any]) -> Iterator[Served]:
    with serving(engine, token_limit=1000) as served:
        yield served


@pytest.mark.parametrize("path", PROMPTS)
def test_more_tokens_than_the_servers_limit_are_cut_to_it(path: str, served: Served, asked: dict[str, Any]) -> None:
    field = "max_output_tokens" if path == "responses" else "max_tokens"
    response = served.http.post(f"/v1/{path}", json={"model": NAME, field: 100_000, **PROMPTS[path]})
    assert response.status_code == 200, response.text
    assert asked["max_new_tokens"] == 1000


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("name", ["min_p", "frequency_penalty", "presence_penalty"])
def test_options_of_the_engine_are_passed_on(name: str, path: str, served: Served, asked: dict[str, Any]) -> None:
    body = {"model": NAME, name: 0.05, **PROMPTS[path]}
    assert served.http.post(f"/v1/{path}", json=body).status_code == 200
    assert asked[name] == 0.05
    assert served.http.post(f"/v1/{path}", json=body | {name: 2.5}).status_code == 400


@pytest.mark.parametrize("field", ["suffix", "options"])
def test_what_would_change_the_answer_and_is_unknown_is_refused_in_one_line(field: str, served: Served) -> None:
    refused = served.http.post("/v1/completions", json={"model": NAME, "prompt": "Who?", field: "x"})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert field in message
    assert "\n" not in message

"""Counters in Prometheus's form."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from blending import CHUNKS, messages
from prometheus_client import generate_latest

from kvrag import BlendEngine, FileStore, Model
from kvrag.cli import serve
from kvrag.listen.check import Checker
from kvrag.server.app import create_app
from kvrag.server.settings import ApiKey, ServerSettings
from kvrag.server.state import State
from kvrag.types import BlendReport, Completed

PAGE = " ".join(CHUNKS[:3])


def _metrics(state: State, namespace: str, prefix: str) -> dict[str, float]:
    lines = generate_latest(state.tenants[namespace].registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(prefix))
    return {name: float(value) for name, value in pairs}


async def test_a_namespace_sees_what_it_has_learned(model: Model, tmp_path: Path) -> None:
    keys = (ApiKey("secret-1", "one"), ApiKey("secret-2", "two"))
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0, learn=True) as engine:
        for number in range(3):
            engine.generate(f"{number}\n\n{PAGE}\n\nWho?", namespace="one", max_new_tokens=1)
            engine.wait_until_idle()
        engine.generate(PAGE, namespace="two", max_new_tokens=1)
        engine.wait_until_idle()
        app = create_app(engine, ServerSettings(name="tiny", api_keys=keys))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            headers = [{"Authorization": f"Bearer {key.secret}"} for key in keys]
            one, two = [(await client.get("/v1/checks", headers=each)).json()["learned"] for each in headers]
    assert one["learned"] == 1
    assert one["tokens"] >= one["reused"] > 16
    assert {name: value for name, value in two.items() if value} == {"seen": 1}


def test_completed_answers_are_counted(engine: BlendEngine) -> None:
    state = State(engine, ServerSettings(name="tiny"), ())
    tenant, report = state.tenants[""], BlendReport.unblended(100, 80)
    for completed in (None, Completed(3, 90, 0.25)):
        tenant.count_answer(replace(report, completed=completed), "stop", 1.0)
    found = _metrics(state, "", "kvrag_completion_time_seconds_")
    assert (found["kvrag_completion_time_seconds_count"], found["kvrag_completion_time_seconds_sum"]) == (1, 0.25)


async def test_a_namespaces_checks_are_at_its_endpoint(endless: Model, tmp_path: Path, learning: None) -> None:
    keys = (ApiKey("secret-1", "one"), ApiKey("secret-2", "two"))
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), check=1.0) as engine:
        app = create_app(engine, ServerSettings(name="tiny", api_keys=keys))
        for namespace, questions in (("one", 2), ("two", 1)):
            engine.warm(CHUNKS, namespace=namespace)
            for number in range(questions):
                prompt = messages(*CHUNKS[:3], question=f"{number}?")
                engine.generate(prompt, namespace=namespace, max_new_tokens=1, temperature=0, margin=1e-9)
        engine._answering.idle.wait()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for key, count in zip(keys, (2, 1), strict=True):
                headers = {"Authorization": f"Bearer {key.secret}"}
                found = (await client.get("/v1/checks", headers=headers)).json()
                assert found["compared"] == count
                assert found["text"] == f"of {count} compared answers {found['kept']} were kept"
            assert (await client.get("/v1/checks")).status_code == 401


async def test_without_checks_the_endpoint_counts_none(engine: BlendEngine) -> None:
    app = create_app(engine, ServerSettings(name="tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        found = (await client.get("/v1/checks")).json()
    assert found["compared"] == 0
    assert "learned" not in found


@pytest.mark.parametrize(("words", "share"), [((), 0.05), (("--check", "0"), 0.0), (("--check", "0.5"), 0.5)])
def test_serve_checks_some_answers(words: tuple[str, ...], share: float, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["--no-corpus", "--store", str(tmp_path), *words])
    with ExitStack() as stack:
        app = serve.build(args, serve.read_settings(args), stack)
        [checker] = [one for one in app.state.kvrag.engine._answering.listeners if isinstance(one, Checker)]
        assert checker._share == share

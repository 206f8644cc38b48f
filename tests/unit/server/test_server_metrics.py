"""Counters in Prometheus's form."""

from __future__ import annotations

from pathlib import Path

from blending import CHUNKS

from kvrag import BlendEngine, FileStore, Model
from kvrag.server.settings import ApiKey, ServerSettings
from kvrag.server.state import State

PAGE = " ".join(CHUNKS[:3])


def _metrics(state: State, namespace: str) -> dict[str, float]:
    lines = state.tenants[namespace].metrics.text().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("kvrag_learn"))
    return {name: float(value) for name, value in pairs}


def test_a_namespaces_metrics_count_what_it_has_learned(model: Model, tmp_path: Path) -> None:
    settings = ServerSettings(name="tiny", api_keys=(ApiKey("secret-1", "one"), ApiKey("secret-2", "two")))
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0, learn=True) as engine:
        state = State(engine, settings, ())
        for number in range(3):
            engine.generate(f"{number}\n\n{PAGE}\n\nWho?", namespace="one", max_new_tokens=1)
            engine._answering.learner.wait()  # type: ignore[union-attr]
        engine.generate(PAGE, namespace="two", max_new_tokens=1)
        engine._answering.learner.wait()  # type: ignore[union-attr]
        one, two = (_metrics(state, name) for name in ("one", "two"))
    assert one["kvrag_learn_chunks_total"] == 1
    assert one["kvrag_learn_reused_tokens_total"] > 16
    assert one["kvrag_learn_tokens_total"] >= one["kvrag_learn_reused_tokens_total"]
    assert one["kvrag_learn_failure_total"] == one["kvrag_learn_ignored_total"] == 0
    assert {name: value for name, value in two.items() if value} == {"kvrag_learn_remembered_texts": 1}


def test_without_learning_there_are_no_such_metrics(engine: BlendEngine) -> None:
    assert not _metrics(State(engine, ServerSettings(name="tiny"), ()), "")

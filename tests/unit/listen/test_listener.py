"""A listener is one file: a new promise changes no other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from blending import CHUNKS, messages

from kvrag import BlendEngine, FileStore, Model
from kvrag.listen.listener import Answered, Listener


class ReusedByDocument(Listener):
    """Counts the reused tokens of each document."""

    name = "reused by document"

    def __init__(self, names: dict[str, str]) -> None:
        self._names, self._counts = names, Counter[str]()

    def answered(self, answer: Answered) -> None:
        for run in answer.request.report.runs:
            self._counts[self._names[run.key]] += len(run)

    def stats(self, namespace: str | None) -> Counter[str]:
        return self._counts


def test_a_promise_is_one_listener(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0) as engine:
        names: dict[str, str] = {}
        for name, chunk in zip("abc", CHUNKS, strict=False):
            engine.warm([chunk], document=name)
            [key] = set(engine.store.keys()) - set(names)  # type: ignore[attr-defined]
            names[key] = name
        engine._answering.listeners.append(ReusedByDocument(names))
        report = engine.generate(messages(*CHUNKS[:2]), max_new_tokens=1).report
        found = engine.stats()["reused by document"]
        assert sum(found.values()) == sum(map(len, report.runs)) > 0
        assert set(found) == {"a", "b"}


def test_an_abandoned_answer_is_prefilled_and_not_answered(model: Model, tmp_path: Path) -> None:
    seen: list[str] = []

    class Both(Listener):
        def prefilled(self, *_: object) -> None:
            seen.append("prefilled")

        def answered(self, answer: Answered) -> None:
            seen.append("answered")

    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine._answering.listeners.append(Both())
        stream = engine.stream(messages(*CHUNKS[:2]), max_new_tokens=4, temperature=0)
        next(stream)
        stream.close()
        assert seen == ["prefilled"]
        engine.generate(messages(*CHUNKS[:2]), max_new_tokens=1)
        assert seen == ["prefilled", "prefilled", "answered"]


@pytest.mark.parametrize("namespace", ["", "other"])
def test_a_listener_without_statistics_is_not_listed(namespace: str, model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), learn=True) as engine:
        assert set(engine.stats(namespace)) == {"checked", "learned"}

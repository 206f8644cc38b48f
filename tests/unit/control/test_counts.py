"""Counts of answers: doubts decide what answers begin with, and a restart resets nothing."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, Model, StoreError
from kvrag.control.calibrate import MARGIN
from kvrag.control.cost import Speed, Workload
from kvrag.control.counts import FILE, AnswerCounts, Counts
from kvrag.control.tuning import decide
from kvrag.reuse.blend import Completion
from kvrag.reuse.request_state import RequestState

PROMPT = messages(*(CHUNKS[number] for number in (2, 0, 3, 1)))
SLOW = Speed(pass_s=1e-4, row_s=1.0, pair_s=1e-9, stitch_s=0.0, load=1e12)


@pytest.fixture(autouse=True)
def _by_the_clock(not_by_the_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.control.tuning.NOTICEABLE_S", 0.01)


@pytest.fixture
def is_unsure(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """A switch: `first` = the model is unsure of every first token."""
    doubts = {"first": True}
    monkeypatch.setattr(Completion, "is_unsure", lambda self, token, margin: doubts["first"] and token == 0)
    return doubts


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """With a margin, and known speed."""
    options: dict[str, Any] = {"conversation_bytes": 0}
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), BlendConfig(margin=3.0), **options) as engine:
        for namespace in ("", "other"):
            engine.warm(CHUNKS, document="d", namespace=namespace)
        _knows(engine, SLOW)
        yield engine


def _knows(engine: BlendEngine, speed: Speed) -> None:
    costs: Any = engine._tuning._costs
    costs.speed, costs.knows_load = lambda: speed, lambda: True


def _ask(engine: BlendEngine, **settings: Any) -> Any:
    return engine.generate(PROMPT, **{"max_new_tokens": 1, "temperature": 0, **settings}).report


# ---------------------------------------------------------------- doubts


@pytest.mark.parametrize("speed", [replace(SLOW, row_s=1e-3), None], ids=["measured", "not measured"])
def test_full_prefill_begins_where_doubts_cost_more_than_reuse_gains(speed: Speed | None) -> None:
    request = Workload(prompt=500, reused=400, inexact=400, bytes=0)
    sure, even, unsure = (decide(speed, request, 0.0, doubt) for doubt in (0.0, 0.5, 0.9))
    assert (sure.full, even.full, unsure.full) == (False, False, True)
    assert unsure.reason == "full prefill: the model was unsure of the first token of 90% of the last answers"
    assert not decide(speed, replace(request, inexact=100), 0.0, 0.9).full, "a completion would compute little"


def test_answers_begin_in_full_while_the_model_doubts_and_with_reuse_again(
    engine: BlendEngine, is_unsure: dict[str, bool]
) -> None:
    policies = []
    for _ in range(24):
        report = _ask(engine)
        policies.append(report.policy)
        assert report.exact
        assert (report.completed is None) == (report.policy == "full")
    begun = policies.index("full")
    assert 2 <= begun <= 12
    assert [number for number in range(begun, 24) if policies[number] != "full"] == [
        number for number in range(begun, 24) if number % 8 == 7
    ]
    assert "unsure of the first token" in _ask(engine).decision
    is_unsure["first"] = False
    later = [_ask(engine).policy for _ in range(16)]
    assert "full" not in later[8:], "one answer in eight was tried"


def test_doubts_are_those_of_answers_that_the_controller_lets_begin(
    engine: BlendEngine, is_unsure: dict[str, bool]
) -> None:
    counts = engine._tuning.counts
    for settings in ({"controller": "off"}, {"deterministic": True}, {"policy": "first_k"}, {"ratio": 0.3}):
        _ask(engine, **settings)
    assert counts[""].doubts == ""
    counts[""].doubts = "1" * 32
    assert _ask(engine).policy == "full"
    assert counts[""].doubts == "1" * 32
    for settings in ({"controller": "off"}, {"deterministic": True}, {"policy": "first_k"}, {"ratio": 0.3}):
        assert _ask(engine, **settings).policy != "full"
    assert _ask(engine, namespace="other").policy == "none"
    is_unsure["first"] = False
    _ask(engine, namespace="other")
    assert (counts["other"].doubts, counts[""].doubts) == ("10", "1" * 32)


def test_a_blended_conversation_goes_on_with_reuse(
    model: Model, tmp_path: Path, is_unsure: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full prefill behind a blended beginning is not exact; a completion is."""
    is_unsure["first"] = False
    with BlendEngine(model, tmp_path, BlendConfig(margin=3.0)) as engine:
        engine.warm(CHUNKS, document="d")
        _knows(engine, SLOW)
        answer = engine.generate(PROMPT[:1], max_new_tokens=2, temperature=0)
        assert not answer.report.exact
        engine._tuning.counts[""].doubts = "1" * 32
        is_unsure["first"] = True
        following = [*PROMPT[:1], {"role": "assistant", "content": answer.text}, *messages(*CHUNKS[:3])]
        report = engine.generate(following, max_new_tokens=1, temperature=0).report
        assert report.conversation_tokens > 50
        assert report.policy != "full"
        assert report.exact


# ---------------------------------------------------------------- restarts


def _count(engine: BlendEngine, *kept: bool, namespace: str) -> None:
    checker = engine._answering.checker
    assert checker is not None
    for is_kept in kept:
        checker._count(RequestState([1], namespace=namespace), is_kept)


def _margin(engine: BlendEngine, namespace: str) -> float:
    request = RequestState(engine.tokenize(PROMPT), BlendConfig(controller="off"), namespace)
    engine._answering.prefill(request)
    assert request.completion
    return request.completion._margin


def test_a_restart_keeps_margins_and_doubts(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.control.tuning.MARGIN", MARGIN)
    with BlendEngine(model, tmp_path, check=1.0) as engine:
        for namespace in ("one", "two"):
            engine.warm(CHUNKS, document="d", namespace=namespace)
        _count(engine, False, True, False, namespace="one")
        engine._tuning.counts["two"].doubts = "011"
    with BlendEngine(model, tmp_path, check=1.0) as engine:
        assert _margin(engine, "one") == pytest.approx(MARGIN * 1.1**2)
        assert _margin(engine, "two") == MARGIN
        stats = engine.checked_in("one")
        assert stats
        assert (stats.last, stats.last_kept, stats.kept) == (3, 1, 0)
        assert engine._tuning.counts["two"].doubts == "011"
        _count(engine, False, namespace="one")
        assert _margin(engine, "one") == pytest.approx(MARGIN * 1.1**3)


def test_counts_are_stored_now_and_then(engine: BlendEngine, is_unsure: dict[str, bool], tmp_path: Path) -> None:
    _ask(engine)
    assert not (tmp_path / FILE).exists()
    engine._tuning._speed_kept = -math.inf
    _ask(engine)
    assert list(json.loads((tmp_path / FILE).read_text()).values()) == [["", "11", 1.0]]


def test_two_processes_and_two_models_keep_their_own(tmp_path: Path) -> None:
    store = FileStore(tmp_path, min_free_bytes=0)
    one, other = AnswerCounts(store, "model"), AnswerCounts(store, "model")
    one["a"].doubts, other["b"].doubts = "1", "01"
    assert other["a"] == Counts(), "looked up, and not changed"
    one.keep()
    other.keep()
    again = AnswerCounts(store, "model")
    assert (again["a"].doubts, again["b"].doubts, again["c"]) == ("1", "01", Counts())
    assert AnswerCounts(store, "another")["a"] == Counts()
    one["a"].factor = other["a"].factor = 2.0
    one.keep()
    other["a"].factor = 3.0
    other.keep()
    assert AnswerCounts(store, "model")["a"].factor == 3.0
    store.close()


@pytest.mark.parametrize("content", ["{", "[]", '{"KEY": 5}', '{"KEY": ["1", "0", NaN]}', '{"KEY": ["1"]}', "\udcff"])
def test_a_damaged_text_is_counted_again(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store = FileStore(tmp_path, min_free_bytes=0)
    key = AnswerCounts(store, "model")._key("a")
    (tmp_path / FILE).write_bytes(content.replace("KEY", key).encode("utf-8", "surrogateescape"))
    counts = AnswerCounts(store, "model")
    assert counts["a"] == Counts()
    assert f"{tmp_path}/{FILE} is damaged" in caplog.text
    counts["a"].factor = 1.1
    counts.keep()
    assert AnswerCounts(store, "model")["a"].factor == 1.1
    store.close()


def test_a_disk_that_fails_costs_no_answer(
    model: Model, tmp_path: Path, is_unsure: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise StoreError("the disk is on fire")

    monkeypatch.setattr(FileStore, "read_text", fail)
    monkeypatch.setattr(FileStore, "change_text", fail)
    with BlendEngine(model, tmp_path, BlendConfig(margin=3.0)) as engine:
        engine.warm(CHUNKS, document="d")
        engine._tuning._speed_kept = -math.inf
        assert _ask(engine).completed is not None
        assert engine._tuning.counts[""].doubts == "1"
        monkeypatch.undo()
        engine._tuning.keep_speed()
    assert "1" in (tmp_path / FILE).read_text(), "what could not be written is written later"

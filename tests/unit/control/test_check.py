"""Checked answers: what is counted, how the margin follows, and what ends a check."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages
from forks import forked

from kvrag import BlendConfig, BlendEngine, FileStore, Grammar, Model, SettingError
from kvrag.control import check
from kvrag.control.agreement import END
from kvrag.control.calibrate import MARGIN, Calibration
from kvrag.control.check import ENOUGH
from kvrag.control.tuning import Tuning
from kvrag.errors import AbandonedError
from kvrag.reuse.request_state import RequestState
from kvrag.types import CheckStats

PROMPT = messages(*CHUNKS[:3])
Compare = Callable[..., tuple[list[int], list[float]]]


@pytest.fixture
def engine(endless: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(
        endless, FileStore(tmp_path, min_free_bytes=0), BlendConfig(controller="off"), check=1.0
    ) as engine:
        engine.warm(CHUNKS, document="a")
        for namespace in ("one", "two"):
            engine.warm(CHUNKS, namespace=namespace)
        yield engine


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Whether full prefill agrees, and by which margin; all answers that it was given are in `given`."""
    said: dict[str, Any] = {"agrees": True, "margin": 5.0, "given": []}

    def compare(model: Model, request: RequestState, answer: Sequence[int], *_: Any) -> tuple[list[int], list[float]]:
        assert request.report.exact
        said["given"].append(list(answer))
        tokens = [token if said["agrees"] else token + 1 for token in answer]
        return tokens, [said["margin"]] * len(answer)

    monkeypatch.setattr(check, "likeliest", compare)
    return said


def _ask(engine: BlendEngine, prompt: Any = PROMPT, **settings: Any) -> Any:
    answer = engine.generate(prompt, **{"max_new_tokens": 2, "temperature": 0, **settings})
    engine._answering.idle.wait()
    return answer


def _stats(engine: BlendEngine, namespace: str | None = None) -> CheckStats:
    stats = engine.checked_in(namespace)
    assert stats is not None
    return stats


def test_answers_are_counted_by_namespace(engine: BlendEngine, full: dict[str, Any]) -> None:
    for namespace, agrees in (("one", True), ("one", False), ("two", True)):
        full["agrees"] = agrees
        _ask(engine, namespace=namespace)
    one, two = _stats(engine, "one"), _stats(engine, "two")
    assert str(one) == "of the last 2 checked answers 1 were kept"
    assert (one.chosen, one.kept, one.lost, one.failed) == (2, 1, 1, 0)
    assert (two.chosen, two.kept, two.lost, two.failed) == (1, 1, 0, 0)
    assert one.margin_factor == 1.0, "nothing is deepened, so there is no margin"
    assert engine.checked == CheckStats(last=3, last_kept=2, chosen=3, kept=2, lost=1)
    assert _stats(engine, "three") == CheckStats()


def test_near_ties_are_kept(engine: BlendEngine, full: dict[str, Any]) -> None:
    full |= {"agrees": False, "margin": 0.9}
    _ask(engine)
    assert _stats(engine).kept == 1


def test_the_first_tokens_and_the_end_are_compared(
    engine: BlendEngine, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = _ask(engine, max_new_tokens=40)
    long = answer.token_ids
    assert full["given"].pop() == list(long[:32])
    assert _ask(engine, max_new_tokens=20, stop=[answer.text[:3]]).finish_reason == "stop"
    assert END not in full["given"].pop(), "a stop string ended it"
    after = next(token for token in long if token != long[0])
    monkeypatch.setitem(engine.model.__dict__, "eos_ids", frozenset({after}))
    short = _ask(engine, max_new_tokens=40).token_ids
    assert full["given"].pop() == [*short, END]


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 0.5},
        {"policy": "full"},
        {"policy": "none"},
        {"deterministic": True},
        {"temperature": 1.0, "seed": 1},
        {"frequency_penalty": 1.0},
        {"logit_bias": {5: 1.0}},
        {"grammar": Grammar(regex="[a-z]*")},
        {"prompt": "a prompt without chunks"},
    ],
    ids=str,
)
def test_what_is_not_checked(engine: BlendEngine, full: dict[str, Any], settings: dict[str, Any]) -> None:
    _ask(engine, **settings)
    assert _stats(engine).chosen == 0
    _ask(engine, policy="first_k")
    assert _stats(engine).chosen == 1


def test_an_abandoned_answer_is_not_checked(engine: BlendEngine, full: dict[str, Any]) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=4, temperature=0)
    next(stream)
    stream.close()
    engine._answering.idle.wait()
    assert _stats(engine).chosen == 0


def test_a_share_is_checked(endless: Model, tmp_path: Path, full: dict[str, Any]) -> None:
    with BlendEngine(endless, tmp_path, check=0.3) as engine:
        engine.warm(CHUNKS)
        for number in range(40):
            _ask(engine, messages(*CHUNKS[:3], question=f"{number}?"), max_new_tokens=1)
        assert 6 <= _stats(engine).kept == _stats(engine).chosen <= 18


# ---------------------------------------------------------------- the margin


@pytest.fixture
def careful(engine: BlendEngine, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> BlendEngine:
    monkeypatch.setattr("kvrag.control.tuning.MARGIN", MARGIN)
    return engine


def _margin(engine: BlendEngine, namespace: str = "", **settings: Any) -> float:
    request = RequestState(engine.tokenize(PROMPT), BlendConfig(controller="off", **settings), namespace)
    engine._answering.prefill(request)
    return request.completion._margin if request.completion else 0.0


def _count(engine: BlendEngine, *kept: bool, namespace: str = "", **settings: Any) -> None:
    checker = engine._answering.checker
    assert checker is not None
    for is_kept in kept:
        checker._count(RequestState([1], BlendConfig(**settings), namespace), is_kept)


def test_lost_answers_bring_the_margin_back_where_the_calibration_chose_a_fixed_ratio(
    careful: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = Calibration("", "query", {}, 0.99, False, (), 0.3, "", start=0.3, margin=0.0)
    monkeypatch.setattr(Tuning, "_calibrated", lambda self, config: (calibration, ""))
    _count(careful, *[True] * ENOUGH)
    assert (_stats(careful, "").margin_factor, _margin(careful)) == (1.0, 0.0)
    _count(careful, False, False)
    assert _stats(careful, "").margin_factor == pytest.approx(1.1)
    assert _margin(careful) == pytest.approx(MARGIN * 1.1)
    _count(careful, *[True] * 200)
    assert (_stats(careful, "").margin_factor, _margin(careful)) == (1.0, 0.0)


def test_the_margin_rises_with_lost_answers(careful: BlendEngine) -> None:
    _count(careful, False, True, False, namespace="one")
    assert _stats(careful, "one").margin_factor == pytest.approx(1.1**2)
    assert _margin(careful, "one") == pytest.approx(MARGIN * 1.1**2)
    assert _margin(careful, "two") == MARGIN
    _count(careful, *[False] * 30, namespace="one")
    assert _margin(careful, "one") == 8.0
    _count(careful, *[True] * 200, False, namespace="one")
    assert _margin(careful, "one") < 8.0, "it does not rise beyond its bound unseen"


def test_the_margin_falls_once_enough_are_kept(careful: BlendEngine) -> None:
    _count(careful, *[True] * 49)
    assert _margin(careful) == MARGIN
    _count(careful, True, True)
    assert _margin(careful) == pytest.approx(MARGIN / 1.02**2)
    _count(careful, *[True] * 100)
    assert _margin(careful) == 0.5
    _count(careful, *[False] * 5)
    assert _margin(careful) > 0.5


def test_only_the_latest_answers_count(careful: BlendEngine) -> None:
    _count(careful, *[False] * 200)
    assert _stats(careful).last_kept == 0
    _count(careful, *[True] * 300)
    stats = _stats(careful)
    assert (stats.last, stats.last_kept, stats.kept, stats.lost) == (200, 200, 300, 200)


def test_a_given_margin_and_deterministic_answers_stay_as_they_are(careful: BlendEngine) -> None:
    _count(careful, *[False] * 5, margin=2.5)
    assert _margin(careful) == MARGIN, "an answer with a given margin says nothing about another one"
    _count(careful, *[False] * 5)
    assert _margin(careful, margin=2.0) == 2.0
    assert _margin(careful, deterministic=True) == MARGIN
    assert _margin(careful) > 2.0


# ---------------------------------------------------------------- idle time


def _held(engine: BlendEngine) -> list[Any]:
    return [task.request for task in engine._answering.idle._waiting]


def test_checks_wait_for_answers_in_progress_and_few_wait(engine: BlendEngine, full: dict[str, Any]) -> None:
    stream = engine.stream("Something else.", max_new_tokens=2)
    next(stream)
    engine.generate_batch(
        [messages(*CHUNKS[:3], question=f"{n}?") for n in range(200)], max_new_tokens=1, temperature=0
    )
    assert _stats(engine).chosen == 200
    assert len(_held(engine)) == 8
    assert not full["given"]
    list(stream)
    engine._answering.idle.wait()
    assert (_stats(engine).kept, len(_held(engine))) == (8, 0)


@pytest.mark.parametrize("where", ["here", "another engine"])
def test_a_check_of_a_forgotten_text_is_dropped(
    engine: BlendEngine, full: dict[str, Any], tmp_path: Path, where: str
) -> None:
    stream = engine.stream("Something else.", max_new_tokens=2, temperature=0)
    next(stream)
    engine.generate(PROMPT, max_new_tokens=2, temperature=0)
    engine.generate(PROMPT, max_new_tokens=2, temperature=0, namespace="one")
    assert len(_held(engine)) == 2
    if where == "here":
        engine.forget("a")
        assert [request.namespace for request in _held(engine)] == ["one"]
        gc.collect()
        kept = [each for each in gc.get_objects() if isinstance(each, RequestState) and not each.namespace]
        assert not any(list(each.token_ids) == engine.tokenize(PROMPT) for each in kept)
    else:
        with BlendEngine(engine.model, FileStore(tmp_path, min_free_bytes=0)) as other:
            other.forget("a")
    list(stream)
    engine._answering.idle.wait()
    assert (_stats(engine, "").kept, _stats(engine, "one").kept) == (0, 1)


def _during_the_check(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[int]:
    """Do something between the first two layers of every check; return a number per layer that was computed."""
    layers, pause = list[int](), engine.model._pause

    def acting() -> None:
        if threading.current_thread().name.startswith("kvrag-idle"):
            layers.append(1)
            act()
        pause()

    monkeypatch.setattr(engine.model, "_pause", acting)
    return layers


def test_forgetting_a_text_ends_its_check_within_a_layer(
    engine: BlendEngine, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = _during_the_check(engine, monkeypatch, lambda: engine.forget("a"))
    _ask(engine)
    assert (layers, full["given"], _held(engine)) == ([1], [], [])
    assert _stats(engine) == CheckStats(chosen=1)


def test_closing_the_engine_ends_a_check_within_a_layer(
    engine: BlendEngine, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    layers = _during_the_check(engine, monkeypatch, engine.close)
    engine.generate(PROMPT, max_new_tokens=2, temperature=0)
    engine._answering.idle._pool.shutdown()
    assert (layers, full["given"], caplog.text) == ([1], [], "")
    assert _stats(engine).failed == 0


def test_an_answer_interrupts_a_check_which_is_tried_again(
    engine: BlendEngine, full: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[Any] = []

    def begin() -> None:
        if not streams:
            streams.append(engine.stream("Something else.", max_new_tokens=2, temperature=0))
            threading.Thread(target=next, args=streams).start()
            while not engine._answering._admission.is_busy():
                pass

    layers = _during_the_check(engine, monkeypatch, begin)
    engine.generate(PROMPT, max_new_tokens=2, temperature=0)
    done = threading.Thread(target=engine._answering.idle.wait)
    done.start()
    done.join(0.5)
    assert done.is_alive()
    assert layers == [1]
    streams[0].close()
    done.join(30)
    assert (_stats(engine).kept, len(full["given"])) == (1, 1)


def test_work_that_is_always_interrupted_is_given_up(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[int]()
    idle = engine._answering.idle

    def interrupted() -> None:
        tries.append(1)
        raise AbandonedError("another answer")

    idle.add(RequestState([1]), interrupted)
    idle.wait()
    assert len(tries) == 3


def test_logits_that_are_not_numbers_are_an_error_and_end_nothing(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.model.forward_all
    monkeypatch.setattr(engine.model, "forward_all", lambda *args: forward(*args) * torch.nan)
    _ask(engine)
    monkeypatch.undo()
    assert _stats(engine) == CheckStats(chosen=1, failed=1)
    monkeypatch.setitem(engine.model.__dict__, "eos_ids", frozenset())
    _ask(engine)
    assert _stats(engine).last == 1


def test_nothing_is_checked_after_the_end_or_in_a_fork(engine: BlendEngine, full: dict[str, Any]) -> None:
    _ask(engine)
    with pytest.raises(SettingError, match="was in use when this process was forked"):
        forked(lambda: engine.checked)
    engine.close()
    engine._answering.idle.add(RequestState([1]), lambda: full["given"].clear())
    assert not _held(engine)
    assert len(full["given"]) == 1


def test_without_a_share_nothing_is_counted_and_deterministic_engines_refuse_one(
    endless: Model, tmp_path: Path, full: dict[str, Any]
) -> None:
    with BlendEngine(endless, tmp_path) as engine:
        engine.warm(CHUNKS)
        _ask(engine)
        assert (engine.checked, full["given"]) == (None, [])
    for settings in ({"check": 0.1}, {"complete": "idle"}):
        with pytest.raises(SettingError, match="deterministic=True"):
            BlendEngine(endless, tmp_path, BlendConfig(deterministic=True), **settings)
    for wrong in (-0.1, 1.1, float("nan"), "2%"):
        with pytest.raises(SettingError, match="check must be a number"):
            BlendEngine(endless, tmp_path, check=wrong)  # type: ignore[arg-type]

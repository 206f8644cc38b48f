"""Checks of answers in idle time, the self-test, and what answers tell of their own."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrag import BlendConfig, BlendEngine, KvragError, Model, SettingError
from kvrag.control.evidence import STARTS, Evidence, rung
from kvrag.control.plan import LARGE
from kvrag.listen.check import DECIDED, END, FEW, Checker, observe

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0}
CORPUS = Path(__file__).parents[3] / "examples" / "corpus"
QUESTIONS = [
    "Which company has its offices in Grimvik?",
    "What does Jomouth send abroad?",
    "Which food is Kala fond of?",
    "Who finished school in 1944?",
    "Where was Zanlina born?",
]

pytestmark = pytest.mark.usefixtures("learning")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    settings: dict[str, Any] = {"dtype": "float32", "store": tmp_path, "config": BlendConfig(context_tokens=0)}
    with BlendEngine.from_pretrained("reader", conversation_bytes=0, **settings) as engine:
        engine.warm(_chunks(), document=[f"{number}" for number in range(5)])
        engine._planner._is_large = True
        yield engine


def _chunks() -> list[str]:
    texts = [path.read_text() for path in sorted(CORPUS.iterdir())]
    return [part for text in texts for part in text.split("\n\n") if len(part) > 80][:5]


def _prompt(number: int) -> list[dict[str, str]]:
    chunks = random.Random(number).sample(_chunks(), 5)
    question = QUESTIONS[number % len(QUESTIONS)]
    return [{"role": "user", "content": "\n\n".join([*chunks, f"Question: {question}"])}]


def _checker(engine: BlendEngine) -> Checker:
    [checker] = [one for one in engine._answering.listeners if isinstance(one, Checker)]
    return checker


def _seen(engine: BlendEngine, start: float, deep: bool = False) -> list[float]:
    return engine._planner.evidence[""].of(rung("query", start, deep, True)).sum(axis=1).tolist()  # type: ignore[no-any-return]


def _is_full_prefills(engine: BlendEngine, ids: list[int], answer: list[int]) -> bool:
    """Whether full prefill, token by token, chooses each token, or is undecided."""
    cache = engine.model.new_cache(len(ids) + len(answer))
    logits = engine.model.forward(torch.tensor([ids]), cache)
    for token in answer:
        best = logits[0].topk(2)
        chosen = int(best.indices[0])
        is_same = chosen in engine.model.eos_ids if token == END else chosen == token
        if not is_same and float(best.values[0] - best.values[1]) >= DECIDED:
            return False
        logits = engine.model.forward_each([token], [cache]) if token != END else logits
    return True


def test_an_answer_is_kept_if_full_prefill_would_give_it(engine: BlendEngine) -> None:
    expected = list[bool]()
    for number in range(6):
        answer = engine.generate(_prompt(number), **GREEDY, margin=1e-9)
        engine._answering.idle.wait()
        ids = engine.tokenize(_prompt(number))
        expected.append(_is_full_prefills(engine, ids, [*answer.token_ids, *[END] * (answer.finish_reason == "stop")]))
        assert (engine.stats()["checked"].compared, engine.stats()["checked"].kept) == (len(expected), sum(expected))
    assert engine.stats()["checked"].failed == 0
    seen, judged, _ = _seen(engine, LARGE[0])
    assert seen > judged > 0, "each answer counts once by its own tokens, and once as it is checked"
    assert judged >= sum(len(answer.token_ids) for answer in [answer])


def test_answers_count_their_tokens_and_doubts(engine: BlendEngine) -> None:
    _checker(engine)._share = 0.0
    answer = engine.generate(_prompt(0), **GREEDY, margin=1e8)
    assert answer.report.deepened is not None
    assert answer.report.completed is not None
    assert (answer.report.deepened.token, answer.report.completed.token) == (0, 1)
    assert _seen(engine, LARGE[0])[:2] == [1, 1]
    assert _seen(engine, LARGE[0], deep=True)[:2] == [2, 1]
    answers = engine._planner.evidence[""].answers
    assert answers == (1, len(answer.token_ids), 0, 0, 1, 1)
    engine.generate(_prompt(1), **GREEDY, margin=1e-9)
    assert _seen(engine, LARGE[0])[0] > 1


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": 0.3},
        {"policy": "none"},
        {"policy": "full"},
        {"policy": "hkvd"},
        {"margin": 0},
        {"controller": "off"},
        {"deterministic": True},
    ],
    ids=str,
)
def test_what_follows_no_evidence_gives_none(engine: BlendEngine, options: dict[str, Any]) -> None:
    engine.generate(_prompt(0), **GREEDY | options)
    engine._answering.idle.wait()
    assert engine._planner.evidence[""].answers.answers == 0
    assert (engine.stats()["checked"].compared, engine.stats()["checked"].failed) == (0, 0)


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {5: 1.0}}], ids=str
)
def test_sampled_and_changed_answers_are_not_checked(engine: BlendEngine, options: dict[str, Any]) -> None:
    engine.generate(_prompt(0), **GREEDY | options)
    engine._answering.idle.wait()
    assert (engine.stats()["checked"].compared, engine.stats()["checked"].failed) == (0, 0)
    assert engine._planner.evidence[""].answers.answers == 1, "its tokens and doubts count"


def test_a_few_answers_are_all_checked_then_a_share_of_them(engine: BlendEngine) -> None:
    added = list[Any]()
    engine._answering.idle.add = lambda request, work: added.append(work) or True  # type: ignore[method-assign]
    _checker(engine)._share = 1e-9
    for number in range(FEW + 5):
        engine.generate(_prompt(number), **GREEDY)
    assert len(added) == FEW
    _checker(engine)._share = 0.0
    engine.reset_calibration()
    engine.generate(_prompt(0), **GREEDY)
    assert len(added) == FEW


def test_a_failing_check_is_counted_and_disturbs_nobody(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KvragError("no memory")

    monkeypatch.setattr("kvrag.listen.check._refer", fail)
    assert engine.generate(_prompt(0), **GREEDY).text
    engine._answering.idle.wait()
    assert (engine.stats()["checked"].failed, engine.stats()["checked"].compared) == (1, 0)


def test_an_engine_is_freed_without_garbage_collection(model: Model, tmp_path: Path) -> None:
    """Else its model stays in memory."""
    with BlendEngine(model, tmp_path, learn=True) as engine:
        engine.generate("Hi", max_new_tokens=1)
        engine.wait_until_idle()
        parts = [*map(weakref.ref, (engine._answering, *engine._answering.listeners))]
    gc.collect()
    gc.disable()
    try:
        del engine
        assert [part() for part in parts if part() is not None] == []
    finally:
        gc.enable()


# ------------------------------------------------------------------------------ calibrate


def test_a_calibration_measures_all_starts_and_is_kept(engine: BlendEngine, tmp_path: Path) -> None:
    done = list[tuple[int, int]]()
    found = engine.calibrate([_prompt(0), _prompt(1)], progress=lambda *steps: done.append(steps))
    steps = 1 + len(STARTS)
    assert done == [(number + 1, 2 * steps) for number in range(2 * steps)]
    assert found == engine.stats()["checked"]
    for start in STARTS:
        seen, judged, _ = _seen(engine, start)
        assert seen == judged > 0
        assert (_seen(engine, start, deep=True)[0] > 0) == (start > 0)
    before = engine._planner.evidence[""].answers
    engine.close()
    with BlendEngine.from_pretrained("reader", dtype="float32", store=tmp_path) as again:
        assert again._planner.evidence[""].answers == before
        again.calibrate(count=1, progress=lambda *_: None)
        assert again._planner.evidence[""].answers.answers == before.answers + 1
        again.reset_calibration()
        assert again._planner.evidence[""].answers.answers == 0


def test_a_calibration_needs_chunks(engine: BlendEngine) -> None:
    with pytest.raises(KvragError, match="at least two stored chunks"):
        engine.calibrate(namespace="empty")
    with pytest.raises(SettingError, match="count"):
        engine.calibrate(count=0)


@pytest.mark.parametrize("may_complete", [True, False])
def test_answers_that_no_doubt_can_complete_are_not_counted_as_deepened(may_complete: bool) -> None:
    """They would say of other starts that deepened answers are seldom completed."""
    evidence = Evidence(threading.Lock())
    done: Any = {"seen": ([], []), "judged": [], "deepened": object(), "completed": None, "may_complete": may_complete}
    observe(None, evidence, SimpleNamespace(late=SimpleNamespace(**done)), 9)  # type: ignore[arg-type]
    answers = evidence.answers
    assert (answers.answers, answers.deepened, answers.completed) == (1, may_complete, 0)

"""Conversations that are completed in idle time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrag import BlendConfig, BlendEngine, Sampling
from kvrag.reader import samples
from kvrag.reuse.request_state import RequestState

QUESTIONS = [*samples.ARTICLES.questions]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(
        "reader",
        dtype="float32",
        store=tmp_path,
        config=BlendConfig(context_tokens=0, controller="off"),
        exact_when_idle=True,
    ) as engine:
        engine.warm(_chunks(), document=[f"{number}" for number in range(5)])
        yield engine


def _chunks() -> list[str]:
    texts = [path.read_text() for path in sorted(samples.ARTICLES.path.iterdir())]
    return [part for text in texts for part in text.split("\n\n") if len(part) > 80][:5]


def _messages(*questions: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*_chunks(), f"Question: {question}"])} for question in questions]


def _ask(engine: BlendEngine, messages: list[dict[str, str]], **settings: Any) -> Any:
    answer = engine.generate(messages, **{"max_new_tokens": 8, "temperature": 0, **settings})
    engine._answering.idle.wait()
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "Question: Who was it?"}]
    return answer


@pytest.mark.parametrize("settings", [{}, {"policy": "none"}, {"ratio": 0.3}], ids=str)
def test_the_next_turn_begins_with_full_prefills_kv(engine: BlendEngine, settings: dict[str, Any]) -> None:
    messages = _messages(QUESTIONS[0])
    first = _ask(engine, messages, **settings)
    assert not first.report.exact
    once = (first.report.prompt_tokens + len(first.token_ids)) * engine.model.bytes_per_token
    assert engine._answering._conversations.num_bytes == once, "the blended KV is gone"
    answer = engine.generate(messages, max_new_tokens=8, temperature=0, logprobs=2)
    full = engine.generate(messages, policy="full", max_new_tokens=8, temperature=0, logprobs=2)
    report = answer.report
    assert report.exact
    assert report.conversation_tokens >= first.report.prompt_tokens - 2
    assert answer.token_ids == full.token_ids
    for one, other in zip(answer.logprobs, full.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_without_it_the_next_turn_is_not_exact(tmp_path: Path) -> None:
    with BlendEngine.from_pretrained("reader", store=tmp_path, config=BlendConfig(context_tokens=0)) as engine:
        engine.warm(_chunks())
        messages = _messages(QUESTIONS[0])
        assert not _ask(engine, messages).report.exact
        assert not _ask(engine, messages).report.exact


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"policy": "full"}, {"ratio": 1.0}], ids=str)
def test_what_is_exact_or_not_kept_is_not_completed(engine: BlendEngine, settings: dict[str, Any]) -> None:
    added: list[Any] = []
    engine._answering.idle.add = lambda request, work: added.append(work)  # type: ignore[method-assign]
    _ask(engine, _messages(QUESTIONS[0]), **settings)
    assert not added
    _ask(engine, [{"role": "user", "content": "Read this."}, *_messages(QUESTIONS[1])], ratio=0.3)
    assert len(added) == 1, "completed, though a given ratio is not checked"


def test_a_forgotten_text_is_not_completed(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is forgotten when all is computed."""
    stream = engine.stream("Something else.", max_new_tokens=2, temperature=0)
    next(stream)
    messages = _messages(QUESTIONS[0])
    engine.generate(messages, max_new_tokens=8, temperature=0)
    engine.forget("1")
    list(stream)
    engine._answering.idle.wait()
    rest = engine._answering._conversations.num_bytes
    assert rest < 100 * engine.model.bytes_per_token
    keep, ratios = engine._answering._keep, list[float | None]()

    def late(request: RequestState, *rest: Any) -> None:
        if request.config.ratio == 1.0:
            engine.forget("2")
        ratios.append(request.config.ratio)
        keep(request, *rest)

    monkeypatch.setattr(engine._answering, "_keep", late)
    _ask(engine, messages)
    assert ratios == [None, None, 1.0]
    assert engine._answering._conversations.num_bytes < 100 * engine.model.bytes_per_token


def test_a_completion_goes_on_from_what_is_exact(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = _messages(QUESTIONS[0])
    _ask(engine, messages)
    messages[-1]["content"] = _messages(QUESTIONS[1])[0]["content"]  # brings the chunks again, elsewhere
    rows = list[int]()
    forward = engine.model.forward

    def counting(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(ids.numel())
        return forward(ids, *rest)

    monkeypatch.setattr(engine.model, "forward", counting)
    second = _ask(engine, messages)
    report = second.report
    assert not report.exact
    left = report.prompt_tokens - report.conversation_tokens + len(second.token_ids)
    assert rows[-1] <= left + 1
    assert engine._answering._conversations.find([*engine.tokenize(messages), 1], BlendConfig(ratio=1.0)).exact > left  # type: ignore[union-attr]

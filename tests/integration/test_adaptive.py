"""Adaptive recompute: an answer of which the model is unsure becomes full prefill's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages
from families import FAMILIES, build

import kvrag.control.plan
from kvrag import BlendConfig, BlendEngine, Grammar, Model, Sampling, SettingError
from kvrag.control.evidence import START
from kvrag.listen.check import likeliest
from kvrag.reuse.blend import FIRST, MOST, LateRecompute

PROMPT = messages(*(CHUNKS[number] for number in (2, 0, 3, 1)))
UNSURE = {"margin": 1e8, "controller": "off"}  # of everything
KINDS = [
    *(
        "llama",
        *(name for name in FAMILIES if "mistral" in name),
        "gemma3",
        "gpt_oss",
        "mixtral",
        "deepseek_v3",
        "cohere",
    ),
    *(name for name in FAMILIES if "longrope" in name or "dynamic" in name),
]


def _model(family: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Model:
    model_type, changes = FAMILIES[family]
    model = Model(build(model_type, **changes), tokenizer, family)
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    return model


def _by_full_prefill(model: Model, ids: Sequence[int], said: Sequence[int], num: int) -> list[int]:
    """The tokens that follow a prompt, prefilled in full, and the beginning of its answer, token by token."""
    cache = model.new_cache(len(ids) + num)
    logits = model.forward(torch.tensor([list(ids)]), cache)
    tokens = list(said)
    for number in range(num):
        token = tokens[number] if number < len(said) else int(logits.argmax())
        tokens[number:] = [token, *tokens[number + 1 :]]
        logits = model.forward_each([token], [cache])
    return tokens


@pytest.fixture
def unsure_at(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of the tokens at which the model is unsure, by blended KV."""
    tokens: set[int] = set()

    def is_unsure(late: LateRecompute, token: int, margin: float) -> bool:
        return token in tokens

    monkeypatch.setattr(LateRecompute, "is_unsure", is_unsure)
    return tokens


@pytest.mark.parametrize("family", KINDS)
def test_a_completed_answer_is_full_prefills(
    family: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsure_at: set[int]
) -> None:
    model = _model(family, tokenizer, monkeypatch)
    with BlendEngine(model, tmp_path, BlendConfig(**UNSURE)) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(PROMPT)
        for number in (0, 3):
            unsure_at.clear()
            unsure_at.add(number)
            answer = engine.generate(PROMPT, max_new_tokens=12, temperature=0, deterministic=True)
            report = answer.report
            assert report.completed is not None
            assert report.completed.token == number
            assert report.exact == (number == 0)
            assert report.recomputed_tokens > 80
            told = f"the model was unsure after {number} tokens: {report.completed.rows} tokens computed in"
            explained = str(engine.explain())
            assert told in explained
            assert "(at first policy query, ratio " in explained
            assert "faster" not in explained
            said = list(answer.token_ids)
            assert said == _by_full_prefill(model, ids, said[:number], 12)


def test_only_what_was_encoded_alone_is_recomputed_at_first(
    model: Model, tmp_path: Path, unsure_at: set[int], monkeypatch: pytest.MonkeyPatch, learning: None
) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    for name, document, policy, ratio in (("behind", "d", "none", 0.0), ("alone", "", "query", 0.15)):
        unsure_at.add(2)
        with BlendEngine(model, tmp_path / name, BlendConfig(margin=1e8)) as engine:
            engine.warm(CHUNKS, document=document)
            report = engine.generate(PROMPT, max_new_tokens=4, temperature=0).report
            assert (report.policy, report.ratio) == (policy, pytest.approx(ratio, abs=0.01))
            assert report.completed is not None
            assert report.completed.rows <= report.recomputed_tokens + report.fresh_tokens + 2


def test_before_the_first_token_a_bounded_number_of_rows_is_computed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning: None
) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    with BlendEngine(model, tmp_path / "alone", BlendConfig(margin=1e8), check=0.0) as engine:
        engine.warm(CHUNKS)
        report = engine.generate(PROMPT, max_new_tokens=1, temperature=0).report
        assert report.deepened is not None
        assert report.deepened.token == 0
        assert report.completed is None, "it would be the third pass before the first token"
        assert not report.exact
    with BlendEngine(model, tmp_path / "behind", BlendConfig(margin=1e8), check=0.0) as engine:
        engine.warm(CHUNKS, document="d")  # begins with plain reuse, whose doubts are completed at once
        report = engine.generate(PROMPT, max_new_tokens=1, temperature=0).report
        assert report.completed is not None
        assert report.fresh_tokens + report.completed.rows <= MOST * report.prompt_tokens
        assert report.exact
        long = messages(*CHUNKS[1:3], question="Who was born in Florton, and who owns a goat? " * 4)
        report = engine.generate(long, max_new_tokens=1, temperature=0).report
        assert (report.policy, report.completed) == ("full", None)
        assert "% is stored, and a recompute on doubt would cost more" in report.decision


@pytest.mark.parametrize("family", KINDS)
def test_a_deepened_answer_continues_from_more_recomputed_tokens(
    family: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsure_at: set[int]
) -> None:
    """As if the same rows were computed by hand, in the same order."""
    model = _model(family, tokenizer, monkeypatch)
    with BlendEngine(model, tmp_path, BlendConfig(**UNSURE)) as engine:
        engine.warm(CHUNKS)
        ids = model.tokenizer.render(PROMPT)
        request = engine.prefill(ids, BlendConfig(ratio=0.15, controller="off"))
        assert 0 < len(request.deeper) <= len(request.selected) + 1
        assert not {*request.deeper.tolist()} & {*request.selected.tolist()}
        said = [int(request.logits.argmax())]
        both = torch.cat([request.ids, torch.tensor(said)])
        rows = LateRecompute(model, request).rows_of_next_share(len(both))
        assert {*rows.tolist()} >= {*request.deeper.tolist(), *range(len(ids), len(both))}
        late = request.fresh > request.deeper[0]
        assert {*rows.tolist()} == {*request.deeper.tolist(), *request.fresh[late].tolist(), len(ids)}
        logits = model.forward(both[rows][None], request.cache, rows)
        request.cache.set_length(len(both))
        for _ in range(4):
            said.append(int(logits.argmax()))
            logits = model.forward_each([said[-1]], [request.cache])
        monkeypatch.setattr(LateRecompute, "is_unsure", lambda late, token, _: token == 1 and late.deepened is None)
        answer = engine.generate(PROMPT, max_new_tokens=5, temperature=0, deterministic=True)
        report = answer.report
        assert list(answer.token_ids) == said
        assert report.deepened is not None
        assert (report.deepened.token, report.deepened.rows) == (1, len(rows))
        assert report.completed is None
        assert report.recomputed_tokens == len(request.deeper) + len(request.selected)


@pytest.mark.parametrize(("ratio", "margin", "share"), [(0.3, None, 0.5), (0.3, 1.0, 1.0), (0.15, None, 1.0)])
def test_a_doubt_that_no_other_follows_recomputes_half(
    ratio: float, margin: float | None, share: float, model: Model, tmp_path: Path
) -> None:
    with BlendEngine(model, tmp_path, BlendConfig()) as engine:
        engine.warm(CHUNKS)
        request = engine.prefill(model.tokenizer.render(PROMPT), BlendConfig(ratio=ratio, margin=margin))
        assert len(request.deeper) == round(share * len(request.selected))


def test_flat_logits_end_in_one_full_prefill(model: Model, tmp_path: Path) -> None:
    """Of a random model, which is unsure of every token."""
    with BlendEngine(model, tmp_path, BlendConfig(**UNSURE)) as engine:
        engine.warm(CHUNKS)
        report = engine.generate(PROMPT, max_new_tokens=30, temperature=0).report
        assert report.deepened is not None
        assert report.completed is not None
        assert (report.deepened.token, report.completed.token) == (0, 1)
        assert report.recomputed_tokens > 80


def test_an_answer_of_a_large_model_is_deepened_and_not_completed(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learning: None
) -> None:
    """Unless a margin was asked for: its whole answer would cost more than full prefill's."""
    monkeypatch.setattr(kvrag.control.plan, "PARAMETERS", 0)
    monkeypatch.setattr(kvrag.control.plan, "LARGE", (2 * START, 1e8))
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    with BlendEngine(model, tmp_path, BlendConfig(controller="off"), check=0.0) as engine:
        engine.warm(CHUNKS)
        for options, is_completed in (({}, False), ({"margin": 1e8}, True)):
            report = engine.generate(PROMPT, max_new_tokens=8, temperature=0, **options).report
            assert report.deepened is not None
            assert (report.completed is not None) == is_completed


def test_a_doubt_between_ending_and_going_on_is_none(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlendEngine(model, tmp_path, BlendConfig(**UNSURE), conversation_bytes=0) as engine:
        engine.warm(CHUNKS)
        prefilled = engine.prefill(model.tokenizer.render(PROMPT), BlendConfig(ratio=0.15, controller="off"))
        first, second, third = prefilled.logits[0].topk(3).indices.tolist()
        for ends, is_unsure in (({second}, False), ({third}, True)):
            monkeypatch.setitem(model.__dict__, "eos_ids", frozenset(ends))
            report = engine.generate(PROMPT, max_new_tokens=1, temperature=0).report
            assert (report.deepened is not None) == is_unsure
            found = likeliest(model, prefilled, [first], Sampling(temperature=0), ends_are_sure=True)
            assert (found[1][0] == math.inf) == (not is_unsure)


def test_a_fixed_ratio_and_a_margin_of_zero_are_never_completed(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        for options in ({"ratio": 0.15}, {"margin": 0}, {"policy": "none"}, {"ratio": 0.3, "margin": 1e8}):
            report = engine.generate(PROMPT, max_new_tokens=8, temperature=0, **options).report
            assert (report.completed, report.exact) == (None, False)


def test_the_first_token_needs_a_third_of_the_margin(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, tmp_path) as engine:
        engine.warm(CHUNKS)
        request = engine.prefill(model.tokenizer.render(PROMPT), BlendConfig(controller="off"))
        late = LateRecompute(model, request, margin=3.0)
        assert [late.is_unsure(0, margin) for margin in (0.99, 1.01)] == [True, False]
        assert [late.is_unsure(1, margin) for margin in (2.99, 3.01, math.nan)] == [True, False, False]
        assert 3 * FIRST == 1


def test_an_answer_is_sampled_alike_whether_or_not_a_token_was_in_doubt(
    model: Model, tmp_path: Path, unsure_at: set[int]
) -> None:
    """A draw that is not emitted uses up no random numbers."""
    unsure_at.add(0)
    with BlendEngine(model, tmp_path, BlendConfig(controller="off")) as engine:
        engine.warm(CHUNKS)
        settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.5, "seed": 7, "deterministic": True}
        exact = engine.generate(PROMPT, ratio=1.0, **settings)
        unsure = engine.generate(PROMPT, margin=1e8, **settings)
        assert unsure.report.completed is not None
        assert unsure.report.completed.token == 0
        assert unsure.token_ids == exact.token_ids


def test_a_token_that_a_grammar_forces_is_never_in_doubt(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, tmp_path, BlendConfig(**UNSURE)) as engine:
        engine.warm(CHUNKS)
        answer = engine.generate(PROMPT, grammar=Grammar(regex="a"), max_new_tokens=4, temperature=0)
        assert answer.text == "a"
        assert answer.report.completed is None


def test_a_completed_answer_is_kept_as_exact(
    model: Model, tmp_path: Path, unsure_at: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    unsure_at.add(2)
    with BlendEngine(model, tmp_path, BlendConfig(**UNSURE)) as engine:
        engine.warm(CHUNKS)
        answer = engine.generate(PROMPT, max_new_tokens=6, temperature=0)
        following = [*PROMPT, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "And who?"}]
        report = engine.generate(following, max_new_tokens=1, temperature=0, ratio=1.0).report
        assert report.exact
        assert report.conversation_tokens > report.prompt_tokens / 2


def test_an_exact_answer_computes_no_margins(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    margins = list[int]()
    topk = torch.Tensor.topk

    def counting(logits: torch.Tensor, k: int) -> Any:
        margins.append(k)
        return topk(logits, k)

    monkeypatch.setattr(torch.Tensor, "topk", counting)
    with BlendEngine(model, tmp_path, conversation_bytes=0) as engine:
        engine.warm(CHUNKS)
        settings: dict[str, Any] = {"max_new_tokens": 5, "temperature": 0, "controller": "off"}

        def num_margins(prompt: Any, **options: Any) -> int:
            margins.clear()
            engine.generate(prompt, **settings, **options)
            return margins.count(2)

        assert num_margins("no chunk is in it", margin=1e8) == 0
        assert num_margins(PROMPT, policy="full") == 0
        assert num_margins(PROMPT, margin=1e8) == 4, "twice of the first token, and of the second"
        assert num_margins(PROMPT, margin=1e-9) == 5


@pytest.mark.parametrize("margin", [float("nan"), -1, "much", 1e300, True])
def test_margins_that_are_none_are_refused(margin: Any) -> None:
    with pytest.raises(SettingError, match="margin"):
        BlendConfig(margin=margin)

"""OpenAI's sampling features, compared with the model's own logits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from blending import messages, plain_logits

from kvrag import BlendEngine, Model, PromptError, SettingError
from kvrag.generate.decode import logprob, penalize

PROMPT = messages("Mira Brel was born in Florton.")


def test_penalties_count_the_tokens_of_the_answer() -> None:
    logits, answer = torch.randn(1, 7), [3, 5, 3, 3]
    got = penalize(logits, torch.tensor(answer), 0.5, 0.25)
    counts = Counter(answer)
    wanted = [float(logits[0, token]) - 0.5 * counts[token] - 0.25 * (token in counts) for token in range(7)]
    torch.testing.assert_close(got, torch.tensor([wanted]))
    torch.testing.assert_close(penalize(logits, torch.tensor([], dtype=torch.long), 2.0, 2.0), logits)


def test_the_likeliest_tokens_are_sorted() -> None:
    found = logprob(torch.tensor([[0.0, 2.0, 1.0]]), 0, 2)
    assert [token for token, _ in found.top] == [1, 2]
    assert found.logprob == pytest.approx(torch.tensor([0.0, 2.0, 1.0]).log_softmax(0)[0].item())
    assert len(logprob(torch.zeros(1, 3), 0, 20).top) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 1.0, "presence_penalty": 2.0, "logit_bias": {7: 1.5, 11: -100}},
    ],
    ids=str,
)
def test_an_answer_is_the_models_own_with_penalties_and_biases(
    settings: dict[str, Any], engine: BlendEngine, endless: Model, hf: Any
) -> None:
    ids = endless.tokenizer.render(PROMPT)
    answer: list[int] = []
    logprobs: list[float] = []
    for _ in range(20):
        logits = plain_logits(hf, ids + answer)[-1]
        adjusted = logits.clone()
        for token, count in Counter(answer).items():
            adjusted[token] -= settings.get("frequency_penalty", 0) * count + settings.get("presence_penalty", 0)
        for token, value in settings.get("logit_bias", {}).items():
            adjusted[token] += value
        answer.append(int(adjusted.argmax()))
        logprobs.append(float(logits.log_softmax(0)[answer[-1]]))
    plain = engine.generate(PROMPT, policy="full", temperature=0, max_new_tokens=20)
    said = engine.generate(PROMPT, policy="full", temperature=0, max_new_tokens=20, logprobs=3, **settings)
    assert list(said.token_ids) == answer != list(plain.token_ids)
    assert [each.token for each in said.logprobs] == answer
    assert [each.logprob for each in said.logprobs] == pytest.approx(logprobs, abs=1e-3)  # before the penalties
    assert {len(each.top) for each in said.logprobs} == {3}
    assert plain.logprobs == ()


def test_token_ids_are_a_prompt(engine: BlendEngine, endless: Model) -> None:
    text = "Mira Brel was born in"
    ids = endless.tokenizer.render(text)
    given, written = (engine.generate(prompt, temperature=0, max_new_tokens=8) for prompt in (ids, text))
    assert given.token_ids == written.token_ids
    assert given.report.prompt_tokens == len(ids)
    with pytest.raises(PromptError, match="unknown token id 99999999: tiny has tokens 0 to"):
        engine.generate([1, 99999999])
    with pytest.raises(PromptError, match="tools need a chat prompt"):
        engine.generate(ids, tools=[{"type": "function", "function": {"name": "look"}}])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"frequency_penalty": 2.1}, "frequency_penalty must be a number in"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be a number in"),
        ({"logit_bias": {5: 101}}, "logit_bias of token 5 must be a number in"),
        ({"logit_bias": {"5": 1}}, "a token id of logit_bias must be an integer"),
        ({"logit_bias": [5]}, "logit_bias must be a dict"),
        ({"logit_bias": {10**6: 1}}, "unknown token 1000000"),
        ({"logprobs": 21}, "logprobs must be an integer in"),
    ],
)
def test_settings_out_of_range_are_refused(engine: BlendEngine, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        engine.generate(PROMPT, **settings)


@pytest.mark.parametrize("text", ["a", " a", "wörld", "漢字 🦜", "\n\n\tx"])
def test_the_bytes_of_tokens_make_the_text(model: Model, text: str) -> None:
    tokenizer = model.tokenizer
    parts = [tokenizer.token_text(token) for token in tokenizer.encode(text)]
    assert b"".join(part for _, part in parts).decode() == text
    assert all(shown == part.decode("utf-8", "replace") or "\ufffd" in shown for shown, part in parts)

"""The trials of `ladder`: their limits are the default's blend, full prefill, and full prefill's change."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, build
from kvrag.adapt.distill import Lesson, answer_over, teach

from benchmarks.quality import ladder
from benchmarks.quality.corrections import (
    Fitted,
    Variant,
    answer,
    changes,
    corrected,
    features,
    fit,
    on_bases,
    prepare,
    recorded,
)
from kvrag import Model
from kvrag.types import Run

CHUNKS = [[7 + (i * 13 + number * 101) % 900 for i in range(20 + 7 * number)] for number in range(3)]
ORDER = (2, 0, 1)


@pytest.fixture(params=["llama", "gemma3", "phi"])
def model(request: pytest.FixtureRequest, tokenizer: Any) -> Model:
    model_type, options = FAMILIES[request.param]
    return Model(build(model_type, **options, num_hidden_layers=4), tokenizer, request.param)


def _lesson(model: Model, order: tuple[int, ...] = ORDER) -> Lesson:
    """Return a prompt of adjacent chunks, the first of them after the preamble."""
    beginning, runs = list(model.preamble), []
    for number in order:
        runs.append(Run(len(beginning), len(beginning) + len(CHUNKS[number]), str(number), 0))
        beginning += CHUNKS[number]
    return Lesson(beginning, [[9, 21, 22]], [([], chunk) for chunk in CHUNKS], runs)


@torch.inference_mode()
def test_a_start_in_the_first_layer_is_the_default_blend(model: Model) -> None:
    lesson = _lesson(model)
    prompt, (target,) = prepare(model, lesson, [0]), teach(model, lesson, 2)
    ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
    chosen = torch.arange(0, len(prompt.where), 5)
    late = Variant(prompt.written, chosen, 0, prompt.stored_inputs[0][chosen])
    default = answer_over(model, ids, target, prompt.written, prompt.where, prompt.where[chosen])
    torch.testing.assert_close(answer(model, ids, target, late, prompt.where), default)


@torch.inference_mode()
def test_a_late_start_from_full_prefills_inputs_is_full_prefill_from_there(model: Model) -> None:
    lesson, start = _lesson(model), 2
    prompt, (target,) = prepare(model, lesson, range(4)), teach(model, lesson, 1)
    ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
    everything = torch.arange(len(prompt.where))
    with recorded(model, range(4)) as inputs:
        late = Variant(prompt.written, everything, start, prompt.full_inputs[start])
        logits = answer(model, ids, target, late, prompt.where)
    torch.testing.assert_close(inputs[start + 1][0, prompt.where], prompt.full_inputs[start + 1], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(prompt.full_inputs[start + 1], prompt.stored_inputs[start + 1], atol=1e-2)

    # below the start, the others attend to the stored KV: the same as writing full prefill's KV above it
    above = [*prompt.written[:start], *prompt.full[start:]]
    torch.testing.assert_close(
        logits, answer_over(model, ids, target, above, prompt.where, prompt.where[:0]), atol=1e-3, rtol=1e-3
    )


@torch.inference_mode()
def test_the_correction_with_full_prefills_coefficients_is_its_projected_change(model: Model) -> None:
    prompt = prepare(model, _lesson(model))
    fitted = fit(model, [_lesson(model, (0, 1)), _lesson(model, (1, 2))], lambda *_: None)
    delta = changes(model, prompt)
    size = fitted.bases[0][0].shape[0]
    for rank in (8, size):
        states = corrected(model, prompt.written, on_bases(delta, fitted.bases), fitted.bases, prompt.where, rank)
        left = changes(model, prepared(prompt, states))
        for (keys, values), (old_keys, old_values), basis in zip(left, delta, fitted.bases, strict=True):
            for now, old, directions in ((keys, old_keys, basis[0]), (values, old_values, basis[1])):
                inside = directions[:, :rank] @ directions[:, :rank].T
                torch.testing.assert_close(now, old - old @ inside, atol=1e-4, rtol=1e-4)


def prepared(prompt: Any, states: Any) -> Any:
    return type(prompt)(**{**vars(prompt), "written": states})


@torch.inference_mode()
def test_what_was_fitted_on_the_prompt_itself_predicts_its_change(model: Model) -> None:
    """More features than tokens: the weights can reproduce every change."""
    lesson = _lesson(model)
    prompt = prepare(model, lesson)
    fitted = fit(model, [lesson, lesson, lesson], lambda *_: None)
    guess = fitted.predict(features(model, lesson, prompt.written, prompt.where))
    states = corrected(model, prompt.written, guess, fitted.bases, prompt.where, 32)
    left, delta = changes(model, prepared(prompt, states)), changes(model, prompt)
    for now, old in zip(left[1:], delta[1:], strict=True):
        assert all(float(a.square().sum()) < 0.2 * float(b.square().sum()) for a, b in zip(now, old, strict=True))
    assert min(fitted.explained) > 0.8
    other = _lesson(model, (2, 1, 0))  # what is known when a chunk is encoded does not depend on the prompt
    moved = features(model, other, prepare(model, other).written, prompt.where)
    length = len(CHUNKS[2])
    for (ours, _), (theirs, _) in zip(
        fitted.predict(features(model, lesson, prompt.written, prompt.where), own=True),
        fitted.predict(moved, own=True),
        strict=True,
    ):
        torch.testing.assert_close(ours[:length], theirs[:length], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_features_tell_what_stands_before(model: Model) -> None:
    lesson = _lesson(model)
    prompt = prepare(model, lesson)
    x = features(model, lesson, prompt.written, prompt.where)[1]
    size = (x.shape[1] - 5) // 2
    own, inside, before, around = x.split([size, 3, size, 2], dim=1)
    first, second = (len(CHUNKS[number]) for number in ORDER[:2])
    assert not before[:first].any()
    torch.testing.assert_close(before[first], own[:first].mean(0))
    torch.testing.assert_close(before[-1], own[: first + second].mean(0))
    assert inside[[0, first], :2].tolist() == [[0, 1], [0, 1]]
    assert around[:, 1].tolist() == [1.0] * first + [0.0] * (len(x) - first)


@torch.inference_mode()
def test_the_shift_adds_the_mean_change_of_the_recomputed_rows(model: Model) -> None:
    """Where stored keys and values are off by a constant, the shift removes it."""
    lesson = _lesson(model)
    prompt, (target,) = prepare(model, lesson), teach(model, lesson, 1)
    ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
    off = [(torch.zeros(1, keys.shape[1] * keys.shape[3]), torch.full((1, keys.shape[1] * keys.shape[3]), 0.3))
           for keys, _ in prompt.full]  # fmt: skip
    fake: Fitted | Any = [tuple(torch.eye(keys.shape[1]) for keys in layer) for layer in off]
    states = corrected(model, prompt.full, off, fake, prompt.where, 1 << 20)
    chosen = torch.arange(0, len(prompt.where), 4)
    shifted = answer(model, ids, target, Variant(states, chosen, is_shifted=True), prompt.where)
    torch.testing.assert_close(shifted, target.logits, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(answer(model, ids, target, Variant(states, chosen), prompt.where), shifted, atol=1e-2)


@torch.inference_mode()
def test_trials_do_the_same_work(model: Model) -> None:
    lesson = _lesson(model)
    ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
    prompt = prepare(model, lesson, [round(start * model.num_layers) for start in ladder.STARTS])
    fitted = fit(model, [lesson, lesson], lambda *_: None)
    scores = ladder._Scores(model, ids, lesson, prompt)
    variants = ladder._trials(model, lesson, prompt, fitted, scores, 0.3)
    default = len(variants["30% by query, recomputed"].chosen) * model.num_layers
    (target,) = teach(model, lesson, 1)
    for name, variant in variants.items():
        work = len(variant.chosen) * (model.num_layers - variant.start)
        assert work == 0 or abs(work - default) < model.num_layers or name.startswith("all"), name
        assert answer(model, ids, target, variant, prompt.where).isfinite().all()


def test_prompts_to_fit_on_have_other_contexts(tmp_path: Path) -> None:
    rows = [
        {"passages": [f"Chunk {number} of a text."], "question": f"Question {part}?", "answers": ["A"]}
        for number in range(6)
        for part in range(3)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = argparse.Namespace(data=path, seed=0, samples=4, fit=5)
    drawn = ladder._rows(args, None)  # type: ignore[arg-type]
    asked, others = ({repr(row.passages) for row in part} for part in (drawn[:4], drawn[4:]))
    assert len(drawn) == 9
    assert not asked & others

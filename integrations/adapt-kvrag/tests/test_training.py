"""Adapters for encoding: what a training step computes is what the product does, and nothing else sees the adapter."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapt_kvrag.differentiable import checkpointed, decoder_layers, encode_rows
from adapt_kvrag.distill import Lesson, answer_over, locate, loss_of, teach, write
from adapt_kvrag.files import new_layers
from adapt_kvrag.lessons import Lessons
from adapt_kvrag.train import CHECKPOINT, Course, _check, train
from blending import blend_selected
from families import FAMILIES, build

from kvrag import Model
from kvrag.backend.transformers.adapter import Adapter
from kvrag.config import BlendConfig
from kvrag.control.prompts import search_by_words
from kvrag.errors import KvragError, ModelLoadError, SettingError
from kvrag.ingest.encode import encode
from kvrag.types import Run

CHUNKS = [[7 + (i * 13 + number * 101) % 900 for i in range(30 + 7 * number)] for number in range(3)]
CONTEXTS = [[], [11, 12, 13, 14], list(range(300, 340))]
KINDS = [
    "llama",
    "llama-yarn",
    "mistral-window",
    "gemma3",
    "smollm3",
    "cohere",
    "phi",
    "qwen3_moe",
    "gpt_oss",
    "gemma4-shared",
]


def _model(family: str, tokenizer: Any) -> Model:
    model_type, changes = FAMILIES[family]
    return Model(build(model_type, **changes), tokenizer, family)


def _lesson(model: Model) -> Lesson:
    """Return two prompts of three chunks in another order than they were encoded in."""
    beginning = [*model.preamble, 5, 6]
    runs = []
    for number in (2, 0, 1):
        runs.append(Run(len(beginning), len(beginning) + len(CHUNKS[number]), str(number), 0))
        beginning += [*CHUNKS[number], 9]
    rows = list(zip(CONTEXTS, CHUNKS, strict=True))
    return Lesson(beginning[:-1], [[9, 21, 22], [9, 23, 24, 25]], rows, runs)


def _trained(model: Model, seed: int = 0) -> Adapter:
    """Return an adapter with an effect."""
    layers = new_layers(model.hf, 4, seed)
    generator = torch.Generator().manual_seed(seed)
    for layer in layers.values():
        layer.up.data = torch.randn(layer.up.shape, generator=generator) * 0.3
    return Adapter(model.hf, layers)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("adapted", [False, True])
def test_a_step_writes_what_ingestion_stores(family: str, adapted: bool, tokenizer: Any) -> None:
    model = _model(family, tokenizer)
    adapter = _trained(model) if adapted else None
    lesson = _lesson(model)
    written, where = write(model, adapter, lesson)
    if adapter:
        with adapter.active():
            stored = dict(encode(model, CHUNKS, CONTEXTS))
    else:
        stored = dict(encode(model, CHUNKS, CONTEXTS))
    tables = model.tables(where)
    for number in range(model.num_layers):
        keys, values = (
            torch.cat([stored[int(run.key)][number][part] for run in lesson.runs], dim=1)[None].clone()
            for part in (0, 1)
        )
        model.rotate(number, keys, tables[number], slice(0, len(where)))
        torch.testing.assert_close(written[number][0].detach(), keys, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(written[number][1].detach(), values, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", KINDS)
def test_with_everything_recomputed_the_student_is_the_teacher(family: str, tokenizer: Any) -> None:
    model = _model(family, tokenizer)
    lesson = _lesson(model)
    written, where = write(model, _trained(model), lesson)
    for end, target in zip(lesson.ends, teach(model, lesson, 3), strict=True):
        ids = torch.tensor([*lesson.beginning, *end])
        logits = answer_over(model, ids, target, written, where, where)
        torch.testing.assert_close(logits.detach(), target.logits, atol=1e-3, rtol=1e-4)
        plain = answer_over(model, ids, target, written, where, where[:0])
        assert not torch.allclose(plain, target.logits, atol=1e-2)


def test_the_student_answers_as_the_engine_does(model: Model) -> None:
    """Plain reuse and the default policy, against the same steps of the product."""
    from adapt_kvrag.distill import choose, stitched

    lesson = _lesson(model)
    written, where = write(model, None, lesson)
    ids = torch.tensor([*lesson.beginning, *lesson.ends[0]])
    target = teach(model, lesson, 1)[0]
    config = BlendConfig(ratio=0.3, controller="off")
    chosen = choose(model, ids, lesson, written, where, config)
    assert 0 < len(chosen) < len(where)
    for selected in (where[:0], chosen):
        with torch.inference_mode():
            logits = blend_selected(model, stitched(ids, lesson, written, where, model), selected)
        ours = answer_over(model, ids, target, written, where, selected)
        torch.testing.assert_close(ours.detach(), logits, atol=1e-3, rtol=1e-4)


def test_gradients_reach_every_weight_of_the_adapter_and_none_of_the_model(model: Model) -> None:
    adapter = _trained(model)
    lesson = _lesson(model)
    for parameter in model.hf.parameters():
        parameter.requires_grad_(False)
    loss_of(model, adapter, lesson, teach(model, lesson, 2), BlendConfig(controller="off")).backward()
    last = f"layers.{model.num_layers - 1}."
    for name, layer in adapter.layers.items():
        if last in name and not name.endswith(("k_proj", "v_proj")):
            continue  # nothing reads the output of the last layer
        for part in (layer.up, layer.down):
            assert part.grad is not None, name
            assert part.grad.abs().sum() > 0, name
    assert all(parameter.grad is None for parameter in model.hf.parameters())


# ----------------------------------------------------------------------------------------------------- the training


def test_chunks_are_located_though_joints_change_their_ends() -> None:
    chunks = [[1, 2, 3, 4], [5, 6, 7, 8], [2, 3]]
    ids = [0, 99, 2, 3, 98, 5, 6, 7, 8, 1, 1, 2, 3]
    assert locate(ids, chunks) == [Run(2, 4, "0", 1), Run(5, 9, "1", 0)]


def test_checkpointed_layers_give_the_same_gradients(model: Model) -> None:
    lesson, gradients = _lesson(model), []
    for layers in ([], decoder_layers(model)):
        adapter = _trained(model)
        with checkpointed(layers):
            loss = loss_of(model, adapter, lesson, teach(model, lesson, 2), None)
            thread = threading.Thread(target=loss.backward)  # as autograd does for a GPU
            thread.start()
            thread.join()
        gradients.append({name: layer.up.grad for name, layer in adapter.layers.items() if layer.up.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() != set()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-5, rtol=1e-4)


def _documents(num: int = 3) -> dict[str, list[str]]:
    names = ["Anna", "Bert", "Cora", "Dora", "Emil", "Fred"]
    return {
        f"{number}.txt": [
            f"{name} of house {number} likes to walk along the {word} river in the evening. "
            f"On other days {name} reads a long book about the {word} and drinks tea with friends."
            for name, word in zip(names, ["blue", "green", "wide", "narrow", "deep", "quiet"], strict=True)
        ]
        for number in range(num)
    }


def _lessons(model: Model, seed: int = 0, context_tokens: int = 32) -> Lessons:
    documents = _documents()
    chunks = [chunk for texts in documents.values() for chunk in texts]
    settings = {"most_tokens": 200, "context_tokens": context_tokens, "seed": seed}
    return Lessons(model, documents, search_by_words(chunks), **settings)


def test_a_lesson_can_be_drawn_again_and_contains_its_chunks(model: Model) -> None:
    lessons = _lessons(model)
    kinds = set()
    for number in range(20):
        lesson = lessons.draw(number)
        assert lesson == lessons.draw(number)
        kinds.add(any(context for context, _ in lesson.rows))
        for run in lesson.runs:
            chunk = lesson.rows[int(run.key)][1]
            assert lesson.beginning[run.start : run.stop] == chunk[run.offset : run.offset + len(run)]
    assert kinds == {False, True}


def test_the_context_of_a_chunk_is_what_precedes_it_as_in_ingestion(model: Model) -> None:
    first, second, *_ = _documents()["0.txt"]
    encode = model.tokenizer.encode
    before = [*encode(first), *encode("\n\n")]
    for context_tokens in (0, 7, len(before) + 5):
        context = _lessons(model, context_tokens=context_tokens)._contexts[second]
        assert context == before[max(0, len(before) - context_tokens) :], context_tokens


def test_too_little_text_is_refused(model: Model) -> None:
    with pytest.raises(KvragError, match="too little text to adapt to: 1 chunks"):
        Lessons(model, {"a": ["One sentence that is long enough to be asked about here."]}, search_by_words([]))


def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look at the clock take a second, so that the number of steps is certain."""
    import adapt_kvrag.train as module

    ticks = iter(range(10**6))
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def _loss(model: Model, lessons: Lessons, adapter: Adapter | None) -> float:
    with torch.no_grad():
        drawn = [lessons.draw(number) for number in range(4)]
        return sum(float(loss_of(model, adapter, lesson, teach(model, lesson, 3), None)) for lesson in drawn)


@pytest.mark.slow
def test_training_lowers_the_loss_and_resumes(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _seconds(monkeypatch)
    lessons, steps = _lessons(model), list[int]()
    before = [parameter.clone() for parameter in model.hf.parameters()]

    def note(done: float, total: float, step: int, loss: float) -> None:
        steps.append(step)

    course = Course(minutes=0.2, rank=4, rate=5e-3, lessons=2, tokens=3, blended=0.25)
    train(model, lessons, course, tmp_path, {"docs": "a"}, note)
    longer = Course(**{**vars(course), "minutes": 0.5})
    layers = train(model, lessons, longer, tmp_path, {"docs": "a"}, note)
    assert steps[:2] == [0, 1]
    assert sorted(set(steps)) == list(range(steps[-1] + 1))  # the second went on from the first
    assert len(steps) == len(set(steps)) + 1
    assert _loss(model, lessons, Adapter(model.hf, layers)) < 0.9 * _loss(model, lessons, None)
    assert all(torch.equal(a, b) for a, b in zip(before, model.hf.parameters(), strict=True))
    with pytest.raises(SettingError, match=r"another training \(different: docs\)"):
        train(model, lessons, course, tmp_path, {"docs": "b"})


def test_a_killed_training_keeps_a_whole_checkpoint(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _seconds(monkeypatch)
    course = Course(minutes=5, rank=4, lessons=1, tokens=2)

    def interrupt(done: float, total: float, step: int, loss: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(model, _lessons(model), course, tmp_path, {}, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    data = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(data[:-100])
    with pytest.raises(ModelLoadError, match="is damaged: delete it"):
        train(model, _lessons(model), course, tmp_path, {})


@pytest.mark.slow
def test_a_training_that_vanishes_resumes_from_its_last_checkpoint(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill or a power cut: nothing is saved at the end."""
    _seconds(monkeypatch)
    monkeypatch.setattr("adapt_kvrag.train._EVERY_S", 8.0)
    course, resumed = Course(minutes=0.2, rank=4, lessons=1, tokens=2), list[int]()
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    steps = [0, 0]  # of the first training, and of its first checkpoint

    def note(done: float, total: float, step: int, loss: float) -> None:
        if (first / CHECKPOINT).exists() and not steps[1]:
            (second / CHECKPOINT).write_bytes((first / CHECKPOINT).read_bytes())
            steps[1] = steps[0]
        steps[0] = step

    whole = train(model, _lessons(model), course, first, {}, note)
    again = train(model, _lessons(model), course, second, {}, lambda *values: resumed.append(values[2]))
    assert resumed == list(range(steps[1], steps[0] + 1)) != [steps[0]]
    for name, layer in whole.items():
        torch.testing.assert_close(again[name].up, layer.up, atol=1e-5, rtol=1e-3)


def test_a_full_disk_is_one_line_and_leaves_the_checkpoint(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _seconds(monkeypatch)
    course = Course(minutes=0.1, rank=4, lessons=1, tokens=2)
    train(model, _lessons(model), course, tmp_path, {})
    before = (tmp_path / CHECKPOINT).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KvragError, match=r"cannot write .*: No space left on device"):
        train(model, _lessons(model), Course(**{**vars(course), "minutes": 0.2}), tmp_path, {})
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]


def test_rows_and_steps_agree_for_padding(model: Model) -> None:
    """Padding at the end of a row changes nothing."""
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 10, 10]])
    positions = torch.arange(4).expand(2, 4)
    together = encode_rows(model, ids, positions)
    alone = encode_rows(model, ids[1:, :2], positions[1:, :2])
    for (keys, _), (own, _) in zip(together, alone, strict=True):
        torch.testing.assert_close(keys[1:, :, :2], own, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama4"])
def test_models_whose_kv_training_cannot_compute_are_refused(family: str, tokenizer: Any) -> None:
    with pytest.raises(SettingError, match=r"cannot be adapted: it has latents \(MLA\) or chunked attention"):
        _check(_model(family, tokenizer))

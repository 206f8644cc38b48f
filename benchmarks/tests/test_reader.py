"""The bundled reader's world and training."""

from __future__ import annotations

import random
import re
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.readers.first import world
from benchmarks.readers.first.corpus import corpus
from benchmarks.readers.first.train import LENGTH, Shape, Training, make_batch, predict, save, train_tokenizer
from benchmarks.readers.first.train import Settings as TrainSettings
from benchmarks.readers.first.world import KINDS, Question, Sample, draw, gather, sample
from benchmarks.readers.prompts import PLAIN, all_texts, prompt_parts
from kvrag import SettingError
from kvrag.sample import ARTICLES, ENCODED_ALONE


def _samples(split: str, num: int = 150, articles: int = 5) -> list[Sample]:
    return [sample(random.Random(f"{split} {seed}"), split, articles) for seed in range(num)]


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[Sample]]:
    return {split: _samples(split) for split in world.SPLITS}


# ---------------------------------------------------------------- the world


def test_a_world_depends_only_on_its_seed() -> None:
    assert _samples("test", 5) == _samples("test", 5)
    assert _samples("test", 1) != _samples("train", 1)


def test_no_name_and_no_value_of_the_test_occurs_in_training(worlds: dict[str, list[Sample]]) -> None:
    answers = {split: {q.answer for s in drawn for q in s.questions} for split, drawn in worlds.items()}
    assert len(answers["test"]) > 500
    assert not answers["test"] & answers["train"]
    text = "\n".join(chain.from_iterable(s.passages for s in worlds["train"]))
    words = set(re.findall(r"\w+", text))
    assert not {answer for answer in answers["test"] if " " not in answer} & words


def test_no_wording_of_the_test_occurs_in_training(worlds: dict[str, list[Sample]]) -> None:
    def wordings(split: str) -> set[str]:
        """Questions and sentences with their names and values blanked."""
        found = set()
        for drawn in worlds[split]:
            answers = sorted({q.answer for q in drawn.questions} | set(drawn.subjects) - {""}, key=len, reverse=True)
            blank = re.compile("|".join(rf"\b{re.escape(answer)}\b" for answer in answers))
            texts = [q.text for q in drawn.questions if q.kind in ("direct", "anaphora", "inverse", "inverse across")]
            found |= {blank.sub("_", text) for text in texts}
        return found

    assert len(wordings("test")) > 30
    assert not wordings("test") & wordings("train")


@pytest.mark.parametrize("split", world.SPLITS)
def test_every_question_has_one_answer(split: str, worlds: dict[str, list[Sample]]) -> None:
    for drawn in worlds[split]:
        for text in {q.text for q in drawn.questions}:
            assert len({q.answer for q in drawn.questions if q.text == text}) == 1
        whole = "\n".join(drawn.passages)
        assert all(re.search(rf"\b{q.answer}\b", whole) for q in drawn.questions)


def test_a_long_context_has_whole_articles_and_only_questions_with_one_answer() -> None:
    for seed in range(12):
        drawn = gather(random.Random(f"long {seed}"), "test", 24)
        runs = [name for name, _ in groupby(drawn.articles)]
        assert len(runs) == len(set(runs)) == 24
        assert len(drawn.passages) == len(drawn.subjects) == len(drawn.articles)
        assert {q.kind for q in drawn.questions} > {"direct", "anaphora", "inverse", "two-hop"}
        whole = "\n".join(drawn.passages)
        for question in drawn.questions:
            assert all(whole.count(sentence) == 1 for _, sentence in question.facts)
        for text in {q.text for q in drawn.questions}:
            assert len({q.answer for q in drawn.questions if q.text == text}) == 1
    assert gather(random.Random(1), "test", 24) == gather(random.Random(1), "test", 24)


def test_all_kinds_occur_and_passages_are_long_enough_to_be_reused(worlds: dict[str, list[Sample]]) -> None:
    kinds = {q.kind for s in worlds["test"] for q in s.questions}
    assert kinds == set(KINDS)
    tokenizer = train_tokenizer(0)
    lengths = [len(tokenizer.encode(p, add_special_tokens=False)) for s in worlds["test"][:40] for p in s.passages]
    assert sorted(lengths)[len(lengths) // 50] >= 16


def test_only_the_first_passage_of_an_article_names_its_subject() -> None:
    for drawn in _samples("train", 40):
        questions = {q.text: q for q in drawn.questions if q.kind == "inverse across"}
        for question in questions.values():
            value = next(iter(re.findall(r"\d{4}", question.text)), None)
            for passage in drawn.passages:
                if value and value in passage:
                    assert question.answer not in passage


def test_questions_are_drawn_without_repetition_from_all_kinds() -> None:
    questions = [Question(f"{kind} {n}", "x", kind) for kind in KINDS for n in range(9)]
    drawn = draw(random.Random(0), questions, 60)
    assert len(set(drawn)) == 60
    assert {q.kind for q in drawn} == set(KINDS)
    assert len(draw(random.Random(0), questions, 1000)) == len(questions)


def test_half_of_the_prompts_are_plain_and_all_can_be_filled_in() -> None:
    rng = random.Random(0)
    drawn = [prompt_parts(rng, ["One.", "Two."]) for _ in range(400)]
    assert (
        150
        < sum(
            before + joint + "?" + after == PLAIN.format(passages="One.\n\nTwo.", question="?")
            for before, joint, after in drawn
        )
        < 250
    )
    assert all("One." in before and not before.endswith(" ") for before, _, _ in drawn)
    assert all(text.count("{question}") == 1 and text.endswith("Answer:") for text in all_texts())


def test_the_corpus_is_of_the_readers_world() -> None:
    texts, questions = corpus(seed=0, num_articles=30)
    articles = {file.name: file.read_text() for file in ARTICLES.path.glob("*.txt")}
    assert articles == {f"{name.lower()}.txt": text + "\n" for name, text in texts.items()}
    known = {(question.text, question.answer) for question in questions}
    assert {*ARTICLES.questions.items(), *ENCODED_ALONE.questions.items()} <= known


# ---------------------------------------------------------------- the training

SMALL: dict[str, Any] = {"layers": 2, "hidden": 64}


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.readers.first.train.STAGES", ((1.0, (Shape((1, 1), 2, 128, 3),)),))


def _train(folder: Path, until: int, steps: int = 6) -> Training:
    training = Training(TrainSettings(steps=steps, **SMALL), folder, compiled=False)
    while training.step < until:
        training.advance()
    training.save()
    return training


@pytest.mark.usefixtures("tiny_shapes")
def test_an_interrupted_training_continues_with_the_same_result(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    straight = _train(tmp_path / "a", 6)
    _train(tmp_path / "b", 3)
    resumed = _train(tmp_path / "b", 6)
    for name, parameter in straight.net.named_parameters():
        assert torch.equal(parameter, dict(resumed.net.named_parameters())[name]), name
    with pytest.raises(SettingError, match="belongs to a training"):
        _train(tmp_path / "b", 6, steps=7)


@pytest.mark.usefixtures("tiny_shapes")
def test_transformers_computes_what_the_training_computed(tmp_path: Path) -> None:
    training = _train(tmp_path, 4)
    net, tokenizer = training.net, training.tokenizer
    save(net, tokenizer, tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = make_batch(tokenizer, random.Random(1), "train", Shape((1, 1), 2, 128, 4))
    with torch.no_grad():
        said = predict(net, batch)
        for row in range(2):
            for number in (number for number in range(4) if batch.kinds[row, number] >= 0):
                question = batch.questions[row, number]
                question = question[question != tokenizer.pad_token_id]
                ids = torch.cat([batch.context[row, : batch.lengths[row]], question])
                theirs = hf(ids[None]).logits[0, batch.lengths[row] : -1]
                torch.testing.assert_close(said.logits[said.numbers == row * 4 + number], theirs, atol=0.05, rtol=0.05)


def test_a_batch_has_the_tokens_of_its_texts() -> None:
    tokenizer = train_tokenizer(0)
    batch = make_batch(tokenizer, random.Random(2), "train", Shape((2, 2), 1, 256, 5))
    assert batch.questions.shape == (1, 5, LENGTH)
    text = tokenizer.decode(batch.context[0, : batch.lengths[0]])
    for number in (number for number in range(5) if batch.kinds[0, number] >= 0):
        ids, answers = batch.questions[0, number], batch.answers[0, number]
        ids, answers = ids[ids != tokenizer.pad_token_id], answers[ids != tokenizer.pad_token_id]
        whole = tokenizer.encode(text + tokenizer.decode(ids), add_special_tokens=False)
        assert whole == batch.context[0, : batch.lengths[0]].tolist() + ids.tolist()
        assert ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(ids[~answers]).endswith("Answer:")
        assert answers.int().diff().abs().sum() == 1, "the question, then the answer"
    subjects = {tokenizer.decode([label]) for label in batch.subjects[0].tolist() if label >= 0}
    assert 1 <= len(subjects) <= 8
    assert all(subject.strip() in text for subject in subjects)


def test_attention_targets_are_the_facts_and_the_copied_tokens() -> None:
    tokenizer = train_tokenizer(0)
    batch = make_batch(tokenizer, random.Random(2), "train", Shape((4, 4), 2, 416, 20))
    shown: dict[tuple[str, int, int], list[tuple[str, str, str]]] = {}
    for row, token, depth, head, place in zip(*batch.pointers.tolist(), batch.places, strict=True):
        number, at = divmod(token, LENGTH)
        ids, answers = batch.questions[row, number], batch.answers[row, number]
        if head == 1:  # after the answer's beginning comes the next token
            assert answers[at]
            assert set(batch.context[row, place].tolist()) == {int(ids[at + 1])}
        found = tokenizer.decode(batch.context[row, place]).strip()
        asked = tokenizer.decode(ids[~answers & (ids != tokenizer.pad_token_id)]), tokenizer.decode(ids[answers])
        shown.setdefault((KINDS[int(batch.kinds[row, number])], depth, head), []).append((found, *asked))
    assert {(depth, head) for _, depth, head in shown} == {(0, 0), (1, 0), (1, 1)}
    for depth in (0, 1):
        assert all(found in answer for found, _, answer in shown["anaphora", depth, 0])
        assert all(found in question for found, question, _ in shown["inverse", depth, 0])
    for kind in {"two-hop", "definition", "table"} & {kind for kind, _, _ in shown}:  # one fact after the other
        pairs = zip(shown[kind, 0, 0], shown[kind, 1, 0], strict=True)
        assert all(first[0] != last[0] and first[1:] == last[1:] for first, last in pairs)

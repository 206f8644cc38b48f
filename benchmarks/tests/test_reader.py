"""The bundled reader's world."""

from __future__ import annotations

import random
import re
from itertools import chain, groupby

import pytest
from transformers import AutoTokenizer

from benchmarks.readers.first import world
from benchmarks.readers.first.corpus import corpus
from benchmarks.readers.first.world import KINDS, Question, Sample, draw, gather, sample
from benchmarks.samples import FOLDER, QUESTIONS
from kvrag.backend.transformers.loading import reader_path


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
    tokenizer = AutoTokenizer.from_pretrained(reader_path())
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


def test_the_corpus_is_of_the_readers_world() -> None:
    texts, questions = corpus(seed=0, num_articles=30)
    articles = {file.name: file.read_text() for file in FOLDER.glob("*.txt")}
    assert articles == {f"{name.lower()}.txt": text + "\n" for name, text in texts.items()}
    known = {(question.text, question.answer) for question in questions}
    assert {*QUESTIONS.items()} <= known

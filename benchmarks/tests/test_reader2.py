"""The second reader's world, checked by a solver that uses only the texts."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence

import pytest

from benchmarks.quality.worlds import world_rows
from benchmarks.readers.second.world import (
    FULL,
    KINDS,
    NOT_STATED,
    SPLITS,
    Question,
    Sample,
    Scale,
    count,
    draw,
    reserved,
    sample,
)

SCALES = (
    FULL,
    Scale((80, 300), (32, 128), (3, 6), (1, 3), near=0.2),
    Scale((250, 700), (48, 160), (4, 8), (1, 4)),
    Scale((500, 1300), (64, 192), (6, 12), (2, 4)),
)
ENTITY = r"[A-Z]\w+ [A-Z]\w+"


def _samples(split: str, num: int, scale: Scale = FULL) -> list[Sample]:
    return [sample(random.Random(f"{split} {seed}"), split, scale) for seed in range(num)]


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[Sample]]:
    return {split: [one for scale in SCALES for one in _samples(split, 8, scale)] for split in SPLITS}


# ---------------------------------------------------------------- the solver

NAMED = (
    rf"(?P<e>{ENTITY}) lists (?P<v>.+) as its (?P<a>\w+)\.",
    rf"The (?P<a>\w+) of (?P<e>{ENTITY}) is (?P<v>.+)\.",
    rf"As (?P<a>\w+), (?P<e>{ENTITY}) has (?P<v>.+)\.",
    rf"In the register, (?P<v>.+) is the (?P<a>\w+) of (?P<e>{ENTITY})\.",
)
UNNAMED = (
    r"It lists (?P<v>.+) as its (?P<a>\w+)\.",
    r"Its (?P<a>\w+) is (?P<v>.+)\.",
    r"As (?P<a>\w+), it has (?P<v>.+)\.",
    r"There, (?P<v>.+) is its (?P<a>\w+)\.",
    r"- (?P<a>\w+): (?P<v>.+)",
    r"set (?P<a>\w+) = (?P<v>.+);",
)
OPENING = (rf"## ({ENTITY})", rf"(?:Entries for )?({ENTITY}):", rf"open\( ({ENTITY}) \)")
Known = dict[tuple[str, str], set[str]]


def read(passages: Iterable[str], documents: Iterable[str]) -> Known:
    """Return what the passages state, by entity; statements about an "it" without a name before it are left out."""
    known: Known = {}
    subject: str | None = None
    head: list[str] = []
    last = ""
    for passage, document in zip(passages, documents, strict=True):
        if document != last:
            subject, head, last = None, [], document
        for line in passage.split("\n"):
            if line.startswith("| "):
                cells = line[2:-2].split(" | ")
                if cells[0] in ("name", "entry"):
                    head = cells
                elif head and cells[0] != "---":
                    for other, value in zip(head[1:], cells[1:], strict=True):
                        pair = (cells[0], other) if head[0] == "name" else (other, cells[0])
                        known.setdefault(pair, set()).add(value)
                continue
            for text in re.split(r"(?<=\.) ", line):
                if found := next(filter(None, (re.fullmatch(form, text) for form in OPENING)), None):
                    subject = found[1]
                elif found := next(filter(None, (re.fullmatch(form, text) for form in NAMED)), None):
                    subject = found["e"]
                    known.setdefault((subject, found["a"]), set()).add(found["v"])
                elif found := next(filter(None, (re.fullmatch(form, text) for form in UNNAMED)), None):
                    known.setdefault((subject or "", found["a"]), set()).add(found["v"])
    return known


def solve(known: Known, question: str) -> set[str]:
    """Return all answers; those of a direct question that has none are `NOT_STATED`."""
    text = question[0].lower() + question[1:]
    if found := re.fullmatch(r"what has (.+) as its (\w+)\?", text):
        value, attribute = found.groups()
        return {entity for (entity, name), values in known.items() if name == attribute and value in values}
    if found := re.fullmatch(r"whose (\w+) is (.+)\?", text):
        attribute, value = found.groups()
        return {entity for (entity, name), values in known.items() if name == attribute and value in values}
    found = re.fullmatch(r"what is the (\w+) of (.+)\?|which (\w+) does (.+) have\?|(\w+) of (.+)\?", text)
    assert found, question
    attribute, entity = filter(None, found.groups())
    if hop := re.fullmatch(r"the (\w+) of (.+)", entity):
        return {value for other in known.get((hop[2], hop[1]), ()) for value in known.get((other, attribute), ())}
    return known.get((entity, attribute), {NOT_STATED})


def _solved(drawn: Sample, question: Question, numbers: Sequence[int]) -> set[str]:
    """Answer from some of the passages; after a gap, the passages before it are not used."""
    stretches = (f"{drawn.documents[n]} {n - index}" for index, n in enumerate(numbers))
    return solve(read((drawn.passages[n] for n in numbers), stretches), question.text)


@pytest.mark.parametrize("split", SPLITS)
def test_the_solver_finds_every_answer_and_only_it(split: str, worlds: dict[str, list[Sample]]) -> None:
    for drawn in worlds[split]:
        known = read(drawn.passages, drawn.documents)
        for question in drawn.questions:
            assert solve(known, question.text) == {question.answer}, question


def test_the_support_is_enough_and_no_part_of_it_is(worlds: dict[str, list[Sample]]) -> None:
    for drawn in worlds["test"]:
        for question in random.Random(0).sample(drawn.questions, min(40, len(drawn.questions))):
            assert _solved(drawn, question, question.support) == {question.answer}, question
            if question.across:
                assert all(_solved(drawn, question, [n]) != {question.answer} for n in question.support), question


def test_the_answers_of_not_retrieved_are_in_the_document(worlds: dict[str, list[Sample]]) -> None:
    asked = {"not retrieved": 0, "unanswerable": 0}
    for drawn in worlds["test"]:
        titles = [title for title, chunks in drawn.library.items() for _ in chunks]
        everything = read((chunk for chunks in drawn.library.values() for chunk in chunks), titles)
        for question in drawn.questions:
            if question.answer == NOT_STATED:
                assert (solve(everything, question.text) == {NOT_STATED}) == (question.kind == "unanswerable")
                asked[question.kind] += 1
    assert min(asked.values()) > 10


# ---------------------------------------------------------------- the world


def test_a_world_depends_only_on_its_seed() -> None:
    assert _samples("test", 3) == _samples("test", 3)
    assert _samples("test", 1) != _samples("train", 1)


def test_no_name_and_no_number_of_the_test_occurs_in_training(worlds: dict[str, list[Sample]]) -> None:
    for split in SPLITS:
        for drawn in worlds[split]:
            for question in drawn.questions:
                if question.kind == "inverse" or question.answer.isdecimal():
                    assert reserved(*question.answer.split()) == (split == "test")


def test_sizes_and_kinds(worlds: dict[str, list[Sample]]) -> None:
    full = worlds["test"][:8]
    lengths = [sum(map(count, drawn.passages)) for drawn in full]
    assert min(lengths) > 1500
    assert max(lengths) < 6500
    assert all(len(chunks) >= 10 for drawn in full for chunks in drawn.library.values())
    assert max(count(passage) for drawn in full for passage in drawn.passages) < 300
    assert {question.kind for drawn in full for question in drawn.questions} == set(KINDS)
    assert any(len(question.support) > 2 for drawn in full for question in drawn.questions if question.kind == "back")
    first = [q for drawn in full for q in drawn.questions if q.kind == "first"]
    assert first


def test_chunks_overlap_and_names_are_nearly_the_same() -> None:
    drawn = _samples("train", 5)
    ends = [(a, b) for one in drawn for chunks in one.library.values() for a, b in itertools.pairwise(chunks)]
    repeated = sum(a.endswith(b.split("\n")[0][:40]) or b[:40] in a for a, b in ends)
    assert 0.2 < repeated / len(ends) < 0.8
    names = {name for one in drawn[:1] for name in re.findall(ENTITY, " ".join(one.passages))}
    assert len({name.split()[0] for name in names}) < 0.8 * len(names)


def test_questions_are_drawn_without_repetition() -> None:
    questions = _samples("train", 1)[0].questions
    drawn = draw(random.Random(0), questions, 50)
    assert len(drawn) == len(set(drawn)) == 50
    assert len(draw(random.Random(0), questions, 10**4)) == len(questions)


def test_rows_for_the_benchmark() -> None:
    rows = world_rows(len(KINDS), seed=5, world=2)
    assert [row.kind for row in rows] == list(KINDS)
    assert rows[:2] == world_rows(2, seed=5, world=2)
    assert all(len(row.documents) == len(row.passages) for row in rows)

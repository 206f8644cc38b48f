"""The second reader's world, checked by a solver that uses only the texts, and its training."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.quality.worlds import world_of, world_rows
from benchmarks.readers.second.train import STAGES, Settings, Stage, Training, answer_loss, load_net, make_batch
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
from kvrag import SettingError
from kvrag.backend.transformers import Tokenizer
from kvrag.backend.transformers.loading import reader_path

ENTITY = r"[A-Z]\w+ [A-Z]\w+"


def _samples(split: str, num: int, scale: Scale = FULL) -> list[Sample]:
    return [sample(random.Random(f"{split} {seed}"), split, scale) for seed in range(num)]


@pytest.fixture(scope="module")
def worlds() -> dict[str, list[Sample]]:
    scales = (FULL, *(stage.scale for stage in STAGES))
    return {split: [one for scale in scales for one in _samples(split, 8, scale)] for split in SPLITS}


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


# ---------------------------------------------------------------- the training


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in place of the pretrained one, with the first reader's tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(str(reader_path()))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = tuple(Stage(until, STAGES[0].scale, 2, 3) for until in (0.5, 1.0))
    monkeypatch.setattr("benchmarks.readers.second.train.STAGES", stages)


def _train(base: Path, folder: Path, until: int, **more: Any) -> Training:
    folder.mkdir(exist_ok=True)
    training = Training(Settings(str(base), steps=4, **more), folder)
    while training.step < until:
        training.advance()
    training.save()
    return training


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_training_resumes(base: Path, tmp_path: Path) -> None:
    straight = _train(base, tmp_path / "a", 4)
    _train(base, tmp_path / "b", 2)
    resumed = _train(base, tmp_path / "b", 4)
    for name, parameter in straight.net.named_parameters():
        if name.startswith("model."):
            assert torch.equal(parameter, dict(resumed.net.named_parameters())[name]), name
    with pytest.raises(SettingError, match="belongs to a training"):
        _train(base, tmp_path / "b", 4, rate=1.0)


@pytest.mark.usefixtures("tiny")
def test_transformers_computes_what_the_training_computed(base: Path, tmp_path: Path) -> None:
    training = _train(base, tmp_path, 2)
    assert world_of(str(tmp_path)) == 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    batch = make_batch(training.tokenizer, random.Random(0), "test", STAGES[0])
    with torch.no_grad():
        asked, _ = training.net.read(batch.context, batch.lengths, batch.questions)
        question = batch.questions[0, 0]
        question = question[question != batch.padding]
        ids = torch.cat([batch.context[0, : batch.lengths[0]], question])
        expected = model(ids[None]).logits[0, -len(question) :]
        ours = training.net.logits(asked[0, 0, : len(question)])
    torch.testing.assert_close(ours, expected, atol=0.05, rtol=0)


def test_prompts_are_those_that_the_engine_would_render(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    rng = random.Random("plain")
    while True:
        batch = make_batch(tokenizer, rng, "train", STAGES[0])
        context = tokenizer.decode(batch.context[0, : batch.lengths[0]])
        asks = batch.questions[0, 0][~batch.answers[0, 0] & (batch.questions[0, 0] != batch.padding)]
        if context.endswith("\n\nQuestion:"):  # the plain format
            break
    message = (context + tokenizer.decode(asks)).removeprefix("<s>").removesuffix("\n\nAnswer:")
    rendered = Tokenizer(tokenizer, "base").render([{"role": "user", "content": message}])
    assert tokenizer.decode(rendered) == context + tokenizer.decode(asks)


@pytest.mark.usefixtures("tiny")
def test_only_answers_are_learned(base: Path, tmp_path: Path) -> None:
    training = _train(base, tmp_path, 0)
    batch = make_batch(training.tokenizer, random.Random(0), "train", STAGES[0])
    loss, mistakes = answer_loss(training.net, batch)
    assert mistakes.shape == batch.questions[:, :, 1:].shape
    assert not (mistakes & ~batch.answers[:, :, 1:]).any()
    loss.backward()  # type: ignore[no-untyped-call]
    assert training.net.subject.weight.grad is None
    assert training.net.answer.weight.grad is None


def test_other_bases_are_refused(base: Path, tmp_path: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    for changed in ({"tie_word_embeddings": False}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        with pytest.raises(SettingError, match="choose another --base"):
            load_net(tmp_path)

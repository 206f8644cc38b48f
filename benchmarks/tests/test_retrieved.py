"""`python -m benchmarks quality --top-k`: one answer in the index, documents warmed as a whole, and leaked answers."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvrag.retrieval.index
from benchmarks.__main__ import main
from benchmarks.quality import grid
from benchmarks.quality.grid import make_cells, make_tasks
from benchmarks.quality.results import HIDDEN, NOT_RETRIEVED, RETRIEVED, hidden, summarise, tables
from benchmarks.quality.retrieved import Corpus, draw_corpus, open_index, retrieved_rows
from benchmarks.quality.rows import QuestionRow, file_rows
from benchmarks.quality.variants import make_configs
from benchmarks.quality.worlds import ARTICLES, WorldRow
from benchmarks.readers.first import world as first
from benchmarks.readers.second import world as second
from kvrag import BlendConfig, BlendEngine, KvragError, Model
from kvrag.control.agreement import Record
from kvrag.retrieval.index import ChunkIndex
from kvrag.store import visible_variant
from kvrag.store.values import text_key

load_embedder = functools.cache(kvrag.retrieval.index.load_embedder)

NAMES = {
    1: {onset + coda for codas in first._CODAS.values() for onset in first.ONSETS for coda in codas},
    2: {f"{left} {right}" for kind in second._KINDS for left in second.LEFT for right in kind.right},
}


@pytest.fixture(autouse=True)
def _embedder_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.retrieval.index, "load_embedder", load_embedder)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return draw_corpus(1, 10, seed=0)


@pytest.fixture
def index(corpus: Corpus, tmp_path: Path) -> Iterator[ChunkIndex]:
    with open_index(corpus, tmp_path) as index:
        yield index


# -------------------------------------------------------------------- the corpus


def _names(world: int, text: str) -> set[str]:
    """Return the made-up names in a text."""
    words = re.findall(r"\w+", text)
    return NAMES[world] & {*words, *(" ".join(pair) for pair in itertools.pairwise(words))}


@pytest.mark.parametrize("world", [1, 2])
def test_a_question_has_one_answer_in_the_whole_index(world: int) -> None:
    corpus = draw_corpus(world, ARTICLES[world], seed=1)
    per_context = {1: 5, 2: 1}[world]
    places: dict[str, set[int]] = {}
    for number, chunks in enumerate(corpus.documents.values()):
        for name in _names(world, "\n".join(chunks)):
            places.setdefault(name, set()).add(number // per_context)
    answers: dict[str, set[str]] = {}
    for question in itertools.chain(*corpus.questions.values()):
        asked = _names(world, question.text)
        homes = {number for name in asked for number in places[name]}
        assert len(homes) == 1, "names that the question contains are those of one context"
        context = homes.pop()
        inside = list(corpus.documents.values())[context * per_context : (context + 1) * per_context]
        assert set(question.support) <= set(itertools.chain(*inside))
        if question.kind != "unanswerable":
            assert any(question.answer in chunk for chunk in (*question.support, question.text))
        answers.setdefault(question.text, set()).add(question.answer)
    assert all(len(different) == 1 for different in answers.values())
    assert len(corpus.documents) == ARTICLES[world]
    kinds = first.KINDS if world == 1 else set(second.KINDS) - {"not retrieved"}
    assert set(corpus.questions) == set(kinds)


def test_a_corpus_is_always_the_same(corpus: Corpus, index: ChunkIndex) -> None:
    assert draw_corpus(1, 10, seed=0) == corpus
    assert draw_corpus(1, 10, seed=1).documents != corpus.documents
    rows = retrieved_rows(corpus, index, 9, k=4)
    assert retrieved_rows(corpus, index, 5, k=4) == rows[:5]
    assert len({row.kind for row in rows}) == min(9, len(corpus.questions)), "kinds take turns"


@pytest.mark.parametrize("world", [1, 2])
def test_questions_name_the_context_that_they_are_about(world: int) -> None:
    corpus = draw_corpus(world, 10, seed=0)
    homes: dict[str, set[str]] = {}
    for question in (question for group in corpus.questions.values() for question in group):
        homes.setdefault(str(question.context), set()).update(corpus.chunks[chunk] for chunk in question.support)
    assert len(homes) > 1
    assert sum(map(len, homes.values())) == len(set().union(*homes.values())), "no document is in two contexts"


def test_the_support_has_the_name_of_a_passages_subject(corpus: Corpus) -> None:
    for question in corpus.questions["anaphora"]:
        fact, name = question.support
        assert question.answer in fact
        assert _names(1, question.text) <= _names(1, name)
    assert all(len(question.support) == 1 for question in corpus.questions["direct"])


def test_rows_hold_the_nearest_chunks_best_first(corpus: Corpus, index: ChunkIndex) -> None:
    for row in retrieved_rows(corpus, index, 9, k=4):
        assert row.passages == tuple(hit.text for hit in index.search(row.question, 4))
        assert row.context in {str(question.context) for question in corpus.questions[row.kind]}
        assert all(text in row.library[name] for text, name in zip(row.passages, row.documents, strict=True))
        assert all(corpus.documents[name] == chunks for name, chunks in row.library.items())
        (around,) = (one for one in retrieved_rows(corpus, index, 9, k=1, around=1) if one.question == row.question)
        chunks = around.library[around.documents[0]]
        at = chunks.index(row.passages[0])
        assert around.passages == chunks[max(0, at - 1) : at + 2], "neighbours in reading order"
    everything = retrieved_rows(corpus, index, 9, k=len(index))
    assert all(row.supported for row in everything)
    assert not all(row.supported for row in retrieved_rows(corpus, index, 9, k=1))


# -------------------------------------------------------------------- what is warmed

LIBRARY = {
    "folder/Mira.md": (
        "# Mira\n\nMira Brel was born in Florton, where her father had a shop for lamps and clocks.",
        "## Travels\n\nShe drives a red car every single day of the year, and sometimes at night too.",
        "She looks after a grey goat that eats the flowers of all the neighbours in the street.",
    )
}
NAME, CHUNKS = next(iter(LIBRARY.items()))
ROW = WorldRow("x", (CHUNKS[2],), "Where was Mira born?", ("Florton",), "", (NAME,), LIBRARY, supported=False)


def _contexts(model: Model, folder: Path, config: BlendConfig) -> list[str]:
    """Return the context of each chunk that the store has after warming, in reading order; "-" = not stored."""
    (task,), _ = make_tasks(model, [ROW], 1)
    contexts = []
    with BlendEngine(model, folder, config) as engine:
        for name, chunks in grid._documents(task.row, config).items():
            engine.warm(chunks, document=name)
        for chunk in CHUNKS:
            text = text_key("", model.tokenizer.encode(chunk))
            key = visible_variant(engine.store.look_up([text])[text], alone_only=False)
            reader = engine.store.open(key) if key else None
            contexts.append(model.tokenizer.decode(reader.context.tolist()) if reader else "-")
    assert task.row.passages == (CHUNKS[2],)
    prompt = model.tokenizer.decode(task.ids)
    assert CHUNKS[2][:20] in prompt
    assert "Florton" not in prompt
    return contexts


def test_neighbours_are_warmed_as_context_but_not_in_the_prompt(model: Model, tmp_path: Path) -> None:
    alone = _contexts(model, tmp_path / "alone", BlendConfig(context_tokens=0))
    assert alone == ["-", "-", ""], "without contexts, neighbours make no difference"
    behind = _contexts(model, tmp_path / "behind", BlendConfig(context_tokens=256))
    assert behind == ["", f"{CHUNKS[0]}\n\n", f"{CHUNKS[0]}\n\n{CHUNKS[1]}\n\n"]


# -------------------------------------------------------------------- answers from what was not retrieved


@pytest.mark.parametrize(
    ("retrieved", "question", "answers"),
    [
        ([2], "Where was Mira born?", ("Florton",)),
        ([0], "Where was Mira born?", ()),
        ([2, 0], "Where was Mira born?", ()),
        ([2], "Was Mira born in Florton?", ()),
    ],
)
def test_hidden_answers_are_before_a_retrieved_chunk_and_not_in_the_prompt(
    retrieved: list[int], question: str, answers: tuple[str, ...]
) -> None:
    passages = tuple(CHUNKS[number] for number in retrieved)
    row = QuestionRow("x", passages, question, ("florton", "Florton")[1:], "", (NAME,) * len(passages), LIBRARY)
    assert hidden(row) == answers


def test_text_after_the_retrieved_chunks_is_not_hidden() -> None:
    row = QuestionRow("x", (CHUNKS[0],), "Which animal does Mira own?", ("grey goat",), "", (NAME,), LIBRARY)
    assert hidden(row) == (), "causal attention: it cannot be in the KV"


def test_leaked_answers_are_counted(model: Model) -> None:
    rows = [replace(ROW, id=str(number)) for number in range(4)]
    seen = replace(ROW, id="seen", passages=(CHUNKS[0],), supported=True)
    tasks, _ = make_tasks(model, [*rows, seen], 1)
    cells = make_cells(make_configs(["query", "random"]), [0.1])
    journal = grid.Journal(None, {}, Record)
    said = {"full": ["Torvik"] * 4, "none": ["Florton."] * 4, "query": ["Florton", "Torvik", "Florton", "florton"]}
    for number, task in enumerate(tasks):
        texts = [[*said.get(cell.label, ["Torvik"] * 4), "Florton"][number] for cell in cells]
        journal.add(task.row.key, [Record([1], [2.0], text, 0.0, 10, 9, 9, 1, 1.0) for text in texts])
    measured = tables(tasks, cells, journal)
    results = {cell["policy"]: cell for cell in summarise(tasks, cells, measured, 0, "hkvd")}
    leaked = {policy: cell["groups"][HIDDEN]["leaked"]["value"] for policy, cell in results.items()}
    assert leaked == {"full": 0, "none": 1, "query": 0.75, "random": 0}
    for cell in results.values():
        assert cell["groups"][HIDDEN]["samples"] == 4
        assert cell["groups"][RETRIEVED]["samples"] == 1
        assert cell["groups"][NOT_RETRIEVED]["samples"] == 4


# -------------------------------------------------------------------- the command

SMALL = ("--top-k", 3, "--articles", 10, "--samples", 8, "--policies", "query", "--ratios", 0.3, "--max-tokens", 2)


@pytest.fixture
def run(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command on the tiny random model; return its output, or the last line on stderr of a failure."""
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)

    def call(*argv: object, fails: bool = False) -> str:
        capsys.readouterr()
        try:
            code: object = main(["quality", *map(str, argv)])
        except SystemExit as end:  # wrong arguments
            code = end.code
        assert bool(code) == fails
        captured = capsys.readouterr()
        return captured.err.splitlines()[-1] if fails else captured.out

    return call


def test_the_command(run: Callable[..., str], tmp_path: Path) -> None:
    argv = (*SMALL, "--context-tokens", "0,256", "--out", tmp_path)
    text = run(*argv)
    for part in ("top 3 of", "context: 256 tokens", "answer not retrieved ("):
        assert part in text
    result = json.loads((tmp_path / "results.json").read_text())
    none = [cell for cell in result["cells"] if cell["policy"] == "none"]
    assert [cell["context_tokens"] for cell in none] == [0, 256]
    assert len({cell["kl"]["value"] for cell in none}) == 2, "contexts make a difference"
    embedded = [path.name for path in tmp_path.glob("index-*.sqlite")]
    assert len(embedded) == 1
    assert run(*argv) == text, "the second run has nothing left to do"


def test_a_second_world(run: Callable[..., str]) -> None:
    text = run("--world", 2, "--articles", 2, "--samples", 2, *SMALL[:2], *SMALL[6:])
    assert "the second reader's world, top 3 of" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--top-k", "0"], "--top-k: must be at least 1, got 0"),
        (["--top-k", "5000", "--articles", "5"], "--top-k must be from 1 to the"),
        (["--top-k", "3", "--articles", "0"], "--articles: must be at least 1, got 0"),
        (["--articles", "5"], "--articles and --around need --top-k K"),
        (["--around", "1"], "--articles and --around need --top-k K"),
        (["--top-k", "3", "--articles", "5", "--around", "-1"], "--around: must be at least 0, got -1"),
        (["--data", "{rows}", "--top-k", "3"], "--data has its own passages: leave out --top-k"),
        (["--data", "{rows}", "--context-tokens", "8"], "--context-tokens needs rows with `documents`"),
        (["--context-tokens", "many"], "--context-tokens: invalid int value: 'many'"),
        (["--context-tokens", "-1"], "--context-tokens: must be at least 0, got -1"),
        (["--top-k", "3", "--articles", "5", "--samples", "9000"], "questions of kind"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], message: str, run: Callable[..., str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"passages": ["One."], "question": "What?", "answers": ["one"]}))
    assert message in run(*(part.format(rows=rows) for part in argv), fails=True)


FILED: dict[str, Any] = {
    "passages": [CHUNKS[2]],
    "question": "What?",
    "answers": ["one"],
    "documents": [NAME],
    "library": {NAME: list(CHUNKS)},
}


def test_rows_of_a_file_may_have_a_library(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(FILED))
    (row,) = file_rows(path, 1)
    assert row.library == LIBRARY


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"library": [1]}, "'library' must be an object"),
        ({"library": {NAME: []}}, "'library' must be an object"),
        ({"library": {NAME: list(CHUNKS[:2])}}, "'library' must have every passage"),
        ({"documents": []}, "'library' must have every passage"),
    ],
)
def test_a_bad_library_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**FILED, "id": "a"}) + "\n" + json.dumps({**FILED, **change}))
    with pytest.raises(KvragError, match=r"data\.jsonl, line 2") as caught:
        file_rows(path, 2)
    assert message in str(caught.value)

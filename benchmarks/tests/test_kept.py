"""`python -m benchmarks kept`: what counts as kept and as right, the command, and its questions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.quality import arms, kept
from benchmarks.quality.arms import DECIDED, Measured, margin_of
from benchmarks.quality.kept import summarise
from benchmarks.quality.questions import (
    CORPUS,
    QUESTIONS,
    TUNING,
    TUNING_CORPUS,
    has_answer,
    is_right,
    nq_rows,
    read_corpus,
    read_questions,
    retrieve,
)
from benchmarks.settings import busy_note
from kvrag import Answer, Model
from kvrag.listen.check import END
from kvrag.types import BlendReport, Completed

# -------------------------------------------------------------------- the rules

FULL = Measured(arms.FULL, "", [5, 6, END], True, 4.0, 8.0, 100, 100, 100, [4.0, 6.0], None, None, [], forced=True)


@pytest.mark.parametrize(
    ("ours", "margins", "margin", "is_kept"),
    [
        ([5, 6, END], [9.0, 9.0, 9.0], None, True),
        ([5, 7, END], [0.1, DECIDED, 0.1], DECIDED, False),
        ([5, 7, 8, END], [9.0, 0.9, 9.0], 0.9, True),
        ([5, END], [9.0, 2.0, 9.0], 2.0, False),
        ([5, 6, 7], [0.1, 0.1, 1.5], 1.5, False),
    ],
    ids=["identical", "decided", "a near tie ends the comparison", "ends earlier", "ends later"],
)
def test_an_answer_is_kept_unless_it_differs_first_where_full_prefill_was_decided(
    ours: list[int], margins: list[float], margin: float | None, is_kept: bool
) -> None:
    assert margin_of(FULL.tokens, ours, margins) == margin
    assert replace(FULL, tokens=ours, margin=margin).kept == is_kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It costs 12 crowns.", True),
        ("(12 CROWNS)", True),
        ("112 crowns", False),
        ("3.12 crowns", False),
        ("12 crownsworth", False),
    ],
)
def test_an_accepted_answer_must_be_a_part_of_the_text_in_whole_words(text: str, expected: bool) -> None:
    assert is_right(text, ["none", "12 crowns"]) == expected


def test_times_are_compared_question_by_question_and_right_answers_are_those_of_full_prefill() -> None:
    fast = replace(FULL, arm="0.15", ttft_s=1.0, total_s=2.0, rows=20, all_rows=30, margin=0.5, forced=False)
    slow = replace(fast, ttft_s=8.0, total_s=16.0, is_right=False, margin=2.0)
    wrong = replace(FULL, is_right=False)
    full, cell = summarise([[FULL, fast], [FULL, slow], [wrong, fast]])
    assert (full["right"]["count"], full["kept"]["count"], full["identical"], full["speedup"]) == (2, 3, 3, 1.0)
    assert (cell["right"]["count"], cell["right"]["total"]) == (1, 2)
    assert (cell["kept"]["count"], cell["forced"]["count"], cell["near_ties"], cell["identical"]) == (2, 0, 2, 0)
    assert cell["speedups"] == {"median": 4.0, "mean": pytest.approx(8.5 / 3), "worst": 0.5}
    assert (cell["speedup"], cell["end"]) == (1.2, 4.0)
    assert (cell["rows"]["median"], cell["all_rows"]) == (0.2, pytest.approx(0.3))


def test_rows_that_complete_a_prompt_are_added() -> None:
    report = BlendReport.unblended(100, 80, ratio=0.1)
    plain = arms._measured("adaptive", Answer("x", (1,), "stop", report), 1.0, [0.5], ["x"])
    assert (plain.rows, plain.all_rows, plain.completed) == (20, 20, None)
    for token, rows in ((0, 118), (3, 28)):
        report = replace(report, completed=Completed(token, 90, 0.5), recomputed_tokens=80)
        one = arms._measured("adaptive", Answer("x", (1,), "stop", report), 1.0, [0.5], ["x"])
        assert (one.rows, one.all_rows) == (rows, 118), "8 of 80 were recomputed at first"
        assert one.completed == {"token": token, "rows": 90, "seconds": 0.5}
    report = replace(report, deepened=Completed(0, 25, 0.1))
    one = arms._measured("adaptive", Answer("x", (1,), "stop", report), 1.0, [0.5], ["x"])
    assert (one.rows, one.all_rows) == (53, 143)


def test_later_tokens_are_compared_where_both_answers_have_them() -> None:
    slow, fast = (replace(FULL, times=[pace * number for number in range(1, 7)]) for pace in (3.0, 1.5))
    _, cell = summarise([[slow, fast], [slow, replace(fast, times=[1.0])], [slow, replace(slow, rows=50)]])
    assert cell["later"] == {"5": {"median": 1.5, "mean": 1.5, "worst": 1.0}, "10": None}
    assert cell["rows_by"] == [1.0]


def test_a_busy_machine_is_noted_beside_the_times() -> None:
    """CPU time: in all, idle, of the benchmark."""
    assert busy_note((100, 10, 5), (200, 20, 94)) == []  # the benchmark alone
    assert busy_note((100, 10, 5), (200, 50, 45)) == []  # others too, but there are free cores
    assert busy_note((100, 10, 5), (200, 20, 35)) == [
        "Machine busy: other processes took 60% of the CPU, so times may not compare"
    ]


def test_both_halves_of_the_public_sets_are_read(tmp_path: Path) -> None:
    lines = [{"q": f"q{n}", "a": ["a"], "title": f"t{n}", "text": f"text {n}"} for n in range(12)]
    (tmp_path / "nq.jsonl").write_text("\n".join(map(json.dumps, lines)))
    halves = [nq_rows(tmp_path / "nq.jsonl", half, 4) for half in (0, 1)]
    assert [[row.id for row in rows] for rows in halves] == [[f"q{n}" for n in range(half, 12, 2)] for half in (0, 1)]
    for row in halves[1]:
        assert len({*row.passages}) == 4
        assert f"text {row.id[1:]}" in row.passages
        assert row.all_documents() == {name: (text,) for name, text in zip(row.documents, row.passages, strict=True)}


# -------------------------------------------------------------------- the command

TEXTS = {
    "north.md": "The north tower has a blue door and ninety steps. It was painted by Arno in the spring of that year.",
    "south.md": "The south tower has a green door and forty steps. It was painted by Bela in the autumn of that year.",
}


@pytest.fixture
def argv(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for two questions about two documents, on the tiny random model."""
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)
    folder, questions = tmp_path / "docs", tmp_path / "questions.jsonl"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    rows = [{"q": f"Who painted the {name[:5]} tower?", "a": ["Arno", "Bela"], "document": name} for name in TEXTS]
    questions.write_text("\n".join(map(json.dumps, rows)))
    return ["kept", "--questions", str(questions), "--docs", str(folder), "--tokens", "3", "--threads", "1"]


def test_arms_are_measured_and_resumed(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    argv += ["--arms", "none", "0.15", "first_k", "--out", str(out)]
    assert main([*argv, "--n", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["samples"] == 1
    measured: list[str] = []
    measure = kept.measure
    monkeypatch.setattr(
        kept, "measure", lambda engine, row, *rest: (measured.append(row.question), measure(engine, row, *rest))[1]
    )
    assert main([*argv, "--json"]) == 0
    assert len(measured) == 2, "a warm-up and the question that was left"
    result = json.loads(capsys.readouterr().out)
    assert (result["settings"]["samples"], result["retrieved"]) == (2, 2)
    full, none, some, first = result["arms"]
    assert [cell["arm"] for cell in result["arms"]] == ["full", "none", "0.15", "first_k"]
    assert (full["kept"]["count"], full["forced"]["count"], full["identical"], full["rows"]["mean"]) == (2, 2, 2, 1.0)
    assert 0 < none["rows"]["mean"] < first["rows"]["mean"] < some["rows"]["mean"] < 1
    for cell in result["arms"]:
        assert cell["near_ties"] == cell["kept"]["count"] - cell["identical"]
        assert cell["forced"]["total"] == 2
    records = [json.loads(line)["records"] for line in out.read_text().splitlines() if line]
    assert [len(one) for one in records] == [4, 4]
    monkeypatch.setattr(kept, "measure", None)
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "2 prompts contain the answer" in text
    assert sum(line.startswith("first_k") for line in text.splitlines()) == 2, "in both tables"


def test_passages_are_documents_of_their_own(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passages = [*TEXTS.values(), "The gate is made of iron and is closed at night by a guard, except in summer."]
    path = tmp_path / "passages.jsonl"
    path.write_text(json.dumps({"passages": passages, "question": "Who painted the gate?", "answers": ["nobody"]}))
    assert main(["kept", "--musique", str(path), "--tokens", "2", "--arms", "none", "adaptive", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["settings"]["samples"], result["retrieved"]) == (1, 0)
    _, none, adaptive = result["arms"]
    assert none["rows"]["mean"] < 0.5
    assert adaptive["forced"]["total"] == 0, "its KV may change during the answer"
    assert main([*argv, "--musique", str(path)]) == 1
    assert "leave out" in capsys.readouterr().err


def test_a_wrong_question_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(argv[2])
    path.write_text(path.read_text() + '\n{"q": "What?", "a": "one", "document": "north.md"}')
    assert main(argv) == 1
    assert "questions.jsonl, line 3: expected q, a (a list of answers) and document" in capsys.readouterr().err


# -------------------------------------------------------------------- the questions


def _about_tokens(text: str) -> int:
    return round(1.35 * len(text.split()))


@pytest.mark.parametrize(
    ("path", "folder", "count"),
    [(QUESTIONS, CORPUS, 100), (TUNING, TUNING_CORPUS, 110)],
    ids=["own", "tuning"],
)
def test_answers_are_in_their_documents_and_are_retrieved(path: Path, folder: Path, count: int) -> None:
    questions = read_questions(path)
    assert len(questions) == len({row["q"] for row in questions}) == count
    assert {row["document"] for row in questions} == {one.name for one in folder.glob("*.md")}
    for row in questions:
        assert is_right((folder / row["document"]).read_text(), row["a"]), row
        assert not is_right(row["q"], row["a"]), row
    found = sum(map(has_answer, retrieve(questions, read_corpus(folder, _about_tokens, 128), 8)))
    assert found >= 0.85 * count

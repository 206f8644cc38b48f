"""`python -m benchmarks quality`: settings of policies, chunk lengths, missing passages, and differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.quality.metrics import Bootstrap, rouge_l, token_f1
from benchmarks.quality.rows import QuestionRow
from benchmarks.quality.variants import leave_out, rechunk
from kvrag import Model

# -------------------------------------------------------------------- metrics and rows


@pytest.mark.parametrize(
    ("text", "rouge"),  # the examples of Lin, 2004, section 3
    [
        ("police kill the gunman", 3 / 4),
        ("the gunman kill police", 2 / 4),
        ("", 0.0),
        ("Police killed the gunman!", 1.0),
    ],
)
def test_rouge_l_by_hand(text: str, rouge: float) -> None:
    assert rouge_l(text, ["police killed the gunman"]) == pytest.approx(rouge)
    assert rouge_l(text, ["nothing", "police killed the gunman"]) == pytest.approx(rouge)


@pytest.mark.parametrize(
    ("text", "answers", "f1"),
    [
        ("the red car", ["red car"], 1.0),
        ("red car now", ["a red car"], 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("red red", ["red car"], 0.5),
        ("boat", ["red car", "boat or car"], 0.5),
        ("", ["red car"], 0.0),
        ("the", ["a"], 1.0),
    ],
)
def test_f1_by_hand(text: str, answers: list[str], f1: float) -> None:
    assert token_f1(text, answers) == pytest.approx(f1)


def test_intervals_are_those_of_the_mean() -> None:
    values = np.random.default_rng(1).normal(size=400)
    interval = Bootstrap(np.arange(400), seed=0).mean(values)
    assert interval["value"] == values.mean()
    assert interval["low"] is not None
    assert interval["high"] is not None
    assert (interval["high"] - interval["low"]) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)
    assert interval == Bootstrap(np.arange(400), seed=0).mean(values)
    assert interval != Bootstrap(np.arange(400), seed=1).mean(values)


def test_questions_about_one_context_are_drawn_together() -> None:
    values, contexts = np.random.default_rng(1).normal(size=40), np.arange(40)
    alone, copied = Bootstrap(contexts, seed=0), Bootstrap(np.repeat(contexts, 10), seed=0)
    tenfold = np.repeat(values, 10)  # ten questions of equal results say no more than one
    assert copied.mean(tenfold) == pytest.approx(alone.mean(values))
    one = Bootstrap(np.zeros(5, int), seed=0).mean(values[:5])
    assert list(one.values()) == pytest.approx(3 * [values[:5].mean()])


def test_what_is_compared_is_paired() -> None:
    values = np.random.default_rng(1).normal(size=50)
    bootstrap = Bootstrap(np.arange(50), seed=0)
    ratio = bootstrap.of(lambda a, b: a / b, 3 * values, values)
    assert ratio["low"] == pytest.approx(3) == ratio["high"]
    assert bootstrap.of(lambda a, b: a / b, values, 0 * values)["value"] is None


def _words(text: str) -> int:
    return len(text.split())


def test_passages_are_cut_and_joined() -> None:
    passages = ["One two three. Four five six seven eight. Nine!", "Ten.", "eleven " * 12]
    chunks = rechunk(passages, 6, _words)
    assert " ".join(chunks).split() == " ".join(passages).split()
    assert all(_words(chunk) <= 6 for chunk in chunks)
    assert chunks[:3] == ("One two three.", "Four five six seven eight. Nine!", "Ten.\n\n" + " ".join(["eleven"] * 5))
    assert len(chunks) == 5
    assert rechunk(["a b.", "c d.", "e f."], 100, _words) == ("a b.\n\nc d.\n\ne f.",)


# -------------------------------------------------------------------- the command

SMALL = ("--samples", 3, "--policies", "query", "--ratios", 0.3, "--max-tokens", 3)


@pytest.fixture
def run(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command on the tiny random model; returns stdout, or the last line on stderr of a failure."""
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


def _cells(result: Any, policy: str) -> list[Any]:
    return [cell for cell in result["cells"] if cell["policy"] == policy]


def test_the_preamble_and_codecs_are_compared(run: Callable[..., str]) -> None:
    result = json.loads(run(*SMALL[:-2], "--max-tokens", 1, "--preamble", "on,off", "--codec", "native,int8", "--json"))
    assert len(result["cells"]) == 2 * 2 * 4
    for cell in _cells(result, "query"):
        if cell["codec"] != "native":
            continue
        # with its preamble the first chunk is exact and not recomputed
        share = cell["recomputed"]
        assert (share < 0.3) if cell["preamble"] else (share == pytest.approx(0.3, abs=1e-3))
    assert len({cell["setup"] for cell in _cells(result, "none")}) == 4
    full = _cells(result, "full")[0]
    assert (
        full["groups"]["depends on another passage"]["samples"] + full["groups"]["depends on one passage"]["samples"]
        == 3
    )
    assert full["rouge_l"]["value"] >= full["em"]["value"]


def test_missing_passages_are_left_out_of_the_prompts(run: Callable[..., str], tmp_path: Path) -> None:
    def tokens(*argv: str) -> list[int]:
        folder = tmp_path / "-".join(["out", *argv])
        run(*SMALL, *argv, "--out", folder)
        lines = filter(None, (folder / "rows.jsonl").read_text().splitlines())
        return [json.loads(line)["records"][0]["prompt_tokens"] for line in lines]

    whole, part = tokens(), tokens("--missing", "0.5")
    assert 0.3 < sum(part) / sum(whole) < 0.8
    assert part == tokens("--missing", "0.5", "--max-tokens", "3"), "the same ones are left out every time"


@pytest.mark.parametrize("documents", [(), ("one", "two", "one")])
def test_missing_passages_stay_in_their_documents(documents: tuple[str, ...]) -> None:
    row = QuestionRow("x", ("a", "b", "c"), "What?", ("a",), documents=documents)
    shorter = leave_out(row, 0.999)
    assert len(shorter.passages) == len(shorter.documents) == 1
    assert shorter.library == row.all_documents()
    assert shorter.passages[0] in shorter.library[shorter.documents[0]]
    assert leave_out(row, 0.0).passages == row.passages


def test_policies_are_compared_at_the_same_ratio(run: Callable[..., str]) -> None:
    argv = ("--samples", 3, "--policies", "query", "first_k", "--ratios", 0.1, 0.4, "--against", "first_k", "--json")
    result = json.loads(run(*argv))
    for cell in result["cells"]:
        assert ("against" in cell) == (cell["policy"] in ("query", "random"))
    for cell in _cells(result, "query"):
        (other,) = [rival for rival in _cells(result, "first_k") if rival["ratio"] == cell["ratio"]]
        assert cell["against"]["kl"]["value"] == pytest.approx(cell["kl"]["value"] - other["kl"]["value"])


def test_the_table(run: Callable[..., str], tmp_path: Path) -> None:
    argv = ("--policies", "query", "first_k", "--against", "first_k", "--chunk-tokens", "0,64", "--out", tmp_path)
    text = run("--samples", 2, "--max-tokens", 2, *argv)
    for part in (
        "passages as they are, preamble on",
        "chunks of 64 tokens",
        "minus first_k",
        "another passage",
        "TTFT",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("query ")]
    assert len(rows) == 2 * 3 * 3, "two chunk lengths, three ratios, three tables"
    result = json.loads((tmp_path / "results.json").read_text())
    assert json.loads(run("--samples", 2, "--max-tokens", 2, *argv, "--json"))["cells"] == result["cells"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policies", "best"], "unknown policy 'best'"),
        (["--chunk-tokens", "4"], "--chunk-tokens: must be 0 or at least 16"),
        (["--chunk-tokens", "64", "--context-tokens", "9"], "--context-tokens and --chunk-tokens exclude each other"),
        (["--docs", ".", "--chunk-tokens", "20,40"], "must be one number of at least 16"),
        (["--docs", ".", "--missing", "0.3"], "--missing and --docs exclude each other"),
        (["--missing", "1"], "--missing: must be a share from 0 to less than 1"),
        (["--preamble", "maybe"], "--preamble: must be one of on, off, got 'maybe'"),
        (["--codec", "zip"], "unknown codec 'zip'; choose one of native, int8, int4"),
        (["--against", "best"], "--against 'best' is not among the measured policies"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    argv: Sequence[str], message: str, run: Callable[..., str], tmp_path: Path
) -> None:
    assert message in run(*argv, "--out", tmp_path / "out", fails=True)
    assert not (tmp_path / "out").exists()

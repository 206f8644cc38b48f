"""`python -m benchmarks answers`: metrics by hand, the grid, resuming a killed run, and bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build

from benchmarks.__main__ import main
from benchmarks.quality import answers as command
from benchmarks.quality import grid
from benchmarks.quality.compare import Record, divergence
from benchmarks.quality.grid import exact_match, make_cells, normalise
from benchmarks.quality.rows import QuestionRow, file_rows
from kvrag import BlendConfig, BlendEngine, KvragError, Model, Sampling
from kvrag.control.plan import wilson

PROSE = [
    "The harbour of Selmunde was built by the engineer Tarvik in those years. It is still used by small boats today.",
    "After the war the bridge over the river was also designed by Tarvik and his brother. It carries two tracks.",
    "Most of the fish that is sold on the market comes from the cold lakes in the north. Prices rise every winter.",
    "The old railway station has a roof of glass and a clock that is always late. It was painted green last year.",
]

# -------------------------------------------------------------------- metrics


def test_answers_are_normalised_as_for_squad() -> None:
    assert normalise("The  Cat's, an\nApple -- a Hat!") == "cats apple hat"
    assert exact_match("A red car.", ["blue", "red  Car"]) == 1
    assert exact_match("red", ["red car"]) == 0


def test_divergence_by_hand() -> None:
    full, other = torch.tensor([[0.5, 0.5, 0.0]]).log(), torch.tensor([[0.25, 0.75, 0.0]]).log() + 3
    assert divergence(full, other) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert divergence(other, full) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert divergence(full, full) == 0


# -------------------------------------------------------------------- data


ROW = {"id": "x", "passages": ["One.", "Two."], "question": "What?", "answers": ["one"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"passages": [', "line 2: not JSON"),
        ("[1]", "line 2: expected a JSON object"),
        (json.dumps({**ROW, "passages": []}), "line 2: 'passages' must be a list of non-empty strings"),
        (json.dumps({**ROW, "passages": ["One.", " "]}), "line 2: 'passages'"),
        (json.dumps({**ROW, "answers": "one"}), "line 2: 'answers' must be a list of non-empty strings"),
        (json.dumps({name: ROW[name] for name in ("passages", "answers")}), "line 2: 'question'"),
        (json.dumps({**ROW, "kind": 3}), "line 2: 'kind' must be a string"),
    ],
)
def test_a_bad_row_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({**ROW, "id": "first"}) + "\n" + line + "\n")
    with pytest.raises(KvragError, match=r"data\.jsonl") as caught:
        file_rows(path, 10)
    assert message in str(caught.value)


def test_files_of_kvsharearena_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "arena.jsonl"
    row = {"_id": "x1", "context": "A. B.", "input": "Who?", "answers": ["A"], "chunks": ["A.", "B."]}
    path.write_text(json.dumps(row))
    (found,) = file_rows(path, 1)
    assert (found.id, found.passages, found.question, found.answers) == ("x1", ("A.", "B."), "Who?", ("A",))


def test_rows_of_a_file_may_have_a_kind(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({**ROW, "id": n, "kind": "k"}) for n in range(3)) + "\n\n")
    rows = file_rows(path, 2)
    assert [row.id for row in rows] == ["0", "1"]
    assert (rows[0].kind, rows[0].answers) == ("k", ("one",))


# -------------------------------------------------------------------- the grid


def test_the_grid_has_full_and_none_in_any_case() -> None:
    configs = {name: BlendConfig(policy=name) for name in ("hkvd", "none")}
    cells = make_cells(configs, [0.1, 0.2, 0.1])
    assert [(cell.label, cell.ratio) for cell in cells] == [
        ("full", None),
        ("none", None),
        ("hkvd", 0.1),
        ("hkvd", 0.2),
    ]


# -------------------------------------------------------------------- the measurement

Bench = Callable[..., Any]


def _with_rows(argv: Sequence[object]) -> list[str]:
    """Return the arguments, with QUESTIONS as the rows if they name no others."""
    return [*map(str, argv), *([] if {"--data", "--docs"} & {*argv} else ["--data", str(QUESTIONS)])]


@pytest.fixture
def bench(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Run the command on the tiny random model, with --json; return its result."""
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)

    def call(*argv: object) -> Any:
        capsys.readouterr()
        assert main(["answers", *_with_rows(argv), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def fails(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must fail with one line on stderr; return the line."""
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)

    def call(*argv: object) -> str:
        capsys.readouterr()
        try:
            code: object = main(["answers", *_with_rows(argv)])
        except SystemExit as end:  # wrong arguments
            code = end.code
        captured = capsys.readouterr()
        assert (code in (1, 2), captured.out) == (True, "")
        assert captured.err.splitlines()[-1].startswith(("kvrag", "python -m benchmarks"))
        return captured.err.splitlines()[-1]

    return call


QUESTIONS = Path(__file__).with_name("questions.jsonl")
"""Four questions about the bundled reader's world."""
SMALL = ("--samples", 3, "--policies", "query", "--ratios", 0.3, "--max-tokens", 3)


def _cells(result: Any, policy: str) -> list[Any]:
    return [cell for cell in result["cells"] if cell["policy"] == policy]


def _timeless(result: Any) -> Any:
    for cell in result["cells"]:
        del cell["ttft_s"], cell["speedup"]
    return result["cells"], result["settings"]


def test_everything_recomputed_is_full_prefill(bench: Bench) -> None:
    result = bench(*SMALL[:-4], "--ratios", 0.3, 1.0, "--max-tokens", 3)
    assert [(cell["policy"], cell["ratio"]) for cell in result["cells"]] == [
        ("full", None),
        ("none", None),
        ("query", 0.3),
        ("query", 1.0),
    ]
    (full,) = _cells(result, "full")
    assert (full["kl"], full["kept"]["value"], full["reused"]) == (0, 1, 0)
    for cell in _cells(result, "query"):
        assert cell["reused"] > 0.5
        if cell["ratio"] == 1.0:
            assert cell["kl"] < 1e-9
            assert cell["kept"]["value"] == 1
            assert cell["same"]["value"] == 1
        else:
            assert cell["kl"] > 1e-9
            assert cell["recomputed"] < 0.3, "with its preamble the first chunk is exact and not recomputed"
    for cell in _cells(result, "none"):
        assert (cell["recomputed"], cell["ratio"]) == (0, None)


def test_passages_are_encoded_with_context_where_rows_name_documents(bench: Bench, tmp_path: Path) -> None:
    (none,) = _cells(bench(*SMALL), "none")
    (with_context,) = _cells(bench(*SMALL, "--context-tokens", "256"), "none")
    (alone,) = _cells(bench(*SMALL, "--context-tokens", "0"), "none")
    assert none["kl"] == with_context["kl"] != alone["kl"]
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(ROW))
    assert bench("--data", data, *SMALL[2:])["settings"]["chunks"]["context_tokens"] == 0


@pytest.mark.usefixtures("endless")
def test_scores_are_those_of_the_answers(bench: Bench, tmp_path: Path) -> None:
    """The tiny model's own words as the right answer."""
    passages = ["Mira Brel was born in Florton. She lives in Grelville and drives a red car every single day.", "Two."]
    settings = [*SMALL[2:-1], 12, "--stop", "@"]
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(json.dumps({**ROW, "passages": passages}))
    bench("--data", data, *settings, "--out", out)
    answer = json.loads((out / "rows.jsonl").read_text())["records"][0]["text"]
    data.write_text(json.dumps({**ROW, "passages": passages, "answers": ["no", answer]}))
    (full,) = _cells(bench("--data", data, *settings), "full")
    assert full["em"]["value"] == 1


def test_intervals_are_over_contexts(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    asked = [{**ROW, "id": name, "passages": PROSE, "question": f"What is {name}?"} for name in ("x", "y", "z")]
    data.write_text("\n".join(map(json.dumps, asked)))
    result = bench("--data", data, *SMALL[2:])
    assert (result["settings"]["samples"], result["settings"]["contexts"]) == (3, 1)
    assert "3 rows of data.jsonl; 95 % intervals over contexts (1); " in "\n".join(command.table(result))
    (none,) = _cells(result, "none")
    assert none["same"]["high"] - none["same"]["low"] > 0.7, "three questions about one context count as one"


def test_orders_of_the_same_passages_are_one_context() -> None:
    rows = [
        QuestionRow("1", ("a", "b"), "", ("c",)),
        QuestionRow("2", ("b", "a"), "", ("c",)),
        QuestionRow("3", ("a",), "", ("c",)),
        QuestionRow("4", ("a",), "", ("c",), context="x"),
        QuestionRow("5", ("b",), "", ("c",), context="x"),
    ]
    assert grid.contexts([grid.Task(row, [1]) for row in rows]).tolist() == [0, 0, 1, 2, 2]
    assert rows[2].key == replace(rows[2], context="x").key, "the same results"


@pytest.mark.parametrize("context_tokens", [0, 256])
def test_documents_are_dropped_after_the_last_row_that_needs_them(
    context_tokens: int, model: Model, tmp_path: Path
) -> None:
    first, last = (PROSE[:2], PROSE[2:])
    library = {"first": tuple(first), "last": tuple(last)}
    rows = [
        QuestionRow("1", (first[0],), "Who?", ("Tarvik",), documents=("first",), library={"first": tuple(first)}),
        QuestionRow("2", (first[1], last[0]), "Who?", ("Tarvik",), documents=("first", "last"), library=library),
        QuestionRow("3", (last[1],), "When?", ("last year",), documents=("last",), library={"last": tuple(last)}),
    ]
    tasks, _ = grid.make_tasks(model, rows, 1)
    cells = make_cells({}, [])
    seen: list[list[str]] = []
    config = BlendConfig(context_tokens=context_tokens)
    with BlendEngine(model, tmp_path, config) as engine:

        def watch(done: int, total: int) -> None:
            seen.append(engine.documents())

        journal = grid.Journal(None, {}, Record)
        grid.answer(engine, tasks, cells, Sampling(1, temperature=0), journal, watch)
    assert seen == ([[], ["first"], ["last"], []] if context_tokens else [[], [], [], []])
    assert list(journal.rows) == [row.key for row in rows]
    assert journal.rows[rows[2].key][1].reused_tokens > 10, "it is encoded when its row is asked"


def test_no_answer_is_not_an_article() -> None:
    """SQuAD's normalisation leaves nothing of "the"."""
    task = grid.Task(QuestionRow("1", (), "", ("the",), beginning="It was", context="x"), [1])
    for answer, right in ((" the cat", 1), (" a cat", 0), ("", 0)):
        journal = grid.Journal(None, {}, Record)
        journal.add(task.row.key, [Record([1], [2.0], answer, 0.0, 1, 0, 0, 0, 1.0)])
        assert grid._table([task], 0, journal)["em"].tolist() == [right]


def test_a_killed_run_continues_where_it_stopped(bench: Bench, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    wanted = _timeless(bench(*SMALL, "--out", whole))
    content = (whole / "rows.jsonl").read_bytes()
    cut.mkdir()
    for stop in (0.1, 0.5, 0.99):
        kept = content[: int(stop * len(content))]
        (cut / "rows.jsonl").write_bytes(kept)
        assert _timeless(bench(*SMALL, "--out", cut)) == wanted
        assert (cut / "rows.jsonl").read_bytes().startswith(kept)
    assert wanted == _timeless(json.loads((cut / "results.json").read_text()))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each measurement of a row."""
    measure, calls = grid._measure, []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return measure(*args)

    monkeypatch.setattr(grid, "_measure", counted)
    return calls


def test_what_is_done_is_not_done_again(bench: Bench, tmp_path: Path, measured: list[Any]) -> None:
    bench(*SMALL, "--out", tmp_path)
    assert len(measured) == 3
    bench(*SMALL, "--out", tmp_path)
    more = bench("--samples", 4, *SMALL[2:], "--out", tmp_path)
    assert len(measured) == 4
    assert _timeless(more) == _timeless(bench("--samples", 4, *SMALL[2:]))


@pytest.mark.parametrize(
    "change",
    [("--max-tokens", 4), ("--ratios", 0.2), ("--codec", "int8"), ("--stop", "x"), ("--context-tokens", 0)],
    ids=str,
)
def test_results_of_other_settings_are_not_used(
    change: Sequence[object], bench: Bench, tmp_path: Path, measured: list[Any]
) -> None:
    bench(*SMALL, "--samples", 1, "--out", tmp_path)
    bench(*SMALL, "--samples", 1, "--out", tmp_path, *change)
    assert len(measured) == 2
    (tmp_path / "rows.jsonl").write_text('[]\nnot JSON\n{"settings": 1}\n')
    bench(*SMALL, "--samples", 1, "--out", tmp_path)
    assert len(measured) == 3, "lines of something else, too"


# -------------------------------------------------------------------- prompts made of documents


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files of prose and one that is not text."""
    folder = tmp_path / "docs"
    folder.mkdir()
    half = len(PROSE) // 2
    (folder / "one.md").write_text("\n\n".join(PROSE[:half]))
    (folder / "two.txt").write_text("\n\n".join(PROSE[half:]))
    (folder / "three.txt").write_bytes(b"\0\1\2")
    return folder


DOCS = ("--samples", 4, "--chunk-tokens", 40, "--ratios", 0.3, 1.0, "--max-tokens", 3, "--top-k", 2)


def test_prompts_are_made_of_a_folder(bench: Bench, folder: Path, tmp_path: Path) -> None:
    result = bench("--docs", folder, *DOCS, "--out", tmp_path / "out")
    assert [(cell["policy"], cell["ratio"]) for cell in result["cells"]] == [
        ("full", None),
        ("none", None),
        ("query", 0.3),
        ("query", 1.0),
    ]
    assert result["settings"]["data"]["file"].startswith("docs (6 chunks, ")
    everything = result["cells"][-1]
    assert everything["same"]["value"] == everything["kept"]["value"] == 1
    assert everything["same"]["low"] == pytest.approx(wilson(2, 2)[0]), (
        "four of four about two sentences are not certainty"
    )
    assert everything["kl"] < 1e-9 < result["cells"][1]["kl"]
    assert everything["reused"] > 0.2
    assert _timeless(bench("--docs", folder, *DOCS)) == _timeless(result)
    pooled = bench("--docs", folder, *DOCS, "--seed", 0, 1, 0)
    assert pooled["settings"]["data"]["seed"] == [0, 1, 0]
    apart = [bench("--docs", folder, *DOCS, "--seed", seed)["settings"]["samples"] for seed in (0, 1)]
    assert max(apart) < pooled["settings"]["samples"] <= sum(apart)


def test_the_report_ends_in_one_sentence(folder: Path, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench("--docs", folder, *DOCS)
    assert main(["answers", "--docs", str(folder), *map(str, DOCS)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == result["verdict"]
    assert "three.txt: skipped: the file is binary" in captured.err


@pytest.mark.parametrize("has_template", [True, False])
def test_a_model_without_a_chat_template_is_named(
    has_template: bool,
    folder: Path,
    bench: Bench,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model.tokenizer.hf, "chat_template", "{{ messages[0].content }}" if has_template else None)
    assert main(["answers", "--docs", str(folder), *map(str, DOCS)]) == 0
    assert ("has no chat template: prompts are plain text" in capsys.readouterr().err) != has_template


def _point(ratio: float | None, kept: float, policy: str = "query") -> dict[str, Any]:
    def interval(value: float) -> dict[str, float]:
        return {"value": value, "low": value, "high": value}

    return {"policy": policy, "ratio": ratio, "kept": interval(kept), "same": interval(0.8)}


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ((0.9, 0.98, 1.0), "Yes: blending keeps your answers from ratio 0.15 on; there, 98.0% [98.0%, 98.0%] are kept"),
        ((1.0, 0.9, 1.0), "Yes: blending keeps your answers from ratio 0.05 on"),
        ((0.9, 0.97, 0.94), "No: blending keeps less than 98% of your answers up to ratio 0.3; there, 94"),
    ],
)
def test_the_verdict(kept: Sequence[float], said: str) -> None:
    line = [_point(ratio, share) for ratio, share in zip((0.05, 0.15, 0.3), kept, strict=True)]
    sentence = command.verdict([_point(None, 1.0, "full"), _point(None, 0.5, "none"), *reversed(line)])
    assert sentence.startswith(said)
    assert sentence.endswith("are kept, and 80.0% are identical.")


def test_an_interrupted_run_reports_the_prompts_that_are_done(
    folder: Path, bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench("--docs", folder, *DOCS, "--samples", 2)
    measure, calls = grid._measure, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(grid, "_measure", interrupted)
    assert main(["answers", "--docs", str(folder), *map(str, DOCS), "--json"]) == 130
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["settings"]["samples"] == 2
    assert _timeless(result)[0] == _timeless(whole)[0]
    assert "interrupted after 2 of 4 prompts" in captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--docs", "{missing}"], "does not exist"),
        (["--docs", "{empty}"], "no files with text in"),
        (["--docs", "{short}"], "there is only one: give more documents, or shorter chunks"),
        (["--docs", "{docs}", "--chunk-tokens", "1200", "--top-k", "9", "--max-tokens", "1900"], "do not fit into"),
        (["--docs", "{docs}", "--data", "{docs}"], "--data and --docs exclude each other"),
        (["--docs", "{docs}", "--instruction", "Think."], "--instruction and --docs exclude each other"),
        (["--docs", "{docs}", "--chunk-tokens", "15"], "--chunk-tokens: must be at least 16, got 15"),
        (["--docs", "{docs}", "--chunk-tokens", "x"], "--chunk-tokens: invalid int value: 'x'"),
        (["--docs", "{docs}", "--top-k", "1"], "--top-k with --docs must be at least 2"),
        (["--docs", "{docs}", "--policies", "none,full"], "--policies with --docs needs one that recomputes tokens"),
    ],
)
def test_a_folder_that_cannot_be_inspected(
    argv: list[str], message: str, fails: Callable[..., str], folder: Path, tmp_path: Path
) -> None:
    names = {name: tmp_path / name for name in ("missing", "empty", "short", "docs")}
    names["empty"].mkdir()
    names["short"].mkdir()
    (names["short"] / "a.txt").write_text("A short text of one chunk that has eight words.")
    assert message in fails(*(part.format(**names) for part in argv), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "{missing}"], "does not exist"),
        (["--data", "{empty}"], "is empty"),
        (["--data", "{long}"], "row long has a prompt of"),
        (["--data", "{long}", "--skip-long"], "none of 1 rows fits into the window of tiny"),
        (["--policies", "best"], "unknown policy 'best'"),
        (["--ratios", "1.5"], "ratio must be a number in [0, 1], got 1.5"),
        (["--ratios", "x"], "--ratios: invalid float value: 'x'"),
        (["--ratios", ","], "pass at least one"),
        (["--chunk-tokens", "64"], "--data has its own passages: leave out --chunk-tokens"),
        (["--codec", "zip"], "--codec: invalid choice: 'zip'"),
        (["--data", "{long}", "--context-tokens", "8"], "--context-tokens needs rows with `documents`"),
        (["--context-tokens", "-1"], "--context-tokens: must be at least 0, got -1"),
        (["--samples", "0"], "--samples: must be at least 1, got 0"),
        (["--top-k", "3"], "--data has its own passages: leave out --top-k"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    argv: list[str], message: str, fails: Callable[..., str], tmp_path: Path
) -> None:
    names = {name: tmp_path / f"{name}.jsonl" for name in ("missing", "empty", "long")}
    names["empty"].write_text("\n")
    names["long"].write_text(json.dumps({**ROW, "id": "long", "passages": ["word " * 3000]}))
    assert message in fails(*(part.format(**names) for part in argv), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_that_are_too_long_can_be_skipped(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({**ROW, "id": n, "passages": ["word " * n]}) for n in (300, 3000)))
    settings = bench("--data", data, *SMALL[2:], "--skip-long")["settings"]
    assert (settings["samples"], settings["skipped"]) == (1, 1)


def test_nan_is_named(
    tokenizer: Any, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hf = build("llama", max_position_embeddings=2048)
    broken = Model(hf, tokenizer, "broken")
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: broken)
    with torch.no_grad():
        hf.model.norm.weight.fill_(torch.nan)
    message = fails(*SMALL, "--out", tmp_path / "out")
    assert "row world-0: the model's logits are NaN" in message
    assert "bfloat16" in message
    with torch.no_grad():
        hf.model.layers[2].self_attn.v_proj.weight.fill_(torch.inf)
    message = fails(*SMALL, "--out", tmp_path / "out")
    assert "row world-0: the model overflows in float32" in message
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------- for people


def test_the_table(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--samples", 2, "--max-tokens", 2, "--policies", "query,first_k")
    result = bench(*argv, "--out", tmp_path)
    assert main(["answers", *_with_rows([*argv, "--out", tmp_path])]) == 0
    text = capsys.readouterr().out
    for part in ("2 rows of questions.jsonl", "answers kept", "TTFT"):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("query ")]
    assert len(rows) == 3
    assert json.loads((tmp_path / "results.json").read_text())["cells"] == result["cells"]


def test_without_rows_the_error_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["answers"]) == 1
    assert capsys.readouterr().err == "kvrag: no questions: pass --docs FOLDER, or --data FILE with questions\n"

"""The command: from a folder of documents to an adapter, or one line about why there is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adapt_kvrag.command as command
import adapt_kvrag.train
import pytest
import torch
from adapt_kvrag.measure import Effect, verdict
from adapt_kvrag.train import CHECKPOINT

from kvrag import Model
from kvrag.backend.transformers.adapter import CONFIG, WEIGHTS, load
from kvrag.cli.main import main

Run = Callable[..., tuple[int, str, str]]
NAMES = ["Anna", "Bert", "Cora", "Dora", "Emil", "Fred"]
WORDS = ["blue", "green", "wide", "narrow", "deep", "quiet"]


def _text(number: int) -> str:
    return "\n\n".join(
        f"{name} of house {number} likes to walk along the {word} river in the evening. "
        f"On other days {name} reads a long book about the {word} and drinks tea with friends."
        for name, word in zip(NAMES, WORDS, strict=True)
    )


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder of three documents."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(_text(number))
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "new" / "out"


@pytest.fixture
def adapt(
    docs: Path, out: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command on the tiny random model, with few prompts; return the exit code and what it printed."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(adapt_kvrag.train, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)
    monkeypatch.setattr(command, "_HELD_OUT", 3)
    monkeypatch.setattr(command, "HANDBOOK", SimpleNamespace(documents=lambda: {"other": _text(7).upper()}))
    base = ["adapt", "--docs", str(docs), "--out", str(out), "--chunk-tokens", "48", "--rank", "4"]

    def run(*argv: str) -> tuple[int, str, str]:
        code = main([*base, *argv])
        return code, *capsys.readouterr()

    return run


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_it_writes_an_adapter_and_a_report(adapt: Run, out: Path, model: Model) -> None:
    code, said, err = adapt("--minutes", "0.3", "--force", "--json")
    assert code == 0, err
    result = json.loads(said)
    assert _names(out) == ["adapt.json", CONFIG, WEIGHTS]
    assert json.loads((out / "adapt.json").read_text()) == result
    for rows in (result["own"], result["other"]):
        assert [(row["ratio"], row["prompts"]) for row in rows] == [(0.0, 3), (0.15, 3)]
    before, after = result["own"][0]["kl"]
    assert before != after
    assert load(out, model.hf, "tiny").layers
    code, said, err = adapt("--minutes", "0.3")
    assert (code, said) == (1, "")
    assert err == f"kvrag: --out {out} holds an adapter already: choose another folder, or delete it\n"


@pytest.mark.slow
def test_an_adapter_that_does_not_help_is_not_written(adapt: Run, out: Path) -> None:
    code, said, _ = adapt("--minutes", "0.1")
    assert code == 1
    table, sentence = said.split("\n\n")
    assert "held-out prompts, another kind (3)" in table
    assert sentence.startswith("nothing was written after")
    assert "which is not a fifth less" in sentence
    assert _names(out) == ["adapt.json", CHECKPOINT]
    code, said, err = adapt("--minutes", "0.1", "--force")
    assert code == 0
    assert " steps, loss " in err, "of the training that was complete already"
    assert f"written to {out} after" in said
    assert "though on held-out prompts" in said
    assert _names(out) == ["adapt.json", CONFIG, WEIGHTS]


@pytest.mark.slow
def test_after_success_the_next_command_is_named(
    adapt: Run, out: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adapt_kvrag.measure.verdict", lambda own, other: "")
    code, said, _ = adapt("--minutes", "0.1")
    assert code == 0
    assert said.splitlines()[-1] == f"next: kvrag warm {docs} --model reader --adapter {out}"


@pytest.mark.slow
def test_a_full_disk_at_the_end_keeps_the_training(adapt: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.replace

    def full(source: Path, path: Path) -> None:
        if path.name == WEIGHTS:
            raise OSError(28, "No space left on device", str(path))
        real(source, path)

    monkeypatch.setattr(os, "replace", full)
    code, said, err = adapt("--minutes", "0.1", "--force")
    assert (code, said) == (1, "")
    assert err.splitlines()[-1] == (
        f"kvrag: cannot write to {out}: No space left on device; the training is kept: run the command again"
    )
    assert _names(out) == [CHECKPOINT]


def _rows(*kls: float) -> list[Effect]:
    return [Effect(0.15 * number, (kls[number], kls[2 + number]), (9, 9), 10) for number in range(2)]


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        ((1.0, 0.5, 0.4, 0.4), (1.0, 0.5, 0.9, 0.5), ""),
        ((1.0, 0.5, 0.4, 0.41), (1.0, 0.5, 0.9, 0.5), "which is not a fifth less"),
        ((1.0, 0.5, 0.4, 0.3), (1.0, 0.5, 0.9, 0.53), "on text of another kind"),
        ((1.0, 0.5, 0.4, float("nan")), (1.0, 0.5, 0.9, 0.5), "which is not a fifth less"),
    ],
)
def test_the_verdict(own: tuple[float, ...], other: tuple[float, ...], reason: str) -> None:
    why_not = verdict(_rows(*own), _rows(*other))
    assert (reason in why_not) if reason else (why_not == "")


@pytest.mark.slow
def test_an_interrupted_training_resumes(adapt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.optim.AdamW.step, [0]

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupt)
    code, _, err = adapt("--minutes", "0.3", "--force")
    assert (code, err.splitlines()[-1]) == (130, "kvrag: interrupted after 2 steps: run the command again to resume")
    code, said, err = adapt("--minutes", "0.3", "--force", "--json")
    assert code == 0, err
    assert json.loads(said)["steps"] > 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--questions", "{empty}"], "contains no questions: write one per line"),
        (["--docs", "{short}"], "blending needs prompts of several chunks, and there is only one"),
        (["--docs", "{few}"], "too little text to adapt to: 12 chunks with"),
        (["--docs", "{blank}"], "no text: none of 1 files could be read"),
        (["--out", "{empty}"], "empty is no folder: {empty} is a file"),
        (["--out", "{empty}/out"], "empty/out is no folder: {empty} is a file"),
        (["--model", "./nowhere"], "cannot load model './nowhere': there is no such folder"),
        (["--minutes", "0"], "must be at least 0.1"),
        (["--rate", "1e30"], "a lower --rate with another --out"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], message: str, adapt: Run, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: tmp_path / name for name in ("empty", "short", "few", "blank")}
    names["empty"].write_text("")
    contents = {"short": "Only one sentence that is not long.", "few": _text(0), "blank": ""}
    for name, content in contents.items():
        names[name].mkdir()
        (names[name] / "a.txt").write_text(content)
    try:
        code, said, err = adapt(*[part.format(**names) for part in argv])
    except SystemExit as error:  # wrong usage
        code, said, err = int(error.code or 0) - 1, *capsys.readouterr()
    assert (code, said) == (1, "")
    assert message.format(**names) in err.splitlines()[-1]
    assert not (out / WEIGHTS).exists()
    assert "--rate" in argv or not out.parent.exists()


def test_a_quantised_model_is_refused(adapt: Run, out: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.hf, "is_quantized", True, raising=False)
    code, said, err = adapt()
    assert (code, said) == (1, "")
    assert "kvrag: a quantised model cannot be adapted: load it in bfloat16" in err
    assert not out.parent.exists()

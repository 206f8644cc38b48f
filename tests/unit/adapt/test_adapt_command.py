"""The command: from a folder of documents to an adapter, or one line about why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrag.adapt.train
import kvrag.cli.adapt as command
from kvrag import Model
from kvrag.adapt.measure import Effect, verdict
from kvrag.backend.transformers.adapter import CONFIG, WEIGHTS, load
from kvrag.cli.main import main

NAMES = ["Anna", "Bert", "Cora", "Dora", "Emil", "Fred"]
WORDS = ["blue", "green", "wide", "narrow", "deep", "quiet"]


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A folder of three documents."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(3):
        text = "\n\n".join(
            f"{name} of house {number} likes to walk along the {word} river in the evening. "
            f"On other days {name} reads a long book about the {word} and drinks tea with friends."
            for name, word in zip(NAMES, WORDS, strict=True)
        )
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def adapt(
    docs: Path, tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command on the tiny random model, with few prompts; return the exit code and what it printed."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(kvrag.adapt.train.time, "perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)
    monkeypatch.setattr(command, "_HELD_OUT", 3)
    base = ["adapt", "--docs", str(docs), "--out", str(tmp_path / "out"), "--chunk-tokens", "48", "--rank", "4"]

    def run(*argv: str) -> tuple[int, str, str]:
        code = main([*base, *argv])
        return code, *capsys.readouterr()

    return run


def test_it_writes_an_adapter_and_a_report(
    adapt: Callable[..., tuple[int, str, str]], tmp_path: Path, model: Model
) -> None:
    code, out, err = adapt("--minutes", "0.3", "--force", "--json")
    assert code == 0, err
    result = json.loads(out)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapt.json", CONFIG, WEIGHTS]
    assert json.loads((tmp_path / "out" / "adapt.json").read_text()) == result
    assert [(row["adapted"], row["ratio"], row["prompts"]) for row in result["own"]] == [
        *((False, 0.0, 3), (False, 0.15, 3), (True, 0.0, 3), (True, 0.15, 3))
    ]
    assert result["own"][0]["kl"] != result["own"][2]["kl"]
    assert load(tmp_path / "out", model.hf, "tiny").layers
    code, _, err = adapt("--minutes", "0.3")
    assert (code, err) == (1, f"kvrag: --out {tmp_path / 'out'} holds an adapter already: choose another folder\n")


def test_an_adapter_that_does_not_help_is_not_written(
    adapt: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.adapt.measure.verdict", lambda own, other: "it does not help")
    code, out, _ = adapt("--minutes", "0.1")
    assert code == 1
    assert "nothing was written after" in out
    assert "it does not help (--force writes it)" in out
    assert not (tmp_path / "out" / WEIGHTS).exists()


def _rows(*kls: float) -> list[Effect]:
    return [Effect(number > 1, 0.15 * (number % 2), kl, 9, 10) for number, kl in enumerate(kls)]


@pytest.mark.parametrize(
    ("own", "other", "reason"),
    [
        ((1.0, 0.5, 0.4, 0.4), (1.0, 0.5, 0.9, 0.5), ""),
        ((1.0, 0.5, 0.4, 0.41), (1.0, 0.5, 0.9, 0.5), "by less than a fifth"),
        ((1.0, 0.5, 0.4, 0.3), (1.0, 0.5, 0.9, 0.53), "on text of another kind"),
        ((1.0, 0.5, 0.4, float("nan")), (1.0, 0.5, 0.9, 0.5), "by less than a fifth"),
    ],
)
def test_the_verdict(own: tuple[float, ...], other: tuple[float, ...], reason: str) -> None:
    why_not = verdict(_rows(*own), _rows(*other))
    assert (reason in why_not) if reason else (why_not == "")


def test_an_interrupted_training_resumes(
    adapt: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = torch.optim.AdamW.step, [0]

    def interrupt(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupt)
    code, _, err = adapt("--minutes", "0.3", "--force")
    assert (code, err.splitlines()[-1]) == (
        130,
        "kvrag: interrupted after 2 steps: run the command again to resume",
    )
    code, out, err = adapt("--minutes", "0.3", "--force", "--json")
    assert code == 0, err
    assert json.loads(out)["steps"] > 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--questions", "{empty}"], "contains no questions: write one per line"),
        (["--docs", "{short}"], "too little text to adapt to|needs prompts of several chunks"),
        (["--out", "{empty}"], "is a file: give a folder"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], message: str, adapt: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("Only one sentence that is not long.")
    names = {"empty": tmp_path / "empty", "short": tmp_path / "short"}
    code, out, err = adapt(*[part.format(**names) for part in argv])
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert any(text in last for text in message.split("|")), err

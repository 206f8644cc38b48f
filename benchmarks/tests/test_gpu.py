"""`python -m benchmarks gpu`, on a CPU and a tiny shape."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_shape import TINY

from benchmarks.shapes import SHAPES
from benchmarks.speed import gpu


def _arguments(**changes: Any) -> argparse.Namespace:
    given = {"models": ["tiny"], "layers": None, "tokens": [512], "device": "cpu", "repeats": 1, "seconds": 90}
    return argparse.Namespace(**given | {"out": None, "json": False} | changes)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    small = {"_PROMPTS": 1, "_RETRIEVED": 4, "_STEPS": 4, "_AT_ONCE": 2, "_SHORT": 3}
    for name, value in small.items():
        monkeypatch.setattr(gpu, name, value)


def test_every_part_has_a_result(tiny: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.run(_arguments(out=tmp_path / "out.json")) == 0
    parts = {part["name"]: part for part in json.loads((tmp_path / "out.json").read_text())}
    assert not any(part["failure"] for part in parts.values())
    assert [name for name in parts if "512 tokens" in name] == [
        "tiny: 512 tokens from RAM",
        "tiny: 512 tokens from device tier",
        "tiny: 512 tokens from disk",
    ]
    assert all(check["passed"] for check in parts["gate, float32"]["result"])
    assert "aten::" in parts["tiny: profile"]["result"]
    answers = parts["answers that equal those of a CPU, of 1"]["result"]
    assert {answers[f"float32 {way}"] for way in ("full", "ratio 1", "none", "query", "hkvd", "default")} == {1}
    decoded = parts["tiny: tokens/s of one answer after 512"]["result"]
    assert {"full", "none", "query", "default", "model.generate"} == {*decoded}
    assert parts["tiny: seconds of 2 answers at once"]["result"]["none"] > 0
    said = capsys.readouterr().out
    assert "query" in said
    assert re.search(r"tiny: ingestion: [1-9]\d* tokens/s", said)


def test_a_part_that_fails_is_reported_and_the_others_run(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(gpu, "_ingestion", broken)
    assert gpu.run(_arguments()) == 1
    said = capsys.readouterr().out
    assert "tiny: ingestion: MemoryError: no room" in said
    assert "tiny: 512 tokens from RAM (" in said


def test_nothing_begins_when_the_time_is_over(tiny: None) -> None:
    parts = gpu.measure(_arguments(seconds=-1), lambda line: None)
    assert {part.failure for part in parts} == {"out of time"}

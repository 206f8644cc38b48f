"""`python -m benchmarks quality`: questions drawn from the reader's world."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.quality.worlds import world_rows
from benchmarks.readers.first.world import KINDS
from kvrag import Model

SMALL = ("--samples", 2, "--policies", "query", "first_k", "--against", "first_k", "--max-tokens", 2)

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command on the tiny random model; returns its exit code and the last line on stderr."""
    monkeypatch.setattr(Model, "from_pretrained", lambda *args, **kwargs: model)

    def call(*argv: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["quality", *map(str, argv)])
        return code, (capsys.readouterr().err.splitlines() or [""])[-1]

    return call


def test_the_worlds_rows_are_balanced_and_always_the_same() -> None:
    rows = world_rows(2 * len(KINDS), seed=3)
    assert [row.kind for row in rows] == 2 * list(KINDS)
    assert all(12 <= len(row.passages) <= 20 for row in rows)
    assert {row.kind for row in rows if not row.across} == {"direct", "inverse"}
    assert rows[:4] == world_rows(4, seed=3)
    assert rows[:4] != world_rows(4, seed=4)
    assert len({row.key for row in rows}) == len(rows)


def test_every_setup_has_its_cells(run: Run, tmp_path: Path) -> None:
    assert run(*SMALL, "--chunk-tokens", "0,64", "--out", tmp_path)[0] == 0
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["settings"]["data"]["file"] == "the reader's world"
    assert len(result["cells"]) == 2 * (2 + 3 * 3)

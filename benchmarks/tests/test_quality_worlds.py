"""`python -m benchmarks quality`: questions drawn from the readers' worlds, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.quality import plots
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


def test_the_plots_of_a_world(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(*SMALL, "--chunk-tokens", "0,64", "--out", tmp_path, "--plots")[0] == 0
    assert {path.name for path in tmp_path.glob("*.png")} == {"ratio.png", "ttft.png", "kinds.png"}
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["settings"]["data"]["file"] == "the reader's world"
    assert len(result["cells"]) == 2 * (2 + 3 * 3)


def test_the_plot_of_a_folder(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, out = tmp_path / "docs", tmp_path / "out"
    folder.mkdir()
    for number, row in enumerate(world_rows(2, seed=0)):
        (folder / f"{number}.txt").write_text("\n\n".join(row.passages))
    assert run("--docs", folder, "--samples", 4, "--chunk-tokens", 40, "--ratios", 0.3, "--out", out, "--plots")[0] == 0
    assert {path.name for path in out.glob("*.png")} == {"kept.png"}
    assert (out / "kept.png").stat().st_size > 5000


def test_plots_without_matplotlib_name_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert "pip install matplotlib" in run(*SMALL, "--plots", "--out", tmp_path / "out")[1]
    assert "--plots needs --out" in run(*SMALL, "--plots")[1]
    assert not (tmp_path / "out").exists()

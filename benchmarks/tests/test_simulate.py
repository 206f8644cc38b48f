"""The cost model over devices, and its comparison with this machine."""

from __future__ import annotations

import json

import pytest

from benchmarks import simulate as bench
from benchmarks.__main__ import main
from benchmarks.simulate import DEVICES, LOADS, MODELS, Point, simulate, speed_of, table
from kvrag import BlendEngine, Model
from kvrag.control.cost import full_seconds


@pytest.fixture(autouse=True)
def _as_installed(not_by_the_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.control.plan.NOTICEABLE_S", 0.01)


def test_every_case_is_listed_and_those_that_do_not_fit_are_marked() -> None:
    cells = list(simulate(contexts=[4000]))
    assert len(cells) == len(DEVICES) * len(MODELS) * len(LOADS)
    for cell in cells:
        fits = 2 * MODELS[cell.model].params <= DEVICES[cell.device].room
        assert (cell.text != "-") == fits


def test_bytes_per_token_are_the_published_ones() -> None:
    kib = {name: shape.bytes_per_token / 1024 for name, shape in MODELS.items()}
    assert kib["Qwen2.5-0.5B"] == 12
    assert kib["Qwen2.5-1.5B"] == 28
    assert kib["Llama-3.1-8B"] == 128
    assert kib["Llama-3.1-70B"] == 320


def test_a_slower_disk_is_never_better_and_a_slow_disk_under_a_fast_gpu_loses() -> None:
    for device in DEVICES:
        times = [cell.blend_s for cell in simulate([device], ["Llama-3.1-8B"], contexts=[4000], ratio=0.15)]
        assert times == sorted(times, key=lambda value: -(value or 0))
    (cell,) = simulate(["H100"], ["Llama-3.1-8B"], ["SATA SSD"], [4000])
    assert cell.ratio == 1.0
    assert cell.text.startswith("full (0.")
    (cell,) = simulate(["laptop CPU, 8 cores"], ["Llama-3.1-8B"], ["SATA SSD"], [4000])
    assert cell.ratio == 0.15
    assert cell.text == f"{cell.full_s / cell.blend_s:.1f}x"  # type: ignore[operator]


def test_the_model_of_this_cpu_matches_its_measurements() -> None:
    """docs/results.md, 2 threads, 3,146 tokens."""
    for model, measured_s in (("Qwen2.5-1.5B", 7.65), ("Qwen2.5-0.5B", 2.95)):
        speed = speed_of(DEVICES["this CPU, 2 cores"], MODELS[model], 3e9)
        assert full_seconds(speed, 3146) == pytest.approx(measured_s, rel=0.2)


def test_table() -> None:
    text = table(list(simulate(["H100"], contexts=[4000])), "model", "load")
    lines = text.splitlines()
    assert len(lines) == 2 + len(MODELS)
    assert all(line.count("|") == len(LOADS) + 2 for line in lines)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--devices", "H100", "--context", "8000"]) == 0
    out = capsys.readouterr().out
    assert "### H100, 8000 tokens of context" in out
    assert "### Llama-3.1-8B from NVMe, 3 GB/s" in out
    assert main(["simulate", "--json", "--models", "Llama-3.1-8B"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cells"]) == len(DEVICES) * len(LOADS) * len(bench.CONTEXTS)
    assert set(result["devices"]) == set(DEVICES)


def test_check_predicts_what_it_measures(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_LEARNED", ((2, 20),))
    monkeypatch.setattr(bench, "_PREDICTED", (("plain", 2, 30, "query", 0.15, None), ("slow", 2, 20, "none", 0.0, 2e6)))
    points = bench.check(model, 1, lambda line: None)
    assert [point.name for point in points] == ["plain", "slow"]
    for point in points:
        assert isinstance(point, Point)
        assert min(point.predicted_full_s, point.full_s, point.predicted_blend_s, point.blend_s) > 0
    size = 2 * 20 * model.bytes_per_token
    assert points[1].blend_s >= 0.9 * size / 2e6, "the throttle holds"
    assert points[1].predicted_blend_s >= 0.9 * size / 2e6


def test_a_throttled_store_is_as_it_was_afterwards(engine: BlendEngine) -> None:
    opening = engine.store.open
    with bench._throttled(engine, 1e6):
        assert engine.store.open != opening
    assert engine.store.open == opening

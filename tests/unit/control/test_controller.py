"""Decisions of the controller on made-up numbers, the cost model's fit of passes, and both inside an engine."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, Model, SettingError
from kvrag.config import DEFAULT_POLICY
from kvrag.control.cost import CostModel, Speed, Workload, blend_seconds, fit, full_seconds
from kvrag.control.plan import decide
from kvrag.reuse.blend import selecting
from kvrag.reuse.load import Trace
from kvrag.reuse.policies import Passes
from kvrag.words import human_bytes

PROMPT = messages(*CHUNKS)
KIB = 1024
# about an 8B model on a fast GPU: 25 ms a pass, 40 µs a token, PCIe
GPU = Speed(pass_s=0.025, row_s=4e-5, pair_s=1e-9, stitch_s=1e-6, load=6e9)


@pytest.fixture(autouse=True)
def _by_the_clock(not_by_the_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.control.plan.NOTICEABLE_S", 0.01)


def _request(context: int, kib_per_token: int = 128, **changes: Any) -> Workload:
    return replace(Workload(context + 64, context, context, context * kib_per_token * KIB), **changes)


def test_a_long_context_is_blended_at_the_ratio_asked_for() -> None:
    fast, request = replace(GPU, load=2e10), _request(16_000)
    is_full, reason = decide(fast, request, 0.15)
    assert not is_full
    assert blend_seconds(fast, request, 0.15) < full_seconds(fast, request.prompt) / 2
    assert reason.startswith("blend at 0.15: predicted ")
    assert "full prefill" in reason


def test_reuse_is_slower_where_loading_takes_longer_than_computing() -> None:
    for load in (0.15e9, 0.5e9, 1.25e9):
        is_full, reason = decide(replace(GPU, load=load), _request(16_000), 0.15)
        assert is_full
        assert 128 * KIB / load > GPU.row_s
        assert f"at {human_bytes(load)}/s" in reason
        assert reason.startswith("full prefill: predicted ")
    assert not decide(replace(GPU, load=7e9), _request(16_000), 0.15)[0]


def test_short_contexts_are_prefilled_in_full() -> None:
    listening = {"passes": Passes(query=0.9), "kib_per_token": 12}
    is_full, reason = decide(GPU, _request(100, **listening), 0.15)
    assert is_full
    assert reason.endswith("the context is short")
    assert not decide(GPU, _request(8_000, **listening), 0.15)[0]


def test_a_small_loss_does_not_switch_to_full_prefill() -> None:
    request = _request(100, 12, passes=Passes(query=0.9))
    slower = blend_seconds(GPU, request, 0.15) - full_seconds(GPU, request.prompt)
    assert slower > 0.01
    assert not decide(replace(GPU, pass_s=GPU.pass_s / 4), request, 0.15)[0]


def test_chunks_in_memory_need_no_loading() -> None:
    slow = replace(GPU, load=1e6)
    assert decide(slow, _request(16_000), 0.15)[0]
    assert not decide(slow, _request(16_000, bytes=0), 0.15)[0]


def test_nothing_measured_is_blended() -> None:
    is_full, reason = decide(None, _request(100), 0.2)
    assert not is_full
    assert "no measurements" in reason


def test_selecting_costs_what_the_policy_looks_at() -> None:
    assert selecting(BlendConfig(policy="query"), 28) == (23 / 28, 0.0)
    assert selecting(BlendConfig(policy="hkvd"), 6) == (0.0, 1 / 6)
    assert selecting(BlendConfig(policy="first_k"), 6) == (0.0, 0.0)
    request = _request(4_000, bytes=0)

    def predicted(ratio: float, **passes: float) -> float:
        return blend_seconds(GPU, replace(request, passes=Passes(**passes)), ratio)

    plain = predicted(0.15)
    assert predicted(0.15, query=0.5) > plain + GPU.pass_s / 3
    assert predicted(0.15, detection=0.5) > plain + full_seconds(GPU, 4_000) / 3
    assert predicted(0.0, query=0.5) == predicted(0.0), "no budget"


# ---------------------------------------------------------------- measuring


def _seen(speed: Speed, rows: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([(1, r, r * r / 2, 0, full_seconds(speed, r)) for r in rows])


def test_fit_finds_what_made_the_times() -> None:
    a, b, c, _ = fit(_seen(GPU, [50, 500, 2000, 8000, 30_000]), 1 / (6 * 4096))
    assert (a, b, c) == pytest.approx((GPU.pass_s, GPU.row_s, GPU.pair_s), rel=0.03)


def test_fit_is_never_negative_and_survives_little() -> None:
    rng = np.random.default_rng(0)
    noisy = _seen(GPU, [400, 450, 500] * 5)
    noisy[:, 4] *= rng.uniform(0.5, 2, 15)
    for seen in (noisy, noisy[:1], _seen(replace(GPU, pass_s=0, pair_s=0), [512, 512])):
        a, b, c, _ = fit(seen, 1 / 6000)
        assert min(a, b, c) >= 0
        assert a + b + c > 0
        middle = a + b * seen[:, 1] + c * seen[:, 2]
        assert 0.4 < float(np.median(middle / seen[:, 4])) < 2.5


def test_costs_need_a_pass() -> None:
    meter = CostModel(4096)
    meter.observe_pass("full", 100, 5_000, 9.0)
    assert meter.speed() is None, "a process's first pass includes one-time costs"
    for rows in (100, 1000, 4000):
        meter.observe_pass("full", rows, rows**2 / 2, full_seconds(GPU, rows))
    alone = meter.speed()
    assert alone is not None
    assert alone.load == math.inf
    assert blend_seconds(alone, _request(4_000, bytes=0), 0.15) < full_seconds(alone, 4_000)
    assert meter.bytes_per_token(7.0) == 7.0
    meter.observe_load(10**9, 8_000, 0.5)
    meter.observe_stitch(1000, 0.001)
    speed = meter.speed()
    assert speed is not None
    assert speed.load == 2e9
    assert speed.stitch_s == pytest.approx(1e-6)
    assert full_seconds(speed, 2000) == pytest.approx(full_seconds(GPU, 2000), rel=0.1)
    assert meter.bytes_per_token(7.0) == 125_000


def test_a_change_is_detected_within_a_few_loads() -> None:
    meter = CostModel(64)
    meter.observe_pass("blend", 5000, 1, 1.0)
    for _ in range(20):
        meter.observe_load(10**9, 1000, 0.1)
    for _ in range(12):
        meter.observe_load(10**6, 1, 0.01)
    speed = meter.speed()
    assert speed is not None
    assert speed.load < 0.3e9


def test_reads_that_overlap_count_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 5.0, 10.0, 12.0])
    monkeypatch.setattr("kvrag.reuse.load.time", SimpleNamespace(perf_counter=lambda: next(now)))
    trace = Trace(model)
    with trace.reading(), trace.reading():
        pass
    with trace.reading():
        pass
    assert trace.seconds["load"] == 6.0


# ---------------------------------------------------------------- inside an engine


def _knows(engine: BlendEngine, speed: Speed) -> None:
    meter = engine._planner._costs
    for rows in (1000, 4000):
        meter.observe_pass("full", rows, rows**2 / 2, full_seconds(speed, rows))
    meter.observe_load(round(speed.load), speed.load / engine.model.bytes_per_token, 1.0)
    meter.observe_pass = lambda *_, **__: None  # type: ignore[method-assign]
    meter.observe_load = lambda *_, **__: None  # type: ignore[method-assign]
    meter.observe_stitch = lambda *_, **__: None  # type: ignore[method-assign]


SLOW_DISK = Speed(1e-4, 1e-3, 1e-9, 0.0, 1e4)
SLOW_MODEL = Speed(1e-4, 1.0, 1e-9, 0.0, 1e12)
SHORT = Speed(1.0, 1e-6, 0.0, 0.0, 1e12)


def test_a_slow_disk_makes_full_prefill(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    _knows(engine, SLOW_DISK)
    answer = engine.generate(PROMPT, max_new_tokens=3, temperature=0)
    report = answer.report
    assert (report.policy, report.ratio, report.runs, report.exact) == ("full", 1.0, (), True)
    assert "loading alone takes" in report.decision
    assert "at 9.8 KiB/s" in report.decision
    assert answer.token_ids == engine.generate(PROMPT, policy="full", max_new_tokens=3, temperature=0).token_ids


def test_a_short_context_makes_full_prefill(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    _knows(engine, SHORT)
    report = engine.generate(PROMPT, max_new_tokens=1).report
    assert report.policy == "full"
    assert report.decision.endswith("the context is short")


def test_a_slow_model_is_blended(engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    _knows(engine, SLOW_MODEL)
    report = engine.generate(PROMPT, max_new_tokens=1).report
    assert (report.policy, report.ratio, len(report.runs)) == (DEFAULT_POLICY, 0.15, 4)
    assert report.decision.startswith("blend at 0.15: predicted ")
    assert report.to_dict()["decision"] == report.decision


@pytest.mark.parametrize(
    "settings",
    [{"ratio": 0.15}, {"policy": "first_k"}, {"policy": "none"}, {"controller": "off"}],
    ids=str,
)
def test_explicit_settings_are_used(settings: dict[str, Any], engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    _knows(engine, SLOW_DISK)
    report = engine.generate(PROMPT, max_new_tokens=1, **settings).report
    assert report.policy == settings.get("policy", DEFAULT_POLICY)
    assert report.ratio == (0.0 if report.policy == "none" else 0.15)
    assert len(report.runs) == 4
    assert report.decision == ""


@pytest.mark.parametrize(
    "config", [BlendConfig(ratio=0.3), BlendConfig(policy="first_k"), BlendConfig(controller="off")], ids=str
)
def test_settings_of_the_config_are_used(config: BlendConfig, model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), config) as engine:
        engine.warm(CHUNKS)
        _knows(engine, SLOW_DISK)
        report = engine.generate(PROMPT, max_new_tokens=1).report
        assert (report.policy, len(report.runs), report.decision) == (config.policy, 4, "")
        assert report.ratio == (config.ratio or 0.15)


@pytest.mark.parametrize("speed", [SLOW_DISK, SLOW_MODEL], ids=["slow disk", "slow model"])
def test_a_deterministic_answer_does_not_depend_on_speed(speed: Speed, engine: BlendEngine) -> None:
    engine.warm(CHUNKS)
    _knows(engine, speed)
    report = engine.generate(PROMPT, max_new_tokens=1, deterministic=True).report
    assert (report.policy, report.ratio, report.decision) == (DEFAULT_POLICY, 0.15, "")


def test_nothing_found_is_nothing_to_decide(engine: BlendEngine) -> None:
    _knows(engine, SLOW_DISK)
    assert engine.generate(PROMPT, max_new_tokens=1).report.decision == ""


def test_a_disk_that_became_fast_is_detected(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.warm(CHUNKS)
    meter = engine._planner._costs
    for rows in (1000, 4000):
        meter.observe_pass("full", rows, 1, rows * 1.0)
    meter.observe_load(1000, 10, 1e6)
    assert engine.generate(PROMPT, max_new_tokens=1).report.policy == "full"
    monkeypatch.setattr("kvrag.control.cost._DISK_S", 0.0)
    assert engine.generate(PROMPT, max_new_tokens=1).report.policy == DEFAULT_POLICY


def test_chunks_in_memory_need_no_measured_disk(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._planner, "observe", lambda *_: None)  # the machine was busy
    engine.warm(CHUNKS)
    assert "no measurements" in engine.generate(PROMPT, max_new_tokens=1).report.decision
    engine._planner._costs.observe_pass("full", 2000, 1, 1.0)
    report = engine.generate(messages(*reversed(CHUNKS)), max_new_tokens=1).report
    assert report.tier == "ram"
    assert report.decision.startswith("blend at 0.15: predicted ")


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_timings_of_a_process_that_waited_for_processors_are_not_used(
    share: float, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrag.control.plan.CPU_SHARE", 2 / 3)
    own = threading.local()

    def clock() -> float:
        own.now = time.perf_counter()
        return float(own.now)

    fake = SimpleNamespace(**vars(time) | {"perf_counter": clock, "thread_time": lambda: share * own.now})
    monkeypatch.setattr("kvrag.reuse.load.time", fake)
    engine.warm(CHUNKS)
    for _ in range(2):
        engine.generate(PROMPT, max_new_tokens=1, controller="off")
    assert (engine._planner._costs.speed() is not None) == (share > 2 / 3)


def test_wrong_settings_are_refused(engine: BlendEngine) -> None:
    with pytest.raises(SettingError, match=r"unknown controller .*; choose one of auto, off"):
        BlendConfig(controller="on")
    with pytest.raises(SettingError, match=r"unknown controller .*; choose one of auto, off"):
        engine.generate(PROMPT, controller="maybe")

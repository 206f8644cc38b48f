"""The cost model on a GPU: a table from an H200, and what is measured before the first plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages
from families import FAMILIES, build
from simulated_gpu import simulated_gpu, to_gpu

from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.backend.protocol import PREFILL_BLOCK
from kvrag.control import cost
from kvrag.control.cost import CostModel, Workload
from kvrag.control.evidence import Setting
from kvrag.control.plan import decide
from kvrag.process import log_once
from kvrag.reuse.blend import selecting
from kvrag.reuse.policies import NO_PASSES, Passes

# 8B in bf16 on an H200: milliseconds to the first token by tokens of the chunks, full prefill's and by tier and policy
H200 = {
    1024: (41, {"device": {"none": 81, "query": 132}, "RAM": {"none": 152, "query": 193}}),
    4096: (135, {"device": {"none": 100, "query": 143}, "RAM": {"none": 168, "query": 186}}),
    8192: (278, {"device": {"none": 140, "query": 276}, "RAM": {"none": 261, "query": 314}}),
    16384: (590, {"device": {"none": 148, "query": 393}, "RAM": {"none": 287, "query": 392}}),
    32768: (1443, {"device": {"none": 268, "query": 952}, "RAM": {"none": 379, "query": 810}}),
}
FROM_DISK = {4096: {"none": 313, "query": 361}, 16384: {"none": 662, "query": 815}}
FRESH = {1024: 70, 4096: 76, 8192: 84, 16384: 100, 32768: 132}
POLICIES = {"none": (0.0, NO_PASSES), "query": (0.15, Passes(query=26 / 32))}
BYTES_PER_TOKEN = 1 << 17


def _workload(tokens: int, policy: str) -> tuple[Workload, float]:
    """A prompt of chunks of 510 tokens, the first of which is exact."""
    reused = tokens // 512 * 510
    ratio, passes = POLICIES[policy]
    return Workload(reused + FRESH[tokens], reused, reused - 510, 0.0, passes), ratio


def _first_use(tier: str) -> CostModel:
    """The few passes that are measured at first use: 41 ms whatever they compute, and 40 ms or more to stitch."""
    few_s, many_s = {"device": (0.081, 0.120), "RAM": (0.152, 0.190)}[tier]
    costs = CostModel(4096, by_kind=True)
    costs.observe_pass("full", 2048, 2048**2 / 2, 0.068)
    costs.observe_pass("least", 64, 64**2 / 2, 0.041)
    costs.observe_pass("blend", 64, 64 * 128, few_s, 1, 64)
    costs.observe_pass("blend", 1024, 1024 * 2048, many_s, 1, 1024)
    return costs


def _observe(costs: CostModel, tokens: int, tier: str, policy: str) -> None:
    """One prompt in full, and one that was blended."""
    full_ms, blended_ms = H200[tokens]
    request, ratio = _workload(tokens, policy)
    costs.observe_pass("full", request.prompt, request.prompt**2 / 2, full_ms / 1000)
    rows, query = FRESH[tokens] + ratio * request.inexact, request.passes.query
    every, passes = rows + query * FRESH[tokens], math.ceil(rows / PREFILL_BLOCK) + query
    costs.observe_pass("blend", every, every * request.prompt, blended_ms[tier][policy] / 1000, passes, request.reused)


def _cells(tier: str, by_more_than: float) -> Iterator[tuple[int, str, bool]]:
    """Tokens and policy where full prefill and blending differ by more, and whether full prefill was faster."""
    for tokens, (full_ms, blended_ms) in H200.items():
        for policy, ms in blended_ms[tier].items():
            if abs(ms / full_ms - 1) > by_more_than:
                yield tokens, policy, ms > full_ms


def _is_full(costs: CostModel, tokens: int, policy: str) -> bool:
    speed = costs.speed()
    assert speed is not None
    request, ratio = _workload(tokens, policy)
    return decide(speed, request, ratio)[0]


@pytest.fixture(autouse=True)
def _by_the_clock(not_by_the_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrag.control.plan.NOTICEABLE_S", 0.01)


@pytest.mark.parametrize("tier", ["device", "RAM"])
def test_first_use_already_tells_short_prompts_from_long_ones(tier: str) -> None:
    costs = _first_use(tier)
    for tokens, policy, expected in _cells(tier, 0.3):
        assert _is_full(costs, tokens, policy) == expected, (tokens, policy)
    for policy in POLICIES:
        assert _is_full(costs, 1024, policy), "41 ms against 81"


@pytest.mark.parametrize(("tier", "margin"), [("device", 0.05), ("RAM", 0.15)])
def test_after_prompts_of_every_length_the_faster_one_is_chosen(tier: str, margin: float) -> None:
    costs = _first_use(tier)
    for tokens in H200:
        for policy in POLICIES:
            _observe(costs, tokens, tier, policy)
    cells = [*_cells(tier, margin)]
    assert {is_full for *_, is_full in cells} == {True, False}
    for tokens, policy, expected in cells:
        assert _is_full(costs, tokens, policy) == expected, (tokens, policy)


@pytest.mark.parametrize("tier", ["device", "RAM"])
@pytest.mark.parametrize("unseen", H200)
def test_prompts_of_a_length_that_was_not_seen_are_predicted(unseen: int, tier: str) -> None:
    costs = _first_use(tier)
    for tokens in H200.keys() - {unseen}:
        for policy in POLICIES:
            _observe(costs, tokens, tier, policy)
    for tokens, policy, expected in _cells(tier, 0.25):
        if tokens == unseen:
            assert _is_full(costs, tokens, policy) == expected, policy


@pytest.mark.parametrize("tier", ["device", "RAM"])
def test_where_all_prompts_are_alike_five_hundredths_count(tier: str) -> None:
    for tokens, policy, expected in _cells(tier, 0.055):
        costs = _first_use(tier)
        for _ in range(16):
            _observe(costs, tokens, tier, policy)
        assert _is_full(costs, tokens, policy) == expected, (tokens, policy)


def test_chunks_on_a_disk_that_is_slower_than_the_gpu_are_computed() -> None:
    costs = _first_use("device")
    for tokens, blended_ms in FROM_DISK.items():
        for policy, ms in blended_ms.items():
            _observe(costs, tokens, "device", policy)
            reused = _workload(tokens, policy)[0].reused
            costs.observe_load(reused * BYTES_PER_TOKEN, reused, ms / 1000)
    speed = costs.speed()
    assert speed is not None
    for tokens in FROM_DISK:
        for policy in POLICIES:
            request, ratio = _workload(tokens, policy)
            cold = replace(request, bytes=request.reused * BYTES_PER_TOKEN)
            assert decide(speed, cold, ratio)[0], (tokens, policy)
    assert not _is_full(costs, 16384, "none"), "in memory"


def test_a_recompute_takes_as_long_as_its_launches() -> None:
    speed = _first_use("device").speed()
    assert speed is not None
    request, _ = _workload(4096, "query")
    few, many = (Setting(start, 0.0, 1.0, 0.0, 0.0, 0.0) for start in (0.01, 0.9))  # all answers are in doubt once
    assert few.doubts_seconds(speed, request) == 0.041
    assert many.doubts_seconds(speed, request) > 0.1
    assert many._replace(more=0.5).doubts_seconds(speed, request) < many.doubts_seconds(speed, request)


def test_on_a_cpu_all_passes_have_one_speed() -> None:
    costs = CostModel(4096)
    for tokens in H200:
        _observe(costs, tokens, "device", "query")
    speed = costs.speed()
    assert speed is not None
    assert (speed.blended, speed.least_s) == (None, 0.0)


@pytest.mark.parametrize("cold_tokens", [0, 10])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_blended_prefill_is_observed_from_the_match_to_the_logits(
    policy: str, cold_tokens: int, model: Model, tmp_path: Path
) -> None:
    """With what it waits for: chunks in memory are laid out by other threads."""
    seconds = {"match": 9.0, "select": 0.5, "load_stall": 0.25, "stitch": 0.125, "blend": 1.0}
    trace: Any = SimpleNamespace(
        own_seconds=seconds, seconds={"load": 3.0}, is_contended=False, cpu_seconds={"blend": 1.0}
    )
    reused = torch.zeros(100, dtype=torch.bool)
    reused[:80] = True
    request: Any = SimpleNamespace(ids=range(100), reused=reused, kept=10, cold_tokens=cold_tokens, bytes_read=7)
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        planner, seen = engine._planner, list[tuple[Any, ...]]()
        planner._is_gpu = True
        planner._costs.observe_pass = lambda *observed: seen.append(observed)  # type: ignore[method-assign]
        planner.observe(request, BlendConfig(policy=policy), 30, trace)
    query = selecting(BlendConfig(policy=policy), model.num_layers).query
    rows = 30 + query * 20
    assert seen == ([] if cold_tokens else [("blend", rows, rows * 100, 1.875, 1 + query, 70)])


# ---------------------------------------------------------------- measured before the first plan


@pytest.fixture
def gpu(tokenizer: Any) -> Iterator[Model]:
    if torch.cuda.is_available():
        pytest.skip("simulates the GPU that this machine has")
    with simulated_gpu():
        yield Model(to_gpu(build(*FAMILIES["llama"][:1], **FAMILIES["llama"][1])), tokenizer, "llama")


def _decision(model: Model, folder: Path, **options: Any) -> str:
    with BlendEngine(model, FileStore(folder, min_free_bytes=0), conversation_bytes=0) as engine:
        engine.warm(CHUNKS)
        return str(engine.generate(messages(*CHUNKS), max_new_tokens=1, **options).report.decision)


def test_the_passes_are_full_and_blended(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, bool]] = []
    forward = model.forward

    def note(ids: Any, cache: Any, rows: Any = None) -> Any:
        passes.append((ids.shape[1], rows is not None))
        return forward(ids, cache, rows)

    monkeypatch.setattr(model, "forward", note)
    most = min(PREFILL_BLOCK, model.context_window - 1)
    full, least, few, many = cost.measure(model)
    assert passes == [(most, False)] * 2 + [(64, False)] * 2 + [(64, True)] * 4 + [(most // 2, True)] * 2
    half, seconds = most // 2, [prefill[3] for prefill in (full, least, few, many)]
    assert full == ("full", most, most**2 / 2, seconds[0], 1, 0)
    assert least == ("least", 64, 64**2 / 2, seconds[1], 1, 0)
    assert few == ("blend", 64, 64 * 128, seconds[2], 1, 64)
    assert many == ("blend", half, half * 2 * half, seconds[3], 1, half)
    assert min(seconds) > 0


def test_a_gpu_is_measured_once_per_model(gpu: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    run = cost.measure
    monkeypatch.setattr(cost, "measure", lambda backend: measured.append(backend) or run(backend))
    for options in ({"controller": "off"}, {"deterministic": True}, {"ratio": 0.3}, {"policy": "none"}):
        _decision(gpu, tmp_path, **options)
    assert measured == [], "nothing is decided by speed"
    for folder in ("1", "2"):
        assert "predicted" in _decision(gpu, tmp_path / folder)
    assert measured == [gpu]


def test_nothing_is_measured_on_a_cpu(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "measure", lambda backend: pytest.fail("measured"))
    assert "no measurements" in _decision(model, tmp_path)


def test_without_memory_to_measure_nothing_is_known_and_this_is_said_once(
    gpu: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(backend: Model) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    log_once.cache_clear()
    monkeypatch.setattr(cost, "measure", fail)
    with caplog.at_level(logging.WARNING, "kvrag"):
        assert all("no measurements" in _decision(gpu, tmp_path / folder) for folder in ("1", "2"))
    assert [record.message for record in caplog.records if "speed" in record.message] == [
        "the speed of the GPU is unknown before its first prompts: memory ran out: use a shorter prompt, fewer or "
        "shorter chunks, a smaller dtype or a smaller conversation_bytes or ram_bytes (CUDA out of memory. Tried to "
        "allocate 2 GiB) (logged once)"
    ]

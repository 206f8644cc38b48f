"""What settings, evidence and speeds mean for a prompt: one table of cases, and what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, Model
from kvrag.control.cost import Speed, Workload
from kvrag.control.evidence import EDGES, MARGINS, START, Evidence, rung, settings
from kvrag.control.plan import FEW, LARGE, LOSS, SMALL, Planner, decide, has_lost_too_many

PROMPT = messages(*CHUNKS[1:], CHUNKS[0])
SIZES = {"small": 1_000_000, "large": 2_000_000_000}

pytestmark = pytest.mark.usefixtures("learning")


def _planner(engine: BlendEngine, size: str) -> Planner:
    planner = engine._planner
    planner._is_large = size == "large"
    return planner


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Any:
    with BlendEngine(model, tmp_path, check=0.0) as engine:
        engine.warm(CHUNKS, document="d")
        yield engine


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"policy": "full"}, ("full", 1.0, 0.0)),
        ({"policy": "full", "ratio": 0.3}, ("full", 0.3, 0.0)),
        ({"policy": "none"}, ("none", 0.0, 0.0)),
        ({"policy": "none", "margin": 2}, ("none", 0.0, 0.0)),
        ({"ratio": 0.4}, ("query", 0.4, 0.0)),
        ({"ratio": 0.4, "margin": 2}, ("query", 0.4, 0.0)),
        ({"margin": 0}, ("query", START, 0.0)),
        ({"margin": 0, "policy": "hkvd"}, ("hkvd", START, 0.0)),
        ({}, {"small": ("none", *SMALL[0]), "large": ("query", *LARGE)}),
        ({"margin": 2}, {"small": ("none", 0.0, 2), "large": ("query", LARGE[0], 2)}),
        ({"margin": 1e8}, {"small": ("none", 0.0, 1e8), "large": ("query", LARGE[0], 1e8)}),
        ({"deterministic": True}, {"small": ("none", *SMALL[0]), "large": ("query", *LARGE)}),
        ({"controller": "off"}, {"small": ("query", *SMALL[1]), "large": ("query", *LARGE)}),
        ({"policy": "hkvd"}, {"small": ("none", *SMALL[0]), "large": ("hkvd", *LARGE)}),
    ],
    ids=str,
)
def test_of_settings(engine: BlendEngine, size: str, config: dict[str, Any], expected: Any) -> None:
    plan = _planner(engine, size).plan(BlendConfig(**config))
    expected = expected[size] if isinstance(expected, dict) else expected
    assert (plan.config.policy, plan.config.ratio, plan.margin) == expected


def _evidence(
    planner: Planner, shares: dict[float, float], wrong: dict[float, float], starts: Any, n: int = 600
) -> None:
    """Count tokens of several starts, of which a share has each margin, and a share of these is wrong."""
    table = np.zeros((3, len(EDGES) + 1))
    for margin, share in shares.items():
        at = int(np.searchsorted(EDGES, margin, side="right"))
        table[:, at] += n * share, n * share, n * share * wrong.get(margin, 0.0)
    evidence = planner.evidence[""]
    for start in starts:
        for deep in (False, True):
            evidence.add(rung("query", start, deep, False), table)
    evidence.count(answers=n // 12, tokens=n)


def test_false_alarms_become_none(engine: BlendEngine) -> None:
    planner = _planner(engine, "large")
    assert planner.plan(BlendConfig()).margin == LARGE[1]
    shares = {0.1: 0.02, 0.3: 0.03, 0.7: 0.03, 1.2: 0.03, 2.5: 0.09, 9.0: 0.8}
    _evidence(planner, shares, {}, (0.15, 0.3), 6000)
    plan = planner.plan(BlendConfig())
    assert (plan.start, plan.margin) == (0.15, 0.0)
    assert planner.verdict("") == "", "no answer was compared"
    planner.evidence[""].count(compared=50, kept=50)
    assert planner.verdict("").startswith("On this model, 15% recomputed keeps 93% to 100% of the answers: ")
    assert planner.plan(BlendConfig(deterministic=True)).margin == LARGE[1], "the prior, the same everywhere"
    assert planner.plan(BlendConfig(), "another namespace").margin == LARGE[1]


def test_true_alarms_stay(engine: BlendEngine) -> None:
    planner = _planner(engine, "large")
    shares = {0.1: 0.02, 0.3: 0.03, 0.7: 0.03, 1.2: 0.03, 2.5: 0.09, 9.0: 0.8}
    _evidence(planner, shares, {0.1: 0.5, 0.3: 0.3}, (0.15, 0.3), 6000)
    planner.evidence[""].count(compared=50, kept=44)  # with the prior's
    plan = planner.plan(BlendConfig())
    assert (plan.start, plan.margin >= 0.5) == (0.15, True), "after more than half, nothing would be completed"
    chosen = [
        one
        for one in settings(planner.evidence[""], planner.evidence[""].answers, "query", False)
        if (one.start, one.margin) == (plan.start, plan.margin)
    ]
    assert chosen[0].lost <= LOSS


def test_a_prior_that_loses_answers_is_left(engine: BlendEngine) -> None:
    planner = _planner(engine, "large")
    _evidence(planner, {0.1: 0.05, 2.5: 0.15, 9.0: 0.8}, {9.0: 0.02, 2.5: 0.1}, (0.15, 0.3), 6000)
    assert planner.plan(BlendConfig()).margin == LARGE[1]
    planner.evidence[""].count(compared=50, kept=44)
    assert planner.plan(BlendConfig()).margin > 1


@pytest.mark.parametrize(
    ("compared", "kept", "expected"),
    [(0, 0, False), (7, 0, False), (8, 7, False), (12, 11, False), (12, 10, True), (40, 38, False), (40, 36, True)],
)
def test_a_loss_or_two_may_be_chance(compared: int, kept: int, expected: bool) -> None:
    assert has_lost_too_many(compared, kept) == expected


def test_where_the_model_is_always_in_doubt_prompts_are_prefilled_in_full(
    engine: BlendEngine, monkeypatch: Any
) -> None:
    monkeypatch.setattr("kvrag.control.plan.NOTICEABLE_S", 0.0)
    planner = _planner(engine, "small")
    monkeypatch.setattr(planner._costs, "speed", lambda: None)  # counts rows
    ids = engine.tokenize(PROMPT)
    assert engine.prefill(ids).report.policy == "none"
    table = np.zeros((3, len(EDGES) + 1))
    table[0, 3] = 100
    planner.evidence[""].add(rung("query", 0.0, False, False), table)
    planner.evidence[""].count(answers=FEW, tokens=12 * FEW)
    assert planner.verdict("").startswith("On this model, prompts are prefilled in full")
    found = [engine.prefill(ids).report for _ in range(32)]
    assert [report.policy for report in found].count("full") == 30, "one of sixteen is tried"
    assert "so often unsure" in next(report.decision for report in found if report.policy == "full")
    other = engine.prefill(ids).report
    assert other.policy == "full"
    assert engine.prefill(ids, BlendConfig(deterministic=True)).report.policy == "none"


def test_expected_doubts_count_in_the_decision(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvrag.control.plan.NOTICEABLE_S", 0.01)
    speed, request = Speed(0.01, 1e-3, 0, 0, 1e12), Workload(1000, 900, 900, 0)
    assert not decide(speed, request, 0.15, 0.1)[0]
    is_full, reason = decide(speed, request, 0.15, 0.9)
    assert is_full
    assert "in all" in reason


def test_every_margin_is_offered(engine: BlendEngine) -> None:
    nothing = Evidence(engine._planner.evidence._lock)
    found = settings(nothing, nothing.answers, "query", False)
    assert {one.margin for one in found} == {*MARGINS}
    assert all(one.doubts == 0 for one in found if not one.margin)
    assert all(one.lost > LOSS for one in found if not one.margin), "nothing is known of these"

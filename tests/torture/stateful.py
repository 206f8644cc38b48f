"""Hypothesis state machines as a campaign, whose cases are operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from torture.campaign import Campaign

_STEPS = 50  # of one machine
_MACHINES = 10  # per case; the first one of each is trivial


def run(campaign: Campaign, machine: Any) -> None:
    """Run machines of a class, which counts its operations as `done`.

    When a failed case is repeated alone, it is reduced to the fewest steps.
    """
    for number in campaign.numbers():
        left = campaign.limits.count - campaign.result.cases
        if campaign.limits.seconds is None and campaign.limits.only is None and left <= 0:
            break
        machine.done = 0
        with campaign.case(number, cases=0):
            count = min(_MACHINES, 1 + max(1, left // _STEPS))
            _run_machines(machine, f"{campaign.limits.seed} {number}", count, campaign.limits.only is not None)
        campaign.result.cases += machine.done


def _run_machines(machine: Any, seed: str, count: int, reduces: bool) -> None:
    limits = settings(
        max_examples=count,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=[hypothesis.Phase.generate] + [hypothesis.Phase.shrink] * reduces,
    )
    said: list[str] = []
    with hypothesis.reporting.with_reporter(said.append):  # type: ignore[attr-defined]
        try:
            run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=limits)
        except Exception as error:
            raise AssertionError(f"{error} after {_steps([*said, *getattr(error, '__notes__', ())])}") from error


def _steps(said: Sequence[str]) -> str:
    return "; ".join(line.strip() for text in said for line in text.splitlines() if "state." in line)

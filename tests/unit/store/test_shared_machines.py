"""Several machines on one shared store that fails, compared with a dictionary."""

from __future__ import annotations

import pytest
from fleet import Fleet
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

LIMITS = settings(
    max_examples=20,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # the torture campaign `machines` reduces a failure to the fewest steps
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("place", ["memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("s3",))])
def test_machines_agree_with_a_dictionary(place: str, request: pytest.FixtureRequest) -> None:
    Fleet.url = request.getfixturevalue(place).url
    few = settings(LIMITS, max_examples=6)  # each step of a server takes long
    run_state_machine_as_test(Fleet, settings=LIMITS if place == "memory" else few)

"""Several machines on one shared store that fails, compared with a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from machines import Machines

LIMITS = settings(
    max_examples=20,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("place", ["memory", "s3", "valkey"])
def test_machines_agree_with_a_dictionary(place: str, request: pytest.FixtureRequest) -> None:
    Machines.url = request.getfixturevalue(place).url
    run_state_machine_as_test(Machines, settings=LIMITS)

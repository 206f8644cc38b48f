"""Durations of the steps of a request."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from kvrag import Model
from kvrag.reuse import load as trace_module
from kvrag.reuse.load import Trace


def test_a_step_counts_with_and_without_the_steps_inside_of_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, seconds, cpu = Trace(model), itertools.count(0.0), itertools.count(0.0, 0.5)
    # a second between two readings, half of it with a processor
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), thread_time=lambda: next(cpu))
    monkeypatch.setattr(trace_module, "time", clock)
    with trace.step("select"), trace.step("stitch"):  # 0 to 3, 1 to 2
        pass
    with trace.step("blend"):  # 4 to 11
        with trace.step("load_stall"):  # 5 to 6
            pass
        with trace.step("stitch"), trace.step("load_stall"):  # 7 to 10, 8 to 9
            pass
    assert trace.seconds == {"match": 0, "load_stall": 2, "stitch": 4, "select": 3, "blend": 7, "load": 0}
    assert trace.own_seconds == {"match": 0, "load_stall": 2, "stitch": 3, "select": 2, "blend": 3, "load": 0}
    assert trace.cpu_seconds == {name: seconds / 2 for name, seconds in trace.own_seconds.items()}

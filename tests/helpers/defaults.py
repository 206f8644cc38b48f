"""Defaults of all tests: offline, one thread, and results that depend neither on the load nor on a calibration.

A conftest imports this module first, as other imports read the environment.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # also of processes: the models are too small for threads, which would only wait

import pytest
import torch

from kvrag.control.plan import Planner

torch.set_num_threads(1)
gc.disable()  # importing and collecting makes no garbage, and looking for some takes a third of the time


def pytest_collection_finish() -> None:
    """From here on garbage is collected, among what the tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noticeably faster, and every timing counts."""
    monkeypatch.setattr("kvrag.control.plan.CPU_SHARE", 0.0)
    monkeypatch.setattr("kvrag.control.plan.NOTICEABLE_S", float("inf"))


_LEARNS, _PRIOR = Planner.learns, Planner._prior


@pytest.fixture(scope="session", autouse=True)
def is_sure() -> Iterator[None]:
    """Keep to one ratio by default: random models are unsure of every token, and nothing is learned from them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Planner, "learns", lambda *_: False)
        patch.setattr(Planner, "_prior", lambda _, config, is_alone: (0.15, config.margin or 0.0))
        yield


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow the prior and the evidence, as users' engines do."""
    monkeypatch.setattr(Planner, "learns", _LEARNS)
    monkeypatch.setattr(Planner, "_prior", _PRIOR)

"""Fixtures of all tests: results depend neither on how busy the machine is nor on a calibration."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def not_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is noticeably faster, and every timing counts."""
    monkeypatch.setattr("kvrag.control.tuning.CPU_SHARE", 0.0)
    monkeypatch.setattr("kvrag.control.tuning.NOTICEABLE_S", float("inf"))
    monkeypatch.setattr("kvrag.control.tuning.STEP", 1.0)


@pytest.fixture(scope="session", autouse=True)
def is_measured() -> Iterator[None]:
    """Make the default ratio that of the bundled model for all: no calibration of random models finds one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvrag.fingerprint.Fingerprint.is_bundled", True)
        yield

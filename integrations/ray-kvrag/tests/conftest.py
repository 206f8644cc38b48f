"""Fixtures of all tests. They need Ray, and are left out in an environment without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from defaults import is_measured, not_by_the_clock  # noqa: F401
from places import Bucket, run_s3

torch.set_num_threads(1)  # the models are too small for more

if find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: Any) -> None:
        """Report skipped tests."""
        terminalreporter.write_line("integrations/ray-kvrag/tests left out: ray is not installed here")


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """An S3 server of this session."""
    with run_s3() as bucket:
        yield bucket

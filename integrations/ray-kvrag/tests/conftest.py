"""Fixtures of all tests. They need Ray, and are left out in an environment without it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from defaults import is_sure, learning, not_by_the_clock, pytest_collection_finish  # noqa: F401
from servers import s3  # noqa: F401

if find_spec("ray") is None:
    collect_ignore_glob = ["test_*.py"]

    def pytest_terminal_summary(terminalreporter: Any) -> None:
        """Report skipped tests."""
        terminalreporter.write_line("integrations/ray-kvrag/tests left out: ray is not installed here")

"""Fixtures of all tests: a tiny random model, offline."""

from __future__ import annotations

from defaults import is_sure, not_by_the_clock, pytest_collection_finish  # noqa: F401
from tiny import *  # noqa: F403

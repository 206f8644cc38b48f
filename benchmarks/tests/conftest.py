"""A tiny random model, offline and on the CPU."""

from __future__ import annotations

from defaults import is_sure, learning, not_by_the_clock, pytest_collection_finish  # noqa: F401
from tiny import *  # noqa: F403

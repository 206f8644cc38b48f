"""Fixtures of shared stores' servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from places import Bucket, Server, run_s3, run_valkey


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """An S3 server of this session's own."""
    with run_s3() as bucket:
        yield bucket


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    """A Valkey server of this session's own."""
    with run_valkey() as server:
        yield server

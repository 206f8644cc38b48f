"""Fixture of a shared store's server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from places import Bucket, run_s3


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """An S3 server of this session's own."""
    with run_s3() as bucket:
        yield bucket

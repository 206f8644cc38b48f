"""Several machines on one shared store that fails, compared with a dictionary: see `tests/helpers/fleet.py`."""

from __future__ import annotations

from fleet import Fleet
from places import run_s3

from torture import stateful
from torture.campaign import Campaign


def run(campaign: Campaign) -> None:
    """Run them on S3."""
    with run_s3() as bucket:
        Fleet.url = bucket.url
        stateful.run(campaign, Fleet)

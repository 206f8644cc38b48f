"""Several machines on one shared store that fails, compared with a dictionary: see `tests/helpers/fleet.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fleet import Fleet
from places import run_s3, run_valkey

from torture import stateful
from torture.campaign import Campaign


def run(campaign: Campaign) -> None:
    """Run them on Valkey and S3 by turns."""
    with ExitStack() as stack:
        places = [stack.enter_context(server()) for server in (run_valkey, run_s3)]

        @contextmanager
        def on_a_place(number: int) -> Iterator[None]:
            Fleet.url = places[number % len(places)].url
            yield

        stateful.run(campaign, Fleet, on_a_place)

"""Hostile documents: each is read or skipped with a reason, in bounded time and memory, and the next file is read.

A case is one of the files in `helpers/hostile.py`; later rounds damage them.
"""

from __future__ import annotations

import os
import time
from contextlib import closing

import psutil
from hostile import FILES

from kvrag.retrieval import sandbox
from torture.campaign import Campaign

_LIMIT_S = 10  # a file that takes longer is skipped
_SLACK_S = 5


def run(campaign: Campaign) -> None:
    """Read the files in a sandbox."""
    sandbox._SECONDS, sandbox._SECONDS_PER_MIB = _LIMIT_S, 0
    slowest, files = 0.0, [*FILES.items()]
    with closing(sandbox.Sandbox()) as child:
        for number in campaign.numbers():
            (suffix, name), made = files[number % len(files)]
            content = made()
            if number >= len(files):
                content = _damaged(content, campaign, number)
            with campaign.case(number):
                began = time.monotonic()
                found = child.parse(name, suffix, content)
                seconds = time.monotonic() - began
                slowest = max(slowest, seconds)
                campaign.kinds["read" if found.texts else "skipped"] += 1
                assert found.texts or found.problems, f"{name}: neither text nor a reason"
                assert "\n" not in "".join(str(problem) for problem in found.problems), f"{name}: a reason of two lines"
                assert seconds < _LIMIT_S + _SLACK_S, f"{name} took {seconds:.0f} s"
                assert child.parse("a", ".html", b"<p>x</p>").texts == ["x"], f"the file after {name} was not read"
                left = [each.pid for each in psutil.Process().children() if each.status() == psutil.STATUS_ZOMBIE]
                assert not left, f"{name} left the processes {left}"
    assert not psutil.Process(os.getpid()).children()
    campaign.result.figures["slowest, s"] = round(slowest, 1)


def _damaged(content: bytes, campaign: Campaign, number: int) -> bytes:
    """Return the content with random bytes in a few places, or cut off."""
    rng, damaged = campaign.random(number), bytearray(content)
    for _ in range(rng.randint(1, 8)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged[: rng.choice([len(damaged), rng.randrange(len(damaged))])])

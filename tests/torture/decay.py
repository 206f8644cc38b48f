"""Reuse does not decay: a short form of `python -m benchmarks decay`, with a kill in the middle.

Each case is one run: prompts of chunks drawn by Zipf's law on a store with room for a third of the corpus, while
documents are rewritten and forgotten, with or without learning. It is killed once, and continues.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.shapes import random_model
from benchmarks.speed.decay import DecaySetup, measure, store_bytes
from kvrag import FileStore
from torture.campaign import Campaign

LEAST = 0.95
"""Share of the first part's hit rate after the warm-up, each relative to the best one, that the last part must keep."""


def run(campaign: Campaign) -> None:
    """Run once per case."""
    lasting = list[float]()
    for number in campaign.numbers():
        rng = campaign.random(number)
        out, learn = campaign.folder / str(number), number % 2 == 0
        exponent, seed = rng.choice([0.7, 1.0]), rng.randrange(1 << 32)
        setup = DecaySetup(parts=4, prompts=500, documents=80, exponent=exponent, full_every=50, seed=seed)
        with campaign.case(number):
            campaign.kinds[f"learn {'on' if learn else 'off'}"] += 1
            _kill(setup, learn, out, rng.uniform(10, 40))
            lasting.append(check(measure(setup, [learn], out), setup, out, learn))
    if lasting:
        campaign.result.figures["lasting, at least"] = min(lasting)


def _kill(setup: DecaySetup, learn: bool, out: Path, seconds: float) -> None:
    """Start the run in another process, which is killed at some time."""
    process = multiprocessing.get_context("spawn").Process(target=measure, args=(setup, [learn], out))
    process.start()
    process.join(seconds)
    if process.is_alive():
        os.kill(process.pid or 0, signal.SIGKILL)
    process.join()


def check(result: dict[str, Any], setup: DecaySetup, out: Path, learn: bool) -> float:
    """Raise AssertionError unless reuse lasts and the store is sound and within its budget; return the share kept."""
    rates = [row["hit_rate"] / row["best"] for row in result["rows"]]
    assert rates[-1] >= LEAST * rates[1], f"hit rates of {rates}, as shares of the best ones"
    budget = store_bytes(random_model(setup.model), setup)
    with closing(FileStore(out / f"learn-{'on' if learn else 'off'}", budget)) as store:
        store.gc()
        found, size = store.check(), store.stats().bytes
    assert found.damaged == found.unreadable == 0, found
    assert size <= budget, f"{size} bytes in a budget of {budget}"
    return float(rates[-1] / rates[1])

"""Threads end their OpenMP threads after using torch: too many of them slow down all others."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import messages

from kvrag import openmp
from kvrag.engine import BlendEngine
from kvrag.retrieval.index import ChunkIndex
from kvrag.scheduling.lock import FairLock

CHUNK = "The lighthouse of Brindle was built in 1871 by Ada Kern, who lived there for forty years."


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def releases(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the threads that release their team."""
    threads: list[int] = []
    monkeypatch.setattr(openmp, "_release", lambda: lambda: threads.append(threading.get_ident()))
    return threads


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs libgomp and two cores")
def test_a_thread_ends_its_openmp_threads(two_threads: None) -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    counts: list[int] = []

    def work() -> None:
        for _ in range(2):
            counts.append(num_threads())
            torch.ones(1 << 20).exp_()
            counts.append(num_threads())
            openmp.release_team()
        counts.append(num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    none, some = counts[0], counts[1]
    assert some == none + 1
    assert counts == [none, some, none, some, none]


def test_a_thread_without_openmp_threads_may_release_them() -> None:
    openmp.release_team()
    openmp.release_team()
    assert torch.ones(1 << 20).exp_().sum() > 1 << 20  # torch works as before


def _stream_and_leave(engine: BlendEngine) -> None:
    deltas = engine.stream(messages(CHUNK), max_new_tokens=8)
    next(deltas)
    deltas.close()


@pytest.mark.parametrize(
    "operation",
    [
        lambda engine: engine.warm([CHUNK], document="a"),
        lambda engine: engine.generate(messages(CHUNK), max_new_tokens=2),
        _stream_and_leave,
        lambda engine: engine.explain(messages(CHUNK)),
        lambda engine: engine.prefill(engine.tokenize(messages(CHUNK))),
        lambda engine: BlendEngine(engine.model, engine.store),
    ],
    ids=["warm", "generate", "stream", "explain", "prefill", "create"],
)
def test_the_engine_releases_the_callers_team(
    engine: BlendEngine, releases: list[int], operation: Callable[[BlendEngine], Any]
) -> None:
    operation(engine)
    assert releases[-1] == threading.get_ident()


def test_a_search_releases_the_callers_team(tmp_path: Path, releases: list[int]) -> None:
    with ChunkIndex(tmp_path / "index.sqlite") as index:
        index.embed([CHUNK])
    assert releases == [threading.get_ident()]


def test_a_lock_handed_over_leaves_no_team(releases: list[int]) -> None:
    lock = FairLock()
    with lock:
        assert not releases
    assert not releases  # no thread waited: the next operation uses the same team
    other = threading.Thread(target=lambda: lock.__enter__())
    with lock:
        other.start()
        while not lock._waiting:
            pass
    other.join()
    assert releases == [threading.get_ident()]

"""Forked processes: what they share with their parent is refused or made anew, and nothing blocks them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages
from forks import forked

from kvrag import BlendEngine, FileStore, KvragError, Model, RemoteEngine, SettingError, process
from kvrag.engine import _shared
from kvrag.retrieval.index import ChunkIndex
from kvrag.scheduling.waiting import FairLock

REFUSED = "was in use when this process was forked: create the engine after the fork only"
PROMPT = messages(*CHUNKS[:2])


def _opened(model: Model, folder: Path) -> BlendEngine:
    return BlendEngine(model, FileStore(folder, min_free_bytes=0), ram_bytes=0, learn=True, check=1.0)


def _refusal(work: Callable[[], object]) -> str:
    with pytest.raises(SettingError) as caught:
        forked(work)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def used(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine all of whose pools have threads."""
    with _opened(model, tmp_path / "kv") as engine:
        engine.warm(CHUNKS, document="a")
        engine.generate(PROMPT, max_new_tokens=2)
        yield engine


USES: dict[str, Callable[[BlendEngine], object]] = {
    "warm": lambda engine: engine.warm(["Something new."]),
    "documents": lambda engine: engine.generate(PROMPT, documents=CHUNKS[:2], max_new_tokens=2),
    "generate": lambda engine: engine.generate(PROMPT, max_new_tokens=2),
    "batch": lambda engine: engine.generate_batch([PROMPT, PROMPT], max_new_tokens=2),
    "forget": lambda engine: engine.forget("a"),
    "forget learned": lambda engine: engine.forget_learned(),
    "documents of a store": lambda engine: engine.documents(),
    "prefill": lambda engine: engine.prefill([1, 2, 3]),
    "close": lambda engine: engine.close(),
}


@pytest.mark.parametrize("use", USES)
def test_an_engine_is_refused_in_a_child(used: BlendEngine, use: str) -> None:
    assert _refusal(lambda: USES[use](used)).startswith(f"this engine {REFUSED}")
    assert used.documents() == ["a"]
    assert used.warm(CHUNKS, document="a").new == 0


@pytest.mark.parametrize("use", ["missing", "remove", "close"])
def test_a_store_is_refused_in_a_child(used: BlendEngine, use: str) -> None:
    store = used.store
    work: Callable[[], object] = store.close if use == "close" else lambda: getattr(store, use)(["key"])
    assert REFUSED in _refusal(work)


def test_answers_in_progress_are_refused_in_a_child(used: BlendEngine) -> None:
    single = used.stream(PROMPT, max_new_tokens=40)
    next(single)
    both = used.stream_batch([PROMPT, PROMPT], max_new_tokens=2)
    next(both)
    for stream in (single, both):
        assert REFUSED in _refusal(partial(list, stream))
        assert list(stream)


def test_a_child_has_an_engine_of_its_own_on_the_same_model(used: BlendEngine, model: Model, tmp_path: Path) -> None:
    def answer(folder: Path) -> tuple[str, int, int]:
        with _opened(model, folder) as engine:
            new = engine.warm(CHUNKS).new
            answer = engine.generate(PROMPT, max_new_tokens=4, ratio=0.5, policy="first_k")
            return answer.text, answer.report.stored_tokens, new

    expected = answer(tmp_path / "parent")
    assert expected[1] > 0
    assert forked(lambda: answer(tmp_path / "child")) == expected


def test_a_file_that_was_open_is_not_opened_again(model: Model, tmp_path: Path) -> None:
    """SQLite would believe that the child holds the parent's locks, and lose what it writes."""

    def new() -> int:
        with _opened(model, tmp_path) as engine:
            return engine.warm(CHUNKS).new

    engine = _opened(model, tmp_path)
    engine.warm(CHUNKS[:1])
    assert _refusal(new).startswith(f"{tmp_path / 'manifest.sqlite'} {REFUSED}")
    engine.close()
    assert forked(new) == len(CHUNKS) - 1
    assert new() == 0


def test_a_shared_engine_is_created_anew_in_a_child(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"store": str(tmp_path)}
    engine = BlendEngine.shared("reader", **settings)
    key = next(key for key, instance in _shared._instances.items() if instance is engine)
    engine.close()
    with _shared._locks[key]:  # as of a thread that creates it
        assert forked(lambda: BlendEngine.shared("reader", **settings).warm(CHUNKS[:1]).new) == 1


def test_a_model_that_another_thread_uses_does_not_block_a_child(model: Model, tmp_path: Path) -> None:
    def use() -> None:
        with _opened(model, tmp_path) as engine:
            engine.warm(CHUNKS)

    ready, over = threading.Event(), threading.Event()

    def hold() -> None:
        with model.lock:
            ready.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        ready.wait()
        assert REFUSED in _refusal(use)
    finally:
        over.set()
        thread.join()
    assert forked(use) is None


@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs libgomp and two cores")
def test_torch_does_not_block_a_child() -> None:
    before, values = torch.get_num_threads(), torch.ones(4, 1000, 1000)
    torch.set_num_threads(2)
    try:
        torch.softmax(values, -1)  # starts threads
        assert forked(lambda: float(torch.softmax(values, -1).sum())) == pytest.approx(4000)
    finally:
        torch.set_num_threads(before)


def test_an_index_is_refused_in_a_child(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with ChunkIndex(path) as index:
        assert _refusal(lambda: len(index)).startswith(f"{path} {REFUSED}")
        assert _refusal(lambda: len(ChunkIndex(path))).startswith(f"{path} {REFUSED}")
    assert forked(lambda: len(ChunkIndex(path))) == 0


def test_a_child_has_connections_of_its_own() -> None:
    connection = RemoteEngine("http://127.0.0.1:9", "m")._blocking
    client = connection._client()
    assert forked(lambda: connection._client() is not client)
    assert connection._client() is client


def test_the_child_of_a_child_is_refused(used: BlendEngine, model: Model) -> None:
    def use() -> None:
        with pytest.raises(KvragError, match=REFUSED):
            used.documents()
        forked(used.documents)

    with model.lock, pytest.raises(KvragError, match=f"this engine {REFUSED}"):
        forked(use)


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
    monkeypatch.setattr(process, "_release", lambda: lambda: threads.append(threading.get_ident()))
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
            process.release_team()
        counts.append(num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    none, some = counts[0], counts[1]
    assert some == none + 1
    assert counts == [none, some, none, some, none]


def test_a_thread_without_openmp_threads_may_release_them() -> None:
    process.release_team()
    process.release_team()
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

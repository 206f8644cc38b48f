"""Reading ahead: the chunks of a prompt are in RAM before it arrives, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, messages

from kvrag import BlendConfig, BlendEngine, FileStore, Model

CONFIG = BlendConfig(controller="off")


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(model, tmp_path, CONFIG) as engine:
        engine.warm(CHUNKS)
        yield engine


def ask(engine: BlendEngine, *chunks: str) -> Any:
    return engine.generate(messages(*chunks), temperature=0, max_new_tokens=8)


def test_chunks_read_ahead_are_in_ram_and_answers_are_the_same(engine: BlendEngine, tmp_path: Path) -> None:
    engine.prefetch([*CHUNKS[:2], "never warmed, and therefore not in the store", CHUNKS[1]])
    engine._prefetcher.wait()
    assert len(engine._pipeline.memory) == 2
    ahead = ask(engine, *CHUNKS[:2])
    assert (ahead.report.tier, ahead.report.bytes_loaded) == ("ram", 0)
    with BlendEngine(engine.model, tmp_path, CONFIG) as other:
        cold = ask(other, *CHUNKS[:2])
        assert cold.report.tier == "disk"
        assert cold.report.bytes_loaded == engine._pipeline.memory.bytes - sum(
            chunk.ids.nbytes for chunk in engine._pipeline.memory._chunks.values()
        )
    assert (ahead.text, ahead.report.runs) == (cold.text, cold.report.runs)


def test_a_namespace_reads_its_own_chunks(engine: BlendEngine) -> None:
    engine.prefetch(CHUNKS, namespace="other")
    engine._prefetcher.wait()
    assert len(engine._pipeline.memory) == 0


def test_it_uses_only_free_space(engine: BlendEngine, tmp_path: Path) -> None:
    engine.prefetch(CHUNKS)
    engine._prefetcher.wait()
    sizes = [chunk.nbytes for chunk in engine._pipeline.memory._chunks.values()]
    with BlendEngine(engine.model, tmp_path, CONFIG, ram_bytes=sum(sizes[:2]) + sizes[2] // 2) as small:
        ask(small, CHUNKS[3])
        (held,) = small._pipeline.memory.keys()
        small.prefetch(CHUNKS[:3])
        small._prefetcher.wait()
        assert small._pipeline.memory.open(held) is not None
        assert len(small._pipeline.memory) == 2
        before = small._pipeline.memory.keys()
        small.prefetch(CHUNKS[:3])
        small._prefetcher.wait()
        assert small._pipeline.memory.keys() == before
    with BlendEngine(engine.model, tmp_path, CONFIG, ram_bytes=0) as none:
        none.prefetch(CHUNKS)
        none._prefetcher.wait()
        assert none._pipeline.memory.bytes == 0


def test_it_does_not_wait_and_leaves_errors_to_the_request(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, let, open_ = threading.Event(), threading.Event(), FileStore.open

    def broken(self: FileStore, key: str) -> Any:
        opened.set()
        assert let.wait(60)
        raise OSError("the disk is gone")

    monkeypatch.setattr(FileStore, "open", broken)
    for _ in range(20):  # returns before anything is read; only a few calls wait
        engine.prefetch(CHUNKS)
    assert opened.wait(60)
    assert engine._prefetcher._pool._work_queue.qsize() < 5
    let.set()
    engine._prefetcher.wait()
    monkeypatch.setattr(FileStore, "open", open_)
    assert len(engine._pipeline.memory) == 0
    engine.prefetch(CHUNKS)  # it works again
    engine._prefetcher.wait()
    assert len(engine._pipeline.memory) == 4


def test_chunks_that_a_request_reads_are_not_read_twice(engine: BlendEngine) -> None:
    memory, store = engine._pipeline.memory, engine.store
    key, other = list(engine._lookup.usable(entry.text_key for entry in store.entries(0)).values())[:2]
    opened = store.open(key)
    assert opened is not None
    reading = memory.keeping(opened)
    engine._prefetcher.start(lambda: [key, other])
    engine._prefetcher.wait()
    assert memory.keys() == [other]
    reading.close()


def test_space_that_was_taken_meanwhile_is_not_used(engine: BlendEngine) -> None:
    memory, store = engine._pipeline.memory, engine.store
    keys = list(engine._lookup.usable(entry.text_key for entry in store.entries(0)).values())
    readers = [memory.keeping(reader, only_free=True) for key in keys if (reader := store.open(key))]
    for reader in readers:
        for number in range(reader.num_layers):
            reader.layer(number)
    readers[0].close()
    memory._chunks._Cache__maxsize = memory.bytes  # type: ignore[attr-defined]
    for reader in readers[1:]:
        reader.close()
    assert memory.keys() == keys[:1]


def test_a_closed_engine_reads_nothing(model: Model, tmp_path: Path) -> None:
    engine = BlendEngine(model, tmp_path)
    engine.warm(CHUNKS)
    engine.close()
    engine.prefetch(CHUNKS)
    assert len(engine._pipeline.memory) == 0

"""A request when the store is slow, fails, or differs from its manifest."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages, plain_logits, prefilled, prepare, relative

from kvrag import BlendConfig, BlendEngine, FileStore, Model, OutOfMemoryError, prefill
from kvrag.backend.positions import Rotation
from kvrag.control.plan import Plan
from kvrag.errors import ChunkUnreadableError
from kvrag.reuse.load import LayerLoader
from kvrag.scheduling.waiting import FairLock

PROMPT = messages(*CHUNKS)


class Reader:
    """A chunk's reader whose layers can be made to fail or to take their time."""

    def __init__(self, reader: Any, before: Callable[[str, int], None]) -> None:
        self._reader, self._before = reader, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def layer(self, number: int) -> Any:
        self._before(self._reader.key, number)
        return self._reader.layer(number)


@pytest.fixture
def cold(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """An engine without RAM tier and conversations, on warmed chunks."""
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), ram_bytes=0, conversation_bytes=0) as engine:
        engine.warm(CHUNKS)
        yield engine


def _intercept(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, before: Callable[[str, int], None]) -> None:
    store: Any = engine.store
    opening = store.open
    monkeypatch.setattr(store, "open", lambda key: (reader := opening(key)) and Reader(reader, before))


@pytest.mark.parametrize("policy", ["query", "hkvd", "random"])
def test_other_answers_continue_while_a_disk_stalls(
    policy: str, cold: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, goes_on = threading.Event(), threading.Event()

    def stall(key: str, number: int) -> None:
        if number == 2:
            stalled.set()
            assert goes_on.wait(30)

    ids = cold.model.tokenizer.render(PROMPT)
    before = prepare(cold, ids, 0.3, policy).logits
    other = cold.generate("Say something else.", max_new_tokens=4, temperature=0).token_ids
    _intercept(cold, monkeypatch, stall)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(prepare(cold, ids, 0.3, policy).logits), daemon=True)
    thread.start()
    assert stalled.wait(30)
    assert cold.generate("Say something else.", max_new_tokens=4, temperature=0).token_ids == other
    assert not found
    goes_on.set()
    thread.join(30)
    assert torch.equal(found[0], before)


def test_the_report_has_the_time_that_the_forward_pass_waited_for_chunks(
    cold: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_waits = threading.Event()
    real = LayerLoader._await

    def wait(self: LayerLoader, number: int) -> Any:
        if number == 2:
            pass_waits.set()
        return real(self, number)

    def read(key: str, number: int) -> None:
        if number == 2:
            assert pass_waits.wait(30)
            time.sleep(0.02)

    ids = cold.model.tokenizer.render(PROMPT)
    monkeypatch.setattr(LayerLoader, "_await", wait)
    _intercept(cold, monkeypatch, read)
    report = prepare(cold, ids, 0.3, "query").report
    assert report.load_s >= 0.02
    assert report.select_s + report.blend_s >= report.load_stall_s >= 0.02


def test_the_first_layer_has_the_disk_to_itself_and_its_chunks_are_read_together(
    cold: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    together = threading.Barrier(len(CHUNKS), timeout=30)

    def begin(key: str, number: int) -> None:
        read.append(number)
        if number == 0:
            together.wait()

    ids = cold.model.tokenizer.render(PROMPT)
    whole = prepare(cold, ids, 0.3).logits
    _intercept(cold, monkeypatch, begin)
    assert torch.equal(prepare(cold, ids, 0.3).logits, whole)
    assert read[: len(CHUNKS)] == [0] * len(CHUNKS)
    assert sorted(read) == sorted(len(CHUNKS) * list(range(cold.model.num_layers)))


def test_a_chunk_that_cannot_be_read_now_is_recomputed_and_stays(
    cold: BlendEngine, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = cold.model.tokenizer.render(PROMPT)
    whole = prepare(cold, ids, 1.0)
    failing = whole.report.runs[1].key

    def fail(key: str, number: int) -> None:
        if key == failing and number == 1:
            raise ChunkUnreadableError(key, "Input/output error")

    with monkeypatch.context() as patch:
        _intercept(cold, patch, fail)
        done = prepare(cold, ids, 1.0)
        assert [run.key for run in done.report.runs] == [run.key for run in whole.report.runs if run.key != failing]
        assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5
        assert done.report.notes == (f"chunk {failing} cannot be read at the moment: Input/output error; recomputed",)
    assert cold.store.stats().damaged == 0
    assert prepare(cold, ids, 1.0).report.runs == whole.report.runs


def test_a_chunk_that_another_process_cannot_read_for_the_decision_is_left_out_in_all(
    cold: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = cold.model.tokenizer.render(PROMPT)
    whole = prepare(cold, ids).report
    failing, other = whole.runs[1].key, []

    def gather(value: Any) -> tuple[Any, ...]:
        """Exchange the values of two processes."""
        if isinstance(value, Plan) and not other:
            other.append(ChunkUnreadableError(failing, "Input/output error"))
            return value, other[0]
        return value, value

    monkeypatch.setattr(cold.model, "gather", gather)
    report = prepare(cold, ids).report
    assert [run.key for run in report.runs] == [run.key for run in whole.runs if run.key != failing]
    assert report.notes == (f"chunk {failing} cannot be read at the moment: Input/output error; recomputed",)


def test_a_failed_allocation_is_not_damage(cold: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = cold.model.tokenizer.render(PROMPT)
    failing = prepare(cold, ids, 1.0).report.runs[2].key

    def fail(key: str, number: int) -> None:
        if key == failing:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    _intercept(cold, monkeypatch, fail)
    report = prepare(cold, ids, 1.0).report
    assert len(report.runs) == 3
    assert "out of memory" in report.notes[0]
    assert cold.store.stats().damaged == 0


def test_a_failing_store_is_given_up_after_a_few_chunks(
    cold: BlendEngine, hf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str, number: int) -> None:
        raise ChunkUnreadableError(key, "Input/output error")

    ids = cold.model.tokenizer.render(PROMPT)
    monkeypatch.setattr("kvrag.prefill._FAILURES", 2)
    _intercept(cold, monkeypatch, fail)
    done = prepare(cold, ids, 0.2)
    assert done.report.runs == ()
    assert len(done.report.notes) == 2
    assert relative(done.logits[0], plain_logits(hf, ids)[-1]) <= 1e-5


def test_a_released_lock_can_be_acquired_and_is_acquired_again() -> None:
    lock, had = FairLock(), threading.Event()

    def take() -> None:
        with lock:
            had.set()

    thread = threading.Thread(target=take, daemon=True)
    with lock:
        thread.start()
        assert not had.wait(0.05)
        with lock.released():
            assert had.wait(30)
            assert not lock.held
        assert lock.held
    thread.join(30)
    assert not lock._held


SHARED = "(SELECT text FROM texts WHERE namespace = '{}' AND ids IN (SELECT ids FROM texts WHERE namespace = '{}'))"


@pytest.mark.parametrize("ram_bytes", [0, 1 << 30])
@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE texts SET namespace = CASE namespace WHEN 'one' THEN 'two' ELSE 'one' END",
        f"UPDATE holders SET key = (SELECT key FROM chunks WHERE text = {SHARED.format('one', 'two')})"
        f" WHERE namespace = 'two'; UPDATE chunks SET text = {SHARED.format('two', 'one')}"
        f" WHERE text = {SHARED.format('one', 'two')}",
    ],
)
def test_a_damaged_manifest_leads_to_no_chunk_of_another_namespace(
    damage: str, ram_bytes: int, model: Model, tmp_path: Path
) -> None:
    ids = model.tokenizer.render(messages(CHUNKS[1]))
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS[:2], document="a", namespace="one")
        engine.warm(CHUNKS[1:3], document="b", namespace="two")
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as manifest:
        manifest.executescript(damage)
        manifest.commit()
    store = FileStore(tmp_path, min_free_bytes=0)
    with BlendEngine(model, store, BlendConfig("none"), ram_bytes=ram_bytes) as engine:
        for _ in range(2):
            report = prefilled(engine, ids, namespace="two").report
            assert all(store.open(run.key).namespace == "two" for run in report.runs)  # type: ignore[union-attr]


def test_a_chunk_with_another_context_than_recorded_is_not_served(model: Model, tmp_path: Path) -> None:
    """It would have traces of its document."""
    ids = model.tokenizer.render(messages(CHUNKS[1]))
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.warm(CHUNKS[:2], document="a")
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as manifest:
        manifest.execute("UPDATE chunks SET context_tokens = 0")
        manifest.commit()
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), BlendConfig("none", context_tokens=0)) as engine:
        report = engine.prefill(ids).report
        assert (report.runs, len(report.notes)) == ((), 1)


def test_a_prompt_hashes_each_chunk_once_and_reads_the_removals_before_and_after(
    cold: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = cold.model.tokenizer.render(messages(CHUNKS[0], CHUNKS[1], CHUNKS[0], CHUNKS[0], CHUNKS[1]))
    hashed, removals = [], []
    hashing, reading = prefill.text_key, cold.store.removals
    monkeypatch.setattr(prefill, "text_key", lambda *text: hashed.append(text) or hashing(*text))
    monkeypatch.setattr(cold.store, "removals", lambda: removals.append(1) or reading())
    assert len(cold.prefill(ids).runs) == 5
    assert (len(hashed), len(removals)) == (2, 2)


FAILURES = [
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] data. DefaultCPUAllocator: can't allocate memory\nframe #0"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4 GiB"),
]


@pytest.mark.parametrize(
    ("policy", "failure", "after"),
    [
        (policy, failure, 3 * ((i + j) % 2))
        for i, policy in enumerate(["full", "query", "hkvd", "first_k"])
        for j, failure in enumerate(FAILURES)
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_memory_that_runs_out_in_a_forward_pass_is_an_error_with_a_remedy(
    after: int, policy: str, failure: Exception, cold: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"policy": policy, "ratio": 0.3, "max_new_tokens": 6, "temperature": 0}
    wanted = cold.generate(PROMPT, **settings)
    forward, calls = cold.model.hf.forward, iter(range(100))

    def fail(**arguments: Any) -> Any:
        if next(calls) >= after:
            raise failure
        return forward(**arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cold.model.hf, "forward", fail)
        with pytest.raises(OutOfMemoryError, match=r"shorter prompt.*fewer.*chunks") as caught:
            cold.generate(messages(*CHUNKS, question="Who?"), **settings)
        assert "\n" not in str(caught.value)
        with pytest.raises(OutOfMemoryError, match="fewer"):
            cold.warm([f"{chunk} And more." for chunk in CHUNKS])
    assert cold.generate(PROMPT, **settings).token_ids == wanted.token_ids
    assert cold.warm([f"{chunk} And more." for chunk in CHUNKS]).new == len(CHUNKS)
    assert cold.store.stats().damaged == 0


def test_another_error_of_the_model_is_passed_on(cold: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(cold.model.hf, "forward", fail)
    with pytest.raises(RuntimeError, match="device-side"):
        cold.generate(PROMPT, max_new_tokens=1)


def test_memory_that_runs_out_while_chunks_are_stitched(cold: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Rotation, "rotate", fail)
        with pytest.raises(OutOfMemoryError):
            cold.generate(PROMPT, policy="none", max_new_tokens=1)
    assert cold.generate(PROMPT, policy="none", max_new_tokens=1).report.stored_tokens

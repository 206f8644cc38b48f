"""Two tiers: chunks on the device, with those that it drops still in RAM; and what happens where memory runs out.

The tier in RAM alone is tested with the store, the copies to a GPU in `tests/integration/test_gpu_tiers.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blending import CHUNKS, messages, prepare

from kvrag import BlendEngine, Model
from kvrag.errors import ChunkUnreadableError, OutOfMemoryError
from kvrag.memory.tier import Keeping, MemoryTier
from kvrag.process import log_once
from kvrag.reuse.blend import LateRecompute, blend

KIB = 1024


class Reader:
    """A stored chunk of one layer of 3 KiB."""

    namespace, ids, context_tokens = "", np.zeros(0, np.uint32), 0
    tier, num_layers, bytes_read = "disk", 1, 0

    def __init__(self, key: str) -> None:
        self.key = key

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1, 1, KIB, dtype=torch.uint8), torch.zeros(1, 1, 2 * KIB, dtype=torch.uint8)

    def close(self) -> None:
        pass


def _use(memory: MemoryTier, *keys: str) -> None:
    """Read chunks as one prompt does."""
    readers = [memory.open(key) or memory.keeping(Reader(key)) for key in keys]
    for reader in readers:
        layer = reader.layer(0)
        if isinstance(reader, Keeping):
            reader.moved(0, layer)
    for reader in readers:
        reader.close()


def test_chunks_are_on_the_device_from_the_second_use_on_and_stay_in_ram() -> None:
    device = MemoryTier(3 * KIB, name="device")
    memory = MemoryTier(6 * KIB, device)
    _use(memory, "a")
    assert (memory.keys(), device.keys()) == (["a"], [])
    _use(memory, "a")
    assert (device.keys(), device._chunks.currsize, memory._chunks.currsize) == (["a"], 3 * KIB, 3 * KIB)
    _use(memory, "b")
    _use(memory, "a")  # from the device; in RAM, it is more recent than "b" from now on
    _use(memory, "c")
    assert [key for key in "abc" if key in memory._chunks] == ["a", "c"]
    _use(memory, "c")
    assert device.keys() == ["c"]
    reader = memory.open("a")
    assert reader is not None
    assert reader.tier == "ram"  # which still has what the device dropped


def test_a_prompt_moves_no_more_to_the_device_than_that_can_keep() -> None:
    device = MemoryTier(6 * KIB, name="device")
    memory = MemoryTier(100 * KIB, device)
    _use(memory, "a", "b", "c", "d")
    assert len(device.keys()) == 0
    _use(memory, "a", "b", "c", "d")
    assert sorted(device.keys()) == ["a", "b"]


def test_a_chunk_dropped_on_its_way_to_the_device_does_not_come_back() -> None:
    device = MemoryTier(6 * KIB, name="device")
    memory = MemoryTier(6 * KIB, device)
    _use(memory, "a")
    reader = memory.open("a")
    assert isinstance(reader, Keeping)
    reader.moved(0, reader.layer(0))
    memory.drop(["a"])
    reader.close()
    assert memory.keys() == []


class Failing:
    """`blend`, which raises the errors first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, *args: Any) -> torch.Tensor:
        if self.errors:
            raise self.errors.pop()
        return blend(*args)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        OutOfMemoryError("memory ran out (CUDA out of memory)"),
        ChunkUnreadableError("0", "out of memory"),  # unpacked on the device
    ],
)
def test_a_pass_without_memory_is_repeated_without_the_tier_on_the_device(
    error: Exception, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    ids = model.tokenizer.render(messages(*CHUNKS[:2]))
    with BlendEngine(model, tmp_path, device_bytes=1 << 30) as engine:
        engine.warm(CHUNKS)
        first = [prepare(engine, ids, 0.2, "query") for _ in range(3)][-1]
        device = engine._pipeline.memory._faster
        assert device is not None
        assert (first.report.tier, len(device.keys())) == ("device", 2)
        fail = Failing(error)
        monkeypatch.setattr("kvrag.prefill.blend", fail)
        again = prepare(engine, ids, 0.2, "query")
        assert torch.equal(again.logits, first.logits)
        assert (again.report.tier, again.report.notes, fail.errors) == ("ram", (), [])
        assert (len(device.keys()), device.max_bytes) == (0, 1 << 29)
        prepare(engine, ids, 0.2, "query")
        assert len(device.keys()) == 2  # it goes on, smaller
        assert len(caplog.records) == 1
        assert "\n" not in caplog.messages[0]


def test_a_pass_is_repeated_once(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = model.tokenizer.render(messages(*CHUNKS[:2]))
    for device_bytes, times in ((1 << 30, 2), (0, 1)):
        with BlendEngine(model, tmp_path / str(times), device_bytes=device_bytes) as engine:
            engine.warm(CHUNKS)
            fail = Failing(*[torch.OutOfMemoryError("CUDA out of memory")] * 5)
            with monkeypatch.context() as patches:
                patches.setattr("kvrag.prefill.blend", fail)
                with pytest.raises(OutOfMemoryError, match="memory ran out"):
                    prepare(engine, ids, 0.2, "query")
            assert len(fail.errors) == 5 - times
            assert prepare(engine, ids, 0.2, "query").report.reused_tokens


class OutOfMemory:
    """A function that runs out of memory after it has computed so many times."""

    def __init__(self, times: int, compute: Any) -> None:
        self.left, self.compute = times, compute

    def __call__(self, *args: Any) -> Any:
        result = self.compute(*args)
        self.left -= 1
        if self.left >= 0:
            raise OutOfMemoryError("memory ran out (CUDA out of memory)")
        return result


@pytest.mark.parametrize("margin", [0.0, 1e8])
def test_a_step_without_memory_is_repeated_once_without_the_tier_on_the_device(
    margin: float, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, settings = messages(*CHUNKS[:2]), {"margin": margin, "controller": "off"}
    with BlendEngine(model, tmp_path, device_bytes=1 << 30, conversation_bytes=0) as engine:
        engine.warm(CHUNKS)
        first = [engine.generate(prompt, max_new_tokens=4, temperature=0, **settings) for _ in range(3)][-1]
        device = engine._pipeline.memory._faster
        assert device is not None
        assert (first.report.tier, len(device.keys())) == ("device", 2)
        owner, name = (LateRecompute, "_forward") if margin else (model, "forward_each")
        for times, fails in ((1, False), (2, True), (0, False)):
            compute = OutOfMemory(times, getattr(owner, name))
            with monkeypatch.context() as patches:
                patches.setattr(owner, name, lambda *args, compute=compute: compute(*args))
                if fails:
                    with pytest.raises(OutOfMemoryError, match="memory ran out"):
                        engine.generate(prompt, max_new_tokens=4, temperature=0, **settings)
                else:
                    again = engine.generate(prompt, max_new_tokens=4, temperature=0, **settings)
                    assert again.text == first.text
            assert compute.left < 0 or fails
            if times:
                assert (len(device.keys()), device.max_bytes) == (0, (1 << 30) >> (1 + fails))


def test_the_tier_on_the_device_becomes_smaller_once_for_all_rows_of_a_step(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BlendEngine(model, tmp_path, device_bytes=1 << 30) as engine:
        engine.warm(CHUNKS)
        device = engine._pipeline.memory._faster
        assert device is not None
        compute = OutOfMemory(1, model.forward_each)
        monkeypatch.setattr(model, "forward_each", compute)
        prompts = [messages(*CHUNKS[:2]), messages(*CHUNKS[1:])]
        assert len(engine.generate_batch(prompts, max_new_tokens=3, temperature=0)) == 2
        assert compute.left < 0
        assert device.max_bytes == 1 << 29

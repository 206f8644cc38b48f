"""How chunks reach a GPU from memory, on a simulated one: few copies, no wait, no concatenation on the CPU.

The work of the stream that copies is done when the model's waits for it, and gives NaN until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from blending import CHUNKS, messages, prepare, relative
from families import stacked
from simulated_gpu import counts, launches, simulated_gpu, to_gpu

from kvrag import BlendEngine, FileStore, Model
from kvrag.config import EngineOptions, checked
from kvrag.memory.tier import TOGETHER, MemoryTier, Pinned
from kvrag.process import log_once
from kvrag.reuse.load import LayerLoader, tiers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates the GPU that this machine has")

LAYERS = 16
GROUPS = 6  # 0, 1, 2 to 3, 4 to 7, 8 to 15, in two pieces of memory at most
GIB = 1 << 30


@contextmanager
def _engine(
    on_gpu: bool, folder: Path, tokenizer: Any, family: str = "llama", num_layers: int = 4, **options: Any
) -> Iterator[BlendEngine]:
    hf = stacked(family, num_layers)
    with simulated_gpu(on_gpu):
        model = Model(to_gpu(hf) if on_gpu else hf, tokenizer, family)
        with BlendEngine(model, FileStore(folder / str(on_gpu), min_free_bytes=0), **options) as engine:
            engine.warm(CHUNKS)
            yield engine


def _logits(engine: BlendEngine, tier: str, policy: str = "query") -> torch.Tensor:
    counts.clear()
    launches.clear()
    done = prepare(engine, engine.model.tokenizer.render(messages(*CHUNKS)), 0.3, policy)
    assert done.report.tier == tier
    assert done.report.recomputed_tokens > 0
    return done.logits.cpu()


@pytest.mark.parametrize(
    ("family", "codec"),
    # windows; keys and values of different widths
    [("llama", "native"), ("llama", "int8"), ("gemma3", "native"), ("youtu", "native")],
)
def test_chunks_in_memory_are_copied_several_layers_at_once(
    family: str, codec: str, tokenizer: Any, tmp_path: Path
) -> None:
    with _engine(False, tmp_path, tokenizer, family, LAYERS, codec=codec) as engine:
        expected = _logits(engine, "disk")
    with _engine(True, tmp_path, tokenizer, family, LAYERS, codec=codec) as engine:
        waits = []
        for tier in ("disk", "ram", "device", "device"):
            assert relative(_logits(engine, tier), expected) < 1e-4, tier
            copies = counts.pop("to_gpu_async", 0)
            pinned = counts.pop("pinned", 0)
            assert counts["cat_on_host"] == 0
            assert (pinned > 0) == (tier == "disk")
            if codec == "native":
                most = 0 if tier == "device" else GROUPS * len(CHUNKS)
                assert most / 2 <= copies <= most
            else:  # packed keys and values are unpacked on the GPU, each from a copy of its own
                assert copies == (0 if tier == "device" else 2 * LAYERS * len(CHUNKS))
            waits.append(dict(counts))
        assert waits[0] == waits[1] == waits[2] == waits[3]


def test_launches_of_a_layer_hardly_depend_on_the_number_of_chunks(tokenizer: Any, tmp_path: Path) -> None:
    with _engine(True, tmp_path, tokenizer, num_layers=LAYERS, device_bytes=0) as engine:
        launched = []
        for num_chunks in (1, 4):
            ids = engine.model.tokenizer.render(messages(*CHUNKS[:num_chunks]))
            for _ in range(2):
                launches.clear()
                prepare(engine, ids, 0.3, "first_k")
            launched.append(launches.total())
    assert launched[1] - launched[0] <= 3 * GROUPS


@pytest.mark.parametrize("device_bytes", [0, GIB])
def test_a_chunk_may_be_dropped_while_it_is_copied(
    device_bytes: int, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _engine(True, tmp_path, tokenizer, device_bytes=device_bytes) as engine:
        expected = _logits(engine, "disk")
        memory = engine._pipeline.memory
        real = LayerLoader._lay_out

        def lay_out(self: LayerLoader, read: Any) -> Any:
            laid = real(self, read)  # not done yet by the GPU
            if len(laid) == 2:
                memory.drop(memory.keys())
            return laid

        monkeypatch.setattr(LayerLoader, "_lay_out", lay_out)
        second = _logits(engine, "ram")
        assert memory.keys() == []
        assert torch.equal(second, expected)
        assert torch.equal(_logits(engine, "disk"), expected)
        if device_bytes:
            monkeypatch.setattr(LayerLoader, "_lay_out", real)
            _logits(engine, "ram")
            monkeypatch.setattr(LayerLoader, "_lay_out", lambda *args: memory.drop(memory.keys()) or real(*args))
            assert torch.equal(_logits(engine, "device"), expected)
            assert memory.keys() == []


def test_without_memory_to_lock_chunks_are_copied_from_any(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    real, left = torch.empty, [2]

    def empty(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory and not left[0]:
            raise RuntimeError("CUDA error: out of memory")
        left[0] -= pin_memory
        return real(*args, pin_memory=pin_memory, **options)

    with _engine(True, tmp_path, tokenizer, device_bytes=0) as engine:
        expected = _logits(engine, "disk")
        engine._pipeline.memory.drop(engine._pipeline.memory.keys())
        monkeypatch.setattr(torch, "empty", empty)
        for tier in ("disk", "ram"):
            assert torch.equal(_logits(engine, tier), expected)
            assert counts["to_gpu"] > 4  # some wait
        assert counts["to_gpu_async"] > 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ram_bytes" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def test_the_tier_on_a_gpu_takes_a_share_of_what_is_left(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    with _engine(True, tmp_path, tokenizer) as engine:
        for free, options, expected in (
            (16 * GIB, {}, 11 * GIB // 2),
            (16 * GIB, {"conversation_bytes": 0, "batch_bytes": 8 * GIB}, 4 * GIB),
            (130 * GIB, {}, 16 * GIB),
            (16 * GIB, {"device_bytes": 0}, None),
            (GIB, {"device_bytes": 3 * GIB}, 3 * GIB),
            (5 * GIB, {}, None),
        ):
            with patch("torch.cuda.mem_get_info", lambda device, free=free: (free, 140 * GIB)):
                device = tiers(engine.model, checked("BlendEngine", EngineOptions, options))._faster
            assert (None if device is None else device.max_bytes) == expected
            assert len(caplog.records) == (free == 5 * GIB)
        with patch("torch.cuda.mem_get_info", lambda device: (GIB, GIB)):
            assert tiers(engine.model, checked("BlendEngine", EngineOptions, {}))._faster is None
    assert len(caplog.records) == 1
    assert "device_bytes" in caplog.messages[0]


def test_a_cpu_has_no_tier_of_its_own_and_locks_no_memory(tokenizer: Any, tmp_path: Path) -> None:
    with _engine(False, tmp_path, tokenizer) as engine:
        memory = engine._pipeline.memory
        assert (memory._faster, memory._allocate) == (None, None)


def test_locked_memory_of_a_chunk_is_in_order_and_little_larger_than_it(tokenizer: Any) -> None:
    with simulated_gpu():
        for num_layers, size in ((32, 1000), (32, 1024), (33, 700), (80, 1100), (16, 4 << 20)):
            take = Pinned(num_layers)
            taken = {number: take(number, size) for number in reversed(range(num_layers))}
            pieces = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in taken.values()}
            assert sum(pieces.values()) <= 1.3 * num_layers * size
            assert len(pieces) <= -(-num_layers // TOGETHER)
            for number in range(1, num_layers):
                before, here = taken[number - 1], taken[number]
                if before.untyped_storage().data_ptr() == here.untyped_storage().data_ptr():
                    assert before.data_ptr() + size == here.data_ptr()
        take = Pinned(9)
        others = take(0, 64), take(8, 640)  # states are larger
        assert [len(one) for one in others] == [64, 640]


def test_the_tier_in_ram_counts_the_memory_that_is_locked(tokenizer: Any, tmp_path: Path) -> None:
    with _engine(True, tmp_path, tokenizer, device_bytes=0) as engine:
        _logits(engine, "disk")
        memory = engine._pipeline.memory
        assert isinstance(memory, MemoryTier)
        locked = {
            part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
            for chunk in memory._chunks.values()
            for layer in chunk.layers.values()
            for part in layer
        }
        ids = sum(chunk.ids.nbytes for chunk in memory._chunks.values())
        assert memory._chunks.currsize == sum(locked.values()) + ids
        assert all(size & (size - 1) == 0 for size in locked.values())


def test_an_edited_history_is_rotated_after_it_was_computed(tokenizer: Any, tmp_path: Path) -> None:
    texts = []
    for on_gpu in (False, True):
        options: dict[str, Any] = {"ratio": 0.3, "max_new_tokens": 4, "temperature": 0}
        with _engine(on_gpu, tmp_path, tokenizer) as engine:
            system = {"role": "system", "content": "Answer in one word."}
            prompt = messages(*CHUNKS, " ".join(str(number) for number in range(60)))
            engine.generate([system, *prompt], **options)
            answer = engine.generate(prompt, edited_history="blend", **options)
            assert answer.report.moved_tokens > 40
            texts.append(answer.text)
    assert texts[0] == texts[1]

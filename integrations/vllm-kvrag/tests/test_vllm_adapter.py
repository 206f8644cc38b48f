"""Stores that were encoded with an adapter: vLLM reads them, and leaves encoding to `kvrag warm`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_engines import CHUNKS, blended, checkpoint, distance, prompt_of, started

from kvrag import BlendEngine, FileStore, Model
from kvrag.adapt.files import new_layers, save
from kvrag.backend.transformers.adapter import LowRank


def test_chunks_of_an_adapter_are_read_and_not_encoded(folder: Path, tmp_path: Path) -> None:
    path, adapter, store = checkpoint("llama", folder), tmp_path / "adapter", tmp_path / "store"
    hf = Model.from_pretrained(str(path)).hf
    layers = {
        name: LowRank(layer.down.detach(), torch.randn_like(layer.up) * 0.1, 1.0)
        for name, layer in new_layers(hf, 4, 0).items()
    }
    save(adapter, layers, "tiny")
    ids = Model.from_pretrained(str(path)).tokenizer.render(prompt_of(CHUNKS[1], CHUNKS[0]))
    with BlendEngine(Model.from_pretrained(str(path), adapter=adapter), FileStore(store, min_free_bytes=0)) as own:
        own.warm(CHUNKS[:2])
        expected = {ratio: blended(own, ids, ratio, "query").logits[0].log_softmax(-1) for ratio in (0.0, 1.0)}
    assert distance(expected[0.0], expected[1.0]) > 1e-2
    with started(path, store, {"adapter": str(adapter)}) as engine:
        for ratio, logprobs in expected.items():
            done = engine.ask(ids, ratio=ratio, policy="query")
            assert done.report is not None
            assert done.report["reused_tokens"] > 100
            assert done.report["exact"] == (ratio == 1.0)
            assert distance(logprobs, done.logprobs) < 1e-3
        report = engine.warm(CHUNKS[2:4], document="a")
        assert "use `kvrag warm --adapter` on this store" in str(report)
        assert engine.full(ids).tokens


def test_a_store_of_an_adapter_is_refused_without_it(folder: Path, tmp_path: Path) -> None:
    path, adapter, store = checkpoint("llama", folder), tmp_path / "adapter", tmp_path / "store"
    save(adapter, new_layers(Model.from_pretrained(str(path)).hf, 4, 0), "tiny")
    with BlendEngine(Model.from_pretrained(str(path), adapter=adapter), FileStore(store, min_free_bytes=0)) as own:
        own.warm(CHUNKS[:2])
    with pytest.raises(Exception, match=r"different: adapter\): pass the adapter"), started(path, store):
        pass

"""Stores that were encoded with an adapter: vLLM reads them, and leaves encoding to `kvrag warm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_engines import CHUNKS, blended, checkpoint, distance, prompt_of, started

from kvrag import BlendEngine, FileStore, Model
from kvrag.backend.transformers.adapter import CONFIG, PREFIX, WEIGHTS


def save_adapter(hf: Any, folder: Path) -> Path:
    """Write a LoRA on the layers of a model that has an effect, in PEFT's format."""
    torch.manual_seed(0)
    weights = {}
    for name, module in hf.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in name:
            weights[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(4, module.in_features) / module.in_features**0.5
            weights[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(module.out_features, 4) * 0.1
    folder.mkdir()
    save_file(weights, folder / WEIGHTS)
    config = {"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 4, "lora_alpha": 4}
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def test_chunks_of_an_adapter_are_read_and_not_encoded(folder: Path, tmp_path: Path) -> None:
    path, store = checkpoint("llama", folder), tmp_path / "store"
    adapter = save_adapter(Model.from_pretrained(str(path)).hf, tmp_path / "adapter")
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
    path, store = checkpoint("llama", folder), tmp_path / "store"
    adapter = save_adapter(Model.from_pretrained(str(path)).hf, tmp_path / "adapter")
    with BlendEngine(Model.from_pretrained(str(path), adapter=adapter), FileStore(store, min_free_bytes=0)) as own:
        own.warm(CHUNKS[:2])
    with pytest.raises(Exception, match=r"different: adapter\): pass the adapter"), started(path, store):
        pass

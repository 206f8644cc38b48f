"""Quantised checkpoints: vLLM encodes and reads their chunks, in stores of their own."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm_engines import CHUNKS, checkpoint, distance, prompt_of, quantised, started
from vllm_kvrag import gate
from vllm_kvrag.fingerprint import checkpoint_fingerprint, fingerprint_of

from kvrag import FileStore, FingerprintMismatchError, ModelLoadError, UnsupportedModelError

PROMPT = prompt_of(*reversed(CHUNKS[:3]))


@pytest.mark.parametrize("kind", ["int8", "fp8", "gptq"])
def test_chunks_that_vllm_encoded_are_read_after_a_restart(kind: str, folder: Path, tmp_path: Path) -> None:
    model = quantised(checkpoint("llama", folder), folder, kind)
    encoded = None
    for _ in range(2):
        with started(model, tmp_path, dtype="bfloat16") as engine:
            layer = engine.core.model_executor.driver_worker.worker.get_model().model.layers[0].mlp.down_proj
            assert "Unquantized" not in type(layer.quant_method).__name__
            if encoded is None:
                encoded = engine.warm(CHUNKS[:3], document="a")["new"]
            done = engine.ask(PROMPT, ratio=1.0, policy="query")
            assert done.report is not None
            assert done.report["reused_tokens"] + done.report["recomputed_tokens"] > 100
            assert done.report["exact"]
            assert distance(done.logprobs, engine.full(PROMPT).logprobs) < 0.2
            assert distance(engine.ask(PROMPT, ratio=0.0, policy="none").logprobs, done.logprobs) > 0.5
    assert encoded == 3


def test_stores_of_other_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    plain = checkpoint("llama", folder)
    int8, fp8 = (quantised(plain, folder, kind) for kind in ("int8", "fp8"))
    names = {model: checkpoint_fingerprint(model, torch.bfloat16).stored_as("native") for model in (plain, int8, fp8)}
    for model, fingerprint in names.items():
        with closing(FileStore(tmp_path / model.name)) as store:
            store.bind(fingerprint)
            for other in names.keys() - {model}:
                with pytest.raises(FingerprintMismatchError, match=r"\(different: weights\): .*use another store"):
                    store.bind(names[other])
    with pytest.raises(FingerprintMismatchError), started(int8, tmp_path / plain.name, dtype="bfloat16"):
        pass


@pytest.mark.parametrize("is_quantised", [True, False])
def test_a_quantised_model_that_fails_the_check_is_served_as_usual_with_advice(
    is_quantised: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.kvrag"), "warning", lambda text, *args: warnings.append(text % args))
    monkeypatch.setattr(gate, "_same", lambda *args: False)
    model = checkpoint("llama", folder)
    with started(quantised(model, folder, "int8") if is_quantised else model, tmp_path, dtype="bfloat16") as engine:
        assert len(engine.ask(PROMPT, 2, ratio=0.15).tokens) == 2
    (warning,) = warnings
    assert "blending is off, vLLM serves as usual: blending in vLLM is not exact for this model" in warning
    assert ("serve this quantised model with --dtype bfloat16" in warning) == is_quantised
    assert "\n" not in warning


# ---------------------------------------------------------------- fingerprint


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    """A quantised checkpoint that a test may change."""
    return quantised(checkpoint("llama", folder), tmp_path, "int8")


@pytest.mark.parametrize("name", ["mlp.down_proj.weight", "self_attn.k_proj.weight_scale", "input_layernorm.weight"])
def test_every_stored_tensor_changes_the_fingerprint(model: Path, name: str) -> None:
    base = checkpoint_fingerprint(model, torch.bfloat16)
    file = model / "model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    tensors[f"model.layers.3.{name}"].view(-1)[0] += 1
    save_file(tensors, file)
    changed = checkpoint_fingerprint(model, torch.bfloat16)
    assert changed.weights != base.weights
    first = {key: tensors[key] for key in sorted(tensors)[::2]}
    save_file(first, model / "model-00001.safetensors")
    save_file({key: tensors[key] for key in tensors.keys() - first.keys()}, file)
    assert checkpoint_fingerprint(model, torch.bfloat16) == changed


def test_the_way_of_quantisation_changes_the_fingerprint(model: Path) -> None:
    base = checkpoint_fingerprint(model, torch.bfloat16)
    config = model / "config.json"
    config.write_text(config.read_text().replace('"token"', '"tensor"'))
    assert checkpoint_fingerprint(model, torch.bfloat16).weights != base.weights


def test_a_plain_checkpoint_that_vllm_quantises_has_another_fingerprint(folder: Path) -> None:
    def of(quantization: str | None, settings: Any = None) -> str:
        model_config = SimpleNamespace(
            model=str(checkpoint("llama", folder)),
            dtype=torch.bfloat16,
            revision=None,
            trust_remote_code=False,
            quantization=quantization,
            quantization_config=settings,
        )
        return fingerprint_of(model_config).weights

    assert len({of(None), of("fp8"), of("int8"), of("int8", {"ignore": ["k_proj"]})}) == 4
    assert of(None) == checkpoint_fingerprint(checkpoint("llama", folder), torch.bfloat16).weights


def test_quantised_files_that_cannot_be_read_are_refused(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match=r"cannot load model .*: check its files"):
        checkpoint_fingerprint(model, torch.bfloat16)
    file.rename(model / "model.bin")
    with pytest.raises(UnsupportedModelError, match="has no safetensors files: use a checkpoint with them"):
        checkpoint_fingerprint(model, torch.bfloat16)

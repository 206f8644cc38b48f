"""GGUF files of each architecture that is read: the model is the one that was written, and the gate passes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from blending import CHUNKS, plain_logits, relative
from families import build
from gguf_files import write_gguf

from kvrag import BlendEngine, Model
from kvrag.backend.transformers.gguf import MODEL_TYPES
from kvrag.inspect.gate import verify


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **more}}


_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
_LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 6}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 3}
_CONV = {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}

_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
_LONG = _rope("longrope", original_max_position_embeddings=96, **_FACTORS) | {"original_max_position_embeddings": 96}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3_factors() -> Any:
    """As llama.cpp's converter computes them, for 16 dimensions, base 5,000 and factor 8."""
    lengths = 2 * np.pi * 5000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0, 1)
    return (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)


# name -> architecture of the file, type of the model, its settings, quantisation of the file, more metadata
FILES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama", "llama", _rope(), "F32", {}),
    "llama3": (
        "llama",
        "llama",
        _rope("llama3", factor=8.0, **_LLAMA3) | {"max_position_embeddings": 32768},
        "Q8_0",
        {"rope_freqs__weight": _llama3_factors()},
    ),
    "llama-yarn": (
        "llama",
        "llama",
        _rope("yarn", factor=4.0, original_max_position_embeddings=256),
        "F32",
        {
            "own__rope__scaling__type": "yarn",
            "own__rope__scaling__factor": 4.0,
            "own__rope__scaling__original_context_length": 256,
        },
    ),
    "llama-bias": ("llama", "llama", _WIDE | {"attention_bias": True, "mlp_bias": True}, "Q3_K", {}),
    "qwen2": ("qwen2", "qwen2", _rope() | {"tie_word_embeddings": True}, "Q8_0", {}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", _rope() | {"moe_intermediate_size": 32}, "Q4_0", {}),
    "qwen3": ("qwen3", "qwen3", _rope() | {"head_dim": 32}, "Q4_1", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}, "Q5_0", {}),
    "phi3": ("phi3", "phi3", _rope(partial_rotary_factor=0.5) | {"sliding_window": 48}, "Q5_1", {}),
    "phi3-long": (
        "phi3",
        "phi3",
        _LONG,
        "F32",
        {
            "own__rope__scaling__original_context_length": 96,
            "rope_factors_short__weight": np.array(_FACTORS["short_factor"], np.float32),
            "rope_factors_long__weight": np.array(_FACTORS["long_factor"], np.float32),
        },
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        _GEMMA | _ALTERNATING | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
        "F16",
        {},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        _GEMMA | {"rope_parameters": _LINEAR, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
        "BF16",
        {"own__rope__scaling__type": "linear", "own__rope__scaling__factor": 2.0},
    ),
    "nemotron": ("nemotron", "nemotron", _rope(partial_rotary_factor=0.75), "Q4_0", {}),
    "stablelm": ("stablelm", "stablelm", _WIDE | {"use_qkv_bias": True}, "Q6_K", {}),
    "stablelm-parallel": ("stablelm", "stablelm", {"use_parallel_residual": True}, "Q8_0", {}),
    "starcoder2": ("starcoder2", "starcoder2", _WIDE | _rope(), "Q4_K", {}),
    "lfm2": ("lfm2", "lfm2", _rope() | _CONV, "Q8_0", {"own__attention__head_count_kv": [0, 2, 0, 2]}),
}


def test_the_architectures_claimed_are_those_tested() -> None:
    assert {architecture for architecture, *_ in FILES.values()} == MODEL_TYPES.keys()


@pytest.mark.parametrize("name", FILES)
def test_gate(name: str, tokenizer: Any, tmp_path: Path) -> None:
    architecture, model_type, changes, kind, metadata = FILES[name]
    hf = build(model_type, **changes)
    path = write_gguf(tmp_path / "tiny.gguf", architecture, hf, tokenizer, kind, **metadata)
    model = Model.from_pretrained(path, dtype="float32")
    ids = model.tokenizer.encode(" ".join(CHUNKS))
    assert relative(model.forward_all(torch.tensor([ids]), model.new_cache(len(ids)))[0], plain_logits(hf, ids)) <= 1e-5
    checks = list(verify(partial(BlendEngine, model), 60))
    assert all(check.passed for check in checks), checks

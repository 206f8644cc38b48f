"""GGUF files in llama.cpp: the gate on each family, engines end to end, and what cannot be run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers", minversion="5.24")

from blending import CHUNKS, messages, prepare, relative
from families import build
from gguf_files import write_gguf

from kvrag import BlendConfig, BlendEngine, Model, ModelLoadError, SettingError, UnsupportedModelError
from kvrag.backend.llama import library
from kvrag.backend.llama.model import LlamaModel
from kvrag.backend.transformers.gguf import read_header
from kvrag.inspect.gate import verify

if library.find() is None:
    pytest.skip("llama.cpp's library is not installed: pip install xllamacpp", allow_module_level=True)


def _rope(kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **more}}


_WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3_factors() -> Any:
    """As llama.cpp's converter computes them, for 16 dimensions, base 5,000 and factor 8."""
    lengths = 2 * np.pi * 5000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / lengths - 1.0) / (4.0 - 1.0), 0, 1)
    return (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)


# name -> architecture of the file, type of the model, its settings, quantisation of the file, more metadata
FILES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama", "llama", _rope(), "F32", {}),
    "llama-8-bits": ("llama", "llama", _rope(), "Q8_0", {}),
    "llama3": (
        "llama",
        "llama",
        _rope("llama3", factor=8.0, **_LLAMA3) | {"max_position_embeddings": 32768},
        "F16",
        {"rope_freqs__weight": _llama3_factors()},
    ),
    "llama-linear": (
        "llama",
        "llama",
        _rope("linear", factor=2.0),
        "F16",
        {"own__rope__scaling__type": "linear", "own__rope__scaling__factor": 2.0},
    ),
    "llama-bias": ("llama", "llama", _WIDE | {"attention_bias": True, "mlp_bias": True}, "Q3_K", {}),
    "qwen2": ("qwen2", "qwen2", _rope() | {"tie_word_embeddings": True}, "F16", {}),
    "qwen3": ("qwen3", "qwen3", _rope() | {"head_dim": 32}, "Q8_0", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}, "F16", {}),
    "phi3": ("phi3", "phi3", _rope(partial_rotary_factor=0.5) | {"sliding_window": None}, "F16", {}),
    "nemotron": ("nemotron", "nemotron", _rope(partial_rotary_factor=0.75), "F16", {}),
    "stablelm": ("stablelm", "stablelm", _WIDE | {"use_qkv_bias": True}, "Q6_K", {}),
    "starcoder2": ("starcoder2", "starcoder2", _WIDE | _rope(), "Q4_K", {}),
}

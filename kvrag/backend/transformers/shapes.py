"""Models with real shapes and random weights: valid for speed, useless for answers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvrag.backend.transformers.loading import reader_path
from kvrag.backend.transformers.model import Model
from kvrag.errors import SettingError

_QWEN = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        **_QWEN,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
"""Configurations of known models, by name."""


def random_model(
    shape: str,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    compile_decode: bool = False,
) -> Model:
    """Return a model of that shape, or of its first `num_layers` layers, with the bundled reader's tokenizer.

    Args:
        device: None = a GPU if there is one.
        compile_decode: As in `Model.from_pretrained`.

    Raises:
        SettingError: Unknown shape.
    """
    if shape not in SHAPES:
        raise SettingError(f"unknown shape {shape!r}; choose one of {', '.join(SHAPES)}")
    tokenizer = AutoTokenizer.from_pretrained(reader_path())
    settings = SHAPES[shape] | ({"num_hidden_layers": num_layers} if num_layers else {})
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(**settings, **special)
    torch.manual_seed(0)
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    name = f"{shape} shape, {config.num_hidden_layers} layers, random weights"
    return Model(hf, tokenizer, name, compile_decode=compile_decode)

"""Models of known shapes with random weights: valid for speed, useless for answers."""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvrag.backend.transformers import Model
from kvrag.backend.transformers.loading import default_device, reader_path
from kvrag.errors import SettingError

_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_LLAMA = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False, "max_position_embeddings": 131072}
_QWEN3_5 = {  # every fourth layer is attention
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 262144,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN2 | _sizes(896, 4864, layers=24, heads=14, kv_heads=2),
    "qwen2.5-1.5b": _QWEN2 | _sizes(1536, 8960, layers=28, heads=12, kv_heads=2),
    "tiny": {"model_type": "llama", "vocab_size": 2000, "tie_word_embeddings": False, "max_position_embeddings": 4096}
    | _sizes(64, 64, layers=2, heads=4, kv_heads=2),
    "qwen3.5-0.8b": _QWEN3_5 | _sizes(1024, 3584, layers=24, heads=8, kv_heads=2),
    "qwen3.5-4b": _QWEN3_5 | _sizes(2560, 9216, layers=32, heads=16, kv_heads=4) | {"linear_num_value_heads": 32},
    "llama-3.1-8b": _LLAMA | _sizes(4096, 14336, layers=32, heads=32, kv_heads=8),
}
"""Configurations of known models; `tiny` is of none, for what does not depend on the model."""


def random_model(
    shape: str,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    tokenizer_of: str | None = None,
) -> Model:
    """Return a model of that shape, or of its first `num_layers` layers; raises SettingError for an unknown one.

    Args:
        tokenizer_of: Model whose tokenizer it has; None = the bundled reader.
    """
    if shape not in SHAPES:
        raise SettingError(f"unknown shape {shape!r}; choose one of {', '.join(SHAPES)}")
    settings = SHAPES[shape] | ({"num_hidden_layers": num_layers} if num_layers else {})
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of or reader_path())
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(**settings, **special)
    torch.manual_seed(0)
    with torch.device(device or default_device()):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    name = f"{shape} shape, {config.num_hidden_layers} layers, random weights"
    return Model(hf, tokenizer, name)


def one_token_words(model: Model) -> list[str]:
    """Return words that are one token each in any position, so that the length of a text in tokens is exact."""
    texts = (model.tokenizer.decode([i]) for i in range(3, len(model.tokenizer.hf)))
    return [text for text in texts if re.fullmatch(" [a-z]+", text) and len(model.tokenizer.encode(text)) == 1]

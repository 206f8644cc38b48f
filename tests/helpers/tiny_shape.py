"""A tiny shape for measurements on untrained models."""

from __future__ import annotations

TINY = {
    "model_type": "llama",
    "vocab_size": 2000,
    "tie_word_embeddings": False,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}

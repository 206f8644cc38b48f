"""A tiny shape for the benchmarks on random models."""

from __future__ import annotations

from kvrag.backend.transformers.shapes import SHAPES

TINY = SHAPES["llama-3.1-8b"] | {
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}

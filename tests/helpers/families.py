"""Tiny random models of every family that kvrag claims."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def _rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **more}}


_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-llama3": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128),
    ),
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=256)),
    "llama-linear": ("llama", _rope("linear", factor=2.0)),
    "llama-dynamic": ("llama", _rope("dynamic", factor=4.0) | {"max_position_embeddings": 96}),
    "llama-longrope": ("llama", _rope("longrope", factor=8.0, original_max_position_embeddings=96, **_FACTORS)),
    "mistral-window": ("mistral", {"sliding_window": 48}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": 48}),
    "phi3-longrope": (
        "phi3",
        _rope("longrope", original_max_position_embeddings=96, **_FACTORS) | {"original_max_position_embeddings": 96},
    ),
    "gemma2": ("gemma2", {"sliding_window": 48, "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 48, "layer_types": _ALTERNATING, "query_pre_attn_scalar": 16}),
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "qk_layernorm": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 48}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48, "layer_types": _ALTERNATING},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": ("exaone4", {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "exaone_moe": ("exaone_moe", _MOE | {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "cwm": ("cwm", {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", _MOE | {"moe_num_experts": 4, "moe_k": 2}),
    "gemma": ("gemma", {}),
    "glm": ("glm", {"partial_rotary_factor": 0.5}),
    "glm4_moe": ("glm4_moe", _MOE | {"n_routed_experts": 4}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": ("helium", {}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "ministral": ("ministral", {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "ministral3": ("ministral3", {}),
    "nemotron": ("nemotron", {}),
    "olmo": ("olmo", {}),
    "olmo3": ("olmo3", {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "persimmon": ("persimmon", {}),
    "phimoe": ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48}),
    "qwen2_moe": ("qwen2_moe", _MOE),
    "seed_oss": ("seed_oss", {}),
}


def build(model_type: str, **changes: Any) -> Any:
    """A random float32 model; weights large enough that attention is not uniform."""
    config = AutoConfig.for_model(model_type, **(SMALL | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            elif "norm" not in name and "layernorm" not in name:
                parameter.normal_(0, 0.3)
    return model.eval()

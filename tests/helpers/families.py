"""Tiny random models of every family that kvrag claims."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from kvrag.backend.transformers.loading import auto_class

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

# of the families that have such a setting
_TINY: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"), 48),
    **dict.fromkeys(("expert_ffn_hidden_size", "intermediate_size_mlp", "window_size", "sliding_window"), 48),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input"), 8),
    **{"qk_head_dim": 16, "vocab_size_per_layer_input": 1536, "attention_chunk_size": 48, "num_layers": 4},
}
# of parts that read images and sound
_TINY_PART: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth", "num_heads", "num_attention_heads"), 2),
    **{"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32, "head_dim": 16},
}


def _rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **more}}


_FACTORS = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
_MROPE = _rope("default", mrope_section=[2, 3, 3])
_SHARED = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
}
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
    "mistral-window": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": 48}),
    "phi3-longrope": (
        "phi3",
        _rope("longrope", original_max_position_embeddings=96, **_FACTORS) | {"original_max_position_embeddings": 96},
    ),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4_text", {"global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_unified": ("gemma4_unified_text", {"global_head_dim": 32}),
    "gemma4-shared": (
        "gemma4_text",
        _SHARED
        | {
            "global_head_dim": 32,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "granite": ("granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "llama4": ("llama4_text", {"no_rope_layers": [1, 1, 0, 1], "layer_types": None, "floor_scale": 64}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "deepseek_v2": ("deepseek_v2", {"num_experts_per_tok": 2}),
    "glm4": ("glm4", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "qk_layernorm": True}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "exaone4": ("exaone4", {"sliding_window": 48, "layer_types": _ALTERNATING}),
    "qwen2_vl": ("qwen2_vl", _MROPE),
    "qwen2_5_vl": ("qwen2_5_vl", _MROPE),
    "glm4v": ("glm4v", _MROPE),
    "glm4v_moe": ("glm4v_moe", _rope("default", mrope_section=[1, 1, 2], partial_rotary_factor=0.5)),
    "mistral4": (
        "mistral4",
        _rope(
            "yarn", factor=4.0, original_max_position_embeddings=64, llama_4_scaling_beta=0.1, partial_rotary_factor=0.5
        )
        | {"head_dim": 16},
    ),
    "dots1": (
        "dots1",
        {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "gemma3n": ("gemma3n_text", _SHARED | {"activation_sparsity_pattern": [0.0] * 6}),
    "glm": ("glm", {"partial_rotary_factor": 0.5}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "ministral": ("ministral", {"sliding_window": 48, "layer_types": _ALTERNATING}),
}

# fmt: off
_PLAIN = (
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "beam", "bitnet", "cohere2", "cohere2_moe", "cwm",
    "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma", "glm4_moe",
    "glm4_moe_lite", "gpt_oss", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
    "hunyuan_v1_dense", "hy_v3", "hyperclovax", "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna",
    "longcat_flash", "mellum", "minicpm3", "minimax_m2", "ministral3", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "persimmon", "phimoe", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
    "seed_oss", "solar_open", "starcoder2", "vaultgemma", "youtu",
)
# fmt: on
FAMILIES |= {model_type: (model_type, {}) for model_type in _PLAIN}

_LINEAR = ["linear_attention", "full_attention"] * 2
_DELTA = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": _LINEAR},
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"layer_types": ["conv", "full_attention"] * 2}) for name in ("lfm2", "lfm2_moe")},
    **{name: (name, _DELTA) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")},
    "lfm3": ("lfm3", {}),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1, 3]}),
    "granitemoehybrid": ("granitemoehybrid", _MAMBA | {"layer_types": _LINEAR}),
    "falcon_h1": ("falcon_h1", _MAMBA | {"mamba_d_ssm": 128}),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "kimi_linear": ("kimi_linear", {"linear_head_dim": 16, "linear_num_heads": 4, "layer_types": _LINEAR}),
    "lara_mini": ("lara_mini", {key: size for key, size in _DELTA.items() if key != "layer_types"}),
}
"""Families with layers that keep a state in place of KV, or beside it."""

SINCE = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe"), "5.19") | dict.fromkeys(HYBRIDS, "5.24")
"""transformers before which a family is refused: rotary modules took no positions of text, caches kept no states."""


def tiny(model_type: str, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny model: `SMALL`, and small values of what else this family's configuration has.

    `changes` are those of its text part.
    """
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config()
    if text is not default:
        parts = {
            name: {key: size for key, size in _TINY_PART.items() if hasattr(part, key)}
            for name in default.sub_configs
            if name != "text_config" and (part := getattr(default, name, None)) is not None
        }
        return {"text_config": {"model_type": text.model_type, **tiny(text.model_type, **changes)}, **parts}
    own = default.to_dict()
    settings = {key: size for key, size in SMALL.items() if key in own or key in default.attribute_map}
    known = {key: size for key, size in _TINY.items() if own.get(key) is not None}
    if kinds := sorted(set(own.get("layer_types") or ()), reverse=True):
        known["layer_types"] = [kinds[number % len(kinds)] for number in range(SMALL["num_hidden_layers"])]
    if "qk_rope_head_dim" in known:
        known |= {"head_dim": known["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
    return settings | known | changes


def build(model_type: str, images: bool = False, **changes: Any) -> Any:
    """A random float32 model; weights large enough that attention is not uniform. `images`: with what reads them."""
    config = AutoConfig.for_model(model_type, **tiny(model_type, **changes))
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if images else auto_class(config)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            elif "norm" not in name and "layernorm" not in name:
                parameter.normal_(0, 0.3)
    return model.eval()


def stacked(family: str, num_layers: int) -> Any:
    """Build a model of a multiple of four layers."""
    model_type, changes = FAMILIES[family]
    config = build(model_type, **changes).config
    changes = changes | {"num_hidden_layers": num_layers}
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            changes[name] = list(getattr(config, name)) * (num_layers // 4)
    return build(model_type, **changes)

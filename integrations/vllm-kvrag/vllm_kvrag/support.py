"""Which models and settings of vLLM can be blended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WITHOUT_DRAFT_MODEL = ("ngram", "ngram_gpu", "suffix")  # speculative decoding that keeps no KV of its own
_SHAPES = "kvrag does not support layers of different shapes in vLLM"


def unsupported_setting(vllm_config: Any) -> str:
    """Return the reason why these settings of vLLM do not support blending; "" = they do."""
    parallel, cache, speculative = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.speculative_config
    reasons = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "speculative decoding with a draft model": speculative and speculative.method not in _WITHOUT_DRAFT_MODEL,
        # the layers use the adapters of vLLM's last batch
        "LoRA adapters": vllm_config.lora_config is not None,
        f"a KV cache of {cache.cache_dtype}": cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
    }
    return next((f"kvrag does not support {reason} in vLLM" for reason, applies in reasons.items() if applies), "")


def unsupported_caches(specs: Mapping[str, Any]) -> str:
    """Return the reason why layers with these KV caches, by name, cannot be blended; "" = they can."""
    kinds = sorted({type(spec).__name__.removesuffix("Spec") for spec in specs.values()})
    if kinds == ["SlidingWindow"]:
        return (
            "kvrag does not support this model in vLLM: its layers attend to a window only, and vLLM keeps no pages "
            "before the window"
        )
    is_mixed = kinds == ["FullAttention", "SlidingWindow"]  # the worker has not unified them
    if is_mixed and len({(spec.num_kv_heads, spec.head_size) for spec in specs.values()}) > 1:
        return _SHAPES
    if kinds != ["FullAttention"]:
        return f"kvrag does not support a model with these kinds of KV cache in vLLM: {', '.join(kinds) or 'none'}"
    return ""


def unsupported_layers(layers: Sequence[Any], names: Mapping[str, Any]) -> str:
    """Return the reason why a model with these attention layers cannot be blended; "" = it can.

    Args:
        names: Names of all layers that have a cache.
    """
    if set(names) != {layer.layer_name for layer in layers}:
        return "kvrag does not support this model in vLLM: not all of its layers keep keys and values"
    if len({(layer.num_kv_heads, layer.head_size, layer.attn_backend.get_name()) for layer in layers}) != 1:
        return _SHAPES
    return ""


def caches_of(kv_cache_config: Any) -> dict[str, Any]:
    """Return the kinds of KV cache by layer."""
    return {name: group.kv_cache_spec for group in kv_cache_config.kv_cache_groups for name in group.layer_names}

"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from numpy.typing import NDArray

from kvrag.backend.llama import library

Numbers = NDArray[Any]

needs_library = pytest.mark.skipif(library.find() is None, reason="llama.cpp's library is not installed: xllamacpp")

# with random blocks: gguf cannot write these; where the scales of a block are, and their number
_SCALES = {"Q2_K": (80, 2), "Q3_K": (108, 1), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 1), "IQ4_XS": (0, 1)}


def write_gguf(
    path: Path, architecture: str, hf: Any, tokenizer: Any, kind: str = "F32", split: int = 0, **metadata: Any
) -> Path:
    """Write a float32 model, and give it the weights that the file has after rounding.

    Args:
        path: The file to write.
        architecture: As llama.cpp names it.
        hf: The model; changed.
        tokenizer: One with a byte-level vocabulary.
        kind: Quantisation of the matrices whose rows are long enough.
        split: Tensors per shard; 0 = one file.
        metadata: Other settings, "__" for a dot; None = without this one. Those of the architecture begin with "own__".
            An array is a tensor.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    for key, value in (_settings(hf.config) | _vocabulary(tokenizer, hf.config.vocab_size) | _dotted(metadata)).items():
        _add(writer, key.replace("own.", f"{architecture}."), value)
    for name, numbers, number in _tensors(architecture, hf, kind):
        writer.add_tensor(name, numbers, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _dotted(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in metadata.items()}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, np.ndarray):
        writer.add_tensor(key, value)
    elif value is not None:
        writer.add_string(key, value)


def _settings(config: Any) -> dict[str, Any]:
    found = {
        "own.context_length": config.max_position_embeddings,
        "own.block_count": config.num_hidden_layers,
        "own.embedding_length": config.hidden_size,
        "own.feed_forward_length": getattr(config, "intermediate_size", None),
        "own.attention.head_count": config.num_attention_heads,
        "own.attention.head_count_kv": getattr(config, "num_key_value_heads", None),
    }
    rope = getattr(config, "rope_parameters", {"rope_theta": 1})
    rope = rope.get("full_attention", rope)
    found["own.rope.freq_base"] = float(rope["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if "partial_rotary_factor" in rope:
        found["own.rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if hasattr(config, "head_dim"):
        found |= {"own.attention.key_length": head_dim, "own.attention.value_length": head_dim}
    fields = {
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "norm_epsilon": "attention.layer_norm_epsilon",
        "norm_eps": "attention.layer_norm_epsilon",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "sliding_window": "attention.sliding_window",
        "conv_L_cache": "shortconv.l_cache",
    }
    return found | {f"own.{key}": value for name, key in fields.items() if (value := getattr(config, name, None))}


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    known = len(tokens)
    tokens += [f"[UNUSED_{number}]" for number in range(known, size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    added = {int(number): 3 if token.special else 4 for number, token in tokenizer.added_tokens_decoder.items()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*(added.get(number, 1) for number in range(known)), *[5] * (size - known)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


@torch.no_grad()
def _tensors(architecture: str, hf: Any, kind: str) -> Iterator[tuple[str, Numbers, Any]]:
    config = hf.config
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    for own, parameter in hf.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        raw, wide = _rounded(parameter, kind)
        base, _, suffix = own.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = own.removesuffix("_bias"), "bias" if own.endswith("_bias") else "weight"
        if architecture == "gpt-oss" and base.endswith(("gate_up_proj", "down_proj")) and suffix == "weight":
            raw = raw.swapaxes(1, 2)
        if suffix == "bias":
            raw = raw.astype(np.float32)
        if base.endswith("gate_up_proj") and "experts" in base:
            for part, rows in zip(("gate", "up"), np.split(raw, 2, axis=1), strict=True):
                yield f"blk.{base.split('.')[2]}.ffn_{part}_exps.{suffix}", np.ascontiguousarray(rows), wide
            continue
        name = f"{names.get_name(base)}.{suffix}"
        assert not name.startswith("None"), own
        if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            raw = raw + np.float32(1)
        if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            pairs = raw.reshape(heads, 2, raw.shape[0] // heads // 2, *raw.shape[1:])
            raw = pairs.swapaxes(1, 2).reshape(raw.shape)
        if name.endswith(("shortconv.conv.weight", "ffn_gate_inp_shexp.weight")):
            raw = raw.squeeze()
        yield name, np.ascontiguousarray(raw), wide


def _rounded(parameter: torch.Tensor, kind: str) -> tuple[Numbers, Any]:
    """Return the bytes of a parameter and their type, and round the parameter itself."""
    number = GGMLQuantizationType[kind]
    per_block, size = GGML_QUANT_SIZES[number]
    numbers = parameter.numpy()
    if parameter.ndim < 2 or parameter.shape[-1] % per_block or parameter.shape[-2] == 1 or kind == "F32":
        return numbers.copy(), None
    if kind in _SCALES:
        random = np.random.default_rng(parameter.numel())
        raw = random.integers(0, 256, (*numbers.shape[:-1], numbers.shape[-1] // per_block, size), np.uint8)
        at, count = _SCALES[kind]
        raw[..., at : at + 2 * count] = np.frombuffer(np.full(count, 3e-4, np.float16).tobytes(), np.uint8)
        raw = raw.reshape(*numbers.shape[:-1], -1)
    else:
        raw = quants.quantize(numbers, number)
    parameter.copy_(torch.from_numpy(quants.dequantize(raw, number).copy()))
    return raw, None if kind == "F16" else number

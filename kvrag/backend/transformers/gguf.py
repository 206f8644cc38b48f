"""GGUF files as transformers models: configuration, tokenizer, and dequantised weights.

transformers' own loader leaves out settings that change the result: Llama 3's RoPE, windows, the RoPE base of some
architectures, how some vocabularies split texts. Here, a file with a setting that would be lost is refused.
"""

from __future__ import annotations

from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, TokenizersBackend
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvrag.backend.gguf import Header, Tensor
from kvrag.errors import ModelLoadError, UnsupportedModelError, reason_of

MODEL_TYPES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "lfm2": "lfm2",
    "llama": "llama",
    "nemotron": "nemotron",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""Architectures of GGUF files (tests/integration/test_gguf.py), and transformers' model type of each."""

_FIELDS: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings",),
    "block_count": ("num_hidden_layers",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "shortconv.l_cache": ("conv_L_cache",),
    "expert_count": ("num_experts",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""Metadata, and the field of the configuration for each: the first that this type of model has."""

_READ_ELSEWHERE = {
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "attention.key_length", "attention.value_length"),
    *(f"rope.scaling.{part}" for part in ("type", "factor", "original_context_length", "attn_factor", "finetuned")),
    *("vocab_size", "tensor_data_layout", "use_parallel_residual"),
}
_BIASES = {"attention_bias": "attn_q", "use_bias": "attn_q", "use_qkv_bias": "attn_q", "mlp_bias": "ffn_up"}
_SCALING, _STOPS = "rope.scaling.", [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SCALES_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the only size that does

# names of how a byte-level vocabulary splits texts, besides those that transformers knows
_AS_GPT2 = (None, "default", "gpt-2", "phi-2", "olmo", "mpt")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
_WHOLE_WORDS = (*_LLAMA3, "falcon3", "tekken", "lfm2")  # a word that is a token needs no merges

_ORIGINAL = "use the model's original files"


def _refuse(header: Header, hint: str) -> NoReturn:
    raise UnsupportedModelError(f"cannot load model {header.name!r}: {hint}")


def _check_kinds(header: Header) -> None:
    """Refuse a file with a quantisation that the package gguf knows, but cannot undo."""
    from gguf import GGML_QUANT_SIZES, dequantize

    for kind in {tensor.kind for tensor in header.tensors}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            _refuse(header, f"its quantisation {kind.name} cannot be undone: use a Q4_K_M or Q8_0 file of the model")


def config_of(header: Header) -> Any:
    """Return the configuration of a GGUF file; its `dtype` is the one to compute in.

    Raises:
        UnsupportedModelError: The architecture is not in MODEL_TYPES, or has a setting that would be lost.
    """
    architecture, metadata = header.architecture, header.metadata
    if architecture not in MODEL_TYPES:
        _refuse(header, f"the architecture {architecture!r} is not read from GGUF files; {', '.join(MODEL_TYPES)} are")
    _check_kinds(header)
    start, tensors = f"{architecture}.", {tensor.name: tensor for tensor in header.tensors}
    own = {key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)}
    if len({name.split(".")[1] for name in tensors if name.startswith("blk.")}) != own["block_count"]:
        _refuse(header, "it does not have the layers that it names: get it again")  # a damaged number can be huge
    default = AutoConfig.for_model(MODEL_TYPES[architecture])
    fields: dict[str, Any] = {name: any(f"{part}.bias" in key for key in tensors) for name, part in _BIASES.items()}
    fields = {name: value for name, value in fields.items() if hasattr(default, name)}
    for key in own.keys() - _READ_ELSEWHERE:
        name = next((name for name in _FIELDS.get(key, ()) if hasattr(default, name)), "")
        if not name:
            _refuse(header, f"its setting {start}{key} would be lost: {_ORIGINAL}")
        fields[name] = own[key]
    width, heads = own["embedding_length"], own["attention.head_count"]
    fields["head_dim"] = head_dim = own.get("attention.key_length", width // heads)
    if own.get("attention.value_length", head_dim) != head_dim:
        _refuse(header, f"its keys and values have different sizes: {_ORIGINAL}")
    if architecture == "lfm2":  # one number per layer
        fields["num_key_value_heads"] = max(own["attention.head_count_kv"])
        fields["layer_types"] = ["full_attention" if row else "conv" for row in own["attention.head_count_kv"]]
        fields["block_auto_adjust_ff_dim"] = False
    if architecture == "phi3":
        fields["original_max_position_embeddings"] = own.get(
            f"{_SCALING}original_context_length", own["context_length"]
        )
    if architecture == "qwen3moe":
        fields["norm_topk_prob"] = True  # as llama.cpp does
    if hasattr(default, "query_pre_attn_scalar"):
        by_width = own["block_count"] == _SCALES_BY_WIDTH[architecture]
        fields["query_pre_attn_scalar"] = width // heads if by_width else head_dim
    if hasattr(default, "use_parallel_residual"):
        fields["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in tensors
    config = AutoConfig.for_model(
        MODEL_TYPES[architecture],
        **fields,
        rope_parameters=_rope(header, own, default.rope_parameters, head_dim),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in tensors,
        dtype=header.dtype,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        eos_token_id=sorted({metadata[key] for key in _STOPS if key in metadata}),
    )
    if lost := [name for name, value in fields.items() if getattr(config, name) != value]:
        _refuse(header, f"its {lost[0]} would be lost: {_ORIGINAL}")
    _check_freqs(header, config)
    return config


def _rope(header: Header, own: dict[str, Any], default: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the RoPE settings; those of `full_attention` only, where the others are scaled in no way."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(own.get("rope.freq_base", 10000.0))}
    rotated = own.get("rope.dimension_count", head_dim)
    if "partial_rotary_factor" in default:
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        _refuse(header, f"RoPE of {rotated} of {head_dim} dimensions would be lost: {_ORIGINAL}")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    scaling = {key.removeprefix(_SCALING): value for key, value in own.items() if key.startswith(_SCALING)}
    kind, length = scaling.get("type", "none"), scaling.get("original_context_length")
    if _LONG in tensors and _SHORT in tensors:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": length}
        rope |= {"long_factor": read(tensors[_LONG]).tolist(), "short_factor": read(tensors[_SHORT]).tolist()}
    elif scaling.get("attn_factor", 1.0) != 1.0 or kind not in ("none", "linear", "yarn"):
        _refuse(header, f"RoPE scaling {kind!r} would be lost: {_ORIGINAL}")
    elif _FREQS in tensors:
        rope |= _LLAMA3_ROPE | {"rope_type": "llama3", "factor": float(read(tensors[_FREQS]).max())}
    elif kind != "none":
        rope |= {"rope_type": kind, "factor": float(scaling["factor"])}
        rope |= {"original_max_position_embeddings": length} if kind == "yarn" else {}
    if "full_attention" in default:
        near = {"rope_type": "default", "rope_theta": float(own.get("rope.freq_base_swa", 10000.0))}
        return {"full_attention": rope, "sliding_attention": near}
    return rope


def _check_freqs(header: Header, config: Any) -> None:
    """Refuse a file whose RoPE factors are not Llama 3's: it names neither their rule nor its settings."""
    if config.rope_parameters.get("rope_type") != "llama3":
        return
    stored = next(read(tensor) for tensor in header.tensors if tensor.name == _FREQS)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    factors = config.rope_parameters["rope_theta"] ** -exponents / scaled
    if not np.allclose(factors.numpy(), stored, rtol=1e-3):
        _refuse(header, f"the factors in {_FREQS} are not Llama 3's: {_ORIGINAL}")


def tokenizer_of(header: Header) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template.

    Raises:
        UnsupportedModelError: It splits texts in an unknown way.
        ModelLoadError: The chat template is broken.
    """
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    architecture, parts, settings = get_gguf_tokenizer(str(header.path))
    way = parts.get("pre_tokenizer_type")
    if parts.get("tokenizer_type") == "gpt2" and way not in (*_AS_GPT2, *_DIGITS, *GGUF_PRE_TOKENIZER_SPLITS):
        _refuse(header, f"how its tokenizer {way!r} splits texts is unknown: {_ORIGINAL}")
    backend, _ = convert_gguf_tokenizer(architecture, parts)
    if way in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    if isinstance(backend.model, BPE):
        backend.model.continuing_subword_prefix = backend.model.end_of_word_suffix = None
        backend.model.ignore_merges = way in _WHOLE_WORDS
    if way in _LLAMA3:
        settings.setdefault("add_bos_token", True)
    length = header.metadata[f"{architecture}.context_length"]
    hf = TokenizersBackend(tokenizer_object=backend, model_max_length=length, **settings)
    if hf.chat_template is not None:
        _check_template(header, hf)
    return hf


def _check_template(header: Header, hf: Any) -> None:
    repair = "`gguf-new-metadata --chat-template-file` writes another one into a copy"
    try:
        text = hf.apply_chat_template([{"role": "user", "content": "kvrag"}], tokenize=False)
    except Exception as error:  # of jinja2, of the template, of Python
        reason = f"its chat template is broken ({reason_of(error)})"
        raise ModelLoadError(f"cannot load model {header.name!r}: {reason}: {repair}") from error
    if "kvrag" not in text:
        raise ModelLoadError(f"cannot load model {header.name!r}: its chat template leaves out the question: {repair}")


def weights_of(header: Header, hf: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights of a GGUF file, dequantised, by their names in the model `hf`, which may have none."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    architecture = next(number for number, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = get_tensor_name_map(architecture, hf.config.num_hidden_layers)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=hf.config.to_dict())
    places: dict[str, str] = {}
    for name in hf.state_dict():
        base, dot, last = processor.preprocess_name(name).rpartition(".")
        base, suffix = (base, dot + last) if last in ("weight", "bias") else (base + dot + last, "")
        if stored := names.get_name(base):
            places[stored + suffix] = name
        else:
            processor.perform_fallback_tensor_mapping(places, suffix, "", base)
    found: dict[str, torch.Tensor] = {}
    for tensor in header.tensors:
        if tensor.name in (_FREQS, _LONG, _SHORT):
            continue
        done = processor.process(
            read(tensor), tensor.name, tensor_key_mapping=places, parsed_parameters={"tensors": found}
        )
        name = places.get(tensor.name) or places.get(tensor.name.removesuffix(".weight"))
        if name is None:
            _refuse(header, f"its {tensor.name} would be lost: {_ORIGINAL}")
        if done.name is not None:
            found[name] = torch.from_numpy(np.require(done.weights, requirements=["C", "W"]))
        found[name] = found[name].to(dtype)
    return found


def read(tensor: Tensor) -> NDArray[np.float32]:
    """Return the numbers of a tensor."""
    from gguf import dequantize

    *rows, _ = tensor.shape
    shape = (*rows, tensor.num_bytes // max(1, prod(rows)))
    raw = np.asarray(np.memmap(tensor.path, np.uint8, "r", tensor.start, shape))
    return np.asarray(dequantize(raw, tensor.kind))

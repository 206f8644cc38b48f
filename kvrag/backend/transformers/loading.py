"""Loading: from a name to a transformers model that can be blended, or an error with the reason."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, ModuleList
from torch.nn.functional import linear
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.cache_utils import Cache

from kvrag.backend.hub import READER, check_model, is_offline
from kvrag.backend.positions import Chunked
from kvrag.backend.transformers import gguf
from kvrag.errors import KvragError, ModelLoadError, SettingError, UnsupportedModelError, out_of_memory, reason_of

logger = logging.getLogger("kvrag")

_FULL = """
    afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 dots1
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama llama4_text longcat_flash mellum minicpm3
    minimax_m2 ministral ministral3 mistral mistral4 mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3
    phimoe qwen2 qwen2_5_vl_text qwen2_moe qwen2_vl_text qwen3 qwen3_moe qwen3_vl_moe_text qwen3_vl_text seed_oss
    smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""
_WITH_STATES = """
    bamba falcon_h1 granitemoehybrid kimi_linear lara_mini lfm2 lfm2_moe lfm3 nemotron_h olmo_hybrid
    qwen3_5_moe_text qwen3_5_text qwen3_next
"""
FAMILIES = frozenset((_FULL + _WITH_STATES).split())
"""Model types whose blending is tested to equal full prefill (tests/integration/test_families.py)."""

ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")
"""Layer types whose KV can be blended."""

STATE_KINDS = ("linear_attention", "conv", "hybrid")
"""Layer types that keep a state of all tokens so far, or a window of a convolution: in place of KV, or beside it."""

_NEITHER = ("mlp", "moe")

_MOST_ROWS = 8  # of a pass that reads the 8-bit weights; beyond, the matrix product takes longer than reading
_MULTIPLE = 32  # of columns, for the kernel
_FUSED = 0.02  # share of the weights in 3 dimensions; convolutions have less


def default_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def reader_path() -> str:
    """Return the folder of the bundled model."""
    return str(files("kvrag") / "reader")


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | None = None,
    device_map: str | dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    allow_unverified: bool = False,
    quantization: str | None = None,
    **where: Any,
) -> tuple[Any, Any]:
    """Load model and tokenizer. `where`: `revision` and `trust_remote_code`, as in transformers.

    Raises:
        ModelLoadError: Unknown name, no network, damaged or incomplete files, or out of memory.
        UnsupportedModelError: The configuration shows that the model cannot be blended.
        SettingError: Unknown dtype or device, or see `quantize`.
    """
    _check_settings(dtype, device)
    if attn_implementation is not None:
        refuse_attention(attn_implementation)
    config = load_config(name, allow_unverified=allow_unverified, **where)
    tokenizer = load_tokenizer(name, **where)
    if attn_implementation is not None:
        where["attn_implementation"] = attn_implementation
    with _explaining(name) as path:
        model, info = auto_class(config).from_pretrained(
            path, dtype=dtype, device_map=device_map, output_loading_info=True, **where
        )
        if missing := sorted(info["missing_keys"]):  # transformers would use random numbers
            raise ModelLoadError(f"cannot load model {name!r}: its files have no weights for {missing[0]}")
        if unused := _left_out(model, info["unexpected_keys"]):
            raise ModelLoadError(f"cannot load model {name!r}: {unused}: it is another model's config.json")
        if device_map is None:
            model = model.to(device or default_device())
        return quantize(model) if quantization else model, tokenizer


def auto_class(config: Any) -> Any:
    """Return the auto class that loads models of this configuration with their text part."""
    only_with_images = (
        type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    )
    return AutoModelForImageTextToText if only_with_images else AutoModelForCausalLM


def _left_out(model: Any, unexpected: Iterable[str]) -> str:
    """Return which of the unexpected weights belong to the model's layers: its result would not be the files'."""
    modules = dict(model.named_modules())
    num_layers = model.config.get_text_config().num_hidden_layers
    lists = [f".{name}" for name, part in modules.items() if isinstance(part, ModuleList) and len(part) == num_layers]
    unused, stored, predicting = [], set[int](), set[int]()
    for key in unexpected:
        module, _, kind = key.rpartition(".")
        place = module if module in modules else module.rpartition(".")[0]
        if kind in ("weight", "bias") and place in modules and any(part.isdigit() for part in place.split(".")):
            unused.append(key)
        layer = re.match(r"(.*?)\.(\d+)\.", key)  # without the first part of its name in files of a model without head
        if layer and any(name.endswith(f".{layer[1]}") for name in lists):
            (predicting if ".eh_proj." in key else stored).add(int(layer[2]))
    num_stored = max(stored - predicting, default=0) + 1  # layers that predict further tokens (MTP) are no part
    if num_stored > num_layers:
        return f"config.json has {num_layers} layers, the files hold {num_stored}"
    return f"{type(model).__name__}, which config.json names, does not use {min(unused)} of its files" if unused else ""


def load_config(name: str, allow_unverified: bool = False, **where: Any) -> Any:
    """Load a model's configuration without its weights; takes `where` and raises like `load`."""
    check_model(name)
    with _explaining(name) as path:
        config = AutoConfig.from_pretrained(path, **where)
    refuse_unsupported(config, allow_unverified)
    return config


def load_window(name: str, **where: Any) -> int:
    """Return the context window of a model without loading it; takes `where` and raises like `load`."""
    if header := gguf.read_header(name):
        return int(header.own["context_length"])
    return context_window(load_config(name, **where).get_text_config())


def load_tokenizer(name: str, **where: Any) -> Any:
    """Load a model's tokenizer only; takes `where` and raises like `load`."""
    if header := gguf.read_header(name):
        return gguf.tokenizer_of(header)
    with _explaining(name) as path:
        return AutoTokenizer.from_pretrained(path, **where)


def attending_layers(config: Any) -> list[int]:
    """Return the numbers of the layers with attention."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [number for number, kind in enumerate(kinds) if kind in (*ATTENTION_KINDS, "hybrid")]


def keeps_states(config: Any) -> bool:
    """Return whether layers keep states."""
    return not set(STATE_KINDS).isdisjoint(getattr(config, "layer_types", None) or ())


def _check_settings(dtype: str | torch.dtype, device: str | None) -> None:
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise SettingError(f"unknown dtype {dtype!r}: use auto, bfloat16, float16 or float32")
    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise SettingError(f"unknown device {device!r}: use cuda, cuda:1, mps, cpu, ...") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"torch finds no GPU for device {device!r}: leave it out to use the CPU")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise SettingError("torch finds no GPU of Apple's for device 'mps': leave it out to use the CPU")


@contextmanager
def _explaining(name: str) -> Iterator[str]:
    """Provide the folder of a model or its name on the hub; if loading fails, raise ModelLoadError with a hint."""
    path = reader_path() if name == READER else name
    try:
        yield path
    except KvragError:
        raise
    except Exception as error:  # transformers, huggingface_hub, safetensors and torch raise different types
        raise ModelLoadError(_explain(name, path, error)) from error


def _explain(name: str, path: str, error: Exception) -> str:
    if out_of_memory(error):
        hint = "it does not fit into memory: use a smaller model, or another dtype or device"
    elif "ignore_mismatched_sizes" in str(error):
        hint = "config.json gives other sizes than the weights have"
    elif "accelerate" in str(error):
        hint = "device_map needs accelerate: pip install accelerate"
    elif "gated repo" in str(error):
        hint = "accept its licence on the model hub, and log in with `hf auth login`"
    elif os.path.isdir(path):
        hint = "check the files in that folder"
    elif is_offline():
        hint = "it is not in the local cache and HF_HUB_OFFLINE is set: unset it, or pass a folder"
    else:
        hint = "check the name and the connection to the hub, or pass a folder with the model's files"
    return f"cannot load model {name!r}: {hint} ({reason_of(error)})"


def refuse_unsupported(config: Any, allow_unverified: bool = False) -> None:
    """Raise UnsupportedModelError if the configuration shows that selective recompute cannot be exact."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    reason = ""
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder model; only causal language models are supported"
    elif other := kinds - {*ATTENTION_KINDS, *STATE_KINDS, *_NEITHER}:
        reason = f"its {', '.join(sorted(other))} layers are neither full, sliding nor chunked attention"
    elif kinds.isdisjoint((*ATTENTION_KINDS, "hybrid")):
        reason = "none of its layers has attention"
    elif keeps_states(text) and not hasattr(Cache, "get_recurrent_state"):
        reason = "its layers keep a state of the tokens so far, which needs transformers 5.24 or newer"
    elif getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "") == "alibi":
        reason = "it uses ALiBi instead of RoPE"
    elif getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # "vision": for images only
        reason = "its attention is bidirectional"
    elif text.model_type not in FAMILIES and not allow_unverified:
        reason = "this family is untested; test your model with `kvrag verify --allow-unverified`"
    if reason:
        raise UnsupportedModelError(f"{config.model_type} models cannot be blended: {reason}")


def refuse_offload(hf: Any) -> None:
    """Raise ModelLoadError if accelerate offloads weights to CPU memory or disk."""
    if any(parameter.device.type == "meta" for parameter in hf.parameters()):
        raise ModelLoadError(
            "device_map offloaded weights to CPU memory or disk, which is not supported: "
            "use more GPU memory, a smaller dtype or model, or device='cpu'"
        )


@contextmanager
def refuse_failures(config: Any) -> Iterator[None]:
    """Convert errors of a trial forward pass of an unknown architecture to UnsupportedModelError."""
    try:
        yield
    except KvragError:
        raise
    except Exception as error:  # architectures fail in different ways
        if out_of_memory(error):
            raise
        raise UnsupportedModelError(
            f"{config.model_type} models cannot be blended: "
            f"a trial forward pass with a cache and a mask failed ({reason_of(error)})"
        ) from error


def refuse_attention(name: str) -> None:
    """Raise UnsupportedModelError unless this attention implementation supports custom masks."""
    if name not in ("sdpa", "eager"):
        raise UnsupportedModelError(
            f"attention implementation {name!r} does not support custom masks: "
            "load the model with attn_implementation='sdpa' or 'eager'"
        )


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the number of keys that a token attends to, itself included, per layer; None = all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * config.num_hidden_layers
    chunk = getattr(config, "attention_chunk_size", None)
    windows = {"sliding_attention": window, "chunked_attention": chunk and Chunked(chunk)}
    return tuple(windows.get(kind) for kind in kinds)


def rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the model's RoPE settings: one dict, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [part for part in parameters.values() if isinstance(part, dict) and "rope_type" in part]
    return nested or ([parameters] if parameters else [])


def context_window(config: Any) -> int:
    """Return the context window in tokens, RoPE scaling included."""
    window = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    parts = rope_parameters(config)
    for part in parts:
        factor = float(part.get("factor") or 1.0)
        if part.get("rope_type") == "linear" and len(parts) > 1:
            continue  # gemma3 already includes the scaling of its full-attention layers; vLLM does the same
        if part.get("rope_type") in ("linear", "dynamic"):
            window = max(window, int(config.max_position_embeddings * factor))
        elif part.get("rope_type") == "yarn" and part.get("original_max_position_embeddings"):
            window = max(window, int(part["original_max_position_embeddings"] * factor))
    return window


def stable_length(rope: list[dict[str, Any]], window: int) -> int:
    """Return the number of tokens up to which RoPE frequencies do not depend on the prompt length."""
    for part in rope:
        if part.get("rope_type") == "dynamic":
            window = min(window, int(window / float(part.get("factor") or 1.0)))
        elif part.get("rope_type") == "longrope":
            window = min(window, int(part.get("original_max_position_embeddings") or window))
    return window


def recompute_threshold(config: Any, stable_length: int) -> int | None:
    """Return the length at which the family's `generate` drops the cache to change RoPE frequencies; None = never."""
    original: int | None = getattr(config, "original_max_position_embeddings", None)
    return stable_length if config.model_type in ("phi3", "phimoe") and original is not None else None


class Int8Linear(Linear):
    """A linear layer with a rounded `weight` (N, K), and the same as int8 `steps` (N, K) and their `sizes` (N,).

    For CPUs, where a decode step takes as long as reading the weights. Every row is rounded to 255 steps of its own
    size. The model is the rounded one from then on. Passes of a few rows read the 8-bit weights, larger ones the same
    values in the model's dtype, which is faster for them; memory grows by half. The kernel is torch's own,
    `aten::_weight_int8pack_mm`.
    """

    steps: Tensor
    sizes: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., N) for (..., K)."""
        num_rows = input.numel() // input.shape[-1]
        if num_rows > _MOST_ROWS:
            return linear(input, self.weight, self.bias)
        rows = input.reshape(num_rows, -1).contiguous()
        result = torch._weight_int8pack_mm(rows, self.steps, self.sizes).reshape(*input.shape[:-1], -1)
        return result if self.bias is None else result + self.bias


@torch.no_grad()
def quantize(hf: Any) -> Any:
    """Round the weights of a model's linear layers in place, and return it.

    Raises:
        SettingError: A device other than the CPU, or weights that are quantised already.
    """
    if getattr(hf, "is_quantized", False):
        raise SettingError("the model's weights are quantised already: leave out quantization")
    if devices := {str(weight.device) for weight in hf.parameters() if weight.device.type != "cpu"}:
        raise SettingError(f"quantization is for CPUs, and the model is on {min(devices)}: leave it out")
    done: dict[int, tuple[Tensor, Tensor]] = {}  # by address: embeddings may share a weight with the last layer
    for layer in hf.modules():
        if type(layer) is not Linear or layer.in_features % _MULTIPLE:
            continue
        weight = layer.weight.data
        if weight.data_ptr() not in done:
            sizes = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(weight.dtype).tiny)
            steps = (weight.float() / sizes.float()[:, None]).round_().clamp_(-127, 127)
            weight.copy_(steps * sizes.float()[:, None])
            done[weight.data_ptr()] = steps.to(torch.int8), sizes
        layer.__class__ = Int8Linear
        quantised = cast(Int8Linear, layer)
        for name, value in zip(("steps", "sizes"), done[weight.data_ptr()], strict=True):
            quantised.register_buffer(name, value, persistent=False)
    sizes_of = [(weight.ndim, weight.numel()) for weight in hf.parameters()]
    share = sum(size for ndim, size in sizes_of if ndim == 3) / max(1, sum(size for _, size in sizes_of))
    if share > _FUSED:
        logger.warning("int8 leaves %.0f %% of the weights as they are: those of its fused experts", 100 * share)
    return hf

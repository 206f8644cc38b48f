"""GGUF files as transformers models: configuration, tokenizer, and dequantised weights.

transformers' own loader leaves out settings that change the result: Llama 3's RoPE, windows, the RoPE base of some
architectures, how vocabularies split and merge texts. Here, a file with a setting that would be lost is refused.
"""

from __future__ import annotations

import json
import logging
import re
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoConfig, TokenizersBackend
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvrag.backend.gguf import Header, Tensor, modelfile
from kvrag.errors import ModelLoadError, UnsupportedModelError, reason_of

logger = logging.getLogger("kvrag")

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
_SCALING = "rope.scaling."
_FREQS, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SCALES_BY_WIDTH = {"gemma2": 46, "gemma3": 62}  # layers of the only size that does

_GGML, _NORMAL, _UNKNOWN, _CONTROL, _ADDED, _BYTE = "tokenizer.ggml.", 1, 2, 3, 4, 6
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEYS = re.compile(
    r"model|pre|tokens|token_type|scores|merges|add_bos_token|add_space_prefix|(bos|eos|eot|eom|unknown|padding)_token_id"
    r"|eos_token_ids|tokenizer\.chat_template(\.\w+)?"
    # harmless: EOS behind texts to train on; tokens in tasks of code and of BERT; a copy of the tokenizer; names
    r"|add_eos_token|(fim_\w+|prefix|suffix|middle|seperator|cls|mask)_token_id|token_type_count"
    r"|tokenizer\.(huggingface\.json|chat_templates)"
)
"""Keys that a file may have for its tokenizer; any other must be False, or is refused."""

# how a byte-level vocabulary splits texts, one way after the other, besides those that transformers knows
_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), (_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _WORDS)),
    "default": (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", "[0-9]{3}"),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
}
_PLAIN = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3 that leave the white space behind them
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""Names with which a word that is a token needs no merges, and BOS is added by default."""

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end an answer, whatever the metadata says, as in llama.cpp."""

_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")  # Ollama's, that transformers has, too
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
    special = _special_ids(header)
    config = AutoConfig.for_model(
        MODEL_TYPES[architecture],
        **fields,
        rope_parameters=_rope(header, own, default.rope_parameters, head_dim),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in tensors,
        dtype=header.dtype,
        bos_token_id=special.get("bos"),
        pad_token_id=special.get("padding"),
        eos_token_id=sorted({special[name] for name in ("eos", "eot", "eom") if name in special}),
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
        UnsupportedModelError: It would give other ids than llama.cpp's, or has a setting that would be lost.
        ModelLoadError: The chat template is broken.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, arrays = header.metadata, [f"{_GGML}tokens", f"{_GGML}merges"]
    part = {key.removeprefix(_GGML): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    for key, value in metadata.items():
        if key.startswith("tokenizer.") and not _KEYS.fullmatch(key.removeprefix(_GGML)) and value is not False:
            _refuse(header, f"its setting {key} would be lost: {_ORIGINAL}")
    texts, _ = read_gguf_metadata(str(header.path), arrays)
    part |= {key.removeprefix(_GGML): texts[key] for key in arrays if key in texts}
    part["tokens"] = tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(part["tokens"])]
    part["vocab"] = {text: number for number, text in enumerate(tokens)}
    part["token_type"] = kinds = part.get("token_type") or [_NORMAL] * len(tokens)
    special, is_spm = {name: tokens[number] for name, number in _special_ids(header).items()}, part["model"] == "llama"
    if part["model"] not in ("llama", "gpt2") or len(part["vocab"]) != len(tokens):
        _refuse(header, f"its tokenizer of the kind {part['model']!r} is not read: {_ORIGINAL}")
    backend = _sentencepiece(header, part, special.get("unknown")) if is_spm else _byte_level(header, part)
    # no metadata say so; llama.cpp goes by the name, of which converters write several
    strips = re.search("phi-?3", f"{metadata.get('general.name')} {is_spm and header.architecture}".lower()) is not None
    own = {special.get("bos"), special.get("eos"), *_ENDS}  # some files call them normal
    added: dict[str | None, AddedToken] = {
        text: AddedToken(
            text, rstrip=strips and text not in _PLAIN, normalized=False, special=kind != _ADDED or text in own
        )
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _ADDED) or text in own
    }
    backend.add_tokens([*added.values()])
    template = part.get("tokenizer.chat_template")
    named = {key[24:]: text for key, text in part.items() if key.startswith("tokenizer.chat_template.")}
    hf = TokenizersBackend(
        tokenizer_object=backend,
        model_max_length=metadata[f"{header.architecture}.context_length"],
        chat_template={"default": template, **named} if template and named else template,
        add_bos_token=part.get("add_bos_token", is_spm or part.get("pre") in _LLAMA3),
        **{role: added.get(special.get(name)) for role, name in _ROLES.items()},
    )
    if hf.chat_template is not None:
        _check_template(header, hf)
    return hf


def _special_ids(header: Header) -> dict[str, int]:
    """Return the ids of special tokens by name. One outside the vocabulary is ignored, as by llama.cpp."""
    ids = {"bos": 1, "eos": 2, "unknown": 0} if header.metadata.get(f"{_GGML}model") == "llama" else {}
    size = header.metadata.get(f"{_GGML}tokens", 0)
    for key, number in header.metadata.items():
        if key.startswith(_GGML) and key.endswith("_token_id") and 0 <= number < size:
            ids[key.removeprefix(_GGML).removesuffix("_token_id")] = number
    return {name: number for name, number in ids.items() if number < size}


def _sentencepiece(header: Header, part: dict[str, Any], unknown: str | None) -> Backend:
    """Return a tokenizer that joins neighbours to the token with the best score."""
    tokens, kinds, vocab = part["tokens"], part["token_type"], part["vocab"]
    scores = part.get("scores") or [0.0] * len(tokens)
    found = [
        (number, text[:cut], text[cut:])
        for text, number in vocab.items()
        if kinds[number] not in (_UNKNOWN, _CONTROL, _BYTE)
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    found.sort(key=lambda merge: (-scores[merge[0]], -len(merge[1])))
    merges = [(left, right) for _, left, right in found]
    if "merges" in part and len({scores[number] for number, *_ in found if kinds[number] == _NORMAL}) == 1:
        merges, found = _pairs(part["merges"]), []  # the scores are placeholders
    first: dict[tuple[float, str], int] = {}
    for rank, (number, left, _) in enumerate(found):
        first.setdefault((scores[number], left), rank)
    for rank, (number, _, right) in enumerate(found):
        other, _, _ = found[min(rank, first.get((scores[number], right), rank))]
        # of equal neighbours, the first in a text goes first, as no ranks can say; runs of one character come out right
        if other != number and len({*tokens[number], *tokens[other]}) > 1:
            both = f"{tokens[number]!r} and {tokens[other]!r}"
            _refuse(header, f"{both} of its tokenizer overlap and have the same score: {_ORIGINAL}")
    backend = Backend(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    before: list[Any] = [normalizers.Replace(" ", "\u2581")]
    after: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if part.get("add_space_prefix", True):
        before, after = [normalizers.Prepend("\u2581"), *before], [*after, decoders.Strip(" ", 1, 0)]
    backend.normalizer, backend.decoder = normalizers.Sequence(before), decoders.Sequence(after)
    return backend


def _byte_level(header: Header, part: dict[str, Any]) -> Backend:
    """Return a tokenizer that joins the bytes of words in the order of the merges."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    way = part.get("pre", "default")
    split = GGUF_PRE_TOKENIZER_SPLITS.get("qwen2" if way == "stablelm2" else way)
    if split is None and way not in _SPLITS:
        _refuse(header, f"how its tokenizer {way!r} splits texts is unknown: {_ORIGINAL}")
    backend = Backend(BPE(part["vocab"], _pairs(part["merges"]), ignore_merges=way in _LLAMA3))
    words = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS.get(way, (split,))]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    return [(merge[:at], merge[at + 1 :]) for merge in merges for at in (merge.index(" ", 1),)]


def set_defaults(header: Header, hf: Any, generation: Any) -> None:
    """Set on tokenizer and generation config what ends answers, and what Ollama's model adds; log the rest of it."""
    layers, listed = modelfile(header.name), header.metadata.get(f"{_GGML}eos_token_ids", ())
    options = json.loads(layers.pop("params", "{}"))
    hf.default_system, hf.default_stop = hf.chat_template and layers.pop("system", ""), tuple(options.pop("stop", ()))
    ends = {hf.backend_tokenizer.token_to_id(text) for text in (*_ENDS, *hf.default_stop)} - {None}
    generation.eos_token_id = sorted({*ends, *(generation.eos_token_id or ()), *listed})
    given = {key.replace("repeat", "repetition"): options.pop(key) for key in _OPTIONS if key in options}
    if "temperature" in given:
        given |= {"do_sample": given["temperature"] > 0, "temperature": given["temperature"] or None}
    generation.update(**given)
    if left := [*(kind.upper() for kind, text in layers.items() if text != hf.chat_template), *options]:
        said = "%s: of its Modelfile, not applied: %s; a chat template is read from its GGUF file only"
        logger.warning(said, header.name, ", ".join(left))


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

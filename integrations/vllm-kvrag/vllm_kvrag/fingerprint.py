"""Fingerprint of the model that vLLM serves: the same as in transformers, so that both can share a store.

Quantised weights have one of their own: vLLM's kernels and transformers compute other KV with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from kvrag import ModelLoadError, UnsupportedModelError
from kvrag.backend.transformers.loading import auto_class, load, load_config, load_tokenizer, refuse_failures
from kvrag.backend.transformers.model import fingerprint
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.fingerprint import Fingerprint, hash_weights

_FILES = "*.safetensors"


def fingerprint_of(model_config: Any) -> Fingerprint:
    """Return the fingerprint of the checkpoint that vLLM serves.

    Raises:
        KvragError: It cannot be read, or its format is not supported.
    """
    return checkpoint_fingerprint(
        model_config.model,
        model_config.dtype,
        model_config.revision,
        model_config.trust_remote_code,
        (model_config.quantization, model_config.quantization_config),
    )


def checkpoint_fingerprint(
    name_or_path: str | Path,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization: tuple[str | None, Any] = (None, None),
) -> Fingerprint:
    """Return the fingerprint of `Model.from_pretrained(name_or_path, dtype=dtype)`, without loading the model.

    Weights that are stored in `dtype` stay memory-mapped and take no memory; others are converted.
    UnsupportedModelError: the weights of a loaded model are not those of the files.

    Args:
        quantization: Method and settings of vLLM, which also quantises plain checkpoints while it loads them.
    """
    name = str(name_or_path)
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    with refuse_failures(config), torch.device("meta"):
        outline = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    stored = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if stored or any(quantization):
        tokenizer = Tokenizer(load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code), name)
        method, settings = quantization
        how = json.dumps([stored or method, repr(settings)], sort_keys=True, default=str)  # versions rename methods
        return fingerprint(name, outline, tokenizer, _hash_files(name, revision, how))
    reason = ""
    if any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(outline)):
        reason = "transformers merges or splits some of its weights on loading"
    elif outline._get_dtype_plan(dtype):
        reason = f"transformers keeps some of its weights in float32, not in {dtype}"
    if reason:
        raise UnsupportedModelError(f"the fingerprint of {name!r} cannot be computed from its files: {reason}")
    options: dict[str, Any] = {"device": "cpu", "revision": revision, "trust_remote_code": trust_remote_code}
    hf, tokenizer = load(name, dtype=str(dtype).removeprefix("torch."), **options)
    return fingerprint(name, hf, Tokenizer(tokenizer, name))


def _hash_files(name: str, revision: str | None, how: str) -> str:
    """Return the hash of a checkpoint's tensors, however they are distributed over files, and of how they are read."""
    try:
        is_local = Path(name).exists()
        folder = Path(name if is_local else snapshot_download(name, revision=revision, allow_patterns=_FILES))
        tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob(_FILES):
            if not file.name.startswith("consolidated"):  # Mistral's own format, beside the other
                tensors |= load_file(file)  # stay memory-mapped
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"cannot load model {name!r}: check its files ({error})") from error
    if not tensors:
        raise UnsupportedModelError(f"{name!r} is quantised and has no safetensors files: use a checkpoint with them")
    return hash_weights([(how, torch.empty(0)), *sorted(tensors.items())])


def tokenizer_of(model_config: Any) -> Tokenizer:
    """Return kvrag's tokenizer of the model."""
    hf = AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )
    return Tokenizer(hf, model_config.model)

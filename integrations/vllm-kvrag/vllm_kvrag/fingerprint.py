"""Fingerprint of the model that vLLM serves: the same as in transformers, so that both can share a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from kvrag import UnsupportedModelError
from kvrag.ext import Fingerprint, Tokenizer, auto_class, fingerprint, load, load_config, refuse_failures


def fingerprint_of(model_config: Any) -> Fingerprint:
    """Return the fingerprint of the checkpoint that vLLM serves.

    Raises:
        KvragError: It cannot be read, or its format is not supported.
    """
    return checkpoint_fingerprint(
        model_config.model, model_config.dtype, model_config.revision, model_config.trust_remote_code
    )


def checkpoint_fingerprint(
    name_or_path: str | Path, dtype: torch.dtype, revision: str | None = None, trust_remote_code: bool = False
) -> Fingerprint:
    """Return the fingerprint of `Model.from_pretrained(name_or_path, dtype=dtype)`, without loading the model.

    Weights that are stored in `dtype` stay memory-mapped and take no memory; others are converted.
    UnsupportedModelError: the weights of a loaded model are not those of the files.
    """
    name = str(name_or_path)
    config = load_config(name, revision, trust_remote_code)
    with refuse_failures(config), torch.device("meta"):
        outline = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    reason = ""
    if getattr(config, "quantization_config", None) or getattr(config.get_text_config(), "quantization_config", None):
        reason = "it is quantised"
    elif any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(outline)):
        reason = "transformers merges or splits some of its weights on loading"
    elif outline._get_dtype_plan(dtype):
        reason = f"transformers keeps some of its weights in float32, not in {dtype}"
    if reason:
        raise UnsupportedModelError(f"the fingerprint of {name!r} cannot be computed from its files: {reason}")
    options: dict[str, Any] = {"device": "cpu", "revision": revision, "trust_remote_code": trust_remote_code}
    hf, tokenizer = load(name, dtype=str(dtype).removeprefix("torch."), **options)
    return fingerprint(name, hf, Tokenizer(tokenizer, name))


def tokenizer_of(model_config: Any) -> Tokenizer:
    """Return kvrag's tokenizer of the model."""
    hf = AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )
    return Tokenizer(hf, model_config.model)

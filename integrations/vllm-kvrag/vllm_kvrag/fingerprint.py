"""Fingerprint of the model that vLLM serves: the same as in transformers, so that both can share a store."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from kvrag.backend.transformers.checkpoint import checkpoint_fingerprint
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.fingerprint import Fingerprint


def fingerprint_of(model_config: Any) -> Fingerprint:
    """Return the fingerprint of the checkpoint that vLLM serves.

    Raises:
        KvragError: It cannot be read, or its format is not supported.
    """
    return checkpoint_fingerprint(
        model_config.model,
        model_config.dtype,
        revision=model_config.revision,
        trust_remote_code=model_config.trust_remote_code,
    )


def tokenizer_of(model_config: Any) -> Tokenizer:
    """Return kvrag's tokenizer of the model."""
    hf = AutoTokenizer.from_pretrained(
        model_config.tokenizer,
        revision=model_config.tokenizer_revision,
        trust_remote_code=model_config.trust_remote_code,
    )
    return Tokenizer(hf, model_config.model)

"""Models of a real shape with random weights: valid for speed, useless for answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvrag.backend.transformers.loading import default_device, reader_path
from kvrag.backend.transformers.model import Model


def untrained_model(
    shape: str,
    settings: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    device: str | None = None,
    compile_decode: bool = False,
) -> Model:
    """Return a model with this configuration and the bundled reader's tokenizer. `shape` is a name to show."""
    tokenizer = AutoTokenizer.from_pretrained(reader_path())
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model(**settings, **special)
    torch.manual_seed(0)
    with torch.device(device or default_device()):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    name = f"{shape} shape, {config.num_hidden_layers} layers, random weights"
    return Model(hf, tokenizer, name, compile_decode=compile_decode)


def one_token_words(model: Model) -> list[str]:
    """Return words that are one token each in any position, so that the length of a text in tokens is exact."""
    texts = (model.tokenizer.decode([i]) for i in range(3, len(model.tokenizer.hf)))
    return [text for text in texts if re.fullmatch(" [a-z]+", text) and len(model.tokenizer.encode(text)) == 1]

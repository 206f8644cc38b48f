"""Adapters of tiny models, made by PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import torch


def adapted_by_peft(hf: Any, seed: int = 0) -> Any:
    """Return a copy of a model with a LoRA on its linear layers that has an effect."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(copy.deepcopy(hf), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    return adapted.eval()


def save_adapter(hf: Any, folder: Path, seed: int = 0) -> Path:
    """Write such an adapter to a folder."""
    adapted_by_peft(hf, seed).save_pretrained(folder)
    return folder

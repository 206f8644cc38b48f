"""Files of a training: the adapter in PEFT's format, and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor, nn

from kvrag import ModelLoadError
from kvrag.ext import CONFIG, PLAIN, PREFIX, TEMPORARY, WEIGHTS, LowRank, delete_left, reason_of, write_file

_SHARED = 0o666  # an adapter is no secret: whoever serves the model reads it


def linear_layers(hf: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's decoder layers, by name; routers of experts are left out."""
    return {
        name: module
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear)
        and any(part.isdigit() for part in name.split("."))
        and name.rsplit(".", 1)[-1] not in ("gate", "router")
    }


def new_layers(hf: nn.Module, rank: int, seed: int) -> dict[str, LowRank]:
    """Return trainable changes of all linear layers that have no effect yet, in float32."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, module in linear_layers(hf).items():
        down = torch.randn(rank, module.in_features, generator=generator) / math.sqrt(module.in_features)
        up = torch.zeros(module.out_features, rank)
        down, up = (part.to(module.weight.device).requires_grad_() for part in (down, up))
        layers[name] = LowRank(down, up, 1.0)
    return layers


def save(folder: Path, layers: Mapping[str, LowRank], base: str) -> None:
    """Write an adapter in PEFT's format, each file complete or not at all. Raises OSError.

    Args:
        base: Name of the model that it was trained for.
    """
    (rank,) = {layer.down.shape[0] for layer in layers.values()}
    (scale,) = {layer.scale for layer in layers.values()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in layers}),
        "inference_mode": True,
        **PLAIN,
    }
    weights = {}
    for name, layer in layers.items():
        weights[f"{PREFIX}{name}.lora_A.weight"] = layer.down
        weights[f"{PREFIX}{name}.lora_B.weight"] = layer.up
    write_file(folder / WEIGHTS, _as_bytes(weights, {"format": "pt"}), mode=_SHARED)
    text = f"{json.dumps(config, indent=1)}\n"
    write_file(folder / CONFIG, text.encode(), mode=_SHARED)  # last: its presence means an adapter


def write_tensors(path: Path, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
    """Write tensors and JSON to one file, which appears complete or not at all. Raises OSError."""
    delete_left(path.parent.glob(TEMPORARY))  # by a killed training
    write_file(path, _as_bytes(tensors, {"content": json.dumps(content)}), mode=_SHARED)


def _as_bytes(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    return serialise({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, metadata)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of `write_tensors`; raises ModelLoadError if it is damaged."""
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["content"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelLoadError(f"{path} is damaged: delete it to start again ({reason_of(error)})") from error

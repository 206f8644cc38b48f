"""A LoRA adapter that is active only while chunks are encoded, in PEFT's format.

It changes what is stored, so that stored KV is nearer to the KV that a prompt would compute. The model that answers is
untouched: full prefill, fresh text and recomputed tokens are what they are without an adapter. Source: SemPIC
(arXiv:2607.28069).
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from kvrag.errors import ModelLoadError, reason_of
from kvrag.process import HeldBriefly

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of PEFT."""

PREFIX = "base_model.model."
PLAIN = {
    **dict.fromkeys(("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")),
    **dict.fromkeys(("use_qalora", "use_bdlora", "kasa_config", "alora_invocation_tokens", "layer_replication")),
    "bias": "none",
}
"""Settings of PEFT that change what an adapter computes, with the only supported values."""

_thread = threading.local()


@dataclass(frozen=True)
class LowRank:
    """The change of one linear layer's output: `scale * up(down(x))`."""

    down: Tensor  # (r, in)
    up: Tensor  # (out, r)
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the (..., out) change for an (..., in) input."""
        return (x @ self.down.to(x.dtype).T) @ (self.up.to(x.dtype).T * self.scale)


class Adapter:
    """The low-rank changes of some linear layers of a model, by module name. `digest` identifies them."""

    def __init__(self, hf: nn.Module, layers: Mapping[str, LowRank]) -> None:
        """Adapt modules of a model; raises ModelLoadError if it has no such modules, or of other sizes."""
        modules = dict(hf.named_modules())
        self._modules = {name: _fitting(modules.get(name), name, layer) for name, layer in layers.items()}
        places = {name: module.weight.device for name, module in self._modules.items()}
        self.layers = {
            name: replace(layer, down=layer.down.to(places[name]), up=layer.up.to(places[name]))
            for name, layer in layers.items()
        }
        self.digest = digest(self.layers)
        self._lock, self._users = HeldBriefly(), 0
        self._hooks: list[Any] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Apply the adapter to the forward passes of this thread. Other threads use the model as it is meanwhile.

        The hooks exist only while a thread is in here: they would slow down every decode step.
        """
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._hooks = [
                    module.register_forward_hook(partial(_add, self, self.layers[name]))
                    for name, module in self._modules.items()
                ]
        _thread.adapter = self
        try:
            yield
        finally:
            _thread.adapter = None
            with self._lock:
                self._users -= 1
                if not self._users:
                    for hook in self._hooks:
                        hook.remove()


def active_adapter() -> Adapter | None:
    """Return the adapter that is active in this thread."""
    return getattr(_thread, "adapter", None)


def _add(adapter: Adapter, layer: LowRank, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Add a layer's change to its output, in threads that encode."""
    if active_adapter() is not adapter:
        return output
    return output + layer(args[0])


def read(folder: str | Path) -> tuple[dict[str, LowRank], str]:
    """Return the changes in an adapter's files, on the CPU, and the name of the model that it was made for.

    ModelLoadError: The files are missing, damaged, or of another kind of adapter.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
        scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
        different = [key for key, value in PLAIN.items() if (config.get(key) or value) != value]
        if str(config.get("init_lora_weights")).startswith(("pissa", "olora", "corda", "lora_ga")):
            different.append("init_lora_weights")  # these change the model's own weights
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, SafetensorError) as error:
        raise ModelLoadError(
            f"cannot load the adapter {str(folder)!r}: it needs {CONFIG} and {WEIGHTS} ({reason_of(error)})"
        ) from error
    if config.get("peft_type") != "LORA" or different:
        kind = ", ".join(different) or f"peft_type {config.get('peft_type')}"
        raise ModelLoadError(f"the adapter {str(folder)!r} is not a plain LoRA ({kind}): only plain ones are supported")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        module, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
        parts.setdefault(module, {})[part] = tensor
    if not parts or any(set(pair) != {"A.weight", "B.weight"} for pair in parts.values()):
        raise ModelLoadError(f"the adapter {str(folder)!r} has other weights than lora_A and lora_B of its layers")
    if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
        raise ModelLoadError(f"the adapter {str(folder)!r} has weights that are NaN or infinite: train it again")
    layers = {module: LowRank(pair["A.weight"], pair["B.weight"], scale) for module, pair in parts.items()}
    return layers, str(config.get("base_model_name_or_path"))


def load(folder: str | Path, hf: nn.Module, name: str) -> Adapter:
    """Load an adapter for a model with this display name; raises ModelLoadError, also if it is for another model."""
    layers, base = read(folder)
    try:
        return Adapter(hf, layers)
    except ModelLoadError as error:
        raise ModelLoadError(f"the adapter {str(folder)!r}, made for {base}, does not fit {name}: {error}") from None


def digest(layers: Mapping[str, LowRank]) -> str:
    """Return a hash of names, scales and weights."""
    state = xxhash.xxh3_128()
    for name, layer in sorted(layers.items()):
        state.update(f"{name} {layer.scale!r} {tuple(layer.down.shape)} {tuple(layer.up.shape)}".encode())
        for part in (layer.down, layer.up):
            state.update(part.detach().cpu().float().contiguous().numpy().tobytes())
    return state.hexdigest()


def _fitting(module: Any, name: str, layer: LowRank) -> Any:
    """Return the module that a change is for."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if module is None or sizes != (layer.down.shape[1], layer.up.shape[0]) or len(layer.down) != layer.up.shape[1]:
        raise ModelLoadError(f"no linear layer {name} of {layer.down.shape[1]} inputs and {layer.up.shape[0]} outputs")
    return module

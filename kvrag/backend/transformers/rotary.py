"""Detect how each layer rotates its keys, by observing the loaded model.

Two short passes run at different positions. Hooks record which rotary module feeds which layer; the cached keys show
which layers rotate (some have no RoPE) and how many dimensions. Undoing the rotation must give the same keys in both
passes, otherwise the model is rejected. This also works for unlisted families.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from kvrag.backend.rope import Pairs, rotate, unrotate
from kvrag.backend.transformers.cache import BlendCache
from kvrag.errors import UnsupportedModelError

_TOKENS = 16


Form = Literal["half_split", "interleaved", "once"]
"""Layout of a model's table: all pairs twice in sequence, each pair twice, or each pair once."""


@dataclass(frozen=True)
class LayerRotary:
    """Rotation of one layer's keys; `module(x, positions, *extra)` gives its tables."""

    module: nn.Module
    extra: tuple[Any, ...]
    pairs: Pairs
    form: Form

    def tables(self, positions: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the model's own cos and sin for (T,) positions, each (T, R) float32, one entry per pair."""
        like = torch.empty(0, dtype=dtype, device=device)  # the module takes dtype and device from it
        cos, sin = self.module(like, positions[None].to(device), *self.extra)
        return _once(cos, self.form), _once(sin, self.form)


def _once(table: Tensor, form: Form) -> Tensor:
    """Convert the model's (1, T, 2R) or (1, T, R) table to (T, R) float32."""
    table = table[0].float()
    if form == "interleaved":
        table = table[:, 0::2]
    elif form == "half_split":
        table = table[:, : table.shape[1] // 2]
    return table.contiguous()


def probe(hf: Any, num_layers: int, shift: int) -> tuple[list[LayerRotary | None], list[torch.device]]:
    """Return the rotation of each layer's keys (None = not rotated) and its device, or raise UnsupportedModelError."""
    first, second = (_observe(hf, num_layers, start) for start in (0, shift))
    layers = [_detect(number, *passes) for number, passes in enumerate(zip(first, second, strict=True))]
    if not any(layers):
        _refuse("no layer applies rotary position embedding (learned or absolute positions, or none)")
    return layers, [layer.keys.device for layer in first if layer.keys is not None]


@dataclass
class _Observation:
    """Observation of one layer during one pass."""

    keys: Tensor | None = None  # (1, H, T, D), as cached
    rotary: tuple[nn.Module, tuple[Any, ...]] | None = None
    tables: tuple[Tensor, Tensor] | None = None  # cos and sin as received by the attention


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedModelError(f"this model cannot be blended: {reason}")


@torch.inference_mode()
def _observe(hf: Any, num_layers: int, start: int) -> list[_Observation]:
    layers = [_Observation() for _ in range(num_layers)]
    outputs: list[tuple[Tensor, nn.Module, tuple[Any, ...]]] = []  # cos tables and the modules that returned them

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2 and "otary" in type(module).__name__:
            extra = args[2:] + tuple(v for k, v in kwargs.items() if k not in ("x", "position_ids"))
            outputs.append((output[0], module, extra))

    def before(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        tables, number = kwargs.get("position_embeddings"), getattr(module, "layer_idx", None)
        if not isinstance(tables, tuple) or not isinstance(number, int):
            return
        layer = layers[number]
        layer.tables = tables
        for cos, rotary, extra in outputs:
            if cos is tables[0] or (cos.shape == tables[0].shape and torch.equal(cos.cpu(), tables[0].cpu())):
                layer.rotary = rotary, extra

    hooks = [module.register_forward_hook(after, with_kwargs=True) for module in hf.modules()]
    hooks += [module.register_forward_pre_hook(before, with_kwargs=True) for module in hf.modules()]
    cache = BlendCache(num_layers, _TOKENS)
    device = hf.get_input_embeddings().weight.device
    ids = torch.arange(_TOKENS, device=device) * 7 + 3
    try:
        hf(  # models with other arguments are caught by the table of families
            input_ids=(ids % hf.config.get_text_config().vocab_size)[None],
            position_ids=torch.arange(start, start + _TOKENS, device=device)[None],
            past_key_values=cache,
            use_cache=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    for layer, cached in zip(layers, cache.layers, strict=True):
        layer.keys = cached.keys
    return layers


def _detect(number: int, first: _Observation, second: _Observation) -> LayerRotary | None:
    if first.keys is None or second.keys is None:
        _refuse(f"layer {number} does not write its keys into the cache")
    if not _rotated(first.keys, second.keys):
        return None
    if first.rotary is None or first.tables is None or second.tables is None:
        _refuse(f"the keys of layer {number} depend on their position, but not by a rotary table that it receives")
    for pairs, form in itertools.product(get_args(Pairs), get_args(Form)):
        tables, shifted = ((_once(cos, form), _once(sin, form)) for cos, sin in (first.tables, second.tables))
        if 2 * tables[0].shape[-1] > first.keys.shape[-1]:
            continue
        a, b = unrotate(first.keys, *tables, pairs), unrotate(second.keys, *shifted, pairs)
        if _same(a, b) and _same(rotate(a, *shifted, pairs), second.keys):
            return LayerRotary(*first.rotary, pairs, form)
    _refuse(f"undoing RoPE on the keys of layer {number} does not give position-free keys")


def _rotated(first: Tensor, second: Tensor) -> bool:
    """Return whether any dimension changed with the position.

    The fast dimensions rotate by full turns, while the slow ones, which may hold most of the norm, hardly change.
    """
    a, b = first.float(), second.float()
    change = (a - b).square().mean(dim=(0, 1, 2)) / a.square().mean(dim=(0, 1, 2)).clamp_min(1e-12)  # (D,)
    return bool(change.max() > 0.1)


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether keys are equal for the median token: in half precision, expert routing may differ for a few."""
    a, b = first.float(), second.float()
    error = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12)  # (B, H, T)
    return bool(error.median() < (1e-3 if first.dtype == torch.float32 else 0.1))

"""Find out how each layer turns its keys, by watching the loaded model run.

Two short passes, the second further along: the hooks see which rotary module feeds which layer, and the cached keys show
which layers turn at all (some have no RoPE) and by how many dimensions. Taking the turn off again must give the same
keys in both passes; a model for which it does not is refused. That covers what no table of families could know.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvrag.errors import UnsupportedModelError
from kvrag.model.cache import BlendCache
from kvrag.rope import Apply, rotate, unrotate

_TOKENS = 16


@dataclass(frozen=True)
class LayerRotary:
    """How one layer's keys are turned; `module(x, positions, *extra)` gives its tables."""

    module: nn.Module
    extra: tuple[Any, ...]
    apply: Apply
    num_rotary: int

    def tables(self, positions: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The model's own cos and sin, each (1, T, R), for (T,) positions."""
        like = torch.empty(0, dtype=dtype, device=device)  # the module reads dtype and device off it
        cos, sin = self.module(like, positions[None].to(device), *self.extra)
        return cos, sin


def probe(hf: Any, num_layers: int, shift: int) -> tuple[list[LayerRotary | None], list[torch.device]]:
    """Per layer how its keys are turned, None where they are not, and the device it runs on.

    Raises:
        UnsupportedModelError: Keys of this model cannot be made position-free.
    """
    seen = [_watch(hf, num_layers, start) for start in (0, shift)]
    found = [_one_layer(number, seen[0][number], seen[1][number]) for number in range(num_layers)]
    if not any(found):
        _refuse("no layer applies rotary position embedding (learned or absolute positions, or none)")
    return found, [layer.keys.device for layer in seen[0] if layer.keys is not None]


@dataclass
class _Seen:
    """What one pass showed of one layer."""

    keys: Tensor | None = None  # (1, H, T, D), as cached
    attention: nn.Module | None = None
    rotary: tuple[nn.Module, tuple[Any, ...]] | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def _refuse(reason: str) -> None:
    raise UnsupportedModelError(f"this model cannot be blended: {reason}")


@torch.inference_mode()
def _watch(hf: Any, num_layers: int, start: int) -> list[_Seen]:
    layers = [_Seen() for _ in range(num_layers)]
    made: list[tuple[Tensor, nn.Module, tuple[Any, ...]]] = []  # cos tables and who made them

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2 and "otary" in type(module).__name__:
            extra = args[2:] + tuple(v for k, v in kwargs.items() if k not in ("x", "position_ids"))
            made.append((output[0], module, extra))

    def before(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        tables, number = kwargs.get("position_embeddings"), getattr(module, "layer_idx", None)
        if not isinstance(tables, tuple) or not isinstance(number, int):
            return
        layer = layers[number]
        layer.attention, (layer.cos, layer.sin) = module, tables
        for cos, rotary, extra in made:
            if cos is tables[0] or (cos.shape == tables[0].shape and torch.equal(cos.cpu(), tables[0].cpu())):
                layer.rotary = rotary, extra

    hooks = [module.register_forward_hook(after, with_kwargs=True) for module in hf.modules()]
    hooks += [module.register_forward_pre_hook(before, with_kwargs=True) for module in hf.modules()]
    cache = BlendCache(num_layers, _TOKENS)
    device = hf.get_input_embeddings().weight.device
    ids = torch.arange(_TOKENS, device=device) * 7 + 3
    try:
        hf(  # models that take other arguments are caught by the table of families
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


def _one_layer(number: int, first: _Seen, second: _Seen) -> LayerRotary | None:
    if first.keys is None or second.keys is None:
        _refuse(f"layer {number} does not write its keys into the cache")
    assert first.keys is not None and second.keys is not None
    if not _turned(first.keys, second.keys):
        return None
    if first.attention is None or first.rotary is None or first.cos is None or second.cos is None:
        _refuse(f"the keys of layer {number} depend on their position, but not by a rotary table it is handed")
    assert first.rotary is not None and first.cos is not None and first.sin is not None
    assert second.cos is not None and second.sin is not None
    apply: Callable[..., Any] | None = getattr(
        sys.modules[type(first.attention).__module__], "apply_rotary_pos_emb", None
    )
    if apply is None:
        _refuse(f"{type(first.attention).__module__} has no apply_rotary_pos_emb to undo")
    assert apply is not None
    # the table covers the turning dimensions once, or one half of them (gpt_oss)
    for num_rotary in (first.cos.shape[-1], 2 * first.cos.shape[-1]):
        if num_rotary > first.keys.shape[-1]:
            continue
        try:
            a = unrotate(first.keys, first.cos, first.sin, apply, num_rotary)
            b = unrotate(second.keys, second.cos, second.sin, apply, num_rotary)
            again = rotate(a, second.cos, second.sin, apply, num_rotary)
        except (RuntimeError, TypeError):
            continue  # shapes or arguments do not fit: not this one
        if _same(a, b) and _same(again, second.keys):
            return LayerRotary(*first.rotary, apply, num_rotary)
    _refuse(f"taking RoPE off the keys of layer {number} does not give position-free keys")
    raise AssertionError


def _turned(first: Tensor, second: Tensor) -> bool:
    """Whether any single dimension changed with the position: RoPE turns the fast ones by whole circles, while the
    slow ones, which may hold most of the norm, hardly move."""
    a, b = first.float(), second.float()
    change = (a - b).square().mean(dim=(0, 1, 2)) / a.square().mean(dim=(0, 1, 2)).clamp_min(1e-12)  # (D,)
    return bool(change.max() > 0.1)


def _same(first: Tensor, second: Tensor) -> bool:
    """Equal for the typical token: mixture-of-experts routing may flip for single ones in half precision."""
    a, b = first.float(), second.float()
    error = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12)  # (B, H, T)
    return bool(error.median() < (1e-3 if first.dtype == torch.float32 else 0.1))

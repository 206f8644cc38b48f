"""Detect how each layer rotates its keys, by observing the loaded model.

Two short passes run at different positions. Hooks record which rotary module feeds which layer; the cached keys show
which layers rotate (some have no RoPE) and how many dimensions. Undoing the rotation must give the same keys in both
passes, otherwise the model is rejected. This also works for unlisted families.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn

from kvrag.backend.positions import Form, LayerRotary, Pairs, cos_sin, once, rotate, unrotate
from kvrag.backend.transformers.rows import BlendCache, cache_argument
from kvrag.errors import UnsupportedModelError

_TOKENS = 16


def probe(
    hf: Any, places: Sequence[int], has_states: bool, shift: int
) -> tuple[list[LayerRotary | None], list[torch.device], int, bool]:
    """Observe a model with attention in the layers `places`, the last of which may use the KV of earlier ones.

    Returns:
        For each layer that has KV of its own, the rotation of its keys (None = not rotated) and its device; their KV
            bytes per token; and `is_latent`, see `BlendCache`.

    Raises:
        UnsupportedModelError: A layer has no KV, or its keys are rotated in an unknown way.
    """
    passes = [_observe(hf, places, start) for start in (0, shift)]
    pairs = list(zip(*passes, strict=True))
    keys_rotate = any(_rotated(a.keys, b.keys) for a, b in pairs)
    is_latent = not keys_rotate and any(_rotated(a.values, b.values) for a, b in pairs)
    if is_latent:
        for layer in itertools.chain(*passes):
            layer.keys, layer.values = layer.values, layer.keys
    rotary = [_detect(number, *pair) for number, pair in enumerate(pairs)]
    if not any(rotary) and not has_states:  # states tell positions apart
        _refuse("no layer applies rotary position embedding (learned or absolute positions, or none)")
    kv = [part for layer in passes[0] for part in (layer.keys, layer.values)]
    return rotary, [keys.device for keys in kv[::2]], sum(part.nbytes for part in kv) // _TOKENS, is_latent


@dataclass
class _Observation:
    """Observation of one layer during one pass."""

    keys: Tensor  # (1, H, T, D), as cached
    values: Tensor
    rotary: tuple[nn.Module, tuple[Any, ...]] | None = None
    tables: tuple[Tensor, Tensor] | None = None  # cos and sin as received by the attention


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedModelError(f"this model cannot be blended: {reason}")


@torch.inference_mode()
def _observe(hf: Any, places: Sequence[int], start: int) -> list[_Observation]:
    received: dict[int, tuple[Tensor, Tensor]] = {}
    made: list[tuple[Tensor, tuple[nn.Module, tuple[Any, ...]]]] = []  # cosines and the modules that returned them

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if "otary" in type(module).__name__ and (tables := cos_sin(output)):
            extra = args[2:] + tuple(v for k, v in kwargs.items() if k not in ("x", "position_ids"))
            made.append((tables[0], (module, extra)))

    def before(module: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
        tables, number = cos_sin(kwargs.get("position_embeddings")), getattr(module, "layer_idx", None)
        if tables and isinstance(number, int):
            received[number] = tables

    hooks = [module.register_forward_hook(after, with_kwargs=True) for module in hf.modules()]
    hooks += [module.register_forward_pre_hook(before, with_kwargs=True) for module in hf.modules()]
    cache = BlendCache(places, _TOKENS)
    device = hf.get_input_embeddings().weight.device
    ids = torch.arange(_TOKENS, device=device) * 7 + 3
    try:
        hf(  # models with other arguments are caught by the table of families
            input_ids=(ids % hf.config.get_text_config().vocab_size)[None],
            position_ids=torch.arange(start, start + _TOKENS, device=device)[None],
            **{cache_argument(type(hf).forward): cache},
            use_cache=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    filled = [place for place in places if cache.layers[place].is_initialized]
    for number in places[: max(len(filled), 1)]:
        if number not in filled:
            _refuse(f"layer {number} does not write its keys into the cache")
    layers = []
    for number in filled:
        layer, tables = cache.layers[number], received.get(number)
        sources = [source for cos, source in made if tables and torch.equal(cos.cpu(), tables[0].cpu())]
        layers.append(_Observation(layer.keys, layer.values, sources[-1] if sources else None, tables))
    return layers


def _detect(number: int, first: _Observation, second: _Observation) -> LayerRotary | None:
    if not _rotated(first.keys, second.keys):
        return None
    if first.rotary is None or first.tables is None or second.tables is None:
        _refuse(f"the keys of layer {number} depend on their position, but not by a rotary table that it receives")
    for pairs, form in itertools.product(get_args(Pairs), get_args(Form)):
        tables, shifted = once(first.tables, form), once(second.tables, form)
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

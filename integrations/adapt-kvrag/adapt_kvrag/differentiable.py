"""Encoding and blending as differentiable passes of the model, to train what is stored.

As in the product, chunks are encoded in rows of their own, and the prompt's other tokens attend to their KV. A row is
encoded at the positions where its chunk lands: attention depends on distances alone, so that is the same as rotating
position-free keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

from kvrag import Model
from kvrag.ext import BlendLayer, StopForward, active_adapter, as_argument

LayerStates = list[tuple[Tensor, Tensor]]
"""Rotated keys and values of each layer, each (B, H, T, D)."""


class GraphCache(Cache):
    """Puts earlier KV before a pass's own, out of place, and records the pass's own."""

    def __init__(self, num_layers: int, past: LayerStates, stop_at: int | None) -> None:
        super().__init__(layers=[BlendLayer(number, 0, None, None) for number in range(num_layers)])
        self.past, self._stop_at = past, stop_at
        self.fresh: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer."""
        self.fresh[layer_idx] = key_states, value_states
        if layer_idx == self._stop_at:
            raise StopForward
        if not self.past:
            return key_states, value_states
        keys, values = self.past[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)


def encode_rows(model: Model, ids: Tensor, positions: Tensor) -> LayerStates:
    """Return the KV of (B, T) rows, each causal, at their (B, T) positions. Padding stands at the end of a row."""
    cache = GraphCache(model.num_layers, [], stop_at=model.num_layers - 1)
    with suppress(StopForward):
        _run(model, ids, positions, positions, cache)
    return [cache.fresh[number] for number in range(model.num_layers)]


def logits_after(
    model: Model,
    ids: Tensor,
    positions: Tensor,
    past: LayerStates,
    past_positions: Tensor,
    count: int,
    make_cache: Callable[..., GraphCache] = GraphCache,
) -> Tensor:
    """Return (count, V) float32 logits after the last tokens of a row.

    Args:
        ids: (S,) tokens at ascending (S,) positions.
        past: KV at (K,) other positions, each (1, H, K, D).
    """
    cache = make_cache(model.num_layers, past, None)
    keys = torch.cat([past_positions, positions])
    logits = _run(model, ids[None], positions[None], keys[None], cache, logits_to_keep=count).logits
    return logits[0, -count:].float()


def _run(model: Model, ids: Tensor, rows: Tensor, keys: Tensor, cache: GraphCache, **arguments: Any) -> Any:
    """Run the model on (B, S) tokens at positions `rows`, which attend to keys at (B, K) positions up to their own."""
    distance = rows[:, :, None] - keys[:, None, :]  # (B, S, K)
    lowest = torch.finfo(model.dtype).min

    def mask(window: int | None) -> Tensor:
        hidden = (distance < 0) | (distance >= (window or model.context_window + keys.shape[1]))
        return torch.zeros(hidden.shape, dtype=model.dtype).masked_fill_(hidden, lowest)[:, None].to(model.device)

    kinds = getattr(model.config, "layer_types", None) or [None] * model.num_layers
    windows = dict(zip(kinds, model.windows, strict=True))
    masks = {kind: mask(window) for kind, window in windows.items()}
    return model.hf(
        input_ids=ids.to(model.device),
        position_ids=rows.to(model.device),
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        **as_argument(model.hf, cache),
        use_cache=True,
        **arguments,
    )


def decoder_layers(model: Model) -> list[nn.Module]:
    """Return the model's decoder layers."""
    owners = [module for module in model.hf.modules() if isinstance(module, nn.ModuleList)]
    return list(next(owner for owner in owners if len(owner) == model.config.num_hidden_layers))


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer's pass and of its repetition, which autograd runs in a thread of its own."""
    now = active_adapter()
    return nullcontext(), now.active() if now else nullcontext()


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute the activations of these layers in the backward pass instead of keeping them."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_contexts)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward

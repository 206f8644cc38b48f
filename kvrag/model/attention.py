"""How rows of a prompt attend, through transformers' own attention interface: faster on CPUs, and audible.

While a masked pass runs, the model's `config` names a function of ours instead of "sdpa" or "eager". No hook sits in
the layers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "kvrag"
_BLOCK = 128  # rows


@dataclass(frozen=True)
class Ear:
    """Listens to a forward pass.

    `hear(layer, attention)` gets (K,) float32, the mean square over heads and the last `num_queries` rows, for each of
    `layers`.
    """

    num_queries: int
    layers: range
    hear: Callable[[int, Tensor], None]


@dataclass(frozen=True)
class _Pass:
    """What this thread's forward pass is about; `blocks` are (start, end) of rows and how many keys they see."""

    blocks: list[tuple[int, int, int]]
    ear: Ear | None


_current = threading.local()
_usual: dict[int, str] = {}
"""id of a config -> the attention implementation that it names when no pass of ours runs."""


@contextmanager
def attention_at(config: Any, rows: Tensor, ear: Ear | None = None) -> Iterator[None]:
    """Run one forward pass of (S,) ascending `rows` with our attention.

    Only one thread at a time may do so for a `config`. Another thread that runs the same transformers model meanwhile
    gets its usual attention.
    """
    ends = range(_BLOCK, len(rows) + _BLOCK, _BLOCK)
    blocks = [(end - _BLOCK, end, int(rows[min(end, len(rows)) - 1]) + 1) for end in ends]
    usual = _usual[id(config)] = config._attn_implementation
    _current.state = _Pass(blocks, ear)
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = usual
        del _current.state


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    now: _Pass | None = getattr(_current, "state", None)
    usual = _usual[id(module.config)]
    if now is not None and attention_mask is not None:
        if now.ear is not None and module.layer_idx in now.ear.layers:
            queries = query[:, :, -now.ear.num_queries :]
            mask = attention_mask[:, :, -now.ear.num_queries :]
            now.ear.hear(cast(int, module.layer_idx), _received(queries, key, mask, kwargs))
        if usual == "sdpa" and query.device.type == "cpu":
            return _in_blocks(query, key, value, attention_mask, kwargs.get("scaling"), now.blocks), None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(usual, eager)
    return attend(module, query, key, value, attention_mask, **kwargs)


def _in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    blocks: list[tuple[int, int, int]],
) -> Tensor:
    """Each KV head is read once for all of its query heads, and no key behind a block of rows.

    transformers copies keys and values per query head when there is a mask, which CUDA kernels need and CPU ones do
    not. See docs/decisions/0003.

    Returns:
        (1, S, HG, D).
    """
    attended = [
        scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, :stop],
            value[:, :, :stop],
            mask[:, :, start:end, :stop],
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for start, end, stop in blocks
    ]
    return torch.cat(attended, dim=1)


def _received(query: Tensor, key: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """(1, HG, S, D) queries, (1, H, K, D) keys, (1, 1, S, K) additive mask -> (K,) mean square of the attention."""
    num_heads, num_keys = query.shape[1], key.shape[2]
    scaled = query[0] * (kwargs.get("scaling") or key.shape[3] ** -0.5)  # there are far fewer queries than scores
    mask, cap = mask[0, :, :, :num_keys].float(), kwargs.get("softcap")
    total = torch.zeros(num_keys, device=query.device)
    group = num_heads // key.shape[1]
    size = 1 if query.device.type == "cpu" else group  # on a CPU the scores of one head stay in the cache
    for start in range(0, num_heads, size):
        scores = (scaled[start : start + size] @ key[0, start // group].T).float()  # (size, S, K)
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        total += scores.add_(mask).softmax(dim=-1).square_().sum(dim=(0, 1))
    return total / (num_heads * query.shape[2])


AttentionInterface.register(_NAME, _attend)

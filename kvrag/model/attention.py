"""Listen to what a forward pass attends to, through transformers' own attention interface."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "kvrag_listen"
Listener = Callable[[int, Tensor], None]
"""Called with layer number and (K,) float32 attention, averaged over heads and the listened-to queries."""

_current = threading.local()


@contextmanager
def listen(config: Any, num_queries: int, layers: range, listener: Listener) -> Iterator[None]:
    """Tell `listener` what the last `num_queries` tokens attend to on `layers`, in forward passes of this thread.

    Only one thread at a time may run a model of this `config`.
    """
    plain = config._attn_implementation
    _current.state = plain, num_queries, layers, listener
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = plain
        del _current.state


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    plain, num_queries, layers, listener = _current.state
    number = int(module.layer_idx)  # type: ignore[arg-type]
    if number in layers:
        mask = attention_mask[:, :, -num_queries:, : key.shape[2]]
        listener(number, _received(query[:, :, -num_queries:], key, mask, kwargs))
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(plain, eager)
    return attend(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]


def _received(query: Tensor, key: Tensor, mask: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """(1, HG, S, D) queries, (1, H, K, D) keys, (1, 1, S, K) additive mask -> (K,) mean attention."""
    num_keys, dim = key.shape[2], key.shape[3]
    grouped = query.reshape(key.shape[1], -1, dim)  # (H, G*S, D): the G query heads of a KV head lie side by side
    scores = (grouped @ key[0].transpose(1, 2)).float() * (kwargs.get("scaling") or dim**-0.5)  # (H, G*S, K)
    if (cap := kwargs.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.view(-1, query.shape[2], num_keys) + mask[0].float()  # (HG, S, K)
    return scores.softmax(dim=-1).mean(dim=(0, 1))


AttentionInterface.register(_NAME, _attend)

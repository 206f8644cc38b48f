"""How rows of a prompt attend, through transformers' own attention interface: faster on CPUs, and audible.

While a masked pass runs, the model's `config` names a function of ours instead of "sdpa" or "eager". No hook sits in
the layers.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "kvrag"
_ROWS = 128  # of a block
_PACKED = 256  # rows of a product, those of all query heads that share a KV head
_SAMPLED = 16  # one key of so many says how high a row's scores may be


@dataclass(frozen=True)
class Ear:
    """Listens to a forward pass.

    `hear(layer, attention)` gets (K,) float32, the mean square over heads and the last `num_queries` rows, for each of
    `layers`.
    """

    num_queries: int
    layers: range
    hear: Callable[[int, Tensor], None]


class _Block(NamedTuple):
    """Rows `start` to `end`: they see no key but those from `low` to `stop`, and all of them those before `hidden`."""

    start: int
    end: int
    low: int
    hidden: int
    stop: int


@dataclass
class _Pass:
    """What this thread's forward pass is about: the positions of its rows, the layers' windows."""

    rows: list[int]
    windows: Sequence[int | None]
    ear: Ear | None
    scratch: Tensor | None = None

    def blocks(self, layer: int, size: int) -> Iterator[_Block]:
        """Go through the rows, `size` at a time."""
        window = self.windows[layer]
        for start in range(0, len(self.rows), size):
            end = min(start + size, len(self.rows))
            first, stop = self.rows[start], self.rows[end - 1] + 1
            low = 0 if window is None else max(0, first + 1 - window)
            yield _Block(start, end, low, first + 1 if window is None else low, stop)

    def room(self, like: Tensor, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Two undefined matrices, in the same memory every time: to fill fresh memory takes longer than to compute."""
        size = num_rows * num_keys
        if self.scratch is None or self.scratch.shape[1] < size:
            self.scratch = like.new_empty(2, size)
        first, second = self.scratch[:, :size].view(2, num_rows, num_keys)
        return first, second


_current = threading.local()
_usual: dict[int, str] = {}
"""id of a config -> the attention implementation that it names when no pass of ours runs."""


@contextmanager
def attention_at(config: Any, rows: Tensor, windows: Sequence[int | None], ear: Ear | None = None) -> Iterator[None]:
    """Run one forward pass of (S,) ascending `rows` with our attention, on layers of these `windows`.

    Only one thread at a time may do so for a `config`. Another thread that runs the same transformers model meanwhile
    gets its usual attention.
    """
    usual = _usual[id(config)] = config._attn_implementation
    _current.state = _Pass(rows.tolist(), windows, ear)
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
        layer, scaling = cast(int, module.layer_idx), kwargs.get("scaling")
        ear = now.ear if now.ear is not None and layer in now.ear.layers else None
        on_cpu = usual == "sdpa" and query.device.type == "cpu"
        if on_cpu and query.dtype == torch.bfloat16:
            num_queries = ear.num_queries if ear else 0
            attended, received = _by_products(query, key, value, attention_mask, scaling, now, layer, num_queries)
            if ear:
                ear.hear(layer, received)
            return attended, None
        if ear:
            queries, mask = query[:, :, -ear.num_queries :], attention_mask[:, :, -ear.num_queries :]
            ear.hear(layer, _received(queries, key, mask, kwargs))
        if on_cpu:
            return _in_blocks(query, key, value, attention_mask, scaling, now.blocks(layer, _ROWS)), None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(usual, eager)
    return attend(module, query, key, value, attention_mask, **kwargs)


def _in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, blocks: Iterable[_Block]
) -> Tensor:
    """Each KV head is read once for all of its query heads, and only the keys that a block of rows may see.

    transformers copies keys and values per query head when there is a mask, which CUDA kernels need and CPU ones do
    not. See docs/decisions/0003.

    Returns:
        (1, S, HG, D).
    """
    attended = [
        scaled_dot_product_attention(
            query[:, :, block.start : block.end],
            key[:, :, block.low : block.stop],
            value[:, :, block.low : block.stop],
            mask[:, :, block.start : block.end, block.low : block.stop],
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        for block in blocks
    ]
    return torch.cat(attended, dim=1)


def _by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    now: _Pass,
    layer: int,
    num_queries: int,
) -> tuple[Tensor, Tensor]:
    """Like `_in_blocks`, but by plain matrix products, which in bfloat16 take half as long as torch's CPU kernel.

    They round the scores. So what the highest of a row may be is taken off inside of the product, which softmax does
    not mind: the scores that count are near zero then, and keep their digits. See docs/decisions/0003.

    Returns:
        (1, S, HG, D), and what an `Ear` hears of the last `num_queries` rows.
    """
    num_heads, num_rows, dim = query.shape[1:]
    group, scaling = num_heads // key.shape[1], scaling or dim**-0.5
    attended = query.new_empty(num_rows, num_heads, value.shape[3])
    received = torch.zeros(key.shape[2])
    for start, end, low, hidden, stop in now.blocks(layer, max(_PACKED // group, 1)):
        for head in range(key.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            queries, keys = query[0, heads, start:end].reshape(-1, dim), key[0, head, low:stop]  # (GS, D), (K, D)
            highest = (queries @ keys[::_SAMPLED].T).amax(dim=1, keepdim=True)
            scores, weights = now.room(query, len(queries), len(keys))  # (GS, K)
            torch.addmm(highest, queries, keys.T, beta=-scaling, alpha=scaling, out=scores)
            scores.view(group, -1, len(keys))[:, :, hidden - low :] += mask[0, 0, start:end, hidden:stop]
            torch.softmax(scores, dim=1, out=weights)
            mixed = (weights @ value[0, head, low:stop]).view(group, end - start, -1)
            attended[start:end, heads] = mixed.transpose(0, 1)
            if end > num_rows - num_queries:
                heard = weights.view(group, -1, len(keys))[:, max(0, num_rows - num_queries - start) :]
                received[low:stop] += heard.float().square_().sum(dim=(0, 1))
    return attended[None], received / (num_heads * max(num_queries, 1))


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

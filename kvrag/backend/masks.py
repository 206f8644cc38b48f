"""Causal masks for scattered rows, and the attention that positions receive from them. Used by all backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

CPU_ROWS = 128
"""Rows per block on a CPU."""

ROWS = 1024
"""Rows per block elsewhere."""

T = TypeVar("T", int, Tensor)

_KEPT_MASKS = 64 << 20  # bytes of masks kept between layers


class Block(NamedTuple):
    """Rows `start` to `end`. They attend to keys from `low` to `stop`; all of them to keys before `hidden`."""

    start: int
    end: int
    low: int
    hidden: int
    stop: int


class Chunked(int):
    """Window of chunked attention: a token attends to its own stretch of this many positions, counted from 0."""


def first_key(window: int | None, row: T) -> T:
    """Return the first position that a row attends to, or those of several rows."""
    if window is None:
        return row - row
    return row - row % window if isinstance(window, Chunked) else row + 1 - window


@dataclass
class Rows:
    """The rows of a forward pass: (S,) ascending positions, and the window of each layer (None = all keys)."""

    rows: Tensor
    positions: list[int]
    windows: Sequence[int | None]
    masks: dict[tuple[str, int | None, int, int], Tensor] = field(default_factory=dict)
    masks_bytes: int = 0

    def blocks(self, layer: int, size: int) -> Iterator[Block]:
        """Split the rows into blocks of `size`."""
        window = self.windows[layer]
        for start in range(0, len(self.positions), size):
            end = min(start + size, len(self.positions))
            first, stop = self.positions[start], self.positions[end - 1] + 1
            low = max(0, first_key(window, first))
            yield Block(start, end, low, first + 1 if window is None else low, stop)

    def mask(self, layer: int, block: Block, low: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the (R, K) additive mask of a block's rows over the keys from `low` to `block.stop`."""
        window = self.windows[layer]
        key = (str(type(window)), window, block.start, low)
        mask = self.masks.get(key)
        if mask is not None and mask.device == device and mask.shape[0] == block.end - block.start:
            return mask
        rows = self.rows[block.start : block.end, None].to(device)
        keys = torch.arange(low, block.stop, device=device)[None]
        hidden = keys > rows
        if window is not None:
            hidden |= keys < first_key(window, rows)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
        if self.masks_bytes + mask.nbytes <= _KEPT_MASKS:
            self.masks[key] = mask
            self.masks_bytes += mask.nbytes
        return mask


def attention_received(
    query: Tensor,
    key: Tensor,
    now: Rows,
    layer: int,
    num_queries: int,
    scaling: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the (K,) squared attention that every position receives from the last `num_queries` rows.

    Takes the (1, HG, S, D) queries of all rows and (1, H, K, D) keys. Summed over the rows, mean over heads.
    `scaling` is 1 / sqrt(D) by default.
    """
    num_heads, num_rows = query.shape[1:3]
    scaling = scaling or key.shape[3] ** -0.5
    total = torch.zeros(key.shape[2], device=query.device)
    group = num_heads // key.shape[1]
    size = 1 if query.device.type == "cpu" else group  # on a CPU, the scores of one head fit into the cache
    for block in now.blocks(layer, CPU_ROWS if query.device.type == "cpu" else ROWS):
        first = max(block.start, num_rows - num_queries)
        if first >= block.end:
            continue
        mask = now.mask(layer, block, block.low, query.dtype, query.device)[first - block.start :].float()
        keys = slice(block.low, block.stop)
        for start in range(0, num_heads, size):
            queries = query[0, start : start + size, first : block.end] * scaling  # smaller than the scores
            scores = (queries @ key[0, start // group, keys].T).float()  # (size, R, K)
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            total[keys] += scores.add_(mask).softmax(dim=-1).square_().sum(dim=(0, 1))
    return total / num_heads

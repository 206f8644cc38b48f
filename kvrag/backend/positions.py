"""What positions mean to a model: the rotation of its keys, and causal masks for scattered rows. Used by all backends.

Rotary position embedding is tensor arithmetic here (arXiv:2104.09864, section 3.2), all in float32: half precision
loses the low bits of large angles, which the inverse needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

T = TypeVar("T", int, Tensor)

Pairs = Literal["half_split", "interleaved"]
"""Which dimensions rotate together: i and i + R (most models), or 2i and 2i + 1 (cohere, glm)."""

Form = Literal["half_split", "interleaved", "once"]
"""Layout of a model's table: all pairs twice in sequence, each pair twice, or each pair once."""

CPU_ROWS = 128
"""Rows per block on a CPU."""

ROWS = 1024
"""Rows per block elsewhere."""

_KEPT_MASKS = 64 << 20  # bytes of masks kept between layers
_BLOCK = 512  # tokens; on a CPU, the float32 intermediates of one block fit into the cache


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = "half_split", out: Tensor | None = None) -> Tensor:
    """Apply RoPE to (B, H, T, D) position-free keys, after any QK-norm.

    Args:
        cos, sin: (T, R) float32, the model's own tables for the target positions, one entry per pair of dimensions. The
            first 2R dimensions rotate, the rest are copied.
        out: (B, H, T, D) to write to, `keys` itself to rotate in place.
    """
    out = torch.empty_like(keys) if out is None else out
    num_rotary = 2 * cos.shape[-1]
    if num_rotary < keys.shape[-1] and out is not keys:
        out[..., num_rotary:] = keys[..., num_rotary:]
    size = _BLOCK if keys.device.type == "cpu" else keys.shape[2]
    for start in range(0, keys.shape[2], size):
        block = slice(start, start + size)
        first, second = _split(keys[:, :, block, :num_rotary], pairs)
        first, second, c, s = first.float(), second.float(), cos[block], sin[block]
        to_first, to_second = _split(out[:, :, block, :num_rotary], pairs)
        rotated = (first * c).addcmul_(second, s, value=-1)  # before `first` can change
        to_second.copy_((second * c).addcmul_(first, s))
        to_first.copy_(rotated)
    return out


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs = "half_split") -> Tensor:
    """Undo `rotate`: rotate by -sin, and divide by the scale of scaled tables (yarn)."""
    scale = cos.square() + sin.square()  # 1 unless the model scales its tables or stores them in half precision
    return rotate(keys, cos / scale, -sin / scale, pairs)


def _split(x: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return views of the first and second dimensions of each pair, (..., 2R) -> two (..., R)."""
    if pairs == "interleaved":
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


class Rotation(NamedTuple):
    """Rotation of one layer's keys at (T,) positions.

    `cos` and `sin` are (T, R) float32, one entry per pair of dimensions; empty for layers without RoPE.
    """

    cos: Tensor
    sin: Tensor
    pairs: Pairs

    def rotate(self, keys: Tensor, landing: slice = slice(None)) -> None:
        """Rotate (B, H, T, D) position-free keys in place, to the `landing` positions."""
        if self.cos.numel():
            cos, sin = (table[landing].to(keys.device) for table in (self.cos, self.sin))
            rotate(keys, cos, sin, self.pairs, out=keys)

    def unrotate(self, keys: Tensor) -> Tensor:
        """Return (B, H, T, D) keys without their position."""
        cos, sin = self.cos.to(keys.device), self.sin.to(keys.device)
        return unrotate(keys, cos, sin, self.pairs) if cos.numel() else keys


UNROTATED = Rotation(torch.empty(0), torch.empty(0), "half_split")
"""Of layers without RoPE."""


@dataclass(frozen=True)
class LayerRotary:
    """Rotary module of one layer; `module(x, positions, *extra)` gives its tables."""

    module: nn.Module
    extra: tuple[Any, ...]
    pairs: Pairs
    form: Form

    def rotation(self, positions: Tensor, dtype: torch.dtype, device: torch.device) -> Rotation:
        """Return the rotation at (T,) positions, with the model's own tables."""
        like = torch.empty(0, dtype=dtype, device=device)  # the module takes dtype and device from it
        tables = cos_sin(self.module(like, positions[None].to(device), *self.extra))
        return Rotation(*once(cast(tuple[Tensor, Tensor], tables), self.form), self.pairs)


def cos_sin(tables: Any) -> tuple[Tensor, Tensor] | None:
    """Return cos and sin of what a rotary module returned, which may be one complex tensor; None if it is neither."""
    if isinstance(tables, Tensor) and tables.is_complex():
        return tables.real, tables.imag
    return tables if isinstance(tables, tuple) and len(tables) == 2 else None


def once(tables: tuple[Tensor, Tensor], form: Form) -> tuple[Tensor, Tensor]:
    """Convert the model's (1, T, 2R) or (1, T, R) cos and sin to (T, R) float32."""
    half = slice(tables[0].shape[2] // 2)
    kept = {"half_split": half, "interleaved": slice(0, None, 2), "once": slice(None)}[form]
    cos, sin = (table[0, :, kept].float().contiguous() for table in tables)
    return cos, sin


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


def causal_mask(rows: Tensor, low: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the (..., S, K) additive mask of (..., S) rows over the keys from `low` to `stop`, on their device."""
    rows = rows[..., None]
    keys = torch.arange(low, stop, device=rows.device)
    hidden = keys > rows
    if window is not None:
        hidden |= keys < first_key(window, rows)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)


@dataclass
class Rows:
    """The rows of a forward pass: (S,) ascending positions, and the window of each layer (None = all keys)."""

    rows: Tensor
    positions: list[int]
    windows: Sequence[int | None]
    masks: dict[tuple[str, int | None, int, int], Tensor] = field(default_factory=dict)
    masks_bytes: int = 0

    def blocks(self, layer: int, size: int) -> list[Block]:
        """Split the rows into blocks of `size`."""
        window, blocks = self.windows[layer], []
        for start in range(0, len(self.positions), size):
            end = min(start + size, len(self.positions))
            first, stop = self.positions[start], self.positions[end - 1] + 1
            low = max(0, first_key(window, first))
            blocks.append(Block(start, end, low, first + 1 if window is None else low, stop))
        return blocks

    def mask(self, layer: int, block: Block, low: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the (R, K) additive mask of a block's rows over the keys from `low` to `block.stop`."""
        window = self.windows[layer]
        key = (str(type(window)), window, block.start, low)
        mask = self.masks.get(key)
        if mask is not None and mask.device == device and mask.shape[0] == block.end - block.start:
            return mask
        mask = causal_mask(self.rows[block.start : block.end].to(device), low, block.stop, window, dtype)
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
    on_cpu = query.device.type == "cpu"
    size = 1 if on_cpu else group  # on a CPU, the scores of one head fit into the cache
    dtype = torch.float32 if on_cpu else query.dtype  # a product's result is rounded to the dtype
    for block in now.blocks(layer, CPU_ROWS if on_cpu else ROWS):
        first = max(block.start, num_rows - num_queries)
        if first >= block.end:
            continue
        mask = now.mask(layer, block, block.low, query.dtype, query.device)[first - block.start :].float()
        keys = slice(block.low, block.stop)
        shared = key[0, :, keys].to(dtype).mT  # (H, D, K)
        for start in range(0, num_heads, size):
            queries = query[0, start : start + size, first : block.end].to(dtype) * scaling  # smaller than the scores
            scores = (queries @ shared[start // group]).float()  # (size, R, K)
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            total[keys] += scores.add_(mask).softmax(dim=-1).square_().sum(dim=(0, 1))
    return total / num_heads

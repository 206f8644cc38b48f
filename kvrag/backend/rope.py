"""Rotary position embedding as tensor arithmetic: rotate a key to a position, and undo it.

Source: arXiv:2104.09864, section 3.2. All computation is in float32: half precision loses the low bits of large angles,
which the inverse needs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Pairs = Literal["half_split", "interleaved"]
"""Which dimensions rotate together: i and i + R (most models), or 2i and 2i + 1 (cohere, glm)."""

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

"""Rotary position embedding as tensor arithmetic: put a key at a position, take it off again.

Source: arXiv:2104.09864, section 3.2. Which dimensions are paired (halves or neighbours) differs between models, so
the turn itself is the model's own `apply_rotary_pos_emb`, handed in as `apply`. Everything here is in float32: a bf16
product loses the low bits that an inverse needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Apply = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, apply: Apply, num_rotary: int) -> Tensor:
    """Apply RoPE to position-free keys.

    Args:
        keys: (B, H, T, D), after any QK-norm, never rotated before.
        cos: (1, T, R), the model's own table for the positions where the keys land.
        sin: (1, T, R), likewise.
        apply: The model's own `apply_rotary_pos_emb(q, k, cos, sin)`.
        num_rotary: How many of the D dimensions turn; the rest passes through.

    Returns:
        (B, H, T, D) in the dtype of `keys`; `keys` is left as it was.
    """
    turning = keys[..., :num_rotary].float()
    _, turned = apply(turning[:, :0], turning, cos.float(), sin.float())  # no query heads: half the work
    turned = turned.to(keys.dtype)
    return turned if num_rotary == keys.shape[-1] else torch.cat([turned, keys[..., num_rotary:]], dim=-1)


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor, apply: Apply, num_rotary: int) -> Tensor:
    """Undo `rotate`: the inverse turn is by -sin, and scaled tables (yarn) are divided out.

    Args and returns as in `rotate`.
    """
    scale = cos.float().square() + sin.float().square()  # 1 unless the model scales its tables or they are in bf16
    return rotate(keys, cos.float() / scale, -sin.float() / scale, apply, num_rotary)

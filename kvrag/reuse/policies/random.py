"""Random tokens: the control that every informed policy must beat."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.reuse.select import Context


def score(context: Context) -> Tensor:
    """Score every position at random."""
    generator = torch.Generator().manual_seed(context.config.seed)
    return torch.rand(len(context.stitched.ids), generator=generator)

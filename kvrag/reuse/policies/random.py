"""Random tokens: the control that every informed policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.reuse.policy import Context, Policy


@dataclass(frozen=True)
class Random(Policy):
    """Random tokens, the same for the same seed."""

    seed: int = 0

    def score(self, context: Context) -> Tensor:
        """Score every position at random."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(context.request.ids), generator=generator)

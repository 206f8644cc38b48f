"""Random tokens: the control that every informed policy must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.request import Request
from kvrag.reuse.policies import Policy


@dataclass(frozen=True)
class Random(Policy):
    """Random tokens, the same for the same seed."""

    seed: int = 0

    def score(self, backend: Backend, request: Request, budget: int) -> Tensor:
        """Score every position at random."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(len(request.ids), generator=generator)

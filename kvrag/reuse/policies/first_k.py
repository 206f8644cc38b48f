"""The first tokens of every run (EPIC / LegoLink, arXiv:2410.15332, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.request import Request
from kvrag.reuse.policies import Policy


class FirstK(Policy):
    """The first tokens of every run, the same number of each."""

    def score(self, backend: Backend, request: Request, budget: int) -> Tensor:
        """Score a token by its place in its run."""
        scores = torch.full((len(request.ids),), -torch.inf)
        for run in request.runs:
            scores[run.start : run.stop] = -torch.arange(len(run), dtype=torch.float32)
        return scores

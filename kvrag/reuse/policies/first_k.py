"""The first tokens of every run (EPIC / LegoLink, arXiv:2410.15332, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.reuse.policy import Context, Policy


class FirstK(Policy):
    """The first tokens of every run, the same number of each."""

    def score(self, context: Context) -> Tensor:
        """Score a token by its place in its run."""
        scores = torch.full((len(context.request.ids),), -torch.inf)
        for run in context.request.runs:
            scores[run.start : run.stop] = -torch.arange(len(run), dtype=torch.float32)
        return scores

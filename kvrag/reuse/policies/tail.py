"""The last tokens before the question (Tail-Replay, arXiv:2608.30310)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.reuse.select import Context, Policy


class Tail(Policy):
    """The last tokens: one stretch, as layers need that keep a state of the tokens before."""

    def score(self, context: Context) -> Tensor:
        """Score a token by its position."""
        return torch.arange(len(context.request.ids), dtype=torch.float32)

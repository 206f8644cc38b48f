"""The tokens nearest to a seam between two runs (KVBoost's SelectiveRecompute: before it; Hypic: on both sides)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.reuse.select import Context


def score(context: Context) -> Tensor:
    """Score `seam_before` tokens at a run's end like `seam_after` at the next one's start."""
    config = context.config
    scores = torch.full((len(context.stitched.ids),), -torch.inf)
    for run in context.stitched.runs:
        distance = torch.arange(1, len(run) + 1)
        after, before = distance / max(config.seam_after, 1e-9), distance.flip(0) / max(config.seam_before, 1e-9)
        scores[run.start : run.stop] = -torch.minimum(after, before)
    return scores

"""Random tokens: the control that every informed policy must beat."""

from __future__ import annotations

import torch

from kvrag.reuse.select import Context, Scores


def score(context: Context) -> Scores:
    """Score every position at random."""
    generator = torch.Generator().manual_seed(context.config.seed)
    return Scores(torch.rand(len(context.stitched.ids), generator=generator))

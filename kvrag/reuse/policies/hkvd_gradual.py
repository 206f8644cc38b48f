"""Like `hkvd`, but the selection is measured again at deeper layers and thinned out: more tokens on the first layers,
fewer on the last, `ratio` on average (CacheBlend, arXiv:2405.16444, section 4.3, "gradual filtering").
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.reuse.measure import deviation
from kvrag.reuse.policies import hkvd
from kvrag.reuse.select import Context, best

_STAGES = ((1.4, 1 / 3), (1.0, 2 / 3), (0.6, 1.0))  # (share of the budget, up to this share of the layers); mean 1


def score(context: Context) -> Tensor:
    """Score by the deviation at the deepest layer at which a token was measured.

    Dropped tokens keep what was recomputed of them. Every stage restarts at the first layer, because a forward pass
    cannot drop rows midway; this costs up to 0.8 of the recompute.
    """
    num_layers, scores = context.backend.num_layers, hkvd.score(context)
    for share, depth in _STAGES:
        kept = best(scores, round(share * context.budget))
        if depth < 1:
            rows = torch.cat([context.stitched.fresh, kept]).sort().values
            check = min(max(round(depth * num_layers), context.config.check_layer + 1), num_layers - 1)
            scores = deviation(context, check, rows)
    return torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept])


passes = hkvd.passes

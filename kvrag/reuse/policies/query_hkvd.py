"""The first tokens, then among twice the budget by `query` the highest products of attention and KV deviation.

A self-contained text draws attention but hardly changes, so recomputing it would be wasted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.config import BlendConfig
from kvrag.reuse.measure import attention, deviation, first_tokens
from kvrag.reuse.policies import query
from kvrag.reuse.select import CANDIDATES, Context, Passes, best


def score(context: Context) -> Tensor:
    """Score the first tokens above all others, and the candidates by attention times deviation.

    The deviation is measured half-way down. That runs half of the layers on the candidates, about as much work as the
    recompute itself.
    """
    inexact, first, received = context.stitched.inexact, first_tokens(context), attention(context)
    candidates = inexact[best((received + first)[inexact], CANDIDATES * context.budget)]
    rows = torch.cat([context.stitched.fresh, candidates]).sort().values
    deviations = deviation(context, context.backend.num_layers // 2, rows)
    values = torch.where(deviations > -torch.inf, received * deviations, -torch.inf)
    values[first > 0] = torch.inf
    return values


def passes(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers of `query`, and half of them on the candidates."""
    return query.passes(config, num_layers)._replace(candidates=num_layers // 2 / num_layers)

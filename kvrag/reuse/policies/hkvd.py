"""The tokens with the highest KV deviation (CacheBlend, arXiv:2405.16444, section 4.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.config import BlendConfig
from kvrag.reuse.measure import deviation
from kvrag.reuse.select import Context, Passes


def score(context: Context) -> Tensor:
    """Score by the deviation at the check layer.

    The layers before it run in full. Their results and the check layer's fresh keys and values are kept.
    """
    rows = torch.arange(context.stitched.kept, len(context.stitched.ids))
    check = min(context.config.check_layer, context.backend.num_layers - 1)
    return deviation(context, check, rows)


def passes(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers before the check layer, on all tokens."""
    return Passes(detection=min(config.check_layer, num_layers - 1) / num_layers)

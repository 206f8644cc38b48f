"""The first tokens of every run, then those that the question attends to over the stitched KV (ProphetKV, QCFuse)."""

from __future__ import annotations

import math

from torch import Tensor

from kvrag.config import BlendConfig
from kvrag.reuse.measure import attention, first_tokens
from kvrag.reuse.select import Context, Passes


def score(context: Context) -> Tensor:
    """Score the first tokens above all others, and these by their attention.

    The first tokens of a chunk were encoded without the text before them, so they count regardless of the question.
    """
    return attention(context) + first_tokens(context)


def passes(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers up to the end of the band, on the fresh tokens."""
    return Passes(query=math.ceil(config.band[1] * num_layers) / num_layers)

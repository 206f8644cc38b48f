"""The first tokens of every run, then those that the question attends to over the stitched KV (ProphetKV, QCFuse)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvrag.backend.protocol import prefill_blocks
from kvrag.config import BlendConfig
from kvrag.reuse.select import Context, Passes

_MIN_QUERIES = 8
_FIRST_SHARE = 1 / 2  # of the budget, at most, for the first tokens of runs


def score(context: Context) -> Tensor:
    """Score the first tokens above all others, and these by their attention.

    The first tokens of a chunk were encoded without the text before them, so they count regardless of the question.
    """
    return attention(context) + first_tokens(context)


def passes(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers up to the end of the band, on the fresh tokens."""
    return Passes(query=math.ceil(config.band[1] * num_layers) / num_layers)


def attention(context: Context) -> Tensor:
    """Return the (T,) attention of the question, the tokens after the last run.

    Root mean square over the heads and a band of layers, so that one head with high attention counts more than many
    with low attention.
    """
    backend, stitched, config = context.backend, context.stitched, context.config
    fresh = stitched.fresh
    last_reused = int(stitched.reused.nonzero()[-1])
    num_queries = max(int((fresh > last_reused).sum()), min(_MIN_QUERIES, len(fresh)))
    low, high = math.floor(config.band[0] * backend.num_layers), math.ceil(config.band[1] * backend.num_layers)
    layers = range(min(max(low, 1), backend.num_layers - 1), max(high, low + 1, 2))  # layer 0 has no context yet
    received, left = torch.zeros(len(stitched.ids)), len(fresh)
    for rows in prefill_blocks(backend, fresh):
        left -= len(rows)
        queries = min(len(rows), num_queries - left)
        ids = stitched.ids[rows][None]
        if queries > 0:
            part = backend.attention_received(ids, stitched.cache, rows, queries, layers)
            received[: len(part)] += part
        else:
            backend.forward_until(layers.stop, ids, stitched.cache, rows)
    return (received / num_queries).sqrt_()


def first_tokens(context: Context) -> Tensor:
    """Return (T,) scores above any attention for `first_tokens` of every run, the same number of each, 0 elsewhere."""
    stitched, config = context.stitched, context.config
    scores = torch.zeros(len(stitched.ids))
    runs = [run for run in stitched.runs if not stitched.exact[run.start]]
    num = min(config.first_tokens, int(_FIRST_SHARE * context.budget) // max(len(runs), 1))
    for run in runs:
        scores[run.start : run.start + min(num, len(run))] = 2.0  # attention is at most 1
    return scores

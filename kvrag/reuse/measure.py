"""Measurements that policies score by: deviation of the stitched KV, and attention of the question."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvrag.backend.protocol import prefill_blocks
from kvrag.reuse.select import Context

_MIN_QUERIES = 8
_FIRST_SHARE = 1 / 2  # of the budget, at most, for the first tokens of runs


def deviation(context: Context, layer: int, rows: Tensor) -> Tensor:
    """Return the (T,) KV deviation of the fresh KV of (S,) `rows` on a layer, -inf elsewhere. The fresh KV is kept."""
    backend, stitched = context.backend, context.stitched
    keys, values = stitched.cache.layer(layer)
    scores = torch.full((len(stitched.ids),), -torch.inf)

    def run(block: Tensor, positions: Tensor | None) -> None:
        def observe(number: int, fresh_keys: Tensor, fresh_values: Tensor) -> bool:
            if number < layer:
                return False
            at = block.to(keys.device)
            total = _distances(fresh_keys, keys[:, :, at]) + _distances(fresh_values, values[:, :, at])
            scores[block] = backend.sum_over_processes(total).cpu()
            stitched.cache.write(layer, at, fresh_keys, fresh_values)
            return True

        backend.forward_until(observe, stitched.ids[block][None], stitched.cache, positions)

    if len(rows) == len(scores) and backend.rows_per_pass is None:  # plain prefill of the prefix: no mask needed
        stitched.cache.set_length(0)
        run(rows, None)
    else:
        for block in prefill_blocks(backend, rows):
            run(block, block)
    return torch.full_like(scores, -torch.inf).index_copy_(0, stitched.inexact, scores[stitched.inexact])


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
            backend.forward_until(lambda number, *_: number == layers.stop, ids, stitched.cache, rows)
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


def _distances(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return the (T,) squared distances of two (1, H, T, D) tensors."""
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))

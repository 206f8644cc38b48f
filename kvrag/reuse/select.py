"""Selection of the reused tokens to recompute. A policy scores every position; the best inexact ones fill the budget.

Rules for all policies: fresh positions are computed anyway and never compete; exact positions are never selected; the
same positions are used for keys and values and on every layer. To add a policy, write a function here, add it to
`_SCORES` and its name to `kvrag.config.POLICIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.config import CANDIDATES, DEFAULT_RATIO, BlendConfig
from kvrag.reuse.stitch import Stitched


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Selection:
    """The positions to recompute.

    Attributes:
        positions: (S,) reused positions.
        final_rows: (F,) fresh positions that the policy has already computed on every layer, over the stitched KV.
    """

    positions: Tensor
    final_rows: Tensor = field(default_factory=_no_rows)


@dataclass(frozen=True)
class Scores:
    """Scores of a policy.

    Attributes:
        values: (T,) a position with a higher score is recomputed first; -inf = never.
        final_rows: See Selection.
    """

    values: Tensor
    final_rows: Tensor = field(default_factory=_no_rows)


@dataclass(frozen=True)
class Context:
    """Input of a policy. A policy may fill layers of `stitched.cache` with better KV, never with worse."""

    backend: Backend
    stitched: Stitched
    config: BlendConfig
    budget: int


def select(backend: Backend, stitched: Stitched, config: BlendConfig) -> Selection:
    """Choose `config.ratio` of the inexact reused positions, ascending."""
    inexact = stitched.inexact
    budget = round((DEFAULT_RATIO if config.ratio is None else config.ratio) * len(inexact))
    if budget == 0 or config.policy == "none":
        return Selection(inexact[:0])
    if budget == len(inexact) and config.min_deviation == 0:
        return Selection(inexact)  # all of them, regardless of scores
    scores = _SCORES[config.policy](Context(backend, stitched, config, budget))
    return Selection(inexact[_best(scores.values[inexact], budget)], scores.final_rows)


def random(context: Context) -> Scores:
    """Random control: every informed policy must beat it."""
    generator = torch.Generator().manual_seed(context.config.seed)
    return Scores(torch.rand(len(context.stitched.ids), generator=generator))


def first_k(context: Context) -> Scores:
    """The first tokens of every run, the same number of each (EPIC / LegoLink, arXiv:2410.15332, section 4)."""
    scores = torch.full((len(context.stitched.ids),), -torch.inf)
    for run in context.stitched.runs:
        scores[run.start : run.stop] = -torch.arange(len(run), dtype=torch.float32)
    return Scores(scores)


def seam(context: Context) -> Scores:
    """The tokens nearest to a seam: `seam_before` at a run's end for every `seam_after` at the next one's start.

    Source: KVBoost's SelectiveRecompute (before) and Hypic (both sides).
    """
    config = context.config
    scores = torch.full((len(context.stitched.ids),), -torch.inf)
    for run in context.stitched.runs:
        distance = torch.arange(1, len(run) + 1)
        after, before = distance / max(config.seam_after, 1e-9), distance.flip(0) / max(config.seam_before, 1e-9)
        scores[run.start : run.stop] = -torch.minimum(after, before)
    return Scores(scores)


def hkvd(context: Context) -> Scores:
    """Highest KV deviation at the check layer (CacheBlend, arXiv:2405.16444, section 4.3).

    The layers before it run in full. Their results and the check layer's fresh keys and values are kept.
    """
    rows = torch.arange(context.stitched.kept, len(context.stitched.ids))
    check = min(context.config.check_layer, context.backend.num_layers - 1)
    return Scores(_deviation(context, check, rows))


def hkvd_gradual(context: Context) -> Scores:
    """Like `hkvd`, but the selection is measured again at deeper layers and thinned out: more tokens on the first
    layers, fewer on the last, `ratio` on average (CacheBlend, arXiv:2405.16444, section 4.3, "gradual filtering").

    Dropped tokens keep what was recomputed of them. Every stage restarts at the first layer, because a forward pass
    cannot drop rows midway; this costs up to 0.8 of the recompute.
    """
    num_layers, scores = context.backend.num_layers, hkvd(context).values
    for share, depth in _STAGES:
        kept = _best(scores, round(share * context.budget))
        if depth < 1:
            rows = torch.cat([context.stitched.fresh, kept]).sort().values
            check = min(max(round(depth * num_layers), context.config.check_layer + 1), num_layers - 1)
            scores = _deviation(context, check, rows)
    return Scores(torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept]))


def _deviation(context: Context, layer: int, rows: Tensor) -> Tensor:
    """Return the (T,) deviation of the fresh KV of (S,) `rows` on a layer, -inf elsewhere. The fresh KV is kept."""
    backend, stitched, config = context.backend, context.stitched, context.config
    keys, values = stitched.cache.layer(layer)
    scores = torch.full((len(stitched.ids),), -torch.inf)

    def measure(block: Tensor, fresh_keys: Tensor, fresh_values: Tensor) -> None:
        at = block.to(keys.device)
        pairs = {"k": (fresh_keys, keys[:, :, at]), "v": (fresh_values, values[:, :, at])}
        deviations = [_METRICS[config.metric](*pairs[name]) for name in config.deviation_of]
        deviation = backend.sum_over_processes(torch.stack(deviations).sum(dim=0))
        scores[block] = (deviation / backend.num_processes if config.metric == "cosine" else deviation).cpu()
        stitched.cache.write(layer, at, fresh_keys, fresh_values)

    def run(block: Tensor, positions: Tensor | None) -> None:
        def observe(number: int, fresh_keys: Tensor, fresh_values: Tensor) -> bool:
            if number == layer:
                measure(block, fresh_keys, fresh_values)
            return number == layer

        backend.forward_until(observe, stitched.ids[block][None], stitched.cache, positions)

    if len(rows) == len(scores) and backend.rows_per_pass is None:  # plain prefill of the prefix: no mask needed
        stitched.cache.set_length(0)
        run(rows, None)
    else:
        for block in prefill_blocks(backend, rows):
            run(block, block)
    deviation = scores[stitched.inexact]
    deviation = deviation.masked_fill(deviation < config.min_deviation, -torch.inf)
    return torch.full_like(scores, -torch.inf).index_copy_(0, stitched.inexact, deviation)


def _best(scores: Tensor, num: int) -> Tensor:
    """Return the positions of the `num` highest finite scores, ascending."""
    best = scores.topk(min(num, len(scores)))
    return best.indices[best.values > -torch.inf].sort().values


def query(context: Context) -> Scores:
    """The first tokens of every run, then those that the question attends to over the stitched KV (ProphetKV, QCFuse).

    The first tokens of a chunk were encoded without the text before them, so they count regardless of the question.
    """
    attention = _attention(context)
    return Scores(attention.values + _first_tokens(context), attention.final_rows)


def _first_tokens(context: Context) -> Tensor:
    """Return (T,) scores above any attention for `first_tokens` of every run, the same number of each, 0 elsewhere."""
    stitched, config = context.stitched, context.config
    scores = torch.zeros(len(stitched.ids))
    runs = [run for run in stitched.runs if not stitched.exact[run.start]]
    num = min(config.first_tokens, int(_FIRST_SHARE * context.budget) // max(len(runs), 1))
    for run in runs:
        scores[run.start : run.start + min(num, len(run))] = 2.0  # attention is at most 1
    return scores


def _attention(context: Context) -> Scores:
    """Attention of the question, the tokens after the last run.

    Root mean square over the heads and a band of layers, so that one head with high attention counts more than many
    with low attention; optionally smoothed over neighbours.
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
            attention = backend.attention_received(ids, stitched.cache, rows, queries, layers)
            received[: len(attention)] += attention
        else:
            backend.forward_until(lambda number, *_: number == layers.stop, ids, stitched.cache, rows)
    received = (received / num_queries).sqrt_()
    values = avg_pool1d(
        received[None], config.smoothing, stride=1, padding=config.smoothing // 2, count_include_pad=False
    )[0]
    return Scores(values, fresh if layers.stop == backend.num_layers else _no_rows())


def query_hkvd(context: Context) -> Scores:
    """The first tokens, then among twice the budget by `query` the highest products of attention and KV deviation.

    The deviation is measured half-way down. A self-contained text draws attention but hardly changes, so recomputing it
    would be wasted. Measuring the deviation runs half of the layers on the candidates, about as much work as the
    recompute itself.
    """
    inexact, first, attention = context.stitched.inexact, _first_tokens(context), _attention(context)
    candidates = inexact[_best((attention.values + first)[inexact], CANDIDATES * context.budget)]
    rows = torch.cat([context.stitched.fresh, candidates]).sort().values
    deviation = _deviation(context, context.backend.num_layers // 2, rows)
    values = torch.where(deviation > -torch.inf, attention.values * deviation, -torch.inf)
    values[first > 0] = torch.inf
    return Scores(values, attention.final_rows)


def _l2(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return the (T,) squared distance of two (1, H, T, D) tensors."""
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))


def _cosine(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return the (T,) cosine distance of two (1, H, T, D) tensors, mean over heads."""
    return 1 - torch.cosine_similarity(fresh.float(), cached.float(), dim=-1).mean(dim=(0, 1))


_MIN_QUERIES = 8
_FIRST_SHARE = 1 / 2  # of the budget, at most, for the first tokens of runs
_STAGES = ((1.4, 1 / 3), (1.0, 2 / 3), (0.6, 1.0))  # (share of the budget, up to this share of the layers); mean 1
_METRICS = {"l2": _l2, "cosine": _cosine}
_SCORES: dict[str, Callable[[Context], Scores]] = {
    "hkvd": hkvd,
    "hkvd_gradual": hkvd_gradual,
    "seam": seam,
    "first_k": first_k,
    "query": query,
    "query_hkvd": query_hkvd,
    "random": random,
}

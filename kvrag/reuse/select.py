"""Which reused tokens to recompute. A policy scores every position; the best of the inexact ones fill the budget.

Rules for all: fresh positions are computed anyway and never compete; a position whose KV is exact is never selected;
the same positions are taken for keys and values and on every layer. To add a policy, write a function here, enter it
in `_SCORES` and its name in `kvrag.config.POLICIES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvrag.backend.transformers import Model
from kvrag.config import CANDIDATES, DEFAULT_RATIO, BlendConfig
from kvrag.reuse.stitch import Stitched


@dataclass(frozen=True)
class Context:
    """What a policy may look at. It may fill layers of `stitched.cache` with better KV, never with worse."""

    model: Model
    stitched: Stitched
    config: BlendConfig
    budget: int


def select(model: Model, stitched: Stitched, config: BlendConfig) -> Tensor:
    """Choose `config.ratio` of the inexact reused positions.

    Returns:
        (S,) positions, ascending.
    """
    inexact = stitched.inexact
    budget = round((DEFAULT_RATIO if config.ratio is None else config.ratio) * len(inexact))
    if budget == 0 or config.policy == "none":
        return inexact[:0]
    if budget == len(inexact) and config.min_deviation == 0:
        return inexact  # no need to ask
    scores = _SCORES[config.policy](Context(model, stitched, config, budget))
    return inexact[_best(scores[inexact], budget)]


def random(context: Context) -> Tensor:
    """The control: any informed policy must beat it."""
    generator = torch.Generator().manual_seed(context.config.seed)
    return torch.rand(len(context.stitched.ids), generator=generator)


def first_k(context: Context) -> Tensor:
    """The first tokens of every run, equally many of each (EPIC / LegoLink, arXiv:2410.15332, section 4)."""
    scores = torch.full((len(context.stitched.ids),), -torch.inf)
    for run in context.stitched.runs:
        scores[run.start : run.stop] = -torch.arange(len(run), dtype=torch.float32)
    return scores


def seam(context: Context) -> Tensor:
    """The tokens nearest to a seam, `seam_before` of a run's end for every `seam_after` of the next one's beginning.

    Source: KVBoost's SelectiveRecompute (before) and Hypic (both sides).
    """
    config = context.config
    scores = torch.full((len(context.stitched.ids),), -torch.inf)
    for run in context.stitched.runs:
        distance = torch.arange(1, len(run) + 1)
        after, before = distance / max(config.seam_after, 1e-9), distance.flip(0) / max(config.seam_before, 1e-9)
        scores[run.start : run.stop] = -torch.minimum(after, before)
    return scores


def hkvd(context: Context) -> Tensor:
    """Highest KV deviation at the check layer (CacheBlend, arXiv:2405.16444, section 4.3).

    The layers before it are run in full, and what they and the check layer's projection computed is kept.
    """
    rows = torch.arange(context.stitched.kept, len(context.stitched.ids))
    check = min(context.config.check_layer, context.model.num_layers - 1)
    return _deviation(context, check, rows)


def hkvd_gradual(context: Context) -> Tensor:
    """Like `hkvd`, but what it chooses is measured again deeper down and thinned out: more tokens on the first layers,
    fewer on the last, `ratio` of them on average (CacheBlend, arXiv:2405.16444, section 4.3, "gradual filtering").

    The tokens that are dropped keep what was recomputed of them. Every stage starts at the first layer again, since a
    forward pass cannot lose rows on its way; that costs up to 0.8 of what the recompute costs.
    """
    num_layers, scores = context.model.num_layers, hkvd(context)
    for share, depth in _STAGES:
        kept = _best(scores, round(share * context.budget))
        if depth < 1:
            rows = torch.cat([context.stitched.fresh, kept]).sort().values
            check = min(max(round(depth * num_layers), context.config.check_layer + 1), num_layers - 1)
            scores = _deviation(context, check, rows)
    return torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept])


def _deviation(context: Context, layer: int, rows: Tensor) -> Tensor:
    """(T,) deviation of the fresh KV of (S,) `rows` on a layer, -inf elsewhere. What was computed for it is kept."""
    stitched, config = context.stitched, context.config
    keys, values = stitched.cache.layer(layer)
    scores = torch.full((len(stitched.ids),), -torch.inf)
    everything = len(rows) == len(scores)  # plain prefill as far as it goes: no mask needed
    if everything:
        stitched.cache.set_length(0)  # an earlier stage may have appended the same rows

    def measure(number: int, fresh_keys: Tensor, fresh_values: Tensor) -> bool:
        if number < layer:
            return False
        at = slice(0, len(rows)) if everything else rows.to(keys.device)
        pairs = {"k": (fresh_keys, keys[:, :, at]), "v": (fresh_values, values[:, :, at])}
        deviations = [_METRICS[config.metric](*pairs[name]) for name in config.deviation_of]
        scores[rows] = torch.stack(deviations).sum(dim=0).cpu()
        keys[:, :, at], values[:, :, at] = fresh_keys, fresh_values
        return True

    context.model.forward_until(measure, stitched.ids[rows][None], stitched.cache, None if everything else rows)
    deviation = scores[stitched.inexact]
    deviation = deviation.masked_fill(deviation < config.min_deviation, -torch.inf)
    return torch.full_like(scores, -torch.inf).index_copy_(0, stitched.inexact, deviation)


def _best(scores: Tensor, num: int) -> Tensor:
    """Positions of the `num` highest scores that are not -inf, ascending."""
    best = scores.topk(min(num, len(scores)))
    return best.indices[best.values > -torch.inf].sort().values


def query(context: Context) -> Tensor:
    """What the tokens after the last run, the question, attend to over the stitched KV (ProphetKV, QCFuse).

    Root mean square over the heads and a band of layers, smoothed over neighbours if wanted.
    """
    model, stitched, config = context.model, context.stitched, context.config
    fresh = stitched.fresh
    last_reused = int(stitched.reused.nonzero()[-1])
    num_queries = max(int((fresh > last_reused).sum()), min(_MIN_QUERIES, len(fresh)))
    low, high = math.floor(config.band[0] * model.num_layers), math.ceil(config.band[1] * model.num_layers)
    layers = range(min(max(low, 1), model.num_layers - 1), max(high, low + 1, 2))  # layer 0 knows no context
    received = model.attention_received(stitched.ids[fresh][None], stitched.cache, fresh, num_queries, layers)
    return avg_pool1d(
        received[None], config.smoothing, stride=1, padding=config.smoothing // 2, count_include_pad=False
    )[0]


def query_hkvd(context: Context) -> Tensor:
    """Of twice the budget by `query`, those whose attention times KV deviation half-way down is highest.

    A text that explains itself draws attention and hardly changes: recomputing it would be a waste. Measuring the
    deviation runs half of the layers on the candidates, about as much work as the recompute itself.
    """
    inexact, attention = context.stitched.inexact, query(context)
    candidates = inexact[_best(attention[inexact], CANDIDATES * context.budget)]
    rows = torch.cat([context.stitched.fresh, candidates]).sort().values
    deviation = _deviation(context, context.model.num_layers // 2, rows)
    return torch.where(deviation > -torch.inf, attention * deviation, -torch.inf)


def hybrid(context: Context) -> Tensor:
    """The tokens at the seams first, equally many at each, then by `query`.

    Which seams the question looks at does not matter: it is the first tokens of a chunk that were encoded without
    knowing what it is about.
    """
    config, inexact = context.config, context.stitched.inexact
    seams = torch.zeros(len(context.stitched.ids))
    for run in context.stitched.runs:
        after = torch.arange(min(config.seam_after, len(run)))
        before = torch.arange(min(config.seam_before, len(run)))
        # attention never exceeds 1; the nearer to the seam, the earlier in line
        seams[run.start + after] += 3.0 - after / len(run)
        seams[run.stop - 1 - before] += 3.0 - before / len(run)
    if int((seams[inexact] > 0).sum()) >= context.budget:
        return seams  # short chunks: no need to listen to the question
    return query(context) + seams


def _l2(fresh: Tensor, cached: Tensor) -> Tensor:
    """(1, H, T, D) twice -> (T,) squared distance."""
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))


def _cosine(fresh: Tensor, cached: Tensor) -> Tensor:
    """(1, H, T, D) twice -> (T,) cosine distance, mean over heads."""
    return 1 - torch.cosine_similarity(fresh.float(), cached.float(), dim=-1).mean(dim=(0, 1))


_MIN_QUERIES = 8
_STAGES = ((1.4, 1 / 3), (1.0, 2 / 3), (0.6, 1.0))  # share of the budget, until this share of the layers; mean 1
_METRICS = {"l2": _l2, "cosine": _cosine}
_SCORES: dict[str, Callable[[Context], Tensor]] = {
    "hkvd": hkvd,
    "hkvd_gradual": hkvd_gradual,
    "seam": seam,
    "first_k": first_k,
    "query": query,
    "query_hkvd": query_hkvd,
    "hybrid": hybrid,
    "random": random,
}

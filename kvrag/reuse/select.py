"""Which reused tokens to recompute. A policy scores every position; the best of the inexact ones fill the budget.

Rules for all: fresh positions are computed anyway and never compete; a position whose KV is exact is never selected;
the same positions are taken for keys and values and on every layer. To add a policy, write a function here, enter it
in `_SCORES` and its name in `kvrag.config.POLICIES`.
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
        final_rows: (F,) fresh positions that the policy has computed on every layer, over the stitched KV.
    """

    positions: Tensor
    final_rows: Tensor = field(default_factory=_no_rows)


@dataclass(frozen=True)
class Scores:
    """A policy's verdict.

    Attributes:
        values: (T,) the higher, the sooner a position is recomputed; -inf = not at all.
        final_rows: See Selection.
    """

    values: Tensor
    final_rows: Tensor = field(default_factory=_no_rows)


@dataclass(frozen=True)
class Context:
    """What a policy may look at. It may fill layers of `stitched.cache` with better KV, never with worse."""

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
        return Selection(inexact)  # all of them, whatever their scores
    scores = _SCORES[config.policy](Context(backend, stitched, config, budget))
    return Selection(inexact[_best(scores.values[inexact], budget)], scores.final_rows)


def random(context: Context) -> Scores:
    """The control: any informed policy must beat it."""
    generator = torch.Generator().manual_seed(context.config.seed)
    return Scores(torch.rand(len(context.stitched.ids), generator=generator))


def first_k(context: Context) -> Scores:
    """The first tokens of every run, equally many of each (EPIC / LegoLink, arXiv:2410.15332, section 4)."""
    scores = torch.full((len(context.stitched.ids),), -torch.inf)
    for run in context.stitched.runs:
        scores[run.start : run.stop] = -torch.arange(len(run), dtype=torch.float32)
    return Scores(scores)


def seam(context: Context) -> Scores:
    """The tokens nearest to a seam, `seam_before` of a run's end for every `seam_after` of the next one's beginning.

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

    The layers before it are run in full, and what they and the check layer's projection computed is kept.
    """
    rows = torch.arange(context.stitched.kept, len(context.stitched.ids))
    check = min(context.config.check_layer, context.backend.num_layers - 1)
    return Scores(_deviation(context, check, rows))


def hkvd_gradual(context: Context) -> Scores:
    """Like `hkvd`, but what it chooses is measured again deeper down and thinned out: more tokens on the first layers,
    fewer on the last, `ratio` of them on average (CacheBlend, arXiv:2405.16444, section 4.3, "gradual filtering").

    Tokens that are dropped keep what was recomputed of them. Every stage starts at the first layer again, since a
    forward pass cannot lose rows on its way; that costs up to 0.8 of what the recompute costs.
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
    """(T,) deviation of the fresh KV of (S,) `rows` on a layer, -inf elsewhere. What was computed for it is kept."""
    backend, stitched, config = context.backend, context.stitched, context.config
    keys, values = stitched.cache.layer(layer)
    scores = torch.full((len(stitched.ids),), -torch.inf)

    def measure(block: Tensor, fresh_keys: Tensor, fresh_values: Tensor) -> None:
        at = block.to(keys.device)
        pairs = {"k": (fresh_keys, keys[:, :, at]), "v": (fresh_values, values[:, :, at])}
        deviations = [_METRICS[config.metric](*pairs[name]) for name in config.deviation_of]
        scores[block] = torch.stack(deviations).sum(dim=0).cpu()
        keys[:, :, at], values[:, :, at] = fresh_keys, fresh_values

    def run(block: Tensor, positions: Tensor | None) -> None:
        def observe(number: int, fresh_keys: Tensor, fresh_values: Tensor) -> bool:
            if number == layer:
                measure(block, fresh_keys, fresh_values)
            return number == layer

        backend.forward_until(observe, stitched.ids[block][None], stitched.cache, positions)

    if len(rows) == len(scores):  # plain prefill as far as it goes: no mask needed
        stitched.cache.set_length(0)
        run(rows, None)
    else:
        for block in prefill_blocks(backend, rows):
            run(block, block)
    deviation = scores[stitched.inexact]
    deviation = deviation.masked_fill(deviation < config.min_deviation, -torch.inf)
    return torch.full_like(scores, -torch.inf).index_copy_(0, stitched.inexact, deviation)


def _best(scores: Tensor, num: int) -> Tensor:
    """Positions of the `num` highest scores that are not -inf, ascending."""
    best = scores.topk(min(num, len(scores)))
    return best.indices[best.values > -torch.inf].sort().values


def query(context: Context) -> Scores:
    """What the tokens after the last run, the question, attend to over the stitched KV (ProphetKV, QCFuse).

    Root mean square over the heads and a band of layers, so that one head that looks at a token counts for more than
    many that glance; smoothed over neighbours if wanted.
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
    """Of twice the budget by `query`, those whose attention times KV deviation half-way down is highest.

    A text that explains itself draws attention and hardly changes: recomputing it would be a waste. Measuring the
    deviation runs half of the layers on the candidates, about as much work as the recompute itself.
    """
    inexact, attention = context.stitched.inexact, query(context)
    candidates = inexact[_best(attention.values[inexact], CANDIDATES * context.budget)]
    rows = torch.cat([context.stitched.fresh, candidates]).sort().values
    deviation = _deviation(context, context.backend.num_layers // 2, rows)
    values = torch.where(deviation > -torch.inf, attention.values * deviation, -torch.inf)
    return Scores(values, attention.final_rows)


def hybrid(context: Context) -> Scores:
    """The tokens at the seams first, equally many at each, then by `query`.

    Which seams the question looks at does not matter: the first tokens of a chunk were encoded without what it is
    about.
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
        return Scores(seams)  # short chunks: the seams are the whole budget
    attention = query(context)
    return Scores(attention.values + seams, attention.final_rows)


def _l2(fresh: Tensor, cached: Tensor) -> Tensor:
    """(1, H, T, D) twice -> (T,) squared distance."""
    return (fresh.float() - cached.float()).square().sum(dim=(0, 1, 3))


def _cosine(fresh: Tensor, cached: Tensor) -> Tensor:
    """(1, H, T, D) twice -> (T,) cosine distance, mean over heads."""
    return 1 - torch.cosine_similarity(fresh.float(), cached.float(), dim=-1).mean(dim=(0, 1))


_MIN_QUERIES = 8
_STAGES = ((1.4, 1 / 3), (1.0, 2 / 3), (0.6, 1.0))  # share of the budget, until this share of the layers; mean 1
_METRICS = {"l2": _l2, "cosine": _cosine}
_SCORES: dict[str, Callable[[Context], Scores]] = {
    "hkvd": hkvd,
    "hkvd_gradual": hkvd_gradual,
    "seam": seam,
    "first_k": first_k,
    "query": query,
    "query_hkvd": query_hkvd,
    "hybrid": hybrid,
    "random": random,
}

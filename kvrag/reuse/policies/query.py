"""The first tokens of every run, then those that the question attends to over the request KV (ProphetKV, QCFuse)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.request import Request
from kvrag.reuse.policies import Passes, Policy

_MIN_QUERIES = 8
_FIRST_SHARE = 1 / 2  # of the budget, at most, for the first tokens of runs


@dataclass(frozen=True)
class Query(Policy):
    """The first tokens of every run, then those that the question attends to.

    Attributes:
        first_tokens: Tokens at the start of every run that are recomputed in any case, as far as half of the budget
            allows; 0 = the question's attention alone decides.
        band: Layers whose attention is used, as fractions of the depth.
    """

    first_tokens: int = 2
    band: tuple[float, float] = (0.5, 0.8)

    def score(self, backend: Backend, request: Request, budget: int) -> Tensor:
        """Score the first tokens above all others, and these by their attention.

        The first tokens of a chunk were encoded without the text before them, so they count regardless of the question.
        """
        return self.attention(backend, request) + self.seams(request, budget)

    def passes(self, num_layers: int) -> Passes:
        """Return the layers up to the end of the band, on the fresh tokens."""
        return Passes(query=math.ceil(self.band[1] * num_layers) / num_layers)

    def attention(self, backend: Backend, request: Request) -> Tensor:
        """Return the (T,) attention of the question, the tokens after the last run.

        Root mean square over the heads and a band of layers, so that one head with high attention counts more than many
        with low attention.
        """
        fresh = request.fresh
        last_reused = int(request.reused.nonzero()[-1])
        num_queries = max(int((fresh > last_reused).sum()), min(_MIN_QUERIES, len(fresh)))
        low, high = math.floor(self.band[0] * backend.num_layers), math.ceil(self.band[1] * backend.num_layers)
        layers = range(min(max(low, 1), backend.num_layers - 1), max(high, low + 1, 2))  # layer 0 has no context yet
        received, left = torch.zeros(len(request.ids)), len(fresh)
        for rows in prefill_blocks(backend, fresh):
            left -= len(rows)
            queries = min(len(rows), num_queries - left)
            ids = request.ids[rows][None]
            if queries > 0:
                part = backend.attention_received(ids, request.cache, rows, queries, layers)
                received[: len(part)] += part
            else:
                backend.forward_until(layers.stop, ids, request.cache, rows)
        return (received / num_queries).sqrt_()

    def seams(self, request: Request, budget: int) -> Tensor:
        """Return (T,) scores above any attention for the first tokens of runs, as many of each; 0 elsewhere."""
        scores = torch.zeros(len(request.ids))
        runs = [run for run in request.runs if not request.exact[run.start]]
        num = min(self.first_tokens, int(_FIRST_SHARE * budget) // max(len(runs), 1))
        for run in runs:
            scores[run.start : run.start + min(num, len(run))] = 2.0  # attention is at most 1
        return scores

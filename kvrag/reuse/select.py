"""Selection of the reused tokens to recompute. A policy scores every position; the best inexact ones fill the budget.

Rules for all policies: fresh positions are computed anyway and never compete; exact positions are never selected; the
same positions are used for keys and values and on every layer. To add a policy, add a module to `kvrag.reuse.policies`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.config import DEFAULT_RATIO, BlendConfig
from kvrag.reuse.stitch import Stitched


@dataclass(frozen=True)
class Context:
    """Input of a policy. A policy may fill layers of `stitched.cache` with better KV, never with worse."""

    backend: Backend
    stitched: Stitched
    config: BlendConfig
    budget: int


class Passes(NamedTuple):
    """Shares of the layers that a policy runs to score, for the cost model."""

    query: float = 0.0  # on the fresh tokens
    detection: float = 0.0  # on all tokens


NO_PASSES = Passes()


def select(backend: Backend, stitched: Stitched, config: BlendConfig) -> Tensor:
    """Return `config.ratio` of the inexact reused positions, (S,) ascending."""
    inexact = stitched.inexact
    budget = round((DEFAULT_RATIO if config.ratio is None else config.ratio) * len(inexact))
    if budget == 0 or config.policy == "none":
        return inexact[:0]
    if budget == len(inexact):
        return inexact  # regardless of scores
    # choosing runs the fresh tokens through most layers: with a long question, computing all reused tokens costs less
    if len(inexact) - budget <= selecting(config, backend.num_layers).query * len(stitched.fresh):
        return inexact
    scores: Tensor = _module(config.policy).score(Context(backend, stitched, config, budget))
    return inexact[best(scores[inexact], budget)]


def selecting(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers that the policy of these settings runs to select."""
    if config.policy in ("none", "full"):
        return NO_PASSES
    passes = getattr(_module(config.policy), "passes", None)
    return passes(config, num_layers) if passes else NO_PASSES


def best(scores: Tensor, num: int) -> Tensor:
    """Return the positions of the `num` highest finite scores, ascending."""
    top = scores.topk(min(num, len(scores)))
    return top.indices[top.values > -torch.inf].sort().values


def _module(policy: str) -> Any:
    return import_module(f"kvrag.reuse.policies.{policy}")

"""Selection of the reused tokens to recompute. A policy scores every position; the best inexact ones fill the budget.

Rules for all policies: fresh positions are computed anyway and never compete; exact positions are never selected; the
same positions are used for keys and values and on every layer. To add a policy, add a module to `kvrag.reuse.policies`.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.config import DEFAULT_RATIO, BlendConfig, PolicyChoice
from kvrag.reuse.policy import NO_PASSES, Context, Passes, Policy
from kvrag.reuse.request_state import RequestState


def select(backend: Backend, request: RequestState, config: BlendConfig) -> tuple[Tensor, Tensor]:
    """Return two times (S,) ascending: the positions to recompute, and the next ones in the policy's order.

    The first are `config.ratio` of the inexact reused positions, or as many as the policy makes of it; the others as
    many again, or fewer where there are no more.
    """
    inexact = request.inexact
    nothing = inexact[:0]
    budget = round((DEFAULT_RATIO if config.ratio is None else config.ratio) * len(inexact))
    if budget == 0 or config.policy == "none":
        return nothing, nothing
    policy = _policy_of(config)
    budget = policy.budget(request, budget)
    if budget == len(inexact):
        return inexact, nothing  # regardless of scores
    # choosing runs the fresh tokens through most layers: with a long question, computing all reused tokens costs less
    if len(inexact) - budget <= selecting(config, backend.num_layers).query * len(request.fresh):
        return inexact, nothing
    scores = policy.score(Context(backend, request, budget))[inexact]
    top = scores.topk(min(2 * budget, len(inexact)))
    ranked = inexact[top.indices[top.values > -torch.inf]]
    return ranked[:budget].sort().values, ranked[budget:].sort().values


def selecting(config: BlendConfig, num_layers: int) -> Passes:
    """Return the layers that the policy of these settings runs to select."""
    if config.policy in ("none", "full"):
        return NO_PASSES
    return _policy_of(config).passes(num_layers)


def _policy_of(config: BlendConfig) -> Policy:
    chosen = PolicyChoice(config.policy)
    module = import_module(f"kvrag.reuse.policies.{chosen.name}")
    policy: Policy = getattr(module, chosen.name.title().replace("_", ""))(**chosen.settings)
    return policy

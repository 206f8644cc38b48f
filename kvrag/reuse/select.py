"""Selection of the reused tokens to recompute. A policy scores every position; the best inexact ones fill the budget.

Rules for all policies: fresh positions are computed anyway and never compete; exact positions are never selected; the
same positions are used for keys and values and on every layer. To add a policy, add a module to `kvrag.reuse.policies`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.config import DEFAULT_RATIO, BlendConfig, check_fields
from kvrag.errors import SettingError
from kvrag.reuse.request_state import RequestState


@dataclass
class Context:
    """Input of a policy. A policy may fill layers of `request.cache` with better KV, never with worse."""

    backend: Backend
    request: RequestState
    budget: int


class Passes(NamedTuple):
    """Shares of the layers that a policy runs to score, for the cost model."""

    query: float = 0.0  # on the fresh tokens
    detection: float = 0.0  # on all tokens


NO_PASSES = Passes()


@dataclass(frozen=True)
class Policy:
    """A policy: its settings are its fields. The subclass is in a module of `kvrag.reuse.policies`."""

    def __post_init__(self) -> None:
        check_fields(self)

    def score(self, context: Context) -> Tensor:
        """Return (T,) scores of all positions: higher ones are recomputed first, those with -inf never."""
        raise NotImplementedError

    def budget(self, request: RequestState, budget: int) -> int:
        """Return how many of the inexact positions to recompute, where the ratio asks for `budget`."""
        return budget

    def passes(self, num_layers: int) -> Passes:
        """Return the layers of the model that scoring runs."""
        return NO_PASSES


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
    policy = policy_of(config.policy)
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
    return policy_of(config.policy).passes(num_layers)


def policy_of(text: str) -> Policy:
    """Return a policy by its name, which settings can follow: `hkvd:check_layer=3`, `query:first_tokens=4,band=0:0.5`.

    Raises SettingError for settings that the policy does not have.
    """
    name, _, assignments = text.partition(":")
    policy: type[Policy] = getattr(import_module(f"kvrag.reuse.policies.{name}"), name.title().replace("_", ""))
    names = [field.name for field in fields(policy)]
    settings: dict[str, Any] = {}
    for assignment in filter(None, assignments.split(",")):
        setting, equals, value = assignment.partition("=")
        if not equals or setting not in names:
            known = f"write NAME=VALUE with one of {', '.join(names)}" if names else "it has none"
            raise SettingError(f"policy {name}: {assignment!r:.80} is not a setting: {known}")
        try:
            numbers = [json.loads(number) for number in value.split(":")]
        except ValueError:
            raise SettingError(f"policy {name}: {assignment!r:.80} is not a number, or two with a colon") from None
        settings[setting] = numbers[0] if len(numbers) == 1 else tuple(numbers)
    return policy(**settings)

"""The policies, one module each. The name of the module is the name of the policy.

A module defines a `Policy` with the module's name in capitals, `FirstK` in `first_k`. For its use, see
`kvrag.reuse.blend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.request import Request


class Passes(NamedTuple):
    """Shares of the layers that a policy runs to score, for the cost model."""

    query: float = 0.0  # on the fresh tokens
    detection: float = 0.0  # on all tokens


NO_PASSES = Passes()


@dataclass(frozen=True)
class Policy:
    """A policy: its settings are its fields."""

    def score(self, backend: Backend, request: Request, budget: int) -> Tensor:
        """Return (T,) scores of all positions: higher ones are recomputed first, those with -inf never.

        May fill layers of `request.cache` with better KV, never with worse. `budget` of the positions are recomputed.
        """
        raise NotImplementedError

    def budget(self, request: Request, budget: int) -> int:
        """Return how many of the inexact positions to recompute, where the ratio asks for `budget`."""
        return budget

    def passes(self, num_layers: int) -> Passes:
        """Return the layers of the model that scoring runs."""
        return NO_PASSES

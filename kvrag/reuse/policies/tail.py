"""The last tokens before the question (Tail-Replay, arXiv:2608.30310)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
from kvrag.request import Request
from kvrag.reuse.policies import Policy

_MOST = 2  # times the budget


class Tail(Policy):
    """The last tokens: one stretch, as layers need that keep a state of the tokens before.

    It begins where a chunk begins: states that begin within a text keep fewer answers, see decision 34.
    """

    def budget(self, request: Request, budget: int) -> int:
        """Lengthen the tail to the beginning of its first chunk, unless that takes more than twice the tokens."""
        inexact = request.inexact
        first = int(inexact[-budget])
        begin = max(run.start for run in request.runs if run.start <= first)
        longer = int((inexact >= begin).sum())
        return longer if longer <= _MOST * budget else budget

    def score(self, backend: Backend, request: Request, budget: int) -> Tensor:
        """Score a token by its position."""
        return torch.arange(len(request.ids), dtype=torch.float32)

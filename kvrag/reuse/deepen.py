"""Deepening: recompute more of a prompt while the model is unsure of its next token.

The margin between the two likeliest tokens is a sign of doubt: where it is large, blended KV nearly always gives full
prefill's token. So an answer begins at a small ratio. A token with a smaller margin is not emitted: the next stage
recomputes more positions, in the order of the policy's scores, and then the question and the answer so far, over the
same cache. The last stage recomputes everything from the first position with inexact KV on: the KV then is full
prefill's. A near tie that a stage does not move is the model's own, and is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.reuse.request_state import RequestState
from kvrag.reuse.select import best
from kvrag.types import Stage

STAGES = (0.3, 0.5)
"""Ratios between the first one and full prefill."""

MOST = 1.25
"""Rows before the first token, at most, relative to full prefill's."""

MOVED = 1.0
"""A margin that a stage changed by less, in nats, is not a matter of KV."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The likeliest next token, and by how many nats it is more likely than the next one."""

    token: int
    margin: float

    def is_confirmed_by(self, other: Doubt) -> bool:
        """Return whether KV of another stage gives the same token by about the same margin."""
        return self.token == other.token and abs(self.margin - other.margin) < MOVED


class Deepening:
    """Stages of recompute left to one prompt, whose answer is being decoded. Changes the prompt's cache.

    Attributes:
        margin: A token with a smaller one is not emitted.
        plain: (1, V) logits of the first token by plain reuse, if the policy computed them.
        stages: Those done so far.
    """

    def __init__(self, backend: Backend, request: RequestState, margin: float) -> None:
        """Begin with what is blended."""
        self.margin, self.plain, self.stages = margin, request.selection.plain, list[Stage]()
        self._backend, self._cache, self._scores = backend, request.cache, request.selection.scores
        self._inexact, self._selected = request.inexact, request.selected
        self._fresh, self._length = request.fresh, len(request.ids)
        self._first = request.num_exact(request.selected[:0])  # all positions before it are exact
        self._ratios = [ratio for ratio in STAGES if ratio * len(self._inexact) > len(self._selected)]
        kept = request.prefix.exact if request.prefix else 0  # full prefill would not compute it either
        asked = len(self._fresh) * (1 if self.plain is None else 2)  # once more by the policy
        self._left = MOST * (self._length - kept) - asked - len(self._selected)
        self.is_complete = request.num_exact(request.selected) == self._length

    @property
    def recomputed(self) -> Tensor:
        """(S,) reused positions that were recomputed."""
        return self._inexact if self.is_complete else self._selected

    def deepen(self, ids: Tensor, token: int) -> Tensor:
        """Compute the next stage; return (1, V) logits after the last token.

        Args:
            ids: (T,) of the prompt and the answer so far. The cache becomes complete for all of them.
            token: Number of the answer's token that is in doubt.
        """
        started, is_first = time.perf_counter(), len(ids) == self._length
        rows = self._next_rows(len(ids), is_first)
        logits = self._forward(ids, rows)
        self._left -= len(rows)
        self.stages.append(Stage(token, len(self.recomputed), len(rows), time.perf_counter() - started))
        return logits

    def _next_rows(self, length: int, is_first: bool) -> Tensor:
        """Return the rows of the next stage, ascending, the last position among them."""
        following = torch.arange(self._length, length)
        while self._ratios and self._scores is not None:
            wanted = best(self._scores[self._inexact], round(self._ratios.pop(0) * len(self._inexact)))
            chosen = torch.zeros(self._length, dtype=torch.bool)
            chosen[self._inexact[wanted]] = True
            chosen[self._selected] = False
            new = chosen.nonzero().squeeze(1)
            if not len(new):
                continue
            chosen[self._fresh[self._fresh > new[0]]] = True
            rows = torch.cat([chosen.nonzero().squeeze(1), following])
            if is_first and len(rows) + self._length - self._first > self._left:
                break
            self._selected = torch.cat([self._selected, new]).sort().values
            return rows
        self.is_complete = True
        return torch.arange(self._first, length)

    def _forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        backend, cache = self._backend, self._cache
        if backend.rope_follows_length and len(ids) > backend.stable_length:
            # as when they were decoded: each token was rotated for the length at its time
            prompt, answer = rows[rows < self._length], rows[rows >= self._length]
            parts: Sequence[Tensor] = [*prefill_blocks(backend, prompt), *answer[:, None]]
        else:
            parts = list(prefill_blocks(backend, rows))
        for part in parts:
            logits = backend.forward(ids[part][None], cache, part)
        cache.set_length(len(ids))
        return logits

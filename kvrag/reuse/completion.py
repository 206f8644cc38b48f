"""Completion: recompute the rest of a prompt when the model is unsure of its next token.

The margin between the two likeliest tokens is a sign of doubt: where it is large, blended KV nearly always gives full
prefill's token. So an answer begins at a small ratio. The first token with a smaller margin is not emitted: everything
from the first position with inexact KV on is recomputed first, with the question and the answer so far, in the same
cache. The KV then is full prefill's, and the answer continues exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.reuse.request_state import RequestState
from kvrag.types import Completed

FIRST = 1 / 3
"""Share of the margin that the first token needs: most answers begin with near ties of style."""

MOST = 1.25
"""Rows before the first token, at most, relative to full prefill's."""


class Completion:
    """The recompute that is left to one prompt, whose answer is being decoded. Changes the prompt's cache.

    Attributes:
        completed: When and how it was done; None = not yet.
    """

    def __init__(self, backend: Backend, request: RequestState, margin: float) -> None:
        """Begin with what is blended. For `margin`, see `BlendConfig`."""
        self.completed: Completed | None = None
        self._margin, self._backend, self._cache = margin, backend, request.cache
        self._length = len(request.ids)
        self._first = request.num_exact(request.selected)  # all positions before it equal full prefill's

    @property
    def is_complete(self) -> bool:
        """True once all KV is full prefill's."""
        return self.completed is not None or self._first == self._length

    def is_unsure(self, token: int, margin: float) -> bool:
        """Return whether more is to be recomputed before this token of the answer is emitted; 0 is the first one."""
        return not self.is_complete and margin < self._margin * (FIRST if token == 0 else 1)

    def complete(self, ids: Tensor, token: int) -> Tensor:
        """Recompute the rest; return (1, V) logits after the last token.

        Args:
            ids: (T,) of the prompt and the answer so far. The cache becomes complete for all of them.
            token: Number of the answer's token that is in doubt.
        """
        started = time.perf_counter()
        rows = torch.arange(self._first, len(ids))
        logits = self._forward(ids, rows)
        self.completed = Completed(token, len(rows), time.perf_counter() - started)
        return logits

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

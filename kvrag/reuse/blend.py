"""CacheBlend's selective recompute: the model's own forward pass on fresh and selected positions.

Source: arXiv:2405.16444, section 4.2. All other positions keep the stitched KV. Recomputed tokens attend to it under
a mask by true positions.
"""

from __future__ import annotations

from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.reuse.request_state import RequestState


def blend(backend: Backend, request: RequestState) -> Tensor:
    """Recompute fresh and selected positions in `request.cache`. The cache is then ready to decode.

    With nothing reused, this is full prefill: the model's ordinary forward pass. A backend that leaves the tail to its
    engine otherwise gets no rows of it, which can be none at all. Returns (1, V) float32 logits after the last token.
    """
    if not request.reused.any():
        return backend.forward(request.ids[None], request.cache)
    for rows in prefill_blocks(backend, blended_rows(backend, request)):
        logits = backend.forward(request.ids[rows][None], request.cache, rows)
    request.cache.set_length(len(request.ids))
    return logits


def blended_rows(backend: Backend, request: RequestState) -> Tensor:
    """Return the (N,) positions that `blend` computes, fresh and selected ones."""
    rows = (~request.reused).index_fill(0, request.selected, True).nonzero().squeeze(1)
    return rows[rows < request.tail()] if backend.leaves_tail else rows

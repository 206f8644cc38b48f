"""CacheBlend's selective recompute: the model's own forward pass on fresh and selected positions.

Source: arXiv:2405.16444, section 4.2. All other positions keep the stitched KV. Recomputed tokens attend to it under
a mask by true positions.
"""

from __future__ import annotations

from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.reuse.stitch import Stitched


def blend(backend: Backend, stitched: Stitched, selected: Tensor) -> Tensor:
    """Recompute fresh and selected positions in `stitched.cache`. The cache is then ready to decode.

    With nothing reused, this is full prefill: the model's ordinary forward pass. A backend that leaves the tail to its
    engine otherwise gets no rows of it, which can be none at all. Returns (1, V) float32 logits after the last token.
    """
    if not stitched.reused.any():
        return backend.forward(stitched.ids[None], stitched.cache)
    for rows in prefill_blocks(backend, blended_rows(backend, stitched, selected)):
        logits = backend.forward(stitched.ids[rows][None], stitched.cache, rows)
    stitched.cache.set_length(len(stitched.ids))
    return logits


def blended_rows(backend: Backend, stitched: Stitched, selected: Tensor) -> Tensor:
    """Return the (N,) positions that `blend` computes, fresh and selected ones."""
    rows = (~stitched.reused).index_fill(0, selected, True).nonzero().squeeze(1)
    return rows[rows < stitched.tail(selected)] if backend.leaves_tail else rows

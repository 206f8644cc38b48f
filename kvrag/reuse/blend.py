"""CacheBlend's selective recompute: the model's own forward pass on the fresh and the selected positions.

Source: arXiv:2405.16444, section 4.2. The rest of the positions keeps the stitched KV, which every recomputed token
attends to under a mask by true positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.reuse.stitch import Stitched

SLAB = 2048
"""Rows per forward pass. Rows are causal, so passes over consecutive slabs give what one pass would, and the mask and
the attention scores stay small on long prompts."""


def blend(model: Model, stitched: Stitched, selected: Tensor) -> Tensor:
    """Recompute fresh and `selected` positions in `stitched.cache`, after which it can decode.

    Args:
        selected: (S,) reused positions to recompute, in any order.

    Returns:
        (1, V) float32 logits after the prompt's last token.
    """
    positions = uncomputed(stitched, selected)
    # where RoPE follows the length, every pass must see the last position
    size = len(positions) if model.rope_follows_length else SLAB
    for slab in torch.split(positions, size):
        logits = model.forward(stitched.ids[slab][None], stitched.cache, slab)
    stitched.cache.set_length(len(stitched.ids))
    return logits


def uncomputed(stitched: Stitched, selected: Tensor) -> Tensor:
    """(N,) positions that `blend` has to compute: all fresh and selected ones, but for those that are final already.

    Whoever listens to the question has run all fresh positions, and before everything that may deviate, a system prompt
    for one, nothing changes any more.
    """
    rows = ~stitched.reused
    rows[selected] = True
    computed, inexact = stitched.cache.computed, stitched.inexact
    if computed is not None and len(inexact):
        final = computed.cpu()
        rows[final[final < inexact[0]]] = False
    return rows.nonzero().squeeze(1)


def prefill(model: Model, ids: Tensor, capacity: int) -> tuple[Tensor, Stitched]:
    """Full prefill, the reference: the model's ordinary forward pass over (T,) ids.

    Returns:
        (1, V) float32 logits after the last token, and the prompt with nothing reused and a complete cache.
    """
    nothing = torch.zeros(len(ids), dtype=torch.bool)
    stitched = Stitched(ids, (), nothing, nothing)
    stitched.cache = model.new_cache(capacity)
    return model.forward(ids[None], stitched.cache), stitched

"""Stitching and blending: from the stored KV of the matched runs to a cache that is ready to decode.

`stitch` lays the KV out as one cache of full length, with keys rotated into place. `blend` is CacheBlend's selective
recompute (arXiv:2405.16444, section 4.2): the model's own forward pass on fresh and selected positions. All other
positions keep the stitched KV. Recomputed tokens attend to it under a mask by true positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, prefill_blocks
from kvrag.reuse.load import LayerLoader
from kvrag.reuse.request_state import RequestState
from kvrag.store import ChunkReader
from kvrag.types import Run


def stitch(backend: Backend, request: RequestState, loader: LayerLoader) -> None:
    """Give a request a cache whose layers are stitched when a forward pass first reaches them.

    The last position is never reused: its logits are needed.
    """
    runs, prefix, num_tokens = request.runs, request.prefix, len(request.ids)
    reused = torch.zeros(num_tokens, dtype=torch.bool)
    exact = torch.zeros(num_tokens, dtype=torch.bool)
    for run in runs:
        reused[run.start : run.stop] = True
    if prefix:
        reused[: prefix.length] = True
        exact[: prefix.exact] = True
    reused[-1] = False
    if (
        runs
        and loader.codec == "native"
        and _is_exact(backend, request.token_ids, runs[0], request.readers[runs[0].key])
    ):
        exact[runs[0].start : runs[0].stop] = reused[runs[0].start : runs[0].stop]
    request.reused, request.exact = reused, exact
    if not runs and not prefix:
        request.cache = backend.new_cache(loader.capacity)
        return
    tables = backend.tables(torch.arange(num_tokens))

    def lay_out(number: int) -> tuple[Tensor, Tensor]:
        keys, values = loader.layer(number)
        with loader.trace.step("stitch", synchronise=False):
            backend.rotate(number, keys[:, :, loader.span], tables[number], loader.span)
        return keys, values

    filled = reused.clone()
    filled[: request.kept] = False
    source, positions = lay_out if runs else None, filled.nonzero().squeeze(1)
    request.cache = backend.new_cache(loader.capacity, source, positions, prefix)


def _is_exact(backend: Backend, ids: Sequence[int], run: Run, reader: ChunkReader) -> bool:
    """Return whether a run is where its chunk was encoded: alone, right after the preamble."""
    if backend.fingerprint.adapter:
        return False
    after_preamble = run.offset == 0 and tuple(ids[: run.start]) == backend.preamble
    # where RoPE depends on the length, the chunk may have been encoded in a pass longer than the prompt
    encoded = len(backend.preamble) + len(reader.ids)
    return after_preamble and not reader.context_tokens and max(len(ids), encoded) <= backend.stable_length


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

"""Stitching: lay out the stored KV of the matched runs as one full-length cache, with keys rotated into place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend
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

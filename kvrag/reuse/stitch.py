"""Stitching: lay out the stored KV of the matched runs as one full-length cache, with keys rotated into place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.protocol import Backend, KVCache
from kvrag.memory.conversation import CachedPrefix
from kvrag.reuse.load import LayerLoader
from kvrag.reuse.prompt import Prompt
from kvrag.store import ChunkReader
from kvrag.types import Run


@dataclass(frozen=True, eq=False)
class Stitched:
    """A prompt with KV at its reused positions; the other positions are computed later.

    A reused position is exact if its KV equals full prefill's: in a run right after the preamble, encoded there, with a
    lossless codec.
    """

    ids: Tensor  # (T,)
    runs: Sequence[Run]  # ascending and disjoint
    reused: Tensor  # (T,) bool
    exact: Tensor  # (T,) bool
    cache: KVCache  # each layer is stitched when a forward pass first reaches it
    prefix: CachedPrefix | None = None  # from a conversation

    @property
    def kept(self) -> int:
        """Number of positions in the cached prefix."""
        return self.prefix.length if self.prefix else 0

    @property
    def fresh(self) -> Tensor:
        """(F,) positions without stored KV."""
        return (~self.reused).nonzero().squeeze(1)

    @property
    def inexact(self) -> Tensor:
        """(R,) reused positions whose KV may deviate; a policy selects from them."""
        inexact = self.reused & ~self.exact
        inexact[: self.kept] = False  # blended in an earlier turn
        return inexact.nonzero().squeeze(1)

    def tail(self, selected: Tensor) -> int:
        """Return the number of positions up to the last that keeps its stitched KV; 1 if none does, 0 without any."""
        kept = self.reused.index_fill(0, selected, False)
        return int(kept.nonzero()[-1]) + 1 if kept.any() else int(self.reused.any())

    def num_exact(self, selected: Tensor) -> int:
        """Return the number of leading positions with full prefill's KV once the `selected` ones are recomputed."""
        deviating = (self.reused & ~self.exact).index_fill(0, selected, False)
        return int(deviating.int().argmax()) if deviating.any() else len(self.ids)


def stitch(backend: Backend, prompt: Prompt, loader: LayerLoader) -> Stitched:
    """Return the prompt with a cache whose layers are stitched when a forward pass first reaches them.

    The last position is never reused: its logits are needed.
    """
    ids, runs, prefix = prompt.ids, prompt.runs, prompt.prefix
    num_tokens = len(ids)
    reused = torch.zeros(num_tokens, dtype=torch.bool)
    exact = torch.zeros(num_tokens, dtype=torch.bool)
    for run in runs:
        reused[run.start : run.stop] = True
    if prefix:
        reused[: prefix.length] = True
        exact[: prefix.exact] = True
    reused[-1] = False
    if runs and loader.codec == "native" and _is_exact(backend, ids, runs[0], prompt.readers[runs[0].key]):
        exact[runs[0].start : runs[0].stop] = reused[runs[0].start : runs[0].stop]
    if not runs and not prefix:
        return Stitched(torch.tensor(ids), runs, reused, exact, backend.new_cache(loader.capacity))
    tables = backend.tables(torch.arange(num_tokens))

    def lay_out(number: int) -> tuple[Tensor, Tensor]:
        keys, values = loader.layer(number)
        with loader.trace.step("stitch", synchronise=False):
            backend.rotate(number, keys[:, :, loader.span], tables[number], loader.span)
        return keys, values

    filled = reused.clone()
    filled[: prompt.kept] = False
    cache = backend.new_cache(loader.capacity, lay_out if runs else None, filled.nonzero().squeeze(1), prefix)
    return Stitched(torch.tensor(ids), runs, reused, exact, cache, prefix)


def _is_exact(backend: Backend, ids: Sequence[int], run: Run, reader: ChunkReader) -> bool:
    """Return whether a run is where its chunk was encoded: alone, right after the preamble."""
    if backend.fingerprint.adapter:
        return False
    after_preamble = run.offset == 0 and tuple(ids[: run.start]) == backend.preamble
    # where RoPE depends on the length, the chunk may have been encoded in a pass longer than the prompt
    encoded = len(backend.preamble) + len(reader.ids)
    return after_preamble and not reader.context_tokens and max(len(ids), encoded) <= backend.stable_length

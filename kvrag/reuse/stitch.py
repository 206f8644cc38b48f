"""Lay the stored KV of the matched runs out as one full-length cache, keys rotated to where they land."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrag.backend.transformers import BlendCache, Model
from kvrag.reuse.conversation import Beginning
from kvrag.store import ChunkReader
from kvrag.store.codec import unpack
from kvrag.types import Run

_AHEAD = 2  # layers read before they are needed
_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="kvrag-read")


@dataclass
class Stitched:
    """A prompt whose reused positions have KV and whose other positions wait to be computed.

    Attributes:
        ids: (T,) the prompt.
        runs: What is reused of chunks, ascending and disjoint.
        reused: (T,) bool.
        exact: (T,) bool, reused positions whose KV equals full prefill's: a run right behind its preamble, if it was
            encoded there and the codec has changed nothing.
        beginning: What is reused as a conversation has it.
        cache: Stitched layer by layer, when a layer is first touched.
        load_s, stitch_s: Time spent waiting for the store and unpacking, and laying out and rotating.
    """

    ids: Tensor
    runs: Sequence[Run]
    reused: Tensor
    exact: Tensor
    beginning: Beginning | None = None
    cache: BlendCache = field(init=False)
    load_s: float = 0.0
    stitch_s: float = 0.0

    @property
    def kept(self) -> int:
        """How many of the first positions are a conversation's."""
        return self.beginning.length if self.beginning else 0

    @property
    def fresh(self) -> Tensor:
        """(F,) positions without stored KV."""
        return (~self.reused).nonzero().squeeze(1)

    @property
    def inexact(self) -> Tensor:
        """(R,) reused positions whose KV may deviate: what a policy chooses from."""
        inexact = self.reused & ~self.exact
        inexact[: self.kept] = False  # blended when it was their turn
        return inexact.nonzero().squeeze(1)

    def num_exact(self, selected: Tensor) -> int:
        """How many of the first positions have full prefill's KV once the `selected` ones are recomputed."""
        deviating = self.reused & ~self.exact
        deviating[selected] = False
        return int(deviating.int().argmax()) if deviating.any() else len(self.ids)


def stitch(
    model: Model,
    ids: Sequence[int],
    runs: Sequence[Run],
    readers: Mapping[str, ChunkReader],
    capacity: int,
    codec: str = "native",
    beginning: Beginning | None = None,
) -> Stitched:
    """Prepare a cache of room for `capacity` positions; reading starts now, rotating when a layer is touched.

    The last position is never reused: its logits are what the prompt is for.

    Args:
        runs: Behind the beginning, if there is one.
        readers: An open reader for every key in `runs`.
        codec: Of what the readers return.
        beginning: What the prompt takes over from a conversation.
    """
    num_tokens = len(ids)
    reused = torch.zeros(num_tokens, dtype=torch.bool)
    exact = torch.zeros(num_tokens, dtype=torch.bool)
    for run in runs:
        reused[run.start : run.stop] = True
    if beginning:
        reused[: beginning.length] = True
        exact[: beginning.exact] = True
    reused[-1] = False
    preamble = model.tokenizer.preamble
    first = runs[0] if runs else None
    behind_preamble = first and first.offset == 0 and tuple(ids[: first.start]) == preamble
    alone = first and behind_preamble and codec == "native" and readers[first.key].context == 0
    if first and alone and max(num_tokens, _encoded_length(model, readers[first.key])) <= model.stable_length:
        exact[first.start : first.stop] = reused[first.start : first.stop]
    stitched = Stitched(torch.tensor(ids), runs, reused, exact, beginning)
    source = _Source(model, stitched, readers, capacity, codec) if runs or beginning else None
    stitched.cache = model.new_cache(capacity, source)
    return stitched


def _encoded_length(model: Model, reader: ChunkReader) -> int:
    """Tokens of the pass that encoded the chunk, of which the prompt may have less; 0 where it is all the same."""
    if not model.rope_follows_length:
        return 0
    keys, _ = reader.layer(0)
    return len(model.tokenizer.preamble) + keys.shape[1]


class _Source:
    """Fills one layer of the cache at a time, reading ahead."""

    def __init__(
        self, model: Model, stitched: Stitched, readers: Mapping[str, ChunkReader], capacity: int, codec: str
    ) -> None:
        self._model, self._stitched, self._readers = model, stitched, readers
        self._capacity, self._codec = capacity, codec
        self._tables = model.tables(torch.arange(len(stitched.ids)))
        self._reads: dict[int, Future[dict[str, tuple[Tensor, Tensor]]]] = {}
        self._read_ahead(0)

    def _read_ahead(self, number: int) -> None:
        for layer in range(number, min(number + 1 + _AHEAD, self._model.num_layers)):
            if layer not in self._reads:
                self._reads[layer] = _pool.submit(self._read, layer)

    def _read(self, number: int) -> dict[str, tuple[Tensor, Tensor]]:
        device = self._model.layer_device(number)
        return {key: unpack(reader.layer(number), self._codec, device) for key, reader in self._readers.items()}

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        started = time.perf_counter()
        self._read_ahead(number)
        chunks = self._reads[number].result()
        self._reads[number] = Future()  # the tensors may go; a layer is asked for once
        loaded = time.perf_counter()
        device = self._model.layer_device(number)
        beginning = self._stitched.beginning
        kept = beginning.conversation.cache.layer(number) if beginning else None
        alike = (old[0] for old in kept) if kept else next(iter(chunks.values()))
        keys, values = (_empty(like, self._capacity, device) for like in alike)
        if kept:
            same = slice(0, self._stitched.kept)
            keys[:, :, same], values[:, :, same] = kept[0][:, :, same], kept[1][:, :, same]
        for run in self._stitched.runs:
            chunk_keys, chunk_values = (part[None, :, run.offset : run.offset + len(run)] for part in chunks[run.key])
            landing = slice(run.start, run.stop)
            self._model.rotate(number, chunk_keys.to(device), self._tables[number], landing, out=keys[:, :, landing])
            values[:, :, landing] = chunk_values
        self._stitched.load_s += loaded - started
        self._stitched.stitch_s += time.perf_counter() - loaded
        return keys, values


def _empty(like: Tensor, num_tokens: int, device: torch.device) -> Tensor:
    """(1, H, num_tokens, D), undefined: fresh positions are written before any token may look at them."""
    return torch.empty(1, like.shape[0], num_tokens, like.shape[2], dtype=like.dtype, device=device)

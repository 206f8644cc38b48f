"""The backend protocol: what blending, selection and encoding need of a model.

`kvrag.backend.transformers` implements it on a transformers model. It is written so that an inference engine can
implement it inside its own worker: forward passes over given positions of a cache, position-free keys, and the
attention that the question pays. Everything else is arithmetic on tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from kvrag.backend.lock import FairLock
from kvrag.fingerprint import Fingerprint

PREFILL_BLOCK = 2048
"""Rows of one forward pass. Rows are causal, so passes over consecutive blocks give what one pass would, and
activations and attention scores stay small on long prompts."""

Tables = tuple[Tensor, Tensor] | None
"""cos and sin of one layer, each (T, R) float32, one entry per pair of dimensions; None if it has no RoPE."""

LayerSource = Callable[[int], tuple[Tensor, Tensor]]
"""Layer number -> stitched keys and values, each (1, H, capacity, D). May wait for a disk."""

Observer = Callable[[int, Tensor, Tensor], bool]
"""Called with a layer's number and its fresh keys and values, each (B, H, S, D), before they are written. True ends
the forward pass there: that layer is not written."""


class KVCache(Protocol):
    """A prompt's KV at full length, keys as the model sees them."""

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (1, H, capacity, D), to read and to write."""

    def get_seq_length(self) -> int:
        """How many positions the next token follows."""

    def set_length(self, length: int) -> None:
        """Declare the positions before `length` complete: from here on the cache grows by appending."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""


class Backend(Protocol):
    """A model that can be blended. Thread-safe: threads take turns, one forward pass each.

    Attributes:
        num_layers, context_window, dtype, device: Facts about the model.
        fingerprint: Identifies the KV of this model in a store.
        windows: Per layer how many keys a token sees; None = all.
        rope_follows_length: RoPE frequencies depend on the length of the prompt (dynamic NTK, longrope) ...
        stable_length: ... but not up to this many tokens.
        lock: Held during a forward pass.
    """

    num_layers: int
    context_window: int
    dtype: torch.dtype
    device: torch.device
    fingerprint: Fingerprint
    windows: tuple[int | None, ...]
    rope_follows_length: bool
    stable_length: int
    lock: FairLock

    @property
    def preamble(self) -> tuple[int, ...]:
        """Token ids that every chunk is encoded behind."""

    @property
    def hidden_size(self) -> int:
        """Width of the model."""

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one token takes, all layers."""

    def layer_device(self, number: int) -> torch.device:
        """Device of a layer."""

    def tables(self, positions: Tensor) -> list[Tables]:
        """Each layer's cos and sin for (T,) positions."""

    def rotate(self, number: int, keys: Tensor, tables: Tables, landing: slice, out: Tensor) -> None:
        """Write (B, H, T, D) position-free keys of a layer to `out`, rotated to the `landing` rows of the tables."""

    def unrotate(self, number: int, keys: Tensor, tables: Tables) -> Tensor:
        """Return the (B, H, T, D) keys of a layer without their position."""

    def new_cache(self, capacity: int, source: LayerSource | None = None) -> KVCache:
        """Return an empty cache, or one whose layers `source` provides when a pass reaches them."""

    def waiting(self) -> AbstractContextManager[None]:
        """Let other threads run their passes while this one waits for a disk in the middle of its own."""

    def forward(self, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """Run the model on (S,) ascending positions `rows`, or append; changes `cache`. Returns (B, V) logits."""

    def forward_until(self, observe: Observer, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> None:
        """Like `forward`, but end the pass when `observe` returns True."""

    def attention_received(self, ids: Tensor, cache: KVCache, rows: Tensor, num_queries: int, layers: range) -> Tensor:
        """Return (K,) the squared attention that every position receives from the last `num_queries` rows.

        Summed over the rows, mean over heads and `layers`; K is the last row + 1. Runs `forward(ids, cache, rows)`
        up to the last of the layers, which is written, and changes `cache` likewise.
        """


def prefill_blocks(backend: Backend, rows: Tensor) -> Iterator[Tensor]:
    """Split (S,) rows into the blocks of one forward pass each."""
    # where RoPE follows the length, every pass must see the last position
    yield from torch.split(rows, max(len(rows), 1) if backend.rope_follows_length else PREFILL_BLOCK)

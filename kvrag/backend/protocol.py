"""The backend protocol: the operations on a model that blending, selection and encoding need.

`kvrag.backend.transformers` implements it; an inference engine can implement it inside its own worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kvrag.backend.positions import Rotation
from kvrag.fingerprint import Fingerprint

T = TypeVar("T")

PREFILL_BLOCK = 2048
"""Rows per forward pass. Rows are causal, so passes over consecutive blocks are equivalent to one pass, and activations
and attention scores stay small on long prompts."""

LayerSource = Callable[[int], tuple[Tensor, Tensor]]
"""Function: layer number -> stitched keys and values, each (1, H, capacity, D). Waits for a disk where the backend's
`passes_may_wait` allows it."""

Branch = tuple[int, int]
"""Tokens that follow a prefix of a row in place of the row's own: length of the prefix, and number of tokens."""

Observer = Callable[[int, Tensor, Tensor], None]
"""Callback with a layer's number and its fresh keys and values, each (B, H, S, D), before they are written. It uses no
collective: it may fail in one process only."""


class CachedKV(Protocol):
    """KV of the first `length` positions of a prompt, with rotated keys."""

    @property
    def length(self) -> int:
        """Number of positions."""

    @property
    def states(self) -> Any:
        """States, after them, of the layers that keep one; None without such layers."""

    def layer(self, number: int) -> Iterable[tuple[Tensor, Tensor]]:
        """Return keys and values of one layer in parts, each (1, H, t, D), in order. Do not change them."""


class KVCache(Protocol):
    """KV of a prompt at full length, with rotated keys.

    Attributes:
        num_layers: Number of its layers.
        alone: How its passes are computed may not depend on other prompts.
    """

    num_layers: int = 0
    alone: bool = False

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, each (1, H, capacity, D). Do not change them."""

    def copied(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Return a copy of the keys and values of these positions, of each layer."""
        layers = map(self.layer, range(self.num_layers))
        return [(keys[:, :, start:stop].clone(), values[:, :, start:stop].clone()) for keys, values in layers]

    def write(self, number: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, each (1, H, S, D), of (S,) positions of one layer."""

    def get_seq_length(self) -> int:
        """Return the number of positions before the next token."""

    @property
    def checkpoints(self) -> Mapping[int, Any]:
        """Position -> states, after the tokens before it, of the layers that keep one; only where they are kept."""
        return {}

    def set_length(self, length: int) -> None:
        """Declare the positions before `length` complete: from now on the cache grows by appending."""

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""


class ChunkTokenizer(Protocol):
    """A tokenizer for ingestion."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text within a prompt."""

    def decode(self, ids: Sequence[int], control_tokens: bool = False) -> str:
        """Return the text of token ids."""


class Outline(Protocol):
    """What determines a chunk's key; needs no weights.

    Attributes:
        preamble: Token ids in front of every encoded chunk.
        stable_length: RoPE frequencies do not depend on the prompt length up to this number of tokens.
    """

    tokenizer: ChunkTokenizer
    preamble: tuple[int, ...]
    context_window: int
    stable_length: int

    def check_window(self, num_tokens: int, what: str = "the prompt") -> None:
        """Raise ContextWindowError unless `num_tokens` and one new token fit."""


class Backend(Outline, Protocol):
    """A model that can be blended. Thread-safe: threads alternate, one forward pass each.

    Attributes:
        fingerprint: Identifies the KV of this model in a store.
        num_parameters: Its size; 0 = unknown.
        bytes_per_token: KV bytes per token, all layers.
        bytes_per_chunk: Bytes that a chunk takes in a store besides its KV: those of its states, if they are stored.
        windows: Number of keys that a token attends to, per layer; None = all.
        rope_follows_length: RoPE frequencies depend on the prompt length (dynamic NTK, longrope).
        rows_per_pass: Maximum number of rows per forward pass; None = the backend has no limit of its own.
        passes_may_wait: A pass may wait for a disk, see `waiting`. False: all KV is loaded before the first pass.
        policies: Those that it can follow besides none and full, the default one first; () = all.
        keeps_states: Some layers keep a state of the tokens so far in place of KV. They see the rows of a pass only,
            and those of the pass before if this one begins where it ended.
        stores_states: The states at a chunk's end are stored with it, as one more layer.
        leaves_tail: The engine around the backend computes all positions after the last that keeps its stitched KV.
        num_processes: Number of processes that share the model by tensor parallelism. All of them run the same
            requests, in the same order.
        heads: The KV heads of this process.
        devices: Those of the layers.
    """

    num_layers: int
    num_parameters: int = 0
    hidden_size: int
    bytes_per_token: int
    bytes_per_chunk: int = 0
    dtype: torch.dtype
    device: torch.device
    fingerprint: Fingerprint
    windows: tuple[int | None, ...]
    rope_follows_length: bool
    rows_per_pass: int | None = None
    passes_may_wait: bool = True
    policies: tuple[str, ...] = ()
    keeps_states: bool = False
    stores_states: bool = False
    leaves_tail: bool = False
    num_processes: int = 1
    heads: slice = slice(None)
    devices: Sequence[torch.device]

    @property
    def waits(self) -> int:
        """Number of times that the calling thread waited for other requests: durations then include their work."""

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the rotation of each layer's keys at (T,) positions."""

    def new_cache(
        self,
        capacity: int,
        source: LayerSource | None = None,
        filled: Tensor | None = None,
        prefix: CachedKV | None = None,
    ) -> KVCache:
        """Return an empty cache, or one whose layers `source` provides when a pass reaches them.

        Args:
            filled: (R,) positions that `source` fills; the others are undefined.
            prefix: KV that the new cache begins with.
        """

    def waiting(self) -> AbstractContextManager[None]:
        """Release the model while this thread waits for a disk during its forward pass."""

    def forward(self, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """Run the model's own forward pass. Changes `cache`. Returns (B, V) float32 logits after the last token.

        Args:
            ids: (B, S) token ids; (1, S) with `rows`.
            rows: (S,) ascending positions: the tokens are written there and attend to every key at or before their own
                position. None: they are appended, as in prefill and decode.
        """

    def forward_until(
        self,
        last: int,
        ids: Tensor,
        cache: KVCache,
        rows: Tensor | None = None,
        branches: Sequence[Branch] = (),
        observe: Observer | None = None,
    ) -> None:
        """Like `forward`, but end the pass at layer `last`: earlier layers are written, that one is not.

        Args:
            observe: Called for every layer up to and including `last`.
            branches: They do not attend to each other. Their tokens and KV follow those of `rows`, which are all
                positions from the first one on.
        """

    def states_after(self, cache: KVCache, row: int) -> tuple[Tensor, Tensor]:
        """Return the states after the last pass of a row, each (N,) on the CPU: windows of convolutions, and the rest.

        Only where `stores_states`.
        """
        raise RuntimeError("this backend stores no states")

    def begin_from(self, cache: KVCache, position: int, states: tuple[Tensor, Tensor]) -> None:
        """Let the next pass that begins at a position do so with these states, see `states_after`."""
        raise RuntimeError("this backend stores no states")

    def attention_received(self, ids: Tensor, cache: KVCache, rows: Tensor, num_queries: int, layers: range) -> Tensor:
        """Return the (K,) squared attention that every position receives from the last `num_queries` rows.

        Summed over the rows, mean over heads and `layers`; K is the last row + 1. Runs `forward(ids, cache, rows)` up
        to the last of the layers, which is written, and changes `cache` accordingly.
        """

    def relieve(self) -> bool:
        """Free memory that only makes passes faster; return whether there was some. Memory ran out."""
        return False

    def gather(self, value: T) -> Sequence[T]:
        """Return the values of all processes, in the same order everywhere."""
        return (value,)

    def all_heads(self, tensor: Tensor) -> Tensor:
        """Return the (B, H, T, D) tensors of all processes as one, with the model's heads in order."""
        return tensor

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors."""
        return tensor


def prefill_blocks(backend: Backend, rows: Tensor, end: int = 0) -> Iterator[Tensor]:
    """Split (S,) rows into blocks of one forward pass each; where states are kept, a block ends at position `end`."""
    # where RoPE depends on the length, every pass must include the last position
    most = max(len(rows), 1) if backend.rope_follows_length else backend.rows_per_pass or PREFILL_BLOCK
    if not backend.keeps_states:
        yield from torch.split(rows, most)
        return
    # the last stretch does not go on from the states of rows with gaps before it, which would mislead it
    for part in rows.tensor_split(sorted([last_stretch(rows), int((rows < end).sum())])):
        yield from (block for block in torch.split(part, most) if len(block))


def last_stretch(rows: Tensor) -> int:
    """Return where in (S,) ascending rows the last stretch of consecutive positions begins."""
    gaps = (rows.diff() > 1).nonzero().flatten()
    return int(gaps[-1]) + 1 if len(gaps) else 0

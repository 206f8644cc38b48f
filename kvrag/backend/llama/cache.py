"""Caches of requests as sequences of one llama.cpp context.

A context has a fixed number of cells and of sequences. A cache takes a sequence when a pass needs it, and gives it up
when others need cells: its state is then kept outside, and written back for the next pass.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvrag.backend.llama.blob import Bytes, Layout, SequenceState
from kvrag.backend.llama.library import Library
from kvrag.backend.protocol import CachedKV, KVCache, LayerSource
from kvrag.errors import ModelError, OutOfMemoryError

SEQUENCES = 32
"""Caches in the context at the same time."""

_HELPER = SEQUENCES  # the sequence that holds what follows a stretch while that is computed


class LlamaCache(KVCache):
    """KV of a prompt: its state, in the context or outside, or what its state is made from at the first pass.

    Attributes:
        length: Positions before the next token.
        held: Position after the last one that has KV.
        is_stale: The context has positions after it, too.
    """

    def __init__(
        self, context: LlamaContext, source: LayerSource | None, filled: Tensor | None, prefix: CachedKV | None
    ) -> None:
        self._context, self._made_from = context, (source, filled, prefix)
        kept = prefix.length if prefix else 0
        rest = torch.empty(0, dtype=torch.long) if filled is None else filled
        self._positions = torch.cat([torch.arange(kept), rest])
        self.length, self.held = kept, int(self._positions[-1]) + 1 if len(self._positions) else 0
        self.outside: Bytes | None = None  # its state
        self._read: SequenceState | None = None  # for `layer`
        self.more: list[SequenceState] = []  # of branches
        self.is_stale = False

    def state(self) -> Bytes | None:
        """Return its state, which is not in the context; None without KV."""
        if self.outside is None and len(self._positions):
            source, filled, prefix = self._made_from
            kept = prefix.length if prefix else 0

            def fill(number: int, keys: Tensor, values: Tensor) -> None:
                at = 0
                for part in prefix.layer(number) if prefix else ():
                    for to, own in zip((keys, values), part, strict=True):
                        to[at : at + own.shape[2]] = own[0].transpose(0, 1)
                    at += part[0].shape[2]
                if source is not None:
                    for to, own in zip((keys, values), source(number), strict=True):
                        to[kept:] = own[0].transpose(0, 1)[filled]

            self.outside = self._context.layout.build(self._positions.numpy().astype(np.int32), fill)
        self._made_from, self._positions = (None, None, None), self._positions[:0]  # they would keep chunks in memory
        return self.outside

    def keep_read(self, state: SequenceState | None, more: list[SequenceState]) -> None:
        """Keep what was read of it after a pass, for `layer`; before a pass, nothing."""
        self._read, self.more = state, more

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, each (1, H, T, D), with those of branches behind them."""
        with self._context.exclusive():
            read = self._read = self._read or self._context.read(self)
            parts = [state.layers[number] for state in (read, *self.more)]
            if number == len(read.layers) - 1 and not self.more:
                self._read = None  # all layers are asked for, in order
        keys, values = (torch.cat(side).transpose(0, 1)[None] for side in zip(*parts, strict=True))
        return keys, values

    def copied(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """See `KVCache.copied`."""
        layers = map(self.layer, range(len(self._context.layout.keys)))
        return [(keys[:, :, start:stop].clone(), values[:, :, start:stop].clone()) for keys, values in layers]

    def write(self, number: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Not possible: a policy that needs it is refused."""
        raise NotImplementedError("llama.cpp writes no single rows")

    def get_seq_length(self) -> int:
        """Return the number of positions before the next token."""
        return self.length

    def set_length(self, length: int) -> None:
        """Declare the positions before `length` complete."""
        self.is_stale = self.is_stale or length < self.held
        self.length, self.held = length, min(self.held, length)

    @property
    def num_bytes(self) -> int:
        """Bytes of its KV."""
        return self.held * self._context.bytes_per_token


class Loaded:
    """A loaded model, which is freed with this."""

    def __init__(self, lib: Any, pointer: int) -> None:
        self._free, self.pointer = lib.llama_model_free, pointer

    def __del__(self) -> None:
        self._free(self.pointer)


class LlamaContext:
    """A llama.cpp context and the caches in it. Not thread-safe: its owner's lock is held by those that call it.

    Attributes:
        layout: Of states; set once it is known.
        bytes_per_token: Likewise.
    """

    layout: Layout
    bytes_per_token: int

    def __init__(
        self,
        library: Library,
        model: Loaded,
        pointer: int,
        num_cells: int,
        num_batch: int,
        num_vocab: int,
        exclusive: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take over a context.

        Args:
            num_batch: Rows that a pass can have.
            exclusive: Returns a context manager that holds the owner's lock.
        """
        self._library, self._lib, self._pointer, self.exclusive = library, library.functions, pointer, exclusive
        self.num_cells, self._num_vocab = num_cells, num_vocab
        self._memory = self._lib.llama_get_memory(pointer)
        self._batch = self._lib.llama_batch_init(num_batch, 0, 1)
        self._sequences: OrderedDict[weakref.ref[LlamaCache], int] = OrderedDict()  # by last use
        self._free = list(range(SEQUENCES))
        self._dropped: deque[weakref.ref[LlamaCache]] = deque()  # garbage collection may end a cache anywhere
        self._helped = 0  # cells of the helper's own
        weakref.finalize(self, _close, self._lib, pointer, self._batch, model)

    # ---------------------------------------------------------------- caches

    def bring_in(self, caches: Sequence[LlamaCache], more: int) -> list[int]:
        """Return the sequences of these caches, with room for so many cells more; others may have to leave."""
        while self._dropped:
            self._leave(self._dropped.popleft())
        own = {weakref.ref(cache): cache for cache in caches}
        need = more + self._helped + sum(cache.held for cache in caches)
        for other in [ref for ref in self._sequences if ref not in own]:
            kept, missing = self._cells(own), len(own.keys() - self._sequences.keys())
            if need + kept <= self.num_cells and missing <= len(self._free):
                break
            if (cache := other()) is not None:
                cache.outside = self.get(self._sequences[other])
            self._leave(other)
        for ref, cache in own.items():
            if ref not in self._sequences:
                if (state := cache.state()) is not None:
                    self.set(self._free[-1], state)
                self._sequences[weakref.ref(cache, self._dropped.append)] = self._free.pop()
                cache.outside = None
            self._sequences.move_to_end(ref)
        return [self._sequences[ref] for ref in own]

    def _cells(self, own: Mapping[Any, Any]) -> int:
        return sum(cache.held for ref in self._sequences if ref not in own and (cache := ref()) is not None)

    def _leave(self, ref: weakref.ref[LlamaCache]) -> None:
        if (sequence := self._sequences.pop(ref, None)) is not None:
            self.remove(sequence, 0)
            self._free.append(sequence)

    def read(self, cache: LlamaCache) -> SequenceState:
        """Return the KV of a cache; raise ModelError if positions of it were lost in a pass that failed."""
        sequence = self._sequences.get(weakref.ref(cache))
        data = cache.state() if sequence is None else self.get(sequence)
        if data is None:
            raise ModelError("the KV of a prompt was read before its first pass")
        positions, layers = self.layout.parse(data)
        if not np.array_equal(positions[: cache.held], np.arange(cache.held)):
            raise ModelError("the KV of this prompt is incomplete: a pass failed")
        return SequenceState(
            positions[: cache.held], [(keys[: cache.held], values[: cache.held]) for keys, values in layers]
        )

    # ---------------------------------------------------------------- sequences

    def remove(self, sequence: int, start: int) -> None:
        """Remove the positions of a sequence from `start` on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def set_aside(self, sequence: int, start: int, cells: int) -> None:
        """Hold the positions from `start` on in the helper, too, which are so many."""
        self._lib.llama_memory_seq_cp(self._memory, sequence, _HELPER, start, -1)
        self._helped = cells

    def put_back(self, sequence: int | None) -> None:
        """Give a sequence what was set aside; None = give it up."""
        if sequence is not None:
            self._lib.llama_memory_seq_cp(self._memory, _HELPER, sequence, -1, -1)
        self.remove(_HELPER, -1)
        self._helped = 0

    def get(self, sequence: int) -> Bytes:
        """Return the state of a sequence."""
        data = np.empty(self._lib.llama_state_seq_get_size(self._pointer, sequence), np.uint8)
        size = self._lib.llama_state_seq_get_data(self._pointer, data.ctypes.data, len(data), sequence)
        return data[:size]

    def set(self, sequence: int, data: Bytes) -> None:
        """Set the state of a sequence; raise OutOfMemoryError if its cells do not fit."""
        size = self._lib.llama_state_seq_set_data(self._pointer, data.ctypes.data, len(data), sequence)
        if size != len(data):
            raise OutOfMemoryError(f"llama.cpp has no room for a prompt's KV: raise n_ctx ({self._library.reason()})")

    def decode(self, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> Tensor:
        """Compute rows of a token, its position and its sequence; return (N, V) logits after those in `outputs`.

        At most `num_batch` rows. Positions of a sequence continue its last one.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for number, (token, position, sequence) in enumerate(rows):
            batch.token[number], batch.pos[number], batch.n_seq_id[number] = token, position, 1
            batch.seq_id[number][0], batch.logits[number] = sequence, 0
        for number in outputs:
            batch.logits[number] = 1
        if status := self._lib.llama_decode(self._pointer, batch):
            raise OutOfMemoryError(f"llama.cpp could not compute a pass (status {status}: {self._library.reason()})")
        if not outputs:
            return torch.empty(0, 0)
        logits = self._lib.llama_get_logits(self._pointer)
        found = np.ctypeslib.as_array(logits, (len(outputs), self._num_vocab))
        return torch.from_numpy(found.copy())  # the next pass writes there


def _close(lib: Any, pointer: int, batch: Any, _: Loaded) -> None:  # the model is freed after its context
    lib.llama_batch_free(batch)
    lib.llama_free(pointer)

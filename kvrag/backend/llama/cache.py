"""Caches of requests as sequences of one llama.cpp context.

A context has a fixed number of cells and of sequences. A cache takes a sequence when a pass needs it, and gives it up
when others need cells: its state is then kept outside, and written back for the next pass.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvrag.backend.llama.blob import Bytes, LayerKV, Layout, positions_of
from kvrag.backend.llama.graph import Inputs
from kvrag.backend.llama.library import GraphTensor, Loaded
from kvrag.backend.protocol import KVCache, LayerSource
from kvrag.errors import ModelError, OutOfMemoryError
from kvrag.scheduling.waiting import POLL_S, check_cancelled, is_cancelled

SEQUENCES = 32
"""Caches in a context at the same time."""

BLOCK = 128
"""Rows per pass, between which other answers' steps run. On a CPU, larger passes are not faster per row."""


LESS = "pass a smaller n_ctx or another kv_type"


class LlamaCache(KVCache):
    """KV of a prompt: its state, in the context or outside, or what its state is made from at the first pass.

    Attributes:
        length: Positions before the next token.
        held: Position after the last one that has KV.
        is_stale: The context has positions after it, too.
        read: Function of each layer's KV, for `layer`; None before the next pass.
    """

    def __init__(self, context: LlamaContext, positions: Tensor, layer: LayerKV) -> None:
        """Begin with KV at these positions."""
        self._context, self._made_from = context, (positions, layer) if len(positions) else None
        self.num_layers = len(context.layout.keys)
        self.length, self.held = 0, int(positions[-1]) + 1 if len(positions) else 0
        self.outside: Bytes | None = None  # its state
        self.read: LayerSource | None = None
        self.is_stale = False

    def state(self) -> Bytes | None:
        """Return its state, which is not in the context; None without KV."""
        if self._made_from:
            (positions, layer), self._made_from = self._made_from, None  # it would keep chunks in memory
            self.outside = self._context.layout.build(positions.numpy().astype(np.int32), layer)
        return self.outside

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, each (1, H, T, D), with those of branches behind them."""
        with self._context.exclusive():
            self.read = self.read or self._context.read(self)
            return self.read(number)

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
        return self.held * self._context.layout.bytes_per_token


class LlamaContext:
    """A llama.cpp context and the caches in it. Not thread-safe: its owner's lock is held by those that call it."""

    layout: Layout  # of states; set once it is known
    memory: int | None  # llama.cpp's; None = the model keeps no KV
    window: int  # of layers that have one; 0 = none has

    def __init__(
        self,
        model: Loaded,
        num_cells: int,
        exclusive: Callable[[], AbstractContextManager[None]],
        changes: Mapping[str, int],
        inputs: Inputs | None = None,
    ) -> None:
        """Make a context whose passes read `inputs`; raise OutOfMemoryError if there is no memory for its cells.

        `exclusive` returns a context manager that holds the owner's lock, `changes` are other parameters.
        """
        self._library, self._lib, self.exclusive = model.library, model.library.functions, exclusive
        self.num_cells, self._num_vocab, self._inputs = num_cells, model.num_vocab, inputs
        params = self._lib.llama_context_default_params()
        self.window = self._lib.llama_model_n_swa(model.pointer)
        # llama.cpp gives up cells that are outside of the window of their only sequence: so they have a second one
        self._second = SEQUENCES if self.window else 0
        params.n_ctx, params.n_batch, params.n_ubatch = num_cells, BLOCK, BLOCK
        params.n_seq_max, params.swa_full = SEQUENCES + self._second + 1, True
        params.kv_unified, params.no_perf = True, True
        for name, value in changes.items():
            setattr(params, name, value)
        # called from C before each node: true once the tensor is empty
        self._goes_on = GraphTensor(ne=(1, 1, 1, 1))
        params.abort_callback = ctypes.cast(self._lib.ggml_is_empty, ctypes.c_void_p)
        params.abort_callback_data = ctypes.addressof(self._goes_on)
        if inputs:
            params.cb_eval = ctypes.cast(inputs.callback, ctypes.c_void_p)
        self._pointer = pointer = self._lib.llama_init_from_model(model.pointer, params)
        if not pointer:
            reason = self._library.reason()
            raise OutOfMemoryError(f"llama.cpp makes no context of {num_cells} tokens ({reason}): {LESS}")
        self.memory = self._lib.llama_get_memory(pointer)
        self._batch = self._lib.llama_batch_init(BLOCK, 0, 2)
        self._sequences = WeakKeyDictionary[LlamaCache, int]()  # by last use
        self._used = set[int]()  # sequences, also those of caches that are gone
        weakref.finalize(self, _close, self._lib, pointer, self._batch, (model, inputs, self._goes_on))

    def bring_in(self, caches: Sequence[LlamaCache], more: int) -> list[int]:
        """Return the sequences of these caches, with room for so many cells more; others may have to leave."""
        others = [cache for cache in self._sequences if cache not in caches]
        cells = more + sum(cache.held for cache in (*caches, *others))
        while others and (cells > self.num_cells or len(caches) + len(others) > SEQUENCES):
            leaving = others.pop(0)
            leaving.outside = self.take_out(leaving)
            cells -= leaving.held
        for sequence in self._used.difference(self._sequences.values()):
            self.remove(sequence, 0)
        for cache in caches:
            if cache not in self._sequences:
                sequence = min(set(range(SEQUENCES)).difference(self._sequences.values()))
                if (state := cache.state()) is not None:
                    self.set(sequence, state)
                cache.outside, self._sequences[cache] = None, sequence
            self._sequences[cache] = self._sequences.pop(cache)
        self._used = set(self._sequences.values())
        return [self._sequences[cache] for cache in caches]

    def append(self, parts: Sequence[tuple[LlamaCache, Sequence[int]]], outputs: Sequence[int]) -> Tensor:
        """Append tokens to caches; return (N, V) logits after those in `outputs`, numbered through."""
        rows = list[tuple[int, int, int]]()
        sequences = self.bring_in([cache for cache, _ in parts], sum(len(tokens) for _, tokens in parts))
        for (cache, tokens), sequence in zip(parts, sequences, strict=True):
            cache.read = None
            if cache.is_stale:
                self.remove(sequence, cache.length)
            cache.is_stale = True  # unless the pass succeeds
            rows += [(token, position, sequence) for position, token in enumerate(tokens, cache.length)]
        logits = self.decode(rows, outputs)
        for cache, tokens in parts:
            cache.length = cache.held = cache.length + len(tokens)
            cache.is_stale = False
        return logits

    def take_out(self, cache: LlamaCache) -> Bytes | None:
        """Return the state of a cache, which leaves the context; None without KV."""
        return self.get(self._sequences.pop(cache)) if cache in self._sequences else cache.state()

    def read(self, cache: LlamaCache) -> LayerSource:
        """Return a function of each layer's KV; raise ModelError if a failed pass has lost positions."""
        sequence = self._sequences.get(cache)
        data = cache.state() if sequence is None else self.get(sequence)
        if data is None:
            raise ModelError("the KV of a prompt was read before its first pass")
        positions, parsed = self.layout.parse(data)
        held = slice(cache.held)
        if not np.array_equal(positions[held], np.arange(cache.held)):
            raise ModelError("the KV of this prompt is incomplete: a pass failed")

        def layer(number: int) -> tuple[Tensor, Tensor]:
            keys, values = (side[held].half().transpose(0, 1)[None] for side in parsed(number))
            return keys, values

        return layer

    def remove(self, sequence: int, start: int) -> None:
        """Remove the positions of a sequence from `start` on."""
        for number in {sequence, sequence + self._second}:
            self._lib.llama_memory_seq_rm(self.memory, number, start, -1)

    def copy(self, source: int, sequence: int) -> None:
        """Add the cells of a sequence to another one."""
        for number in {sequence, sequence + self._second} - {source}:
            self._lib.llama_memory_seq_cp(self.memory, source, number, -1, -1)

    def get(self, sequence: int) -> Bytes:
        """Return the state of a sequence."""
        last = self._lib.llama_memory_seq_pos_max(self.memory, sequence)
        if not self.window or last < self.window:
            return self._get(sequence)
        states, piece = list[Bytes](), SEQUENCES + self._second
        # llama.cpp leaves out cells that are outside of the window of the last one
        for start in range(0, last + 1, self.window):
            self._lib.llama_memory_seq_cp(self.memory, sequence, piece, start, start + self.window)
            states.append(self._get(piece))
            self._lib.llama_memory_seq_rm(self.memory, piece, -1, -1)
        states = [data for data in states if len(positions_of(data))]
        return self.layout.without(states, np.empty(0, np.int32), last + 1)

    def _get(self, sequence: int) -> Bytes:
        data = np.empty(self._lib.llama_state_seq_get_size(self._pointer, sequence), np.uint8)
        size = self._lib.llama_state_seq_get_data(self._pointer, data.ctypes.data, len(data), sequence)
        return data[:size]

    def set(self, sequence: int, data: Bytes) -> None:
        """Set the state of a sequence; raise OutOfMemoryError if its cells do not fit."""
        size = self._lib.llama_state_seq_set_data(self._pointer, data.ctypes.data, len(data), sequence)
        if size != len(data):
            raise OutOfMemoryError(f"llama.cpp has no room for a prompt's KV: raise n_ctx ({self._library.reason()})")
        self.copy(sequence, sequence)

    def decode(self, rows: Sequence[tuple[int, int, int]], outputs: Sequence[int]) -> Tensor:
        """Compute rows of a token, its position and its sequence; return (N, V) logits after those in `outputs`.

        At most `BLOCK` rows. Positions of a sequence continue its last one.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for number, (token, position, sequence) in enumerate(rows):
            batch.token[number], batch.pos[number], batch.logits[number] = token, position, 0
            batch.seq_id[number][0], batch.seq_id[number][1] = sequence, sequence + self._second
            batch.n_seq_id[number] = 2 if self._second else 1
        for number in outputs:
            batch.logits[number] = 1
        with self._stopping() if len(rows) > SEQUENCES else nullcontext():  # a shared step has several consumers
            status = self._lib.llama_decode(self._pointer, batch)
        if status:
            reason = self._library.reason()
            check_cancelled()
            raise OutOfMemoryError(f"llama.cpp could not compute a pass (status {status}: {reason})")
        if self._inputs and self._inputs.error:
            raise self._inputs.error
        if not outputs:
            return torch.empty(0, self._num_vocab)
        logits = self._lib.llama_get_logits(self._pointer)
        found = np.ctypeslib.as_array(logits, (len(outputs), self._num_vocab))
        return torch.from_numpy(found.copy())  # the next pass writes there

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let a pass end once its consumer has left."""
        is_over, has_left = threading.Event(), is_cancelled.get()

        def watch() -> None:
            while not is_over.wait(POLL_S):
                self._goes_on.ne[0] = not has_left()

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()
            self._goes_on.ne[0] = 1


def _close(lib: Any, pointer: int, batch: Any, _: object) -> None:  # what the context uses is freed after it
    lib.llama_batch_free(batch)
    lib.llama_free(pointer)

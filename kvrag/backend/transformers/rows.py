"""Passes on scattered rows: the cache and the attention with which the model's own forward pass computes a subset.

The cache writes at the positions of the rows. During a pass, the model's `config` names kvrag's attention instead of
"sdpa" or "eager", through transformers' own interface: it splits the rows into blocks, masks each block by the true
positions of its rows, and can report the attention of the last rows. During a decode step, each row attends to its own
cache, so rows of different lengths need no padding. On a GPU, steps and other small passes are captured as graphs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvrag.backend.positions import CPU_ROWS, ROWS, Block, Rows, attention_received, causal_mask, first_key
from kvrag.backend.protocol import Branch, CachedKV, KVCache, LayerSource, Observer

_GROWTH = 256  # positions
_ALIGNED = 16  # positions: CUDA's attention would pad other masks

WARM_UP = 2
"""Passes before one is captured: they load kernels, and short answers are over by then."""

MOST_ROWS = 256
"""Rows of a pass that is captured; the GPU takes longer for more than their launches do."""

_LEAST_ROWS = 16


@functools.cache
def cache_argument(forward: Callable[..., object]) -> str:
    """Return the argument of a model's `forward` that takes the cache: its name changed with transformers 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class StopForward(Exception):
    """Raised inside a forward pass to end it."""


class BlendLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer at full length, regardless of the layer's window, with room to grow in place."""

    is_sliding = False

    def __init__(self, number: int, capacity: int, source: LayerSource | None, prefix: CachedKV | None) -> None:
        super().__init__()
        self._number, self._capacity, self._source, self._prefix = number, capacity, source, prefix
        self.length = 0
        self.place: tuple[JoinedRows, int] | None = None  # of these keys and values, as a row of a shared tensor

    def lazy_initialization(self, key_states: Tensor | None, value_states: Tensor | None) -> None:
        """Use the stitched tensors, or allocate tensors shaped like the prefix or the first ones written."""
        prefix = list(self._prefix.layer(self._number)) if self._prefix else []
        if self._source is not None:
            self.keys, self.values = self._source(self._number)
        else:
            shapes = prefix[0] if prefix else (key_states, value_states)
            self.keys, self.values = (_resized(cast(Tensor, part), 0, self._capacity) for part in shapes)
        start = 0
        for keys, values in prefix:
            stop = start + keys.shape[2]
            self.keys[:, :, start:stop], self.values[:, :, start:stop] = keys, values
            start = stop
        self._source = self._prefix = None  # they would keep chunks and the conversation in memory
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append, like a DynamicLayer, but without copying earlier positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.keys.shape[2]:
            self.resize(start, _room(self.length))
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def write(self, key_states: Tensor, value_states: Tensor, rows: Tensor, stop: int) -> tuple[Tensor, Tensor]:
        """Write at positions `rows`; return everything before `stop`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = rows.to(key_states.device)
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def resize(self, used: int, capacity: int) -> None:
        """Copy the first `used` positions to tensors of its own."""
        self.keys, self.values = (_resized(tensor, used, capacity) for tensor in (self.keys, self.values))
        self.place = None

    def get_seq_length(self) -> int:
        """Return the number of positions before the next token."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that `query_length` appended tokens attend to."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: masks need no bound."""
        return -1


def _resized(tensor: Tensor, used: int, capacity: int) -> Tensor:
    """Copy the first `used` positions of a (B, H, T, D) tensor to one for `capacity`; the others are uninitialised."""
    resized = tensor.new_empty(*tensor.shape[:2], capacity, tensor.shape[3])
    resized[:, :, :used] = tensor[:, :, :used]
    return resized


StateKey = tuple[int, str, int]
"""The model's layer, "conv" or "recurrent", and which of the layer's states."""


States = dict[StateKey, Tensor]
"""States of layers after the tokens before a position, each (B, ...). Neither it nor its tensors change."""


class StatefulCache(Cache):  # type: ignore[misc]
    """A cache that also has what layers keep of the tokens so far in place of KV: states and windows of convolutions.

    Attributes:
        held: States of the pass in progress, each (B, ...). Its tensors are replaced, never changed.
    """

    held: dict[StateKey, Tensor]

    def _own(self, key: StateKey) -> Tensor | None:
        if (state := self.held.get(key)) is not None:
            state = self.held[key] = state.clone()  # kernels of single tokens change it in place
        return state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the window of a convolution, which the caller may change; None = no tokens yet."""
        return self._own((layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a state, which the caller may change; None = no tokens yet."""
        return self._own((layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append (B, C, S) inputs of a convolution to its window; return both."""
        key = (layer_idx, "conv", state_idx)
        before = self.held.get(key)
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        if before is None:
            inputs = nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            inputs = torch.cat([before, conv_states], dim=-1)
        self.held[key] = inputs[..., -size:].clone()
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace a state."""
        self.held[layer_idx, "recurrent", state_idx] = recurrent_states.clone()
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False."""
        return False


class BlendCache(StatefulCache, KVCache):
    """A cache whose `update` can write at given positions of full-length tensors that are already filled.

    Attributes:
        own_layers: Layers with KV of their own, in order.
        numbers: The model's layers with KV -> their numbers among these.
        rows: (S,) ascending positions to write (blending), or None to append (prefill, decode).
        stop: With `rows`: keys from `stop` on are hidden.
        observer: Called with every layer's fresh keys and values; can end the pass.
        pause: Called in every layer of a pass, for other threads to use the model.
        filled: Positions that have KV before the first pass; None = all before its length.
        is_latent: The model (MLA) writes latents, which have no position, and one rotated key for all heads. Here, that
            key is the key, and the latents are the values.
    """

    def __init__(
        self,
        places: Sequence[int],
        capacity: int,
        source: LayerSource | None = None,
        prefix: CachedKV | None = None,
        is_latent: bool = False,
        filled: Tensor | None = None,
    ) -> None:
        """Create a cache for the model's layers with KV, which are at `places` among all of its layers, ascending."""
        own = {place: BlendLayer(number, capacity, source, prefix) for number, place in enumerate(places)}
        first = own[places[0]]  # stands for the others, of which transformers asks the length only
        super().__init__(layers=[own.get(place, first) for place in range(places[-1] + 1)])
        self.own_layers, self.numbers = list(own.values()), {place: number for number, place in enumerate(places)}
        self.num_layers = len(places)
        self._first: dict[int, States] = {0: {}}
        if prefix and prefix.states:
            self._first[prefix.length] = prefix.states
        self._ends: tuple[tuple[int, States], ...] = ()  # after the last passes
        self._before = self._now = (0, States())  # of the last pass or step, and after it
        self._given: tuple[int, States] | None = None  # for one pass
        self.held = {}
        self.capacity = capacity
        if prefix and filled is not None:
            filled = torch.cat([torch.arange(prefix.length), filled])
        self.filled = filled
        self.is_latent = is_latent
        self.rows: Tensor | None = None
        self.stop = 0
        self.observer: Observer | None = None
        self.last: int | None = None
        self.pause: Callable[[], None] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values; return everything that the new tokens may attend to."""
        if self.is_latent:
            key_states, value_states = value_states, key_states
        if self.pause is not None:
            self.pause()
        if self.observer is not None:
            self.observer(self.numbers[layer_idx], key_states, value_states)
        if self.numbers[layer_idx] == self.last:
            raise StopForward
        layer: BlendLayer = self.layers[layer_idx]
        if self.rows is None:
            keys, values = layer.update(key_states, value_states)
        else:
            keys, values = layer.write(key_states, value_states, self.rows, self.stop)
        return (values, keys) if self.is_latent else (keys, values)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer at full capacity; stitch them if no pass has reached the layer yet."""
        layer = self.own_layers[number]
        if not layer.is_initialized:
            layer.lazy_initialization(None, None)
        return layer.keys, layer.values

    def copied(self, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """See `KVCache.copied`; all layers are initialised."""
        layers, part = self.own_layers, slice(start, stop)
        return [(layer.keys[:, :, part].clone(), layer.values[:, :, part].clone()) for layer in layers]

    def write(self, number: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, each (1, H, S, D), of (S,) positions of one layer."""
        self.own_layers[number].write(keys, values, rows, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers reached so far, including their room to grow."""
        own = [layer for layer in self.own_layers if layer.is_initialized]
        states = sum(state.nbytes for state in self._now[1].values())
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in own) + states

    def set_length(self, length: int) -> None:
        """Declare the positions before `length` complete: from now on the cache grows like a DynamicCache."""
        self.rows = None
        for layer in self.own_layers:
            layer.length = length

    def begin_states(self, start: int, stop: int) -> None:
        """Prepare the states for a pass from `start` to `stop`: those before it, or none if a gap precedes it.

        Raises ValueError if they are not kept any more.
        """
        known = {**dict((*self._ends, self._before, self._now)), **self._first}
        if self._given and self._given[0] == start:
            known.setdefault(*self._given)
            self._given = None
        if start not in known and start < self._now[0]:
            raise ValueError(f"the states before position {start} are not kept")
        self._ends = tuple(end for end in self._ends if end[0] <= start)  # the others are being replaced
        self._before, self._stop = (start, known.get(start, {})), stop
        self.held = dict(self._before[1])

    def end_states(self, states: States | None = None) -> None:
        """Take over the states after a pass; those after a decode step are given."""
        self._now = self._stop, self.held if states is None else states
        if states is None:
            self._ends = (*self._ends[-1:], self._now)

    def begin_from(self, position: int, states: States) -> None:
        """Let the next pass that begins at a position do so with these states, if those there are not known."""
        self._given = position, states

    @property
    def states(self) -> States:
        """The states after the last pass or step."""
        return self._now[1]

    @property
    def checkpoints(self) -> dict[int, States]:
        """See `KVCache.checkpoints`: of the prefix, of the last passes of the prefill, and of the last step."""
        return {position: states for position, states in (*self._first.items(), *self._ends, self._now) if states}


def _room(length: int) -> int:
    """Return a capacity for that many positions, and more."""
    capacity = length + max(_GROWTH, length // 4)
    return capacity + -capacity % _ALIGNED


class PassGraph:
    """A pass that is captured as a CUDA graph: launching its operations takes longer than the operations.

    Its input, its output and the KV that it writes to stay where they are.
    """

    def __init__(self, inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> None:
        """Capture `compute`, from inputs of this shape to logits, without running it. Raises RuntimeError."""
        self._inputs = inputs.clone()
        with torch.cuda.stream(_stream(inputs.device)):
            try:
                self._graph, self._logits = _captured(self._inputs, compute)
            except RuntimeError:
                # torch's default generator waits for the end of a capture: until then, no token could be drawn
                _captured(self._inputs, torch.zeros_like)
                raise

    def replay(self, inputs: Tensor) -> Tensor:
        """Return the logits of a pass with these inputs."""
        self._inputs.copy_(inputs)
        self._graph.replay()
        return self._logits.clone()  # the next pass writes there


def _captured(inputs: Tensor, compute: Callable[[Tensor], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a function in the current stream."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")  # other threads may copy chunks to the device meanwhile
    try:
        return graph, compute(inputs)
    finally:
        graph.capture_end()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures: each stream has a workspace for products, which is never freed."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def padded(ids: Tensor, rows: Tensor) -> Tensor:
    """Return (2, 1, S) tokens and positions of a pass, of which few sizes exist: the last row is repeated."""
    inputs = torch.stack([ids.cpu(), rows.cpu()])[:, None]
    size = max(_LEAST_ROWS, 1 << (len(rows) - 1).bit_length())
    return torch.cat([inputs, inputs[..., -1:].expand(2, 1, size - len(rows))], dim=2)


class JoinedRows:
    """KV of a step's rows in one tensor per layer: one operation appends to all of them, and one attends for all.

    The rows' caches hold views of it, until they are in a step of other rows.

    Attributes:
        passes: Tokens per row -> number of passes so far.
        graphs: Tokens per row -> a pass on these rows, captured.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device) -> None:
        """Begin without KV, with room for `capacity` positions of each row."""
        self.num_rows, self.capacity = num_rows, capacity
        self.passes, self.graphs = Counter[int](), dict[int, PassGraph]()
        self._rows = torch.arange(num_rows, device=device)[:, None]
        self._layers: list[tuple[Tensor, Tensor]] = []

    def _add(self, like: BlendLayer) -> tuple[Tensor, Tensor]:
        """Add a layer, and return its keys and values."""
        shape = self.num_rows, like.keys.shape[1], self.capacity
        self._layers.append(
            (like.keys.new_zeros(*shape, like.keys.shape[3]), like.values.new_zeros(*shape, like.values.shape[3]))
        )
        return self._layers[-1]

    def take(self, caches: Sequence[BlendCache]) -> None:
        """Move the rows' KV here, layer by layer: there may be no room for it twice."""
        for layers in zip(*(cache.own_layers for cache in caches), strict=True):
            keys, values = self._add(layers[0])
            for row, layer in enumerate(layers):
                keys[row, :, : layer.length] = layer.keys[0, :, : layer.length]
                values[row, :, : layer.length] = layer.values[0, :, : layer.length]
                layer.keys, layer.values, layer.place = keys[row : row + 1], values[row : row + 1], None
        for row, cache in enumerate(caches):  # not before: there may be no memory for all layers
            for layer in cache.own_layers:
                layer.place = self, row

    @classmethod
    def of(cls, caches: Sequence[BlendCache], least: int, device: torch.device) -> JoinedRows | None:
        """Return these rows as joined; None if they are fewer than `least`, empty, or less than the padding."""
        lengths = [cache.get_seq_length() for cache in caches]
        longest = max(lengths)
        if len(caches) < least or not longest or len(caches) * longest > 2 * sum(lengths):
            for layer in (layer for cache in caches for layer in cache.own_layers if layer.place):
                layer.resize(layer.length, layer.keys.shape[2])  # one row would keep the tensors of all
            return None
        places = [cache.own_layers[0].place for cache in caches]
        rows = places[0][0] if places[0] else None
        if rows and longest < rows.capacity and places == [(rows, row) for row in range(rows.num_rows)]:
            return rows
        joined = cls(len(caches), _room(longest), device)
        joined.take(caches)
        return joined

    def append(self, number: int, fresh: Sequence[Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, H, S, D) keys and values of a layer at (B, S) positions; return all, (B, H, capacity, D)."""
        rows, positions = (part.to(fresh[0].device) for part in (self._rows, positions))
        for whole, part in zip(self._layers[number], fresh, strict=True):
            whole[rows, :, positions] = part.transpose(1, 2)
        return self._layers[number]


class FixedPlace(JoinedRows):
    """A place for the KV of one prompt after another, so that passes captured for one are replayed for the next."""

    def __init__(self, cache: BlendCache, device: torch.device) -> None:
        """Make room for caches of about this capacity, whose layers are stitched."""
        super().__init__(1, _room(cache.capacity), device)
        for layer in cache.own_layers:
            self._add(layer)
        self._taken_by = weakref.ref(cache)

    def suits(self, cache: BlendCache) -> bool:
        """Return whether a cache fits without much padding."""
        return cache.capacity < self.capacity <= 4 * _room(cache.capacity)

    @property
    def is_taken(self) -> bool:
        """True while the last prompt's cache is alive: other threads may be reading it."""
        return self._taken_by() is not None

    def take(self, caches: Sequence[BlendCache]) -> None:
        """Move the KV here that one cache has before its first pass."""
        (cache,) = caches
        self._taken_by = weakref.ref(cache)
        assert cache.filled is not None
        length = int(cache.filled[-1]) + 1
        like = cache.own_layers[0].keys
        is_filled = torch.zeros(length, 1, dtype=torch.bool).index_fill_(0, cache.filled, True).to(like.device)
        zero = like.new_zeros(())
        for layer, wholes in zip(cache.own_layers, self._layers, strict=True):
            for whole, part in zip(wholes, (layer.keys, layer.values), strict=True):
                # what a mask hides must be finite: zero times infinity is not zero
                torch.where(is_filled, part[:, :, :length], zero, out=whole[:, :, :length])
                whole[:, :, length:].zero_()
            (layer.keys, layer.values), layer.place = wholes, (self, 0)


class StepCache(StatefulCache):
    """One decode step of several caches of different lengths: row b of the new keys and values is appended to cache b.

    Or a pass on few rows of one cache, which is in a `FixedPlace`.

    The model sees only the new keys and values, and is given their positions.

    Attributes:
        lengths: Of the caches before the step.
        windows: Number of keys that a token attends to, per layer; None = all.
        positions: (B, S) of the new tokens, on the model's device; S is 1 in a step.
        fresh: Layer -> its new keys, as the model passed them.
        states: Layer -> its keys and values by row, each (1, H, K, D); of joined rows, one pair of (B, H, K, D).
    """

    def __init__(self, caches: Sequence[BlendCache], joined: JoinedRows | None, windows: Sequence[int | None]) -> None:
        """Begin a step. The caches append from now on; `joined` has their KV, if it is in one tensor per layer."""
        super().__init__(layers=list(caches[0].layers))
        self.held = {}
        self._caches = caches
        for cache in caches:
            cache.rows = cache.pause = None
        self.lengths = [cache.get_seq_length() for cache in caches]
        self.fresh: dict[int, Tensor] = {}
        self.states: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.joined, self.windows = joined, windows

    def begin(self, positions: Tensor) -> None:
        """Begin to compute (B, S) tokens; what was computed while a capture failed is void."""
        self.positions, self.masks = positions, dict[tuple[str, int | None, torch.device], Tensor]()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the tokens of each row; return the new keys and values."""
        self.fresh[layer_idx] = key_states
        if self.joined is None:
            rows = zip(self._caches, key_states.unbind(), value_states.unbind(), strict=True)
            self.states[layer_idx] = [cache.update(key[None], value[None], layer_idx) for cache, key, value in rows]
            return key_states, value_states
        swaps = self._caches[0].is_latent
        fresh = (value_states, key_states) if swaps else (key_states, value_states)
        pair = self.joined.append(self._caches[0].numbers[layer_idx], fresh, self.positions)
        self.states[layer_idx] = [pair[::-1] if swaps else pair]
        return key_states, value_states

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        """Return the (B, 1, S, capacity) additive mask of joined rows, in dtype and on the device of `like`.

        All layers with this window use the same. Nothing in it depends on numbers that only the host knows.
        """
        name = str(type(window)), window, like.device
        if name not in self.masks:
            assert self.joined is not None
            positions = self.positions.to(like.device)
            self.masks[name] = causal_mask(positions, 0, self.joined.capacity, window, like.dtype)[:, None]
        return self.masks[name]

    def end(self) -> None:
        """Count the new token in all layers of joined rows."""
        for cache, length in zip(self._caches, self.lengths, strict=True):
            for layer in cache.own_layers:
                layer.length = length + 1

    def get_seq_length(self, *_: Any) -> int:
        """Return 0."""
        return 0

    def begin_states(self) -> None:
        """Take the rows' states for a step."""
        for cache in self._caches:
            cache.begin_states(cache.get_seq_length(), cache.get_seq_length() + 1)
        first, *others = (cache.held for cache in self._caches)
        self.held = {
            key: torch.cat([state, *(each[key] for each in others)]) if others else state
            for key, state in first.items()
        }

    def end_states(self) -> None:
        """Give the rows their states after the step."""
        if len(self._caches) == 1:
            self._caches[0].end_states(self.held)
            return
        for row, cache in enumerate(self._caches):
            cache.end_states({key: state[row : row + 1].clone() for key, state in self.held.items()})


_NAME = "kvrag"
_HAS_TILES = torch.cpu._is_amx_tile_supported()  # torch's bfloat16 kernel uses them, and needs half of the time
_PACKED = 256  # rows of a matrix product: all query heads that share a KV head
_SAMPLED = 16  # every 16th key gives a bound of a row's scores


@dataclass(frozen=True)
class AttentionObserver:
    """Observer of the attention of the last rows of a forward pass.

    `observe(layer, attention)` is called for each of `layers` with (K,) float32: squared attention weights, summed over
    the last `num_queries` rows, mean over heads.
    """

    num_queries: int
    layers: range
    observe: Callable[[int, Tensor], None]


@dataclass
class _Pass(Rows):
    """State of one thread's forward pass."""

    observer: AttentionObserver | None = None
    branches: Sequence[tuple[slice, _Pass]] = ()  # with the rows of their tokens in this pass
    scratch: Tensor | None = None
    masked: dict[Any, list[tuple[int, Tensor, Block]]] = field(default_factory=dict)  # by window and device

    def masked_blocks(self, layer: int, on_cpu: bool, like: Tensor) -> list[tuple[int, Tensor, Block]]:
        """Return the blocks with their masks, in dtype and on the device of `like`, and the first key of these.

        Layers with equal windows share them. `on_cpu`, the keys before a block's first one are left out.
        """
        window, before = self.windows[layer], self.masks_bytes
        if (known := self.masked.get((type(window), window, like.device))) is not None:
            return known
        lows = [(block, block.low if on_cpu else 0) for block in self.blocks(layer, CPU_ROWS if on_cpu else ROWS)]
        found = [(low, self.mask(layer, block, low, like.dtype, like.device), block) for block, low in lows]
        if self.masks_bytes - before == sum(mask.nbytes for _, mask, _ in found):  # all of them are kept
            self.masked[type(window), window, like.device] = found
        return found

    def room(self, like: Tensor, num_rows: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """Return two uninitialised matrices in the same memory every time: fresh memory is slower to fill."""
        size = num_rows * num_keys
        if self.scratch is None or self.scratch.shape[1] < size:
            self.scratch = like.new_empty(2, size)
        first, second = self.scratch[:, :size].view(2, num_rows, num_keys)
        return first, second


_current = threading.local()
_usual: dict[int, str] = {}
"""id of a config -> its attention implementation outside of kvrag's passes."""


def attention_at(
    config: Any,
    rows: Tensor,
    positions: Tensor,
    windows: Sequence[int | None],
    observer: AttentionObserver | None = None,
    branches: Sequence[Branch] = (),
) -> AbstractContextManager[None]:
    """Run one forward pass of (S,) ascending `rows` with kvrag's attention, on layers with these `windows`.

    With `branches`, the rows are consecutive, and the branches' tokens follow the last one in the cache. `positions`
    are those of all tokens, on the model's device: layers and blocks that copy them would wait for the device.

    Only one thread at a time may do so per `config`. Other threads that run the same transformers model meanwhile get
    its usual attention.
    """
    end = len(rows)
    now = _Pass(positions[:end], rows.tolist(), windows, observer=observer)
    if branches:
        now.branches = [(slice(0, end), replace(now))]
        for start, length in branches:
            own = slice(end, end + length)
            now.branches.append((own, _Pass(positions[own], list(range(start, start + length)), windows)))
            end += length
    return attention_of(config, now)


class _Cudnn:
    """cuDNN's attention, a setting of the process: off while passes run, of any model."""

    def __init__(self) -> None:
        self._lock, self._passes, self._was_used = threading.Lock(), 0, True

    def count(self, more: int) -> None:
        """Add to the number of passes."""
        with self._lock:
            if not self._passes:
                self._was_used = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
            self._passes += more
            torch.backends.cuda.enable_cudnn_sdp(self._was_used and not self._passes)


_cudnn = _Cudnn()


@contextmanager
def attention_of(config: Any, state: _Pass | StepCache) -> Iterator[None]:
    """Run this pass or step of the calling thread with kvrag's attention, see `attention_at`.

    On GPUs it is computed without cuDNN, which plans each new shape: hardly two steps have the same, or two passes.
    """
    _usual[id(config)] = config._attn_implementation
    _current.state = state
    try:
        with implementation(config, _NAME, 1):
            yield
    finally:
        del _current.state


def suspended(config: Any) -> AbstractContextManager[None]:
    """Restore the usual attention of `config` while this thread waits during its pass."""
    if not hasattr(_current, "state"):
        return nullcontext()
    return implementation(config, _usual[id(config)], -1)


@contextmanager
def implementation(config: Any, name: str, passes: int = 0) -> Iterator[None]:
    """Use this attention implementation, with so many passes more in progress that are computed without cuDNN."""
    before, config._attn_implementation = config._attn_implementation, name
    _cudnn.count(passes)
    try:
        yield
    finally:
        config._attn_implementation = before
        _cudnn.count(-passes)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend like `config._attn_implementation`: (1, HG, S, D) queries -> (1, S, HG, D)."""
    now: _Pass | StepCache | None = getattr(_current, "state", None)
    if now is None:  # another thread's pass
        return _usual_attention(module)(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is None or attention_mask.numel() != 1:
        raise ValueError("its attention uses custom masks")  # rejected when the model is loaded
    if isinstance(now, StepCache):
        return _in_rows(module, query, now, _source(module, key, now), **kwargs), None
    positions = torch.cat([now.rows, *(branch.rows for _, branch in now.branches[1:])])
    query = _with_temperature(module, query, positions)
    if not now.branches:
        if query.shape[2] < len(now.positions):  # layers that use other layers' KV may compute the last rows only
            last = slice(-query.shape[2], None)
            now = replace(now, rows=now.rows[last], positions=now.positions[last], masks={}, masks_bytes=0, masked={})
        return _at_rows(module, query, key, value, now, **kwargs), None
    attended, start = [], now.positions[0]
    for rows, branch in now.branches:
        shared, fresh = slice(0, branch.positions[0]), slice(start + rows.start, start + rows.stop)
        keys, values = (torch.cat([part[:, :, shared], part[:, :, fresh]], dim=2) for part in (key, value))
        attended.append(_at_rows(module, query[:, :, rows], keys, values, branch, **kwargs))
    return torch.cat(attended, dim=1), None


def _source(module: nn.Module, key: Tensor, cache: StepCache) -> int:
    """Return the layer whose KV a layer attends to: its own, or an earlier one's if it has none."""
    for number, fresh in reversed(cache.fresh.items()):
        if fresh is key or (number == module.layer_idx and hasattr(module, "expand_kv")):
            return number
    raise ValueError("it attends to other keys than those in its cache")  # rejected when the model is loaded


def _with_temperature(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Scale queries by their positions where a layer (Llama 4's without RoPE) did so by their numbers in the pass.

    Takes (B, HG, S, D) queries and (S,) positions, or (B, S).
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scale(places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1) / module.floor_scale)) * module.attn_scale + 1

    change = scale(positions.to(query.device)) / scale(torch.arange(query.shape[2], device=query.device))
    return (query * change.view(-1, 1, query.shape[2], 1)).to(query.dtype)


def _usual_attention(module: nn.Module) -> Any:
    """Return the function that a module usually attends with."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(_usual[id(module.config)], eager)


def _on_cpu(module: nn.Module, query: Tensor) -> bool:
    """Return whether torch's CPU kernel is called directly, for its speed."""
    return query.device.type == "cpu" and _usual[id(module.config)] == "sdpa"


def _at_rows(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, now: _Pass, **kwargs: Any) -> Tensor:
    """Attend with the rows of a pass: (1, HG, S, D) queries -> (1, S, HG, D)."""
    layer, scaling = cast(int, module.layer_idx), kwargs.get("scaling")
    observer = now.observer if now.observer is not None and layer in now.observer.layers else None
    on_cpu = _on_cpu(module, query)
    if on_cpu and query.dtype == torch.bfloat16 and not _HAS_TILES:
        num_queries = observer.num_queries if observer else 0
        attended, received = _by_products(query, key, value, scaling, now, layer, num_queries)
        if observer:
            observer.observe(layer, received)
        return attended
    if observer:
        softcap = kwargs.get("softcap")
        observer.observe(layer, attention_received(query, key, now, layer, observer.num_queries, scaling, softcap))
    blocks = []
    for low, mask, block in now.masked_blocks(layer, on_cpu, query):
        queries = query[:, :, block.start : block.end]
        keys, values = (part[:, :, low : block.stop] for part in (key, value))
        if on_cpu:
            # reads each KV head once for all of its query heads; with a mask, transformers copies keys and values for
            # each query head, which CUDA kernels need and CPU kernels do not, see docs/decisions/0003
            attended = scaled_dot_product_attention(
                queries, keys, values, mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            ).transpose(1, 2)
        else:
            attended = _usual_attention(module)(module, queries, keys, values, mask[None, None], **kwargs)[0]
        blocks.append(attended)
    return torch.cat(blocks, dim=1)


def _in_rows(module: nn.Module, query: Tensor, now: StepCache, source: int, **kwargs: Any) -> Tensor:
    """Attend row by row: (B, HG, S, D) queries, each to its own row's keys within the window -> (B, S, HG, D).

    `source` is the layer whose KV they attend to.
    """
    layer = cast(int, module.layer_idx)
    window, on_cpu, attend = now.windows[layer], _on_cpu(module, query), _usual_attention(module)
    states = now.states[source]
    query = _with_temperature(module, query, now.positions)
    expand = getattr(module, "expand_kv", None)  # from latents (MLA)
    if now.joined is not None:
        mask, (key, value) = now.mask(window, query), states[0]
        if expand is not None:
            key, value = expand(key, value)
        return cast(Tensor, attend(module, query, key, value, mask, **kwargs)[0])
    attended = []
    for row, (key, value) in zip(query.unbind(), states, strict=True):
        if window is not None and (low := first_key(window, key.shape[2] - 1)) > 0:
            key, value = key[:, :, low:], value[:, :, low:]
        if expand is not None:
            key, value = expand(key, value)
        if on_cpu:
            # the query heads of a KV head are rows of one product: many times faster than enable_gqa on a CPU
            packed = row.reshape(1, key.shape[1], -1, row.shape[2])  # (1, H, G, D)
            mixed = scaled_dot_product_attention(packed, key, value, scale=kwargs.get("scaling"))
            attended.append(mixed.reshape(1, 1, -1, value.shape[3]))
        else:
            attended.append(attend(module, row[None], key, value, None, **kwargs)[0])
    return torch.cat(attended) if len(attended) > 1 else attended[0]


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, now: _Pass, layer: int, num_queries: int
) -> tuple[Tensor, Tensor]:
    """Attend with plain matrix products, which in bfloat16 on a CPU without AMX take half as long as torch's kernel.

    Products round the scores. An upper bound of each row's scores is therefore subtracted inside the product: the
    relevant scores are then near zero and keep their precision. See docs/decisions/0003.

    Returns (1, S, HG, D), and the input of `AttentionObserver.observe` for the last `num_queries` rows.
    """
    num_heads, num_rows, dim = query.shape[1:]
    group, scaling = num_heads // key.shape[1], scaling or dim**-0.5
    attended = query.new_empty(num_rows, num_heads, value.shape[3])
    received = torch.zeros(key.shape[2])
    for block in now.blocks(layer, max(_PACKED // group, 1)):
        start, end, low, hidden, stop = block
        mask = now.mask(layer, block, hidden, query.dtype, query.device) if hidden < stop else None
        for head in range(key.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            queries, keys = query[0, heads, start:end].reshape(-1, dim), key[0, head, low:stop]  # (GR, D), (K, D)
            highest = (queries @ keys[::_SAMPLED].T).amax(dim=1, keepdim=True)
            scores, weights = now.room(query, len(queries), len(keys))  # (GR, K)
            torch.addmm(highest, queries, keys.T, beta=-scaling, alpha=scaling, out=scores)
            if mask is not None:
                scores.view(group, -1, len(keys))[:, :, hidden - low :] += mask
            torch.softmax(scores, dim=1, out=weights)
            mixed = (weights @ value[0, head, low:stop]).view(group, end - start, -1)
            attended[start:end, heads] = mixed.transpose(0, 1)
            if end > num_rows - num_queries:
                observed = weights.view(group, -1, len(keys))[:, max(0, num_rows - num_queries - start) :]
                received[low:stop] += observed.float().square_().sum(dim=(0, 1))
    return attended[None], received / num_heads


AttentionInterface.register(_NAME, _attend)

"""The transformers cache that lets blending use the model's own forward pass on a subset of rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvrag.backend.protocol import CachedKV, LayerSource, Observer

_GROWTH = 256  # positions


def as_argument(hf: Any, cache: Cache) -> dict[str, Cache]:
    """Return a cache as an argument of the model's forward pass, whose name changed with transformers 5.24."""
    return {_argument(cast(Any, type(hf))): cache}


@functools.cache
def _argument(architecture: Any) -> str:
    return "cache" if "cache" in inspect.signature(architecture.forward).parameters else "past_key_values"


class StopForward(Exception):
    """Raised inside a forward pass to end it."""


class BlendLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer at full length, regardless of the layer's window, with room to grow in place."""

    is_sliding = False

    def __init__(self, number: int, capacity: int, source: LayerSource | None, prefix: CachedKV | None) -> None:
        super().__init__()
        self._number, self._capacity, self._source, self._prefix = number, capacity, source, prefix
        self.length = 0

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
            capacity = self.length + max(_GROWTH, self.length // 4)
            self.keys, self.values = (_resized(tensor, start, capacity) for tensor in (self.keys, self.values))
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


class BlendCache(Cache):  # type: ignore[misc]
    """A cache whose `update` can write at given positions of full-length tensors that are already filled.

    Attributes:
        rows: (S,) ascending positions to write (blending), or None to append (prefill, decode).
        stop: With `rows`: keys from `stop` on are hidden.
        observer: Called with every layer's fresh keys and values; can end the pass.
        pause: Called in every layer of a pass, for other threads to use the model.
        is_latent: The model (MLA) writes latents, which have no position, and one rotated key for all heads. Here, that
            key is the key, and the latents are the values.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        source: LayerSource | None = None,
        prefix: CachedKV | None = None,
        is_latent: bool = False,
    ) -> None:
        super().__init__(layers=[BlendLayer(number, capacity, source, prefix) for number in range(num_layers)])
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
            self.observer(layer_idx, key_states, value_states)
        if layer_idx == self.last:
            raise StopForward
        layer: BlendLayer = self.layers[layer_idx]
        if self.rows is None:
            keys, values = layer.update(key_states, value_states)
        else:
            keys, values = layer.write(key_states, value_states, self.rows, self.stop)
        return (values, keys) if self.is_latent else (keys, values)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer at full capacity; stitch them if no pass has reached the layer yet."""
        layer: BlendLayer = self.layers[number]
        if not layer.is_initialized:
            layer.lazy_initialization(None, None)
        return layer.keys, layer.values

    def write(self, number: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, each (1, H, S, D), of (S,) positions of one layer."""
        self.layers[number].write(keys, values, rows, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers reached so far, including their room to grow."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)

    def set_length(self, length: int) -> None:
        """Declare the positions before `length` complete: from now on the cache grows like a DynamicCache."""
        self.rows = None
        for layer in self.layers:
            layer.length = length


class NoCache(Cache):  # type: ignore[misc]
    """The cache of a decode step, of which the model sees only the new keys and values, and whose positions it gets."""

    def __init__(self, layers: Sequence[BlendLayer] = ()) -> None:
        super().__init__(layers=list(layers))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values."""
        return key_states, value_states

    def get_seq_length(self, *_: Any) -> int:
        """Return 0."""
        return 0


class StepCache(NoCache):
    """One decode step of several caches of different lengths: row b of the new keys and values is appended to cache b.

    Attributes:
        fresh: Layer -> its new keys, as the model passed them.
        states: Layer -> its keys and values by row, each (1, H, K, D).
    """

    def __init__(self, caches: Sequence[BlendCache]) -> None:
        """Begin a step. The caches append from now on."""
        super().__init__(caches[0].layers)
        self._caches = caches
        for cache in caches:
            cache.rows = cache.pause = None
        self.fresh: dict[int, Tensor] = {}
        self.states: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append one token per row; return the new keys and values."""
        rows = zip(self._caches, key_states.unbind(), value_states.unbind(), strict=True)
        self.states[layer_idx] = [cache.update(key[None], value[None], layer_idx) for cache, key, value in rows]
        self.fresh[layer_idx] = key_states
        return key_states, value_states

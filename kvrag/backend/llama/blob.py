"""The state of a sequence as llama.cpp writes it: parsed, and built from KV.

As in `llama_kv_cache::state_write_meta` and `state_write_data` of b11549, of one cache with one stream: magic,
sequence, number of streams and of cells | position, number of sequences and sequence of each cell | whether values are
transposed, layers, rotations of quantised KV | each layer's keys | each layer's values. Nothing in it names a version,
so each context tries out that it parses and builds the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]

_MAGIC, _F16 = 0xAF143CD8, 1
_START, _KIND = struct.Struct("<IiII"), struct.Struct("<IIII")
_ROWS, _COLUMNS = struct.Struct("<iQ"), struct.Struct("<iII")


class SequenceState(NamedTuple):
    """KV of a sequence: of each layer (T, H, D) float16 keys and values, in order of the positions."""

    positions: NDArray[np.int32]
    layers: list[tuple[Tensor, Tensor]]


class Layout(NamedTuple):
    """Form of a context's states: heads and dimensions of each layer's keys and values.

    Attributes:
        is_transposed: Values are written by dimension, as without flash attention.
    """

    is_transposed: bool
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, data: Bytes, key_dim: int, value_dim: int) -> Layout:
        """Read the layout from a state; raise ValueError for one of another form."""
        _, _, _, cells = _START.unpack_from(data.data)
        at = _START.size + 12 * cells
        is_transposed, num_layers, *_ = _KIND.unpack_from(data.data, at)
        at += _KIND.size
        keys, values = list[tuple[int, int]](), list[tuple[int, int]]()
        for _ in range(num_layers):
            _, size = _ROWS.unpack_from(data.data, at)
            keys.append((size // (2 * key_dim), key_dim))
            at += _ROWS.size + cells * size
        for _ in range(num_layers):
            size = _COLUMNS.unpack_from(data.data, at)[2] * 2 if is_transposed else _ROWS.unpack_from(data.data, at)[1]
            values.append((size // (2 * value_dim), value_dim))
            at += _ROWS.size + cells * size
        return cls(bool(is_transposed), tuple(keys), tuple(values))

    def parse(self, data: Bytes) -> SequenceState:
        """Return the KV in a state; raise ValueError unless every byte is understood."""
        _, _, streams, cells = _START.unpack_from(data.data)
        at = _START.size + 12 * cells
        if (streams, *_KIND.unpack_from(data.data, at)) != (1, self.is_transposed, len(self.keys), 0, 0):
            raise ValueError("it has other streams, layers or rotations")
        found = np.frombuffer(data, "<i4", 3 * cells, _START.size).reshape(cells, 3)[:, 0]
        keys, values = self._parts(data, at + _KIND.size, cells, is_new=False)
        if (np.diff(found) < 0).any():  # cells are in the order in which they were free
            order = torch.from_numpy(np.argsort(found))
            found, keys, values = np.sort(found), [part[order] for part in keys], [part[order] for part in values]
        return SequenceState(found, list(zip(keys, values, strict=True)))

    def build(self, positions: NDArray[np.int32], fill: Callable[[int, Tensor, Tensor], Any]) -> Bytes:
        """Return the state of a sequence whose keys and values `fill(layer, keys, values)` writes, each (T, H, D)."""
        cells = np.stack([positions, np.ones_like(positions), np.zeros_like(positions)], axis=1)
        start = _START.pack(_MAGIC, 0, 1, len(positions)) + cells.astype("<i4").tobytes()
        start += _KIND.pack(self.is_transposed, len(self.keys), 0, 0)
        parts = self.keys + self.values
        size = sum(_ROWS.size + 2 * heads * dim * len(positions) for heads, dim in parts)
        data = np.empty(len(start) + size, np.uint8)
        data[: len(start)] = np.frombuffer(start, np.uint8)
        for number, (keys, values) in enumerate(zip(*self._parts(data, len(start), len(positions)), strict=True)):
            fill(number, keys, values)
        return data

    def _parts(self, data: Bytes, at: int, cells: int, is_new: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of all keys and of all values, each (T, H, D), of a state whose layers begin at `at`.

        Writes their kinds and sizes if it `is_new`, else raises ValueError for others.
        """
        parts = []
        for number, (heads, dim) in enumerate(self.keys + self.values):
            width, is_by_column = heads * dim, self.is_transposed and number >= len(self.keys)
            kind = _COLUMNS.pack(_F16, 2, width) if is_by_column else _ROWS.pack(_F16, 2 * width)
            stop = at + len(kind) + 2 * width * cells
            if is_new:
                data[at : at + len(kind)] = np.frombuffer(kind, np.uint8)
            elif bytes(data[at : at + len(kind)]) != kind or stop > len(data):
                raise ValueError(f"part {number} is of another kind or size")
            numbers = torch.from_numpy(data[at + len(kind) : stop].view(np.float16))
            rows = numbers.view(width, cells).T if is_by_column else numbers.view(cells, width)
            parts.append(rows.view(cells, heads, dim))
            at = stop
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are left")
        return parts[: len(self.keys)], parts[len(self.keys) :]

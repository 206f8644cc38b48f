"""The state of a sequence as llama.cpp writes it: parsed, and built from KV.

As in `llama_kv_cache::state_write_meta` and `state_write_data` of b11549, of one cache with one stream: magic,
sequence, number of streams and of cells | position, number of sequences and sequence of each cell | whether values are
transposed, layers, rotations of quantised KV | each layer's keys | each layer's values. Nothing in it names a version,
so each context tries out that it parses and builds the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int32]

_MAGIC, _F16 = 0xAF143CD8, 1
_START, _KIND = struct.Struct("<IiII"), struct.Struct("<IIII")
_ROWS, _COLUMNS = struct.Struct("<iQ"), struct.Struct("<iII")


def positions_of(data: Bytes) -> Positions:
    """Return a view of the positions of a state's cells."""
    cells = _START.unpack_from(data.data)[3]
    return data[_START.size : _START.size + 12 * cells].view("<i4").reshape(cells, 3)[:, 0]


class Layout(NamedTuple):
    """Form of a context's states: heads and dimensions of each layer's keys and values.

    Attributes:
        is_transposed: Values are written by dimension, as without flash attention.
    """

    is_transposed: bool
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, data: Bytes, heads: Sequence[int], dims: tuple[int, int]) -> Layout:
        """Return the layout of a state from each layer's heads, and the dimensions of their keys and values."""
        is_transposed, *_ = _KIND.unpack_from(data.data, _START.size + 12 * len(positions_of(data)))
        keys, values = (tuple((count, dim) for count in heads) for dim in dims)
        return cls(bool(is_transposed), keys, values)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV."""
        return sum(2 * heads * dim for heads, dim in self.keys + self.values)

    def parse(self, data: Bytes) -> tuple[Positions, list[tuple[Tensor, Tensor]]]:
        """Return positions, ascending, and each layer's keys and values, (T, H, D) in float16.

        Raises ValueError unless every byte is understood.
        """
        _, _, streams, cells = _START.unpack_from(data.data)
        at = _START.size + 12 * cells
        if (streams, *_KIND.unpack_from(data.data, at)) != (1, self.is_transposed, len(self.keys), 0, 0):
            raise ValueError("it has other streams, layers or rotations")
        found = positions_of(data)
        keys, values = self._parts(data, at + _KIND.size, cells, is_new=False)
        if (np.diff(found) < 0).any():  # cells are in the order in which they were free
            order = torch.from_numpy(np.argsort(found))
            found, keys, values = np.sort(found), [part[order] for part in keys], [part[order] for part in values]
        return found, list(zip(keys, values, strict=True))

    def build(self, positions: Positions, layers: Iterable[tuple[Tensor, Tensor]]) -> Bytes:
        """Return the state of a sequence with these keys and values, (T, H, D) of each layer."""
        cells = np.stack([positions, np.ones_like(positions), np.zeros_like(positions)], axis=1)
        start = _START.pack(_MAGIC, 0, 1, len(positions)) + cells.astype("<i4").tobytes()
        start += _KIND.pack(self.is_transposed, len(self.keys), 0, 0)
        parts = self.keys + self.values
        size = _ROWS.size * len(parts) + self.bytes_per_token * len(positions)
        data = np.empty(len(start) + size, np.uint8)
        data[: len(start)] = np.frombuffer(start, np.uint8)
        keys, values = self._parts(data, len(start), len(positions))
        for number, (own_keys, own_values) in enumerate(layers):
            keys[number].copy_(own_keys)
            values[number].copy_(own_values)
        return data

    def without(self, data: Bytes, rows: Positions, length: int) -> Bytes:
        """Return a state without these positions, and without those from `length` on."""
        positions = positions_of(data)
        if not (np.isin(positions, rows) | (positions >= length)).any():
            return data
        positions, layers = self.parse(data)
        kept = np.flatnonzero(~np.isin(positions, rows) & (positions < length))
        return self.build(positions[kept], ((keys[kept], values[kept]) for keys, values in layers))

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

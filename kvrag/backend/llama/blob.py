"""The state of a sequence as llama.cpp writes it: parsed, and built from KV.

As in `llama_kv_cache::state_write_meta` and `state_write_data` of b11549, with one stream: magic, sequence | of each
cache: number of streams and of cells | position, number of sequences and sequence of each cell | whether values are
transposed, layers, widths of the Hadamard matrices by which quantised keys and values are multiplied (0 = none) | each
layer's keys | each layer's values. Nothing in it names a version, so each context tries out that it parses and builds
the same bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.errors import ModelError

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int32]

_MAGIC, _F16, _Q8 = 0xAF143CD8, 1, 8
_BLOCK = 32  # numbers in q8_0: a scale in float16, and 8 bits of each
_FIRST = 8  # bytes of magic and sequence
_START, _KIND = struct.Struct("<IiII"), struct.Struct("<IIII")
_ROWS, _COLUMNS = struct.Struct("<iQ"), struct.Struct("<iII")


def positions_of(data: Bytes) -> Positions:
    """Return a view of the positions of a cache's cells."""
    cells = _START.unpack_from(data.data)[3]
    return data[_START.size : _START.size + 12 * cells].view("<i4").reshape(cells, 3)[:, 0]


class Layout(NamedTuple):
    """Form of one cache in states: heads and dimensions of each layer's keys and values.

    Attributes:
        is_transposed: Values are written by dimension, as without flash attention.
        kind: Of the numbers, f16 or q8_0.
        widths: Of the matrices by which keys and values are multiplied.
    """

    is_transposed: bool
    kind: int
    widths: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, data: Bytes, heads: Sequence[int], dims: tuple[int, int]) -> Layout:
        """Return the layout of a state from each layer's heads, and the dimensions of their keys and values."""
        at = _START.size + 12 * len(positions_of(data))
        is_transposed, _, *widths = _KIND.unpack_from(data.data, at)
        kind, _ = _ROWS.unpack_from(data.data, at + _KIND.size)
        keys, values = (tuple((count, dim) for count in heads) for dim in dims)
        return cls(bool(is_transposed), kind, (widths[0], widths[1]), keys, values)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV."""
        return sum(self._row_bytes(heads * dim) for heads, dim in self.keys + self.values)

    def size(self, cells: int) -> int:
        """Return the bytes of a state."""
        kinds = _ROWS.size * len(self.keys + self.values)
        return _START.size + _KIND.size + kinds + (12 + self.bytes_per_token) * cells

    def parse(self, data: Bytes) -> tuple[Positions, list[tuple[Tensor, Tensor]]]:
        """Return positions, ascending, and each layer's keys and values, (T, H, D) in float16; of q8_0, in float32.

        Raises ValueError unless every byte is understood.
        """
        _, _, streams, cells = _START.unpack_from(data.data)
        at = _START.size + 12 * cells
        if (streams, *_KIND.unpack_from(data.data, at)) != (1, self.is_transposed, len(self.keys), *self.widths):
            raise ValueError("it has other streams, layers or rotations")
        found = positions_of(data)
        keys, values = self._parts(data, at + _KIND.size, cells, is_new=False)
        if (np.diff(found) < 0).any():  # cells are in the order in which they were free
            order = torch.from_numpy(np.argsort(found))
            found, keys, values = np.sort(found), [part[order] for part in keys], [part[order] for part in values]
        if self.kind == _Q8:
            keys, values = (
                [_dequantised(part, form, width) for part, form in zip(parts, own, strict=True)]
                for parts, own, width in zip((keys, values), (self.keys, self.values), self.widths, strict=True)
            )
        return found, list(zip(keys, values, strict=True))

    def build(self, positions: Positions, layers: Iterable[tuple[Tensor, Tensor]]) -> Bytes:
        """Return the state of a sequence with these keys and values, (T, H, D) of each layer."""
        cells = np.stack([positions, np.ones_like(positions), np.zeros_like(positions)], axis=1)
        start = _START.pack(_MAGIC, 0, 1, len(positions)) + cells.astype("<i4").tobytes()
        start += _KIND.pack(self.is_transposed, len(self.keys), *self.widths)
        data = np.empty(self.size(len(positions)), np.uint8)
        data[: len(start)] = np.frombuffer(start, np.uint8)
        keys, values = self._parts(data, len(start), len(positions))
        for number, layer in enumerate(layers):
            for part, numbers, width in zip((keys[number], values[number]), layer, self.widths, strict=True):
                part.copy_(_quantised(numbers, width) if self.kind == _Q8 else numbers)
        return data

    def _parts(self, data: Bytes, at: int, cells: int, is_new: bool = True) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of all keys and of all values of a state whose layers begin at `at`.

        Each is (T, H, D); of q8_0, bytes of (T, blocks, 34).

        Writes their kinds and sizes if it `is_new`, else raises ValueError for others.
        """
        parts = []
        for number, (heads, dim) in enumerate(self.keys + self.values):
            width, is_by_column = heads * dim, self.is_transposed and number >= len(self.keys)
            size = self._row_bytes(width)
            kind = _COLUMNS.pack(_F16, 2, width) if is_by_column else _ROWS.pack(self.kind, size)
            stop = at + len(kind) + size * cells
            if is_new:
                data[at : at + len(kind)] = np.frombuffer(kind, np.uint8)
            elif bytes(data[at : at + len(kind)]) != kind or stop > len(data):
                raise ValueError(f"part {number} is of another kind or size")
            own, at = data[at + len(kind) : stop], stop
            if self.kind == _Q8:
                parts.append(torch.from_numpy(own).view(cells, width // _BLOCK, 2 + _BLOCK))
                continue
            numbers = torch.from_numpy(own.view(np.float16))
            rows = numbers.view(width, cells).T if is_by_column else numbers.view(cells, width)
            parts.append(rows.view(cells, heads, dim))
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes are left")
        return parts[: len(self.keys)], parts[len(self.keys) :]

    def _row_bytes(self, width: int) -> int:
        return width // _BLOCK * (2 + _BLOCK) if self.kind == _Q8 else 2 * width


def _dequantised(blocks: Tensor, form: tuple[int, int], width: int) -> Tensor:
    scales, steps = blocks[..., :2].view(torch.float16), blocks[..., 2:].view(torch.int8)
    return _multiplied(scales.float() * steps, width).view(len(blocks), *form)


def _quantised(numbers: Tensor, width: int) -> Tensor:
    blocks = _multiplied(numbers.float(), width).view(len(numbers), -1, _BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True) / 127
    steps = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([scales.half().view(torch.uint8), steps.view(torch.uint8)], -1)


def _multiplied(numbers: Tensor, width: int) -> Tensor:
    return numbers.reshape(-1, width) @ _hadamard(width) if width else numbers.contiguous()


@cache
def _hadamard(width: int) -> Tensor:
    """Return the matrix, which is its own inverse, by which llama.cpp evens out what it quantises."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / width**0.5


class Layouts(NamedTuple):
    """Form of a context's states. Layers with a window have a cache of their own, which follows the other one.

    Attributes:
        caches: That of each.
        layers: Numbers of the layers in each.
    """

    caches: tuple[Layout, ...]
    layers: tuple[list[int], ...]

    @classmethod
    def of(cls, data: Bytes, heads: Sequence[int], dims: tuple[int, int], windows: Sequence[int | None]) -> Layouts:
        """Return the layout of a state from each layer's heads and window, and the dimensions of keys and values."""
        caches, groups = list[Layout](), [list[int]() for _ in range(2 if any(windows) else 1)]
        for number, window in enumerate(windows):
            groups[window is not None].append(number)
        for group in groups:
            caches.append(Layout.of(data, [heads[number] for number in group], dims))
            data = data[caches[-1].size(len(positions_of(data))) - _FIRST :]
        return cls(tuple(caches), tuple(groups))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(map(len, self.layers))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV."""
        return sum(layout.bytes_per_token for layout in self.caches)

    def split(self, data: Bytes) -> Iterator[Bytes]:
        """Yield a view of each cache's state, of which the first 8 bytes are not read."""
        for layout in self.caches:
            size = layout.size(len(positions_of(data))) if layout is not self.caches[-1] else len(data)
            yield data[:size]
            data = data[size - _FIRST :]

    def renumber(self, data: Bytes, own: Positions, others: Positions) -> None:
        """Replace the positions of cells; raise ModelError for other positions than their own."""
        for positions in map(positions_of, self.split(data)):
            if not np.array_equal(positions, own):
                raise ModelError("llama.cpp moved the cells of a prompt: use another build of it")
            positions[:] = others

    def parse(self, data: Bytes) -> tuple[Positions, list[tuple[Tensor, Tensor]]]:
        """See `Layout.parse`."""
        parts = [layout.parse(part) for layout, part in zip(self.caches, self.split(data), strict=True)]
        positions = parts[0][0]
        if not all(np.array_equal(positions, found) for found, _ in parts):
            raise ValueError("its caches have other positions")
        found = zip(self.layers, parts, strict=True)
        layers = {number: layer for numbers, (_, own) in found for number, layer in zip(numbers, own, strict=True)}
        return positions, [layers[number] for number in range(self.num_layers)]

    def build(self, positions: Positions, layer: Callable[[int], tuple[Tensor, Tensor]]) -> Bytes:
        """Return the state of a sequence with the keys and values of each layer, (T, H, D)."""
        pairs = zip(self.caches, self.layers, strict=True)
        parts = [layout.build(positions, map(layer, numbers)) for layout, numbers in pairs]
        return np.concatenate([parts[0], *(part[_FIRST:] for part in parts[1:])]) if len(parts) > 1 else parts[0]

    def joined(self, states: Sequence[Bytes]) -> Bytes:
        """Return a state with the cells of several ones."""
        positions, layers = zip(*map(self.parse, states), strict=True)
        own = list(zip(*layers, strict=True))  # by layer and state

        def layer(number: int) -> tuple[Tensor, Tensor]:
            keys, values = zip(*own[number], strict=True)
            return torch.cat(keys), torch.cat(values)

        return self.build(np.concatenate(positions), layer)

    def without(self, data: Bytes, rows: Positions, length: int) -> Bytes:
        """Return a state without these positions, and without those from `length` on."""
        positions = positions_of(data)
        if not (np.isin(positions, rows) | (positions >= length)).any():
            return data
        positions, layers = self.parse(data)
        kept = np.flatnonzero(~np.isin(positions, rows) & (positions < length))
        return self.build(positions[kept], lambda number: (layers[number][0][kept], layers[number][1][kept]))

"""The state of a sequence as llama.cpp writes it: parsed, and built from KV.

As in `llama_kv_cache::state_write_meta` and `state_write_data` of b11549, with one stream: magic, sequence | of each
cache: number of streams and of cells | position, number of sequences and sequence of each cell | whether values are
transposed, layers, widths of the Hadamard matrices by which quantised keys and values are multiplied (0 = none) | each
layer's keys | each layer's values. Nothing in it names a version, so each context tries out that it parses and builds
the same bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.errors import ModelError

Bytes = NDArray[np.uint8]
Positions = NDArray[np.int32]
LayerKV = Callable[[int], tuple[Tensor, Tensor]]
"""Function: layer number -> its keys and values, each (T, H, D)."""

_MAGIC, _F16, _Q8 = 0xAF143CD8, 1, 8
_BLOCK = 32  # numbers in q8_0: a scale in float16, and 8 bits of each
_START, _CELLS, _KIND = struct.Struct("<Ii"), struct.Struct("<II"), struct.Struct("<IIII")
_ROWS, _COLUMNS = struct.Struct("<iQ"), struct.Struct("<iII")


def positions_of(data: Bytes) -> Positions:
    """Return a view of the positions of a state's cells, in its first cache."""
    at = _START.size + _CELLS.size
    _, cells = _CELLS.unpack_from(data.data, _START.size)
    return data[at : at + 12 * cells].view("<i4").reshape(cells, 3)[:, 0]


class Layout(NamedTuple):
    """Form of a context's states: heads and dimensions of each layer's keys and values.

    Attributes:
        is_transposed: Values are written by dimension, as without flash attention.
        kind: Of the numbers, f16 or q8_0.
        widths: Of the matrices by which keys and values are multiplied.
        caches: Numbers of the layers in each cache: those with a window have one of their own.
    """

    is_transposed: bool
    kind: int
    widths: tuple[int, int]
    keys: tuple[tuple[int, int], ...]
    values: tuple[tuple[int, int], ...]
    caches: tuple[list[int], ...]

    @classmethod
    def of(cls, data: Bytes, heads: Sequence[int], dims: tuple[int, int], windows: Sequence[int | None]) -> Layout:
        """Return the layout of a state from each layer's heads and window, and the dimensions of keys and values."""
        at = _START.size + _CELLS.size + 12 * len(positions_of(data))
        is_transposed, _, *widths = _KIND.unpack_from(data.data, at)
        kind, _ = _ROWS.unpack_from(data.data, at + _KIND.size)
        keys, values = (tuple((count, dim) for count in heads) for dim in dims)
        full, local = ([n for n, window in enumerate(windows) if (window is None) == own] for own in (True, False))
        caches = (full, local) if local else (full,)
        return cls(bool(is_transposed), kind, (widths[0], widths[1]), keys, values, caches)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV."""
        return sum(self._row_bytes(heads * dim) for heads, dim in self.keys + self.values)

    def parse(self, data: Bytes) -> tuple[Positions, LayerKV]:
        """Return positions, ascending, and a function of each layer's keys and values.

        These are (T, H, D) in float16; of q8_0, in float32. Raises ValueError unless every byte is understood.
        """
        found = positions_of(data)
        tables, *sides = self._views(data, len(found))
        if not all(np.array_equal(table[:, 0], found) for table in tables):
            raise ValueError("its caches have other positions")
        is_sorted = bool((np.diff(found) > 0).all())
        order = torch.from_numpy(np.argsort(found))  # cells are in the order in which they were free

        def layer(number: int) -> tuple[Tensor, Tensor]:
            keys, values = (side[number] if is_sorted else side[number][order] for side in sides)
            if self.kind == _Q8:
                keys = _dequantised(keys, self.keys[number], self.widths[0])
                values = _dequantised(values, self.values[number], self.widths[1])
            return keys, values

        return found[order.numpy()], layer

    def build(self, positions: Positions, layer: LayerKV) -> Bytes:
        """Return the state of a sequence with the keys and values of each layer, (T, H, D)."""
        data = np.empty(self._size(len(positions)), np.uint8)
        data[: _START.size] = np.frombuffer(_START.pack(_MAGIC, 0), np.uint8)
        tables, *sides = self._views(data, len(positions), is_new=True)
        for table in tables:
            table[:] = np.stack([positions, np.ones_like(positions), np.zeros_like(positions)], axis=1)
        for number, *parts in zip(range(len(self.keys)), *sides, strict=True):
            for part, numbers, width in zip(parts, layer(number), self.widths, strict=True):
                part.copy_(_quantised(numbers, width) if self.kind == _Q8 else numbers)
        return data

    def plain(self, queries: Tensor) -> Tensor:
        """Return (..., D) queries without the matrix by which keys are multiplied, too."""
        return _multiplied(queries, self.widths[0]).view_as(queries)

    def renumber(self, data: Bytes, own: Positions, others: Positions) -> None:
        """Replace the positions of cells; raise ModelError for other positions than their own."""
        for table in self._views(data, len(positions_of(data)))[0]:
            if not np.array_equal(table[:, 0], own):
                raise ModelError("llama.cpp moved the cells of a prompt: use another build of it")
            table[:, 0] = others

    def without(self, states: Sequence[Bytes], rows: Positions, length: int) -> Bytes:
        """Return a state with the cells of several, but without these positions and those from `length` on."""
        positions = np.concatenate([*map(positions_of, states)])
        if len(states) == 1 and not (np.isin(positions, rows) | (positions >= length)).any():
            return states[0]
        found, layers = zip(*map(self.parse, states), strict=True)
        positions = np.concatenate(found)
        kept = np.flatnonzero(~np.isin(positions, rows) & (positions < length))

        def layer(number: int) -> tuple[Tensor, Tensor]:
            keys, values = zip(*(own(number) for own in layers), strict=True)
            return torch.cat(keys)[kept], torch.cat(values)[kept]

        return self.build(positions[kept], layer)

    def _views(self, data: Bytes, cells: int, is_new: bool = False) -> tuple[list[Bytes], list[Tensor], list[Tensor]]:
        """Return views of each cache's (T, 3) cells, and of each layer's keys and values.

        These are (T, H, D); of q8_0, bytes of (T, blocks, 34). Writes all other bytes if it `is_new`, else raises
        ValueError if they are others.
        """
        if len(data) != self._size(cells):
            raise ValueError(f"{len(data)} bytes in place of {self._size(cells)}")
        at, tables, sides = _START.size, list[Bytes](), (dict[int, Tensor](), dict[int, Tensor]())

        def take(size: int) -> Bytes:
            nonlocal at
            at += size
            return data[at - size : at]

        def match(expected: bytes) -> None:
            own = take(len(expected))
            if is_new:
                own[:] = np.frombuffer(expected, np.uint8)
            elif own.tobytes() != expected:
                raise ValueError(f"it has another form at byte {at}")

        for layers in self.caches:
            match(_CELLS.pack(1, cells))
            tables.append(take(12 * cells).view("<i4").reshape(cells, 3))
            match(_KIND.pack(self.is_transposed, len(layers), *self.widths))
            for is_values, forms in enumerate((self.keys, self.values)):
                is_by_column = self.is_transposed and is_values
                for number in layers:
                    (heads, dim), width = forms[number], math.prod(forms[number])
                    size = self._row_bytes(width)
                    match(_COLUMNS.pack(_F16, 2, width) if is_by_column else _ROWS.pack(self.kind, size))
                    own = take(size * cells)
                    if self.kind == _Q8:
                        part = torch.from_numpy(own).view(cells, width // _BLOCK, 2 + _BLOCK)
                    else:
                        numbers = torch.from_numpy(own.view(np.float16))
                        rows = numbers.view(width, cells).T if is_by_column else numbers.view(cells, width)
                        part = rows.view(cells, heads, dim)
                    sides[is_values][number] = part
        keys, values = ([side[number] for number in range(len(self.keys))] for side in sides)
        return tables, keys, values

    def _size(self, cells: int) -> int:
        """Return the bytes of a state."""
        kinds = _ROWS.size * len(self.keys + self.values) + len(self.caches) * (_CELLS.size + _KIND.size)
        return _START.size + kinds + (12 * len(self.caches) + self.bytes_per_token) * cells

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

"""Inputs of passes, read and replaced through `cb_eval`, which llama.cpp calls before each node of a graph."""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvrag.backend.llama.blob import Positions
from kvrag.backend.llama.library import EvalCallback, GraphTensor
from kvrag.backend.positions import Pairs, Rotation, first_key

_SOURCES = {b"ROPE": 1, b"SOFT_MAX": 1, b"FLASH_ATTN_EXT": 3}  # which source is positions, or a mask
_I32, _MASKS = 26, {0: np.float32, 1: np.float16}
_NEVER = np.iinfo(np.int32).max
_PAIRS: dict[int, Pairs] = {0: "interleaved", 2: "half_split"}  # by mode


class Rope(NamedTuple):
    """Settings of a layer's RoPE.

    Attributes:
        dims: Dimensions of a head that rotate.
        original: Context length that YaRN extends.
        scale: Of the frequencies.
        yarn: Share of YaRN's correction, by which fast pairs keep their frequency.
        magnitude: Of rotated keys.
        fast, slow: Turns within `original` of the pairs that keep it, and of those that are scaled.
        factors: Divisors of the frequencies, such as Llama 3's; none = 1.
    """

    pairs: Pairs
    dims: int
    original: int
    base: float
    scale: float
    yarn: float
    magnitude: float
    fast: float
    slow: float
    factors: tuple[float, ...]

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotation at (T,) positions."""
        numbers = torch.arange(self.dims // 2, dtype=torch.float64)
        frequencies = self.base ** (-2 * numbers / self.dims) / torch.tensor(self.factors or 1.0, dtype=torch.float64)
        magnitude, kept = self.magnitude, torch.zeros(())
        if self.yarn:  # arXiv:2309.00071, section 3.2
            turns = self.original / (2 * math.pi)
            first, last = (self.dims / 2 * math.log(turns / own, self.base) for own in (self.fast, self.slow))
            low, high = max(math.floor(first), 0), min(math.ceil(last), self.dims - 1)
            kept = self.yarn * (1 - ((numbers - low) / max(high - low, 0.001)).clamp(0, 1))
            magnitude *= 1 - 0.1 * math.log(self.scale)
        angles = positions[:, None].double() * frequencies * (kept + self.scale * (1 - kept))
        return Rotation((angles.cos() * magnitude).float(), (angles.sin() * magnitude).float(), self.pairs)


class Inputs:
    """Positions and mask that the passes of one context read in place of its own.

    llama.cpp accepts consecutive positions only. So rows with gaps are given to it as if they followed all other cells,
    and `cb_eval` writes what the nodes of the graph read.

    Attributes:
        callback: For the context, which must not outlive this.
        error: Of the last pass, whose result then is wrong.
        watched: Layers whose attention is noted in passes with other inputs, which end after the last of them.
        queries: (1, HG, S, D) of each pass, of each watched layer; without flash attention, weights over the cells.
        scaling, softcap: Of their scores.
        ropes: Of each layer of the last observed pass; None = its keys do not rotate.
        masks: Which cells its first row attends to, of each layer.
        windows: Of each layer, for passes whose inputs are replaced.
        cells: Positions of all cells of the last one.
    """

    def __init__(self, functions: Any) -> None:
        self._operation, self._set = functions.ggml_op_desc, functions.ggml_backend_tensor_set
        self._get = functions.ggml_backend_tensor_get
        self.callback, self.windows = EvalCallback(self._called), tuple[int | None, ...]()
        self.watched, self.queries = range(0), defaultdict[int, list[Tensor]](list)
        self.observe()

    def observe(self) -> None:
        """Let the next pass read its own inputs, and note what they are."""
        self._is_observed, self.ropes, self.masks = True, list[Rope | None](), list[np.ndarray[Any, Any]]()
        self._rope: Rope | None = None  # of the next attention
        self.error: BaseException | None = None

    def replace(self, cells: Positions, rows: Positions) -> None:
        """Let the next pass compute rows at these positions; `cells` has those of all cells, these rows included."""
        self.cells, self._rows, self._written = cells, rows, set[int]()
        self._is_observed, self._layer, self.error = False, 0, None

    def _called(self, node: Any, is_before: bool, _data: object) -> bool:
        """Return whether to call again after a node, and after it, whether to go on."""
        try:
            number = _SOURCES.get(self._operation(node))
            source = None if number is None else node.contents.sources[number]
            if source is None:
                return False
            if not is_before:
                return self._note_attention(node)
            if not self._is_observed:
                return self._write(source)
            self._note(node.contents, source)
        except BaseException as error:  # ctypes would only print it
            self.error = error
        return False

    def _note(self, node: GraphTensor, source: int) -> None:
        tensor = GraphTensor.from_address(source)
        if tensor.type == _I32:
            self._rope = self._settings(node)
        else:  # attention, whose keys were rotated since the last one
            mask = np.empty(tensor.ne[0], _MASKS[tensor.type])
            self._get(source, mask.ctypes.data, 0, mask.nbytes)
            self.masks.append(mask == 0)
            self.ropes.append(self._rope)
            self._rope = None

    def _settings(self, node: GraphTensor) -> Rope:
        numbers = np.array(node.op_params, np.int32)
        _, dims, mode, _, original = numbers[:5].tolist()
        base, scale, yarn, magnitude, fast, slow = numbers[5:11].view(np.float32).tolist()
        if mode not in _PAIRS:
            raise ValueError("its keys are not rotated by one position")
        factors = np.empty(dims // 2 if node.sources[2] else 0, np.float32)
        if node.sources[2]:
            self._get(node.sources[2], factors.ctypes.data, 0, factors.nbytes)
        divisors = tuple(factors.tolist())
        return Rope(_PAIRS[mode], dims, original, base, scale, yarn, magnitude, fast, slow, divisors)

    def _note_attention(self, node: Any) -> bool:
        """Note an attention that was computed; return whether others are to follow."""
        has_weights, layer = self._operation(node) == b"SOFT_MAX", self._layer - 1
        tensor = node.contents if has_weights else GraphTensor.from_address(node.contents.sources[0])
        address = ctypes.addressof(tensor)
        sizes, steps = ([*reversed(numbers)] for numbers in (tensor.ne, tensor.nb))
        data = torch.empty(sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) // 4 + 1)
        self._get(address, data.data_ptr(), 0, data.nbytes)
        self.queries[layer].append(data.as_strided(sizes, [step // 4 for step in steps]))
        self.scaling, _, self.softcap = np.array(node.contents.op_params[:3], np.int32).view(np.float32).tolist()
        return layer + 1 < self.watched.stop

    def _write(self, source: int) -> bool:
        """Replace an input, unless that is done; return whether it belongs to a watched attention."""
        tensor = GraphTensor.from_address(source)
        is_mask = tensor.type != _I32
        self._layer += is_mask
        is_watched = is_mask and self._layer - 1 in self.watched
        if source in self._written:
            return is_watched
        data: np.ndarray[Any, Any] = self._rows
        if is_mask:
            cells = np.full(tensor.ne[0], _NEVER)
            cells[: len(self.cells)] = self.cells
            rows = torch.from_numpy(self._rows)[:, None]
            first = first_key(self.windows[self._layer - 1], rows).numpy()
            is_seen = (first <= cells) & (cells <= self._rows[:, None])
            data = np.where(is_seen, 0, -np.inf).astype(_MASKS[tensor.type])
        self._set(source, data.ctypes.data, 0, data.nbytes)
        self._written.add(source)
        return is_watched

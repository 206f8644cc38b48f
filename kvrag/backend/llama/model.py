"""GGUF models in llama.cpp: forward passes over rows, by whole sequences.

llama.cpp appends to sequences. Rows with gaps, or with KV behind them, are computed in another context of the model:
the prompt's cells get numbers for positions, the rows are appended, and `Inputs` says where all of them really are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvrag.backend.llama.blob import Bytes, Layout, Positions, positions_of
from kvrag.backend.llama.cache import BLOCK, LESS, SEQUENCES, LlamaCache, LlamaContext
from kvrag.backend.llama.graph import Inputs
from kvrag.backend.llama.library import load
from kvrag.backend.positions import UNROTATED, Rotation, Rows, attention_received, first_key
from kvrag.backend.protocol import PREFILL_BLOCK, Branch, CachedKV, KVCache, LayerSource, Observer
from kvrag.backend.transformers.gguf import Header, stand_in, tokenizer_of
from kvrag.backend.transformers.model import Model
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.config import DECLARED, OF_GGUF
from kvrag.errors import OutOfMemoryError, SettingError, UnsupportedModelError
from kvrag.fingerprint import Fingerprint
from kvrag.process import check_process
from kvrag.scheduling.waiting import FairLock
from kvrag.words import human_bytes

_CELLS_BYTES = 2 << 30  # of KV in the context, by default
_OTHER_CELLS = 512  # in the other context at first; it grows with the prompts
_KV_TYPES = {"f16": (1, 1.0), "q8_0": (8, 34 / 64)}  # llama.cpp's numbers of them, and sizes relative to 16 bits
_TRIAL, _SHIFT, _TOLERANCE = 16, 1037, 0.02  # tokens of the trial, their second position, and the error allowed
_MEMORY = Path("/proc/meminfo")
_STATES = "its layers keep a state, which this backend does not restore"
_REFUSED = {
    "llama_model_has_encoder": "it has an encoder",
    "llama_model_is_recurrent": _STATES,
    "llama_model_is_hybrid": _STATES,
}
_ORIGINAL = "use the model's original files, which torch runs"
_LONG, _SCALE = "rope_factors_long.weight", "attention.temperature_scale"
_SAMPLES, _SAMPLE = 4096, 256  # of a file: fine-tuning changes nearly every weight


@contextmanager
def _holding(lock: FairLock, process: int) -> Iterator[None]:
    """Hold a model's lock, unless this thread does so already: garbage collection can read a cache anywhere."""
    check_process(process, "this model")
    with nullcontext() if lock.held else lock:
        yield


class LlamaModel(Model):
    """A GGUF model in llama.cpp, for blending. What `generate` would do with logits is transformers' own.

    Stored KV has 16 bits, whatever the weights have.
    """

    dtype, device = torch.float16, torch.device("cpu")
    passes_may_wait = keeps_states = stores_states = rope_follows_length = False
    rows_per_pass = PREFILL_BLOCK  # of the protocol; `BLOCK` of llama.cpp
    policies = ("query", "tail", "first_k", "random")
    recompute_threshold, state_bytes = None, 0

    def __init__(
        self,
        header: Header,
        n_ctx: int | None = None,
        kv_type: str = "f16",
        n_threads: int | None = None,
        n_gpu_layers: int | None = None,
        device: str | None = None,
        preamble: bool = True,
        flash: int = -1,
    ) -> None:
        """Load a GGUF file.

        Args:
            n_ctx: Cells of the context: tokens of a prompt and its answer, at most. None = the model's window, or what
                fits into 2 GiB of KV.
            kv_type: Of the context's KV: "f16", or "q8_0" for half of the memory.
            n_threads: None = as torch.
            n_gpu_layers: Layers on a GPU; None = as llama.cpp decides, with device "cpu" none.
            device: "cpu" or None.
            flash: Flash attention: 1 = on, 0 = off, -1 = as llama.cpp decides.

        Raises:
            ModelLoadError: There is no library, or it cannot read the file.
            UnsupportedModelError: The model cannot be blended exactly.
        """
        self._process, own = os.getpid(), header.own
        layers = 0 if device == "cpu" else n_gpu_layers
        self._model = load(header.name, header.path, **({} if layers is None else {"n_gpu_layers": layers}))
        self._library = self._model.library
        self.name, self.lock = header.name, FairLock()
        self._exclusive = partial(_holding, self.lock, self._process)
        self.num_parameters: int = self._library.functions.llama_model_n_params(self._model.pointer)
        self.num_layers: int = self._library.functions.llama_model_n_layer(self._model.pointer)
        self.devices = [self.device] * self.num_layers
        for name, reason in _REFUSED.items():
            if getattr(self._library.functions, name)(self._model.pointer):
                raise _unsupported(header, reason)
        self.vocab_size = self._model.num_vocab
        tokenizer = tokenizer_of(header, self._model)
        self.hf = stand_in(tokenizer, self.vocab_size)
        self.tokenizer = Tokenizer(tokenizer, self.name, preamble)
        self.preamble = self.tokenizer.preamble
        self.hidden_size: int = own["embedding_length"]
        self.bytes_per_token = header.numbers_per_token * self.dtype.itemsize
        number, share = _KV_TYPES[kv_type]
        cell_bytes = share * self.bytes_per_token
        self.context_window = min(own["context_length"], n_ctx or max(int(_CELLS_BYTES / cell_bytes), 1024))
        if self.context_window < own["context_length"]:
            self.if_too_long += ", or raise n_ctx"
        if layers == 0 or not self._library.functions.llama_supports_gpu_offload():
            _check_memory(self.context_window, cell_bytes)
        same = own.get("rope.scaling.original_context_length", 0) if _SCALE in own else self.context_window
        if self.context_window > same:
            raise _unsupported(header, f"its queries depend on their position after {same} (pass n_ctx={same})")
        self.stable_length = self.context_window
        self._inputs = Inputs(self._library.functions)
        changes = dict.fromkeys(("type_k", "type_v"), number) | {"flash_attn_type": flash}
        changes |= dict.fromkeys(("n_threads", "n_threads_batch"), n_threads or torch.get_num_threads())
        self._new_context = partial(LlamaContext, self._model, exclusive=self._exclusive, changes=changes)
        self._context = self._new_context(self.context_window)
        # LongRoPE's factors depend on the size of a context
        size = self.context_window if _LONG in header.tensors else min(_OTHER_CELLS, self.context_window)
        self._other = self._new_context(size, inputs=self._inputs)
        self._try_out(header)
        self.fingerprint = Fingerprint(
            model=self.name,
            weights=f"llama.cpp {_digest(header)}",
            tokenizer=self.tokenizer.digest,
            dtype="float16" if kv_type == "f16" else kv_type,
            rope=xxhash.xxh3_128_hexdigest(json.dumps(self._ropes).encode()),
            preamble=self.preamble,
        )

    @classmethod
    def from_header(cls, header: Header, settings: Mapping[str, Any]) -> LlamaModel:
        """Load the file of a header with the options of `Model.from_pretrained`."""
        own = {name: settings[name] for name in (*OF_GGUF, "device", "preamble")}
        for name, value in settings.items():
            if name not in own and value != DECLARED[name].default and name != "allow_unverified":
                raise SettingError(f"{name}: a GGUF file runs in llama.cpp as it is: leave it out, or {_ORIGINAL}")
        if own["device"] not in (None, "cpu"):
            raise SettingError("device: llama.cpp takes its own GPU, or 'cpu' for none")
        return cls(header, **own)

    def _observe(self, tokens: Sequence[int]) -> None:
        """Set each layer's RoPE and window to those that llama.cpp has; raise ValueError for others than are known."""
        other, inputs, window = self._other, self._inputs, self._other.window or 64
        last = window + window // 2
        starts = (last - window, window - 1, last - 2)  # of two rows each, where windows begin and before the last
        for start in starts:
            other.decode([(token, position, 1) for position, token in enumerate(tokens[:2], start)], ())
            other.copy(1, 0)
            other.remove(1, 0)
        inputs.observe()
        other.decode([(tokens[2], last, 0)], ())
        cells = np.array([*(position for start in starts for position in (start, start + 1)), last])
        kinds = [(own, cells >= first_key(own, last)) for own in (None, window)]
        found = [[own for own, seen in kinds if np.array_equal(seen, mask[: len(cells)])] for mask in inputs.masks]
        if len(found) != self.num_layers or not all(found):
            raise ValueError("not every layer has attention, or one hides other keys than windows do")
        if not any(inputs.ropes):
            raise ValueError("none of its layers has RoPE")
        self._ropes, self.windows = inputs.ropes, tuple(own[0] for own in found)
        inputs.windows = self.windows

    def _try_out(self, header: Header) -> None:
        """Raise UnsupportedModelError unless states are understood, and keys at other positions are what we make them.

        Sets the context's layout, and the settings of each layer's RoPE.
        """
        context, tokens = self._context, [7 * number % self.vocab_size for number in range(_TRIAL)]
        heads = header.own.get("attention.head_count_kv", header.own["attention.head_count"])
        heads = heads if isinstance(heads, list) else [heads] * self.num_layers

        def state_at(start: int) -> Bytes:
            context.remove(0, 0)
            context.decode([(token, start + number, 0) for number, token in enumerate(tokens)], ())
            return context.get(0)

        shift = min(_SHIFT, header.own["context_length"] - _TRIAL)  # a table of positions may end there
        if context.memory is None:
            raise _unsupported(header, "it keeps no KV")
        data = state_at(0)
        try:
            self._observe(tokens)
            context.layout = layout = Layout.of(data, heads, header.dims, self.windows)
            (at, layer), (_, other) = layout.parse(data), layout.parse(state_at(shift))
            if not np.array_equal(layout.build(at, layer), data):
                raise ValueError("it cannot be built")
        except ValueError as error:
            raise _unsupported(header, f"llama.cpp computes it in a way unknown to kvrag ({error})") from error
        context.remove(0, 0)
        whole, moved = ([*map(own, range(self.num_layers))] for own in (layer, other))
        positions, rows = torch.arange(_TRIAL), torch.arange(1, _TRIAL, 3)
        rotations = zip(self.rotations(positions), self.rotations(positions + shift), strict=True)
        layers = [(keys.transpose(0, 1)[None], values.transpose(0, 1)[None]) for keys, values in whole]
        # values are not rotated: they differ by what rounding in the layers before adds up to
        pairs = zip(whole, moved, strict=True)
        allowed = [max(_TOLERANCE, 2 * _difference(others, values)) for (_, values), (_, others) in pairs]
        for (keys, _), (others, _), (before, after), most in zip(layers, moved, rotations, allowed, strict=True):
            free = before.unrotate(keys)
            after.rotate(free)
            if _difference(free, others.transpose(0, 1)[None]) > most:
                raise _unsupported(header, "its keys are not rotated by RoPE alone")
        cache = self.new_cache(_TRIAL, lambda number: layers[number], positions[~torch.isin(positions, rows)])
        self._compute([tokens[at] for at in rows], cache, rows)
        found = context.read(cache)
        for number, (expected, most) in enumerate(zip(layers, allowed, strict=True)):
            sides = zip(found(number), expected, strict=True)
            if max(_difference(ours[:, :, rows], own[:, :, rows]) for ours, own in sides) > most:
                raise _unsupported(header, "llama.cpp computes rows with gaps otherwise")

    # ---------------------------------------------------------------- rotary

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the rotation of each layer's keys at (T,) positions."""
        made = {rope: rope.rotation(positions) if rope else UNROTATED for rope in set(self._ropes)}
        return [made[rope] for rope in self._ropes]

    # ---------------------------------------------------------------- forward

    def new_cache(
        self,
        capacity: int,
        source: LayerSource | None = None,
        filled: Tensor | None = None,
        prefix: CachedKV | None = None,
    ) -> Any:
        """See `Backend.new_cache`."""
        kept, rest = prefix.length if prefix else 0, torch.empty(0, dtype=torch.long) if filled is None else filled

        def layer(number: int) -> tuple[Tensor, Tensor]:
            parts = list(prefix.layer(number)) if prefix else []
            if source is not None:
                keys, values = source(number)
                parts.append((keys[:, :, rest], values[:, :, rest]))
            keys, values = _joined(parts)
            return keys[0].transpose(0, 1), values[0].transpose(0, 1)

        cache = LlamaCache(self._context, torch.cat([torch.arange(kept), rest]), layer)
        cache.length = kept
        return cache

    def forward(self, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """See `Backend.forward`."""
        return self._compute(ids[0].tolist(), cache, rows)

    def forward_all(self, ids: Tensor, cache: KVCache) -> Tensor:
        """See `Model.forward_all`."""
        return self._compute(ids[0].tolist(), cache, None, all_logits=True)[None]

    def forward_each(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> Tensor:
        """See `Model.forward_each`. Caches that do not fit into the context together are computed one after another."""
        check_process(self._process, "this model")
        logits = list[Tensor]()
        left = [(cache, [token]) for token, cache in zip(tokens, cast(Sequence[LlamaCache], caches), strict=True)]
        with self.lock.first(), torch.inference_mode():
            while left:
                cells = np.cumsum([cache.held + 1 for cache, _ in left[:SEQUENCES]])
                size = max(int((cells <= self._context.num_cells).sum()), 1)
                logits.append(self._context.append(left[:size], range(size)))
                left = left[size:]
        return torch.cat(logits)

    def forward_until(
        self,
        last: int,
        ids: Tensor,
        cache: KVCache,
        rows: Tensor | None = None,
        branches: Sequence[Branch] = (),
        observe: Observer | None = None,
    ) -> None:
        """See `Backend.forward_until`; all layers are computed and written. After branches, no pass can follow."""
        assert isinstance(cache, LlamaCache)
        tokens = ids[0].tolist()
        first = cache.length if rows is None else int(rows[0])
        ends = np.cumsum([len(tokens) - sum(length for _, length in branches), *(length for _, length in branches)])
        with self._exclusive(), torch.inference_mode():
            self._compute(tokens[: ends[0]], cache, rows)
            parts = {-1: (self._context.read(cache), 0)}
            # the longest prefix first: a branch takes the place of what follows its prefix
            for number in sorted(range(len(branches)), key=lambda number: -branches[number][0]):
                at, _ = branches[number]
                cache.set_length(at)
                self._compute(tokens[ends[number] : ends[number + 1]], cache, None)
                parts[number] = self._context.read(cache), at

        def layer(number: int) -> tuple[Tensor, Tensor]:
            sides = ((read(number), at) for _, (read, at) in sorted(parts.items()))
            return _joined((keys[:, :, at:], values[:, :, at:]) for (keys, values), at in sides)

        cache.read = layer
        for number in range(last + 1 if observe else 0):
            keys, values = layer(number)
            cast(Observer, observe)(number, keys[:, :, first:], values[:, :, first:])

    def attention_received(self, ids: Tensor, cache: KVCache, rows: Tensor, num_queries: int, layers: range) -> Tensor:
        """See `Backend.attention_received`."""
        assert isinstance(cache, LlamaCache)
        inputs, layout = self._inputs, self._context.layout
        with self._exclusive(), torch.inference_mode():
            inputs.watched = layers
            try:
                self._compute(ids[0].tolist(), cache, rows)
                noted = [inputs.queries.pop(layer) for layer in layers]
            finally:
                inputs.watched = range(0)
                inputs.queries.clear()
            total, keys = torch.zeros(cache.held), self._context.read(cache)
            now, before = Rows(rows, rows.tolist(), self.windows), len(inputs.cells) - len(rows)
            for layer, passes in zip(layers, noted, strict=True):
                if not layout.is_transposed:
                    query, key = layout.plain(torch.cat(passes, 2)), keys(layer)[0]
                    settings = inputs.scaling, inputs.softcap or None
                    total += attention_received(query, key, now, layer, num_queries, *settings)
                    continue
                for start, weights in zip(range(0, len(rows), BLOCK), passes, strict=True):  # without flash attention
                    first, end = max(len(rows) - num_queries - start, 0), before + start + weights.shape[2]
                    received = weights[0, :, first:, :end].square().sum((0, 1)) / weights.shape[1]
                    total[inputs.cells[:end]] += received
        return total[: int(rows[-1]) + 1] / len(layers)

    def own_logits(self, ids: list[int], is_other: bool = False) -> Tensor:
        """See `Model.own_logits`; the other way divides the prompt into other passes.

        Several: by one division, logits with 8 bits of KV may stay exactly the same.
        """
        cache, ends = self.new_cache(len(ids)), [len(ids) // part for part in (9, 6, 4, 3) if is_other]
        for part in torch.tensor([ids]).tensor_split(ends, dim=1):
            logits = self.forward(part, cache)
        return logits

    def own_tokens(self, ids: list[int], number: int) -> list[int]:
        """See `Model.own_tokens`."""
        cache, tokens = self.new_cache(len(ids)), list[int]()
        logits = self.forward(torch.tensor([ids]), cache)
        while (token := int(logits.argmax())) not in self.eos_ids and len(tokens) < number:
            tokens.append(token)
            logits = self.forward_each([token], [cache])
        return tokens

    def _compute(self, tokens: list[int], cache: KVCache, rows: Tensor | None, all_logits: bool = False) -> Tensor:
        """Compute rows; return (N, V) logits, after the last one unless another number is asked."""
        assert isinstance(cache, LlamaCache)
        count = len(tokens)
        positions = torch.arange(cache.length, cache.length + count) if rows is None else rows
        start, stop = int(positions[0]), int(positions[-1]) + 1
        is_own = stop - start == count and (rows is None or stop >= cache.held)
        outputs = range(0 if all_logits else count - 1, count)
        with self._exclusive(), torch.inference_mode():
            cache.read = None
            try:
                passes = self._append_rows if is_own and not self._inputs.watched else self._fill
                logits = list(passes(tokens, positions.numpy().astype(np.int32), cache, outputs))
            except BaseException:
                cache.set_length(min(cache.length, start))
                raise
        return torch.cat(logits)

    def _blocks(self, tokens: list[int], outputs: range) -> Iterator[tuple[list[int], slice, list[int]]]:
        """Yield the tokens of each pass, where they are among all, and which have logits; steps run in between."""
        for start in range(0, len(tokens), BLOCK):
            if start:
                self.lock.pause(nullcontext)
            part = tokens[start : start + BLOCK]
            wanted = [number for number in range(len(part)) if start + number in outputs]
            yield part, slice(start, start + len(part)), wanted

    def _append_rows(
        self, tokens: list[int], positions: Positions, cache: LlamaCache, outputs: range
    ) -> Iterator[Tensor]:
        """Compute consecutive rows. What was at their positions or behind leaves."""
        if (start := int(positions[0])) > cache.held:
            raise ValueError(f"positions {cache.held} to {start} have no KV")
        cache.length, cache.held, cache.is_stale = start, start, True
        for part, _, wanted in self._blocks(tokens, outputs):
            yield self._context.append([(cache, part)], wanted)

    def _fill(self, tokens: list[int], positions: Positions, cache: LlamaCache, outputs: range) -> Iterator[Tensor]:
        """Compute rows with gaps, or with KV behind them, in the other context, which has room for one prompt."""
        stop, held = int(positions[-1]) + 1, cache.held
        if (data := self._context.take_out(cache)) is None:
            raise ValueError("a prompt without KV has rows with gaps")
        layout = self._context.layout
        data = layout.without([data], positions, held)
        cells = positions_of(data).copy()
        if (cells < stop).sum() + len(positions) < stop:
            raise ValueError(f"positions before {stop} have no KV")
        cache.outside, cache.held = None, 0  # if this fails
        layout.renumber(data, cells, np.arange(len(cells), dtype=np.int32))
        if self._other.num_cells < (most := len(cells) + len(positions)):
            self._other = self._new_context(min(1 << most.bit_length(), self.context_window), inputs=self._inputs)
        self._other.layout = layout
        self._other.remove(0, 0)
        self._other.set(0, data)
        for part, place, wanted in self._blocks(tokens, outputs):
            rows = list(zip(part, range(len(cells), most), repeat(0)))
            cells = np.concatenate([cells, positions[place]])
            self._inputs.replace(cells, positions[place])
            yield self._other.decode(rows, wanted)
        data = self._other.get(0)
        layout.renumber(data, np.arange(most, dtype=np.int32), cells)
        cache.outside, cache.is_stale = data, False
        cache.length, cache.held = max(cache.length, stop), max(held, stop)


def _joined(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    keys, values = zip(*parts, strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the median over heads and tokens of the relative difference."""
    off = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1).clamp_min(1e-6)
    return float(off.median())


def _check_memory(cells: int, cell_bytes: float) -> None:
    """Raise OutOfMemoryError if the KV of a context does not fit into memory: Linux would end this process later."""
    if _MEMORY.exists():
        free = 1024 * int(_MEMORY.read_text().partition("MemAvailable:")[2].split()[0])
        if cells * cell_bytes > free:
            sizes = f"{human_bytes(cells * cell_bytes)} of memory, and {human_bytes(free)} are free"
            raise OutOfMemoryError(f"{cells} tokens need {sizes}: {LESS}")


def _unsupported(header: Header, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"cannot load model {header.name!r}: {reason}: {_ORIGINAL}")


def _digest(header: Header) -> str:
    """Hash the header and samples of the weights of a file."""
    digest, data = xxhash.xxh3_128(), np.memmap(header.path, np.uint8, "r")
    for start in range(0, len(data), max(_SAMPLE, len(data) // _SAMPLES)):
        digest.update(data[start : start + _SAMPLE].tobytes())
    return f"{digest.hexdigest()} {len(data)}"


Model.of_file = LlamaModel.from_header

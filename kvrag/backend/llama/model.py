"""GGUF models in llama.cpp: forward passes over stretches of rows, by whole sequences.

llama.cpp appends to sequences. A stretch in the middle of a prompt is computed like this: what follows it is set aside,
the stretch is appended to what comes before it, and what followed is put back. By causality, the result is that of one
pass over all rows.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor

from kvrag.backend.llama import library
from kvrag.backend.llama.blob import Layout, SequenceState
from kvrag.backend.llama.cache import SEQUENCES, LlamaCache, LlamaContext, Loaded
from kvrag.backend.positions import Pairs, Rotation
from kvrag.backend.protocol import Branch, CachedKV, KVCache, LayerSource, Observer
from kvrag.backend.transformers.gguf import Header, rope_factors, stand_in, tokenizer_of
from kvrag.backend.transformers.model import Model
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.config import DECLARED
from kvrag.errors import ModelLoadError, SettingError, UnsupportedModelError
from kvrag.fingerprint import Fingerprint
from kvrag.process import check_process
from kvrag.scheduling.waiting import FairLock

_BLOCK = 128
"""Rows per pass on a CPU, between which other answers' steps run. Larger passes are not faster per row there."""

_BATCH = 512  # rows per pass, at most
_CELLS_BYTES = 2 << 30  # of KV in the context, by default
_TRIAL, _SHIFT, _TOLERANCE = 16, 37, 0.02  # tokens of the trial, their second position, and the error allowed
_PAIRS: dict[int, Pairs] = {0: "interleaved", 2: "half_split"}  # by rope type
_ORIGINAL = "use the model's original files, which torch runs"
_LONG = "rope_factors_long.weight"
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
    rows_per_pass = _BATCH
    policies = ("tail", "first_k", "random")
    recompute_threshold, state_bytes = None, 0

    def __init__(
        self,
        header: Header,
        n_ctx: int | None = None,
        device: str | None = None,
        preamble: bool = True,
        flash: int = -1,
    ) -> None:
        """Load a GGUF file.

        Args:
            n_ctx: Cells of the context: tokens of a prompt and its answer, at most. None = the model's window, or what
                fits into 2 GiB of KV.
            device: "cpu" = no layer on a GPU.
            flash: Flash attention: 1 = on, 0 = off, -1 = as llama.cpp decides.

        Raises:
            ModelLoadError: There is no library, or it cannot read the file.
            UnsupportedModelError: The model cannot be blended exactly.
        """
        self._library, self._process = library.load(), os.getpid()
        lib, own = self._library.functions, header.own
        params = lib.llama_model_default_params()
        if device == "cpu":
            params.n_gpu_layers = 0
        pointer = lib.llama_model_load_from_file(os.fsencode(header.path), params)
        if not pointer:
            raise ModelLoadError(f"cannot load model {header.name!r}: llama.cpp: {self._library.reason()}")
        self._model = Loaded(lib, pointer)
        self.name, self.lock = header.name, FairLock()
        self._exclusive = partial(_holding, self.lock, self._process)
        self.num_layers: int = lib.llama_model_n_layer(pointer)
        self.windows = (None,) * self.num_layers
        self._refuse_unsupported(header)
        self.vocab_size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(pointer))
        tokenizer = tokenizer_of(header)
        self.hf = stand_in(tokenizer, self.vocab_size)
        self.tokenizer = Tokenizer(tokenizer, self.name, preamble)
        self.preamble = self.tokenizer.preamble
        self.hidden_size: int = own["embedding_length"]
        self.head_dim = header.dims[0]
        rope = {
            "rope_theta": own.get("rope.freq_base", 10000.0),
            "dims": own.get("rope.dimension_count", self.head_dim),
            "factor": own.get("rope.scaling.factor", 1.0) if own.get("rope.scaling.type") == "linear" else 1.0,
        }
        exponents = torch.arange(0, rope["dims"], 2, dtype=torch.float64) / rope["dims"]
        self._frequencies = rope["rope_theta"] ** -exponents / rope["factor"] / rope_factors(header)
        self.bytes_per_token = header.numbers_per_token * self.dtype.itemsize
        self.context_window = min(own["context_length"], n_ctx or max(_CELLS_BYTES // self.bytes_per_token, 1024))
        self.stable_length = self.context_window
        self._context = self._new_context(flash)
        self._try_out(header)
        self.fingerprint = Fingerprint(
            model=self.name,
            weights=f"llama.cpp {_digest(header)}",
            tokenizer=self.tokenizer.digest,
            dtype="float16",
            rope=json.dumps(rope, sort_keys=True),
            preamble=self.preamble,
        )

    @classmethod
    def from_header(cls, header: Header, settings: Mapping[str, Any]) -> LlamaModel:
        """Load the file of a header with the options of `Model.from_pretrained`."""
        own = {name: settings[name] for name in ("n_ctx", "device", "preamble")}
        for name, value in settings.items():
            if name not in own and value != DECLARED[name].default and name != "allow_unverified":
                raise SettingError(f"{name}: a GGUF file runs in llama.cpp as it is: leave it out, or {_ORIGINAL}")
        if own["device"] not in (None, "cpu"):
            raise SettingError("device: llama.cpp takes its own GPU, or 'cpu' for none")
        return cls(header, **own)

    def _refuse_unsupported(self, header: Header) -> None:
        """Raise UnsupportedModelError for a model whose KV is not one cache of rotated keys."""
        lib, pointer, reason = self._library.functions, self._model.pointer, ""
        self._pairs = _PAIRS.get(lib.llama_model_rope_type(pointer))
        if lib.llama_model_has_encoder(pointer):
            reason = "it has an encoder"
        elif lib.llama_model_is_recurrent(pointer) or lib.llama_model_is_hybrid(pointer):
            reason = "its layers keep a state, which this backend does not restore"
        elif lib.llama_model_n_swa(pointer) > 0:
            reason = "its layers with a window have a cache of their own"
        elif self._pairs is None:
            reason = "its keys are not rotated by one position"
        elif header.own.get("rope.scaling.type", "none") not in ("none", "linear") or _LONG in header.tensors:
            reason = "its RoPE is scaled by YaRN or LongRoPE"
        if reason:
            raise _unsupported(header, reason)

    def _new_context(self, flash: int) -> LlamaContext:
        lib = self._library.functions
        params = lib.llama_context_default_params()
        cells = self.context_window
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = cells, _BATCH, _BATCH, SEQUENCES + 1
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        params.flash_attn_type, params.kv_unified, params.no_perf = flash, True, True
        context = lib.llama_init_from_model(self._model.pointer, params)
        if not context:
            raise ModelLoadError(
                f"cannot load model {self.name!r}: llama.cpp makes no context of {cells} tokens, "
                f"{cells * self.bytes_per_token / 2**30:.1f} GiB: pass a smaller n_ctx ({self._library.reason()})"
            )
        return LlamaContext(self._library, self._model, context, cells, _BATCH, self.vocab_size, self._exclusive)

    def _try_out(self, header: Header) -> None:
        """Raise UnsupportedModelError unless states are understood, and keys at other positions are what we make them.

        Sets the context's layout.
        """
        context, tokens = self._context, [7 * number % self.vocab_size for number in range(_TRIAL)]
        positions = torch.arange(_TRIAL)

        def state_at(start: int) -> SequenceState:
            context.remove(0, 0)
            context.decode([(token, start + number, 0) for number, token in enumerate(tokens)], ())
            data = context.get(0)
            if start == 0:
                context.layout = Layout.of(data, *header.dims)
                state = context.layout.parse(data)
                built = context.layout.build(state.positions, lambda n, *to: _copy(to, state.layers[n]))
                context.remove(0, 0)
                context.set(0, built)
                if not np.array_equal(context.get(0), data):
                    raise ValueError("a state is not restored as it was")
            return context.layout.parse(data)

        try:
            context.bytes_per_token = self.bytes_per_token
            first, second = state_at(0), state_at(_SHIFT)
            sums = [sum(heads * dim for heads, dim in side) for side in (context.layout.keys, context.layout.values)]
            if 2 * sum(sums) != self.bytes_per_token or len(first.layers) != self.num_layers:
                raise ValueError("it has other heads than its header says")
        except (ValueError, IndexError, ctypes.ArgumentError) as error:
            raise _unsupported(header, f"llama.cpp writes its KV in an unknown form ({error})") from error
        finally:
            context.remove(0, 0)
        before, after = self.rotations(positions)[0], self.rotations(positions + _SHIFT)[0]
        for (keys, _), (others, _) in zip(first.layers, second.layers, strict=True):
            free = before.unrotate(keys.transpose(0, 1)[None])
            after.rotate(free)
            other = others.transpose(0, 1)[None].float()
            off = (free.float() - other).norm(dim=-1) / other.norm(dim=-1).clamp_min(1e-6)
            if not off.median() < _TOLERANCE:
                raise _unsupported(header, "its keys are not rotated as its header says")

    # ---------------------------------------------------------------- rotary

    def layer_device(self, number: int) -> torch.device:
        """Return the device of a layer's KV outside of llama.cpp."""
        return self.device

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the rotation of each layer's keys at (T,) positions, which is the same for all."""
        angles = positions[:, None].double() * self._frequencies
        return [Rotation(angles.cos().float(), angles.sin().float(), cast(Pairs, self._pairs))] * self.num_layers

    # ---------------------------------------------------------------- forward

    def new_cache(
        self,
        capacity: int,
        source: LayerSource | None = None,
        filled: Tensor | None = None,
        prefix: CachedKV | None = None,
    ) -> Any:
        """See `Backend.new_cache`."""
        return LlamaCache(self._context, source, filled, prefix)

    def forward(self, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """See `Backend.forward`."""
        return self._compute(ids[0].tolist(), cache, rows)[-1:]

    def forward_all(self, ids: Tensor, cache: KVCache) -> Tensor:
        """See `Model.forward_all`."""
        return self._compute(ids[0].tolist(), cache, None, all_logits=True)[None]

    def forward_each(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> Tensor:
        """See `Model.forward_each`. Caches that do not fit into the context together are computed one after another."""
        check_process(self._process, "this model")
        logits, left = list[Tensor](), list(zip(tokens, cast(Sequence[LlamaCache], caches), strict=True))
        with self.lock.first(), torch.inference_mode():
            while left:
                group, cells = [left.pop(0)], 0
                while left and len(group) < SEQUENCES:
                    cells = sum(cache.held + 1 for _, cache in (*group, left[0]))
                    if cells > self._context.num_cells:
                        break
                    group.append(left.pop(0))
                logits.append(self._append(group))
        return torch.cat(logits)

    def _append(self, group: Sequence[tuple[int, LlamaCache]]) -> Tensor:
        caches = [cache for _, cache in group]
        sequences = self._context.bring_in(caches, len(caches))
        for cache, sequence in zip(caches, sequences, strict=True):
            cache.keep_read(None, [])
            if cache.is_stale:
                self._context.remove(sequence, cache.length)
                cache.is_stale = False
        rows = [(token, cache.length, own) for (token, cache), own in zip(group, sequences, strict=True)]
        logits = self._context.decode(rows, range(len(rows)))
        for cache in caches:
            cache.length = cache.held = cache.length + 1
        return logits

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
        stop = len(tokens) - sum(length for _, length in branches)
        more, fresh = dict[int, SequenceState](), slice(first, first + stop)
        with self._exclusive(), torch.inference_mode():
            self._compute(tokens[:stop], cache, rows, no_logits=True)
            whole = self._context.read(cache)
            starts = np.cumsum([stop, *(length for _, length in branches)])
            # the longest prefix first: a branch takes the place of what follows its prefix
            for number in sorted(range(len(branches)), key=lambda number: -branches[number][0]):
                at, own = branches[number][0], tokens[starts[number] : starts[number + 1]]
                cache.set_length(at)
                self._compute(own, cache, None, no_logits=True)
                positions, layers = self._context.read(cache)
                own_layers = [(keys[at:].clone(), values[at:].clone()) for keys, values in layers]
                more[number] = SequenceState(positions[at:], own_layers)
        behind = [more[number] for number in range(len(branches))]
        cache.keep_read(whole, behind)
        for number in range(last + 1 if observe else 0):
            parts = [[side[fresh] for side in whole.layers[number]], *(state.layers[number] for state in behind)]
            keys, values = (torch.cat(side).transpose(0, 1)[None] for side in zip(*parts, strict=True))
            cast(Observer, observe)(number, keys, values)

    def attention_received(self, ids: Tensor, cache: KVCache, rows: Tensor, num_queries: int, layers: range) -> Tensor:
        """Not possible: a policy that needs it is refused."""
        raise SettingError("llama.cpp reports no attention: use policy='tail' or 'first_k', or backend='torch'")

    def own_logits(self, ids: list[int], is_other: bool = False) -> Tensor:
        """See `Model.own_logits`; the other way divides the prompt into other passes."""
        cache = self.new_cache(len(ids))
        for part in torch.tensor([ids]).tensor_split([len(ids) // 3] if is_other else [], dim=1):
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

    def _compute(
        self,
        tokens: list[int],
        cache: KVCache,
        rows: Tensor | None,
        all_logits: bool = False,
        no_logits: bool = False,
    ) -> Tensor:
        """Compute rows, stretch by stretch; return (N, V) logits, after the last one unless another number is asked."""
        assert isinstance(cache, LlamaCache)
        positions = list(range(cache.length, cache.length + len(tokens))) if rows is None else rows.tolist()
        gaps = [at for at, (one, other) in enumerate(pairwise(positions), 1) if other != one + 1]
        logits = [torch.empty(0, self.vocab_size)]
        with self._exclusive(), torch.inference_mode():
            for start, stop in pairwise([0, *gaps, len(tokens)]):
                wanted = range(stop - start) if all_logits else [stop - start - 1] * (stop == len(tokens))
                found = self._stretch(
                    tokens[start:stop], positions[start], cache, () if no_logits else wanted, rows is None
                )
                logits += found
        return torch.cat(logits)

    def _stretch(
        self, tokens: list[int], start: int, cache: LlamaCache, wanted: Sequence[int], is_last: bool
    ) -> list[Tensor]:
        """Compute consecutive rows. What follows them stays, unless they are the last ones."""
        context, stop, logits = self._context, start + len(tokens), list[Tensor]()
        if start > cache.held:
            raise ValueError(f"positions {cache.held} to {start} have no KV")
        cache.keep_read(None, [])
        behind = 0 if is_last else max(cache.held - stop, 0)
        try:
            for at in range(0, len(tokens), _BLOCK):
                if at:
                    self.lock.pause(nullcontext)
                part = tokens[at : at + _BLOCK]
                (sequence,) = context.bring_in([cache], len(part))
                if at == 0:
                    if behind:
                        context.set_aside(sequence, stop, behind)
                    context.remove(sequence, start)
                    cache.is_stale = False
                rows = [(token, start + number, sequence) for number, token in enumerate(part, at)]
                outputs = [number - at for number in wanted if at <= number < at + len(part)]
                cache.held = start + at
                logits.append(context.decode(rows, outputs))
                cache.held += len(part)
            if behind:
                (sequence,) = context.bring_in([cache], 0)
                context.put_back(sequence)
        except BaseException:
            context.put_back(None)
            cache.set_length(min(cache.length, start))
            raise
        cache.held = stop + behind
        cache.length = max(cache.length, stop) if not is_last else stop
        return [part for part in logits if len(part)]


def _copy(to: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for one, part in zip(to, parts, strict=True):
        one.copy_(part)


def _unsupported(header: Header, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"cannot load model {header.name!r}: {reason}: {_ORIGINAL}")


def _digest(header: Header) -> str:
    """Hash the header and samples of the weights of a file."""
    digest, size = xxhash.xxh3_128(), os.path.getsize(header.path)
    with open(header.path, "rb") as file:
        for start in range(0, size, max(_SAMPLE, size // _SAMPLES)):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return f"{digest.hexdigest()} {size}"


Model.of_file = LlamaModel.from_header

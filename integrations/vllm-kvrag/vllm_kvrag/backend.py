"""Backend protocol on vLLM's model: forward passes over scattered rows of a request's pages.

A stretch [a, b) of rows is given to vLLM as a request of b - a query tokens with a context of b tokens; all stretches
share the request's block table. vLLM writes a layer's keys and values before it attends, so its causal mask by context
length is the mask by true position, and every attention backend that serves chunked prefill serves blending.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvrag import ContextWindowError, UnsupportedModelError
from kvrag.backend.positions import UNROTATED, Rotation, Rows, attention_received
from kvrag.backend.protocol import Backend, Branch, CachedKV, KVCache, LayerSource, Observer
from kvrag.backend.transformers.loading import context_window, rope_parameters, stable_length
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.fingerprint import Fingerprint
from vllm_kvrag import pages
from vllm_kvrag.pages import PageMap
from vllm_kvrag.runner import CancelledError, Job
from vllm_kvrag.support import caches_of, unsupported_layers

T = TypeVar("T")


class _StopForward(Exception):
    """Raised inside a forward pass to end it early."""


@dataclass(frozen=True)
class _Pass:
    """Kind of a forward pass.

    Attributes:
        last: Layer at which it ends: before it, or after its attention with `attended`.
        observe: Called with the fresh keys and values of every layer.
        attended: Called with the queries of every layer after its attention.
        shift: Added to the positions for which keys are rotated.
    """

    last: int
    observe: Observer | None = None
    attended: Callable[[int, Tensor], None] | None = None
    shift: int = 0


@dataclass
class PagedCache(KVCache):
    """KV of one request in its pages. Layers are stitched when a pass first reaches them.

    Attributes:
        branches: KV of the row's branches, by branch and layer: the pages have no room for it.
    """

    backend: VllmBackend
    capacity: int
    source: LayerSource | None = None
    filled: Tensor | None = None
    length: int = 0
    laid_out: set[int] = field(default_factory=set)
    branches: list[list[tuple[Tensor, Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_layers = self.backend.num_layers

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return copies of keys and values of one layer, each (1, H, capacity, D), followed by the branches'."""
        backend = self.backend

        def read() -> tuple[Tensor, Tensor]:
            self.lay_out(number)
            return backend.page_map.read(backend.layers[number], backend.slots[: self.capacity])

        parts = [backend.call(read), *(branch[number] for branch in self.branches)]
        keys, values = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
        return keys, values

    def write(self, number: int, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values, each (1, H, S, D), of (S,) positions of one layer."""
        layer, slots = self.backend.layers[number], self.backend.slots[rows]
        self.backend.call(lambda: pages.write(layer, keys, values, slots))

    def lay_out(self, number: int) -> None:
        """Write the stitched KV of a layer into its pages, once."""
        if number in self.laid_out or self.source is None or self.filled is None:
            return
        self.laid_out.add(number)
        keys, values = self.source(number)
        self.write(number, self.filled, keys[:, :, self.filled], values[:, :, self.filled])

    def lay_out_all(self) -> None:
        """Write the stitched KV of all layers."""
        for number in range(self.backend.num_layers):
            self.lay_out(number)

    def get_seq_length(self) -> int:
        """Return the number of positions before the next token."""
        return self.length

    def set_length(self, length: int) -> None:
        """Mark the positions before `length` as complete."""
        self.length = length

    @property
    def num_bytes(self) -> int:
        """0: the pages belong to vLLM."""
        return 0


class VllmBackend(Backend):
    """Model of a vLLM worker.

    `on` returns an instance that is bound to the pages of one request.

    Attributes:
        tokenizer: kvrag's tokenizer of this model.
        layers: Attention layers, in order.
        page_map: Reads their pages.
        slots: (T,) slot of each position.
        block_size: Tokens per block.
        rank: Number of this process in its tensor-parallel group.
        with_logits: Compute logits in every pass; only the check at start-up needs them.
    """

    rope_follows_length = False
    passes_may_wait = False
    leaves_tail = True  # vLLM computes the question in its own batch
    with_logits = False

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        model: Any,
        tokenizer: Tokenizer,
        fingerprint: Fingerprint,
    ) -> None:
        """Wrap the loaded model of this process, whose KV cache is allocated.

        Raises:
            UnsupportedModelError: The model, or a setting of vLLM, does not support blending.
        """
        self.tokenizer, self.fingerprint, self.preamble = tokenizer, fingerprint, tokenizer.preamble
        self._config, self._model = vllm_config, model
        self._job: Job | None = None
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        self.context_window, self.dtype = int(config.max_model_len), config.dtype
        # vLLM's own frequencies are fixed, but transformers, which may have encoded a chunk, follows the length
        text, window = config.hf_text_config, context_window(config.hf_text_config)
        self.stable_length = min(self.context_window, stable_length(rope_parameters(text), window))
        self.device = torch.device(vllm_config.device_config.device)
        self.rows_per_pass: int | None = vllm_config.scheduler_config.max_num_batched_tokens
        self.num_processes: int = parallel.tensor_parallel_size
        by_name = get_layers_from_vllm_config(vllm_config, Attention)
        self.layers: list[Any] = [by_name[name] for name in sorted(by_name, key=extract_layer_index)]
        self.num_layers = len(self.layers)
        self.devices = [self.device] * self.num_layers
        if reason := unsupported_layers(self.layers, caches_of(kv_cache_config)):
            raise UnsupportedModelError(reason)
        self.hidden_size, self.vocab_size = int(config.get_hidden_size()), int(config.get_vocab_size())
        self.windows = tuple(layer.sliding_window for layer in self.layers)
        num_heads, local_heads = config.get_total_num_kv_heads(), self.layers[0].num_kv_heads
        self.rank = get_tp_group().rank_in_group
        first = self.rank * num_heads // self.num_processes
        self.heads = slice(first, first + local_heads)
        self._copies = max(1, local_heads * self.num_processes // num_heads)  # of each head
        self.bytes_per_token = 2 * self.num_layers * num_heads * self.layers[0].head_size * self.dtype.itemsize
        self._rotary = [_rotary(model, layer) for layer in self.layers]
        (group,) = kv_cache_config.kv_cache_groups
        self.block_size = int(group.kv_cache_spec.block_size)
        num_slots = kv_cache_config.num_blocks * self.block_size
        # before anything else uses the layers: writing pages needs its setup
        builder = self.layers[0].attn_backend.get_builder_cls()
        self._builder = builder(group.kv_cache_spec, group.layer_names, vllm_config, self.device)
        try:
            self.page_map = PageMap(self.layers[0], num_slots)
        except ValueError as error:
            raise UnsupportedModelError(f"{self.layers[0].attn_backend.get_name()} attention: {error}") from error
        self.slots = torch.empty(0, dtype=torch.long, device=self.device)
        self._blocks = torch.empty(0, dtype=torch.int32, device=self.device)

    def on(self, blocks: Sequence[int], job: Job | None) -> VllmBackend:
        """Return a backend for the pages of one request.

        Args:
            job: Job that uses it; None = used on the main thread.
        """
        bound = copy.copy(self)
        bound._job = job
        bound._blocks = torch.tensor(blocks, dtype=torch.int32, device=self.device)
        starts = bound._blocks.long()[:, None] * self.block_size
        bound.slots = (starts + torch.arange(self.block_size, device=self.device)).flatten()
        return bound

    def call(self, work: Callable[[], T], rows: int = 0) -> T:
        """Execute a function on the main thread."""
        return self._job.call(work, rows) if self._job else work()

    @property
    def waits(self) -> int:
        """Number of operations that waited for other requests, whose work measured durations then include."""
        return self._job.waits if self._job else 0

    def check_window(self, num_tokens: int, what: str = "the prompt") -> None:
        """Raise ContextWindowError unless `num_tokens` and one new token fit."""
        if num_tokens + 1 > self.context_window:
            raise ContextWindowError(
                f"{what} has {num_tokens} tokens, too many for the window of {self.context_window} (one for the "
                "answer): use shorter chunks"
            )

    # ---------------------------------------------------------------- processes

    def gather(self, value: T) -> Sequence[T]:
        """Return the values of all processes, in order of rank."""
        if self.num_processes == 1:
            return (value,)
        packed = pickle.dumps(value)  # may fail, so not while the others wait
        return [pickle.loads(each) for each in self.call(lambda: exchange(packed))]

    def together(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which uses no collective; if it fails in one process, raise in all."""
        return together(work, self.gather if self.num_processes > 1 else None)

    def all_heads(self, tensor: Tensor) -> Tensor:
        """Return the (B, H, T, D) tensors of all processes as one, with the model's heads in order."""
        if self.num_processes == 1:
            return tensor
        part = tensor.contiguous()
        gathered = self.call(lambda: get_tp_group().all_gather(part, dim=1))
        return gathered[:, :: self._copies]

    def sum_over_processes(self, tensor: Tensor) -> Tensor:
        """Return the sum of the processes' tensors."""
        if self.num_processes == 1:
            return tensor
        part = tensor.to(self.device).contiguous()
        return self.call(lambda: get_tp_group().all_reduce(part))

    # ---------------------------------------------------------------- rotary

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Return the rotation of each layer's keys at (T,) positions; layers with equal tables share the tensors."""
        found: dict[int, Rotation] = {id(None): UNROTATED}
        for rotary in self._rotary:
            if id(rotary) not in found:
                cos, sin = rotary.cos_sin_cache[positions.to(self.device)].float().chunk(2, dim=-1)
                found[id(rotary)] = Rotation(cos.contiguous(), sin.contiguous(), _pairs(rotary))
        return [found[id(rotary)] for rotary in self._rotary]

    # ---------------------------------------------------------------- forward

    def new_cache(
        self,
        capacity: int,
        source: LayerSource | None = None,
        filled: Tensor | None = None,
        prefix: CachedKV | None = None,
    ) -> PagedCache:
        """Return a cache in the request's pages, which already contain a `prefix`.

        The capacity is limited to that of the pages.
        """
        capacity = min(capacity, len(self.slots))
        return PagedCache(self, capacity, source, filled, prefix.length if prefix else 0)

    def waiting(self) -> AbstractContextManager[None]:
        """Do nothing: passes never wait for storage."""
        return nullcontext()

    def forward(self, ids: Tensor, cache: KVCache, rows: Tensor | None = None) -> Tensor:
        """Run the model on (S,) ascending positions `rows`, or append; see the protocol.

        Empty rows only write the stitched KV into the pages.

        Returns:
            (1, V) float32 logits, empty unless `with_logits`.
        """
        if rows is not None and not len(rows):
            assert isinstance(cache, PagedCache)
            self.call(cache.lay_out_all)
            return torch.empty(1, 0)
        return self._forward(ids, cache, rows, _Pass(self.num_layers))

    def forward_until(
        self,
        last: int,
        ids: Tensor,
        cache: KVCache,
        rows: Tensor | None = None,
        branches: Sequence[Branch] = (),
        observe: Observer | None = None,
        shift: int = 0,
    ) -> None:
        """Like `forward`, but end the pass at layer `last`; see the protocol.

        A branch is computed in the pages of the positions that it replaces, whose KV is restored afterwards.

        Args:
            shift: Added to the positions for which keys are rotated.
        """
        assert isinstance(cache, PagedCache)
        lengths = [length for _, length in branches]
        row, *others = torch.split(ids, [ids.shape[1] - sum(lengths), *lengths], dim=1)
        if branches:
            assert rows is not None
            cache.capacity = int(rows[-1]) + 1
        self._forward(row, cache, rows, _Pass(last, observe, shift=shift))
        for (branch_start, length), branch_ids in zip(branches, others, strict=True):
            rows = torch.arange(branch_start, branch_start + length)
            replaced = self.call(partial(self._read, rows))
            self.forward_until(last, branch_ids, cache, rows, observe=observe)
            cache.branches.append(self.call(partial(self._read, rows)))
            self.call(partial(self._write, rows, replaced))

    def _read(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values, each (1, H, S, D), of these positions of all layers."""
        return [self.page_map.read(layer, self.slots[rows]) for layer in self.layers]

    def _write(self, rows: Tensor, layers: list[tuple[Tensor, Tensor]]) -> None:
        for layer, (keys, values) in zip(self.layers, layers, strict=True):
            pages.write(layer, keys, values, self.slots[rows])

    def attention_received(self, ids: Tensor, cache: KVCache, rows: Tensor, num_queries: int, layers: range) -> Tensor:
        """Return the (K,) squared attention of each position from the last `num_queries` rows."""
        total = torch.zeros(int(rows[-1]) + 1, device=self.device)
        row_set = Rows(rows, rows.tolist(), self.windows)

        def attended(number: int, query: Tensor) -> None:
            if number in layers:
                layer = self.layers[number]
                keys = self.page_map.read_keys(layer, self.slots[: len(total)])
                query = query.reshape(-1, layer.num_heads, layer.head_size).transpose(0, 1)[None]
                softcap = getattr(layer.impl, "logits_soft_cap", None) or None
                total.add_(attention_received(query, keys, row_set, number, num_queries, layer.impl.scale, softcap))

        self._forward(ids, cache, rows, _Pass(layers[-1], attended=attended))
        return self.sum_over_processes(total).cpu() / (len(layers) * self.num_processes)

    def _forward(
        self,
        ids: Tensor,
        cache: KVCache,
        rows: Tensor | None,
        kind: _Pass,
    ) -> Tensor:
        assert isinstance(cache, PagedCache)
        if rows is None:
            rows = torch.arange(cache.length, cache.length + ids.shape[1])
            cache.length += ids.shape[1]
        if int(rows[-1]) >= len(self.slots):
            raise ContextWindowError(
                f"{int(rows[-1]) + 1} tokens do not fit into the request's pages, which hold {len(self.slots)}: "
                "a warm request needs all of its texts as the prompt"
            )
        logits = torch.empty(1, 0)
        for part in torch.split(torch.arange(len(rows)), self.rows_per_pass or len(rows)):
            forward_pass = partial(self._pass, ids[0, part], rows[part], cache, kind)
            logits = self.call(forward_pass, len(part))
        return logits

    @torch.inference_mode()
    def _pass(self, ids: Tensor, rows: Tensor, cache: PagedCache, kind: _Pass) -> Tensor:
        # a process that failed inside the pass would leave the others waiting in its collectives
        context, inputs = self.together(lambda: self._prepare(ids, rows, kind.shift))
        hidden, failures = None, list[Exception]()
        with self._hooks(cache, kind, failures), context, suppress(_StopForward):
            hidden = self._model(**inputs)
        self.together(lambda: _raise_first(failures))
        if hidden is None or not self.with_logits:
            return torch.empty(1, 0)
        logits = self._model.compute_logits(hidden[-1:])  # None on other ranks than 0
        return torch.empty(1, 0) if logits is None else logits.float()

    def _prepare(self, ids: Tensor, rows: Tensor, shift: int) -> tuple[AbstractContextManager[None], dict[str, Tensor]]:
        """Return vLLM's context of a pass and the model's inputs."""
        ids, rows = ids.to(self.device), rows.to(self.device)
        metadata, slots = self._builder.build(0, self._metadata(rows)), self.slots[rows]
        names = [layer.layer_name for layer in self.layers]
        context = set_forward_context(
            dict.fromkeys(names, metadata),
            self._config,
            num_tokens=len(rows),
            slot_mapping=dict.fromkeys(names, slots),
            skip_compiled=True,
        )
        return context, {"input_ids": ids, "positions": rows + shift}

    def _metadata(self, rows: Tensor) -> CommonAttentionMetadata:
        """Return metadata of (S,) rows, with one request per stretch of neighbouring rows."""
        rows_cpu = rows.cpu()
        begins = torch.cat([torch.tensor([True]), rows_cpu[1:] != rows_cpu[:-1] + 1]).nonzero().squeeze(1)
        starts = torch.cat([begins, torch.tensor([len(rows_cpu)])]).int()
        ends = (rows_cpu[starts[1:].long() - 1] + 1).int()
        lengths = starts[1:] - starts[:-1]
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            num_reqs=len(begins),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._blocks[None].expand(len(begins), -1).contiguous(),
            slot_mapping=self.slots[rows],
            seq_lens_cpu_upper_bound=ends,
            positions=rows,
        )

    @contextmanager
    def _hooks(self, cache: PagedCache, kind: _Pass, failures: list[Exception]) -> Iterator[None]:
        """Hook the attention layers for one pass: stitch each layer, and call the observers.

        If one of them fails, the pass goes on without them, because other processes wait in its collectives.
        """

        def guarded(work: Callable[..., None], *args: Any) -> None:
            if failures:
                return
            try:
                work(*args)
            except Exception as error:
                if self.num_processes == 1:
                    raise
                failures.append(error)

        def observed(number: int, layer: Any, parts: tuple[Tensor, ...]) -> None:
            if kind.observe is not None:
                keys, values = (
                    part.reshape(-1, layer.num_kv_heads, layer.head_size).transpose(0, 1)[None] for part in parts
                )
                kind.observe(number, keys, values)

        def before(number: int, layer: Any) -> Callable[..., None]:
            def hook(_: Any, args: tuple[Tensor, ...]) -> None:
                guarded(cache.lay_out, number)
                guarded(observed, number, layer, args[1:3])
                if number == kind.last and kind.attended is None:
                    raise _StopForward

            return hook

        def after(number: int, attended: Callable[[int, Tensor], None]) -> Callable[..., None]:
            def hook(_: Any, args: tuple[Tensor, ...], output: Any) -> None:
                guarded(attended, number, args[0])
                if number == kind.last:
                    raise _StopForward

            return hook

        hooks = []
        for number, layer in enumerate(self.layers):
            hooks.append(layer.register_forward_pre_hook(before(number, layer)))
            if kind.attended is not None:
                hooks.append(layer.register_forward_hook(after(number, kind.attended)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def together(work: Callable[[], T], gather: Callable[[bool], Sequence[bool]] | None) -> T:
    """Return the result of `work`. If it fails in one process, raise in all.

    Args:
        gather: Returns the values of all processes; None = there is one.

    Raises:
        CancelledError: It failed in another process.
    """
    if gather is None:
        return work()
    try:
        result = work()
    except Exception:
        gather(True)
        raise
    if any(gather(False)):
        raise CancelledError("it failed in another process")
    return result


def _raise_first(failures: Sequence[Exception]) -> None:
    if failures:
        raise failures[0]


def exchange(value: T) -> list[T]:
    """Return the values of all processes of the tensor-parallel group, in order of rank."""
    group = get_tp_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def _rotary(model: Any, layer: Any) -> Any:
    """Return the rotary module of an attention layer; None = its keys are not rotated."""
    parent = model.get_submodule(layer.layer_name.rpartition(".")[0])
    return getattr(parent, "rotary_emb", None)


def _pairs(rotary: Any) -> Any:
    return "half_split" if rotary.is_neox_style else "interleaved"

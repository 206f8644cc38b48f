"""A GPU that a test can count on a machine without one: tensors that say "cuda" and compute on the CPU.

An operation on tensors of both devices is refused as CUDA refuses it, and every operation that makes the CPU wait for
the GPU is counted: reading a number, a shape that depends on values, and a copy that is not `non_blocking`, or not from
pinned memory. Another stream than the model's does its work when the model's waits for it; until then, results are NaN.
It may not read what the model's computes without having waited for that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_aten = torch.ops.aten
_READS = (
    _aten._local_scalar_dense,
    _aten.equal,
    _aten.nonzero,
    _aten.masked_select,
    _aten.repeat_interleave,
    _aten.bincount,
)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_)
_COPIES = (_aten.copy_, _aten._to_copy)
_ALLOCATIONS = (_aten.empty, _aten.new_empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty_strided)


class OnGpu(Tensor):
    """A tensor on the GPU; `numbers` has its numbers, and `made` says when the model's stream computed them, or 0."""

    made = 0

    @staticmethod
    def __new__(cls, real: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device="meta",  # in C++, which has no CUDA here
        )
        made.numbers = real
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return GPU

    @property
    def is_meta(self) -> bool:
        """Not on the device that stands for the GPU."""
        return False

    def tolist(self) -> Any:
        """Copy them to the CPU, as the tensor of a GPU does; torch refuses it to other tensors."""
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        """The memory of its numbers."""
        return self.numbers.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return f"OnGpu({self.numbers!r})"


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Time:
    """Number of operations of the model's stream so far, and of those for which the CPU has waited."""

    now = done = 0


class _Stream:
    """A stream beside the model's, or an event of it, or the model's own."""

    def __init__(self, device: object = None) -> None:
        self.device = GPU
        self.work: list[Callable[[], object]] = []
        self.seen = 0  # the model's work up to here is done before its own

    def record_event(self) -> _Stream:
        return self

    def wait_event(self, event: _Stream) -> None:
        """Let the other stream work. The CPU does not wait."""
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            for work in event.work:
                work()
        event.work.clear()

    def wait_stream(self, stream: _Stream) -> None:
        """Wait for the model's stream."""
        self.seen = _Time.now

    def later(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Do again what was done to know the result's shape."""
        if not isinstance(result, Tensor) or func._schema.is_mutable:
            self.work.append(lambda: func(*args, **kwargs))
            return
        self.work.append(lambda: result.copy_(func(*args, **kwargs)))
        if result.is_floating_point():
            result.fill_(torch.nan)

    def synchronize(self) -> None:
        _note("synchronize")


class _Graph:
    """A CUDA graph: notes a pass's operations, and repeats them where their tensors are.

    The numbers that the pass computes are lost, as if it had not run.
    """

    captured: Sequence[_Graph] = ()
    """The one that is being captured."""

    has_generator = False
    """One has torch's random numbers, from its beginning to the next end of a capture that does not fail."""

    def capture_begin(self, **_: object) -> None:
        assert not _Graph.captured
        _Graph.has_generator, self.is_broken = True, False
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[int, Tensor]]] = []
        _Graph.captured = [self]

    def capture_end(self) -> None:
        _Graph.captured = ()
        for *_, results in self.operations:
            for result in results.values():
                if result.is_floating_point():
                    result.fill_(math.nan)
        if self.is_broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        _Graph.has_generator = False

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        given: list[int] = []
        _mapped(lambda part: given.append(id(part)), args)
        parts = () if func.is_view else enumerate(_several(result))
        new = {number: part for number, part in parts if isinstance(part, Tensor) and id(part) not in given}
        self.operations.append((func, args, kwargs, new))

    def replay(self) -> None:
        launches["replay"] += 1
        with _disable_current_modes():
            for func, args, kwargs, results in self.operations:
                again = _several(func(*args, **kwargs))
                for number, result in results.items():
                    result.copy_(again[number])


counts: Counter[str] = Counter()
"""Number of waits of the CPU and of copies to the GPU, by name."""

_streams: list[_Stream] = []
"""Streams beside the model's in which this thread works."""

_pinned: dict[int, Any] = {}
"""Pinned memory by its address; kept, so that no other has that address."""

launches: Counter[str] = Counter()
"""Number of operations that launch at least one kernel on the GPU, by name: all but views and allocations."""


def _several(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (list, tuple)) else [result]


def _note(name: str) -> None:
    if _Graph.captured and not name.endswith("_async"):
        _Graph.captured[0].is_broken = True
        raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
    counts[name] += 1
    if name not in ("to_gpu", "to_gpu_async", "pinned", "cat_on_host"):
        _Time.done = _Time.now


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._can_decompose():  # in inference mode, they arrive as one operation
        with _Mode():
            return func.decompose(*args, **kwargs)
    tensors: list[Tensor] = []

    def real(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors.append(part)
        return part.numbers if isinstance(part, OnGpu) else part

    packet = func.overloadpacket
    real_args, real_kwargs = _mapped(real, args), _mapped(real, kwargs)
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    on_cpu = [tensor for tensor in tensors if not isinstance(tensor, OnGpu)]
    to = kwargs.get("device")
    if to is not None:
        to = CPU if torch.device(to).type == "cpu" else GPU
        real_kwargs["device"] = CPU
    is_pinned = real_kwargs.pop("pin_memory", None)
    if is_pinned:
        _note("pinned")
    if packet is _aten.cat and not on_gpu and on_cpu[0].is_floating_point():
        _note("cat_on_host")
    if packet is _aten._fused_sdp_choice:
        return 0  # the plain one: the others have kernels for each device
    if packet in _COPIES:
        goes_to = _device(args[0]) if packet is _aten.copy_ else (to or _device(args[0]))
        comes_from = _device(args[1]) if packet is _aten.copy_ else _device(args[0])
        waits = not (kwargs.get("non_blocking") or (packet is _aten.copy_ and args[2:] == (True,)))
        if comes_from.type == "cpu" and on_cpu[-1].untyped_storage().data_ptr() not in _pinned:
            waits = waits or goes_to.type == "cuda"
        if goes_to.type != comes_from.type:
            _note(("to_cpu" if goes_to.type == "cpu" else "to_gpu") + ("" if waits else "_async"))
        is_result_on_gpu = goes_to.type == "cuda"
    else:
        is_result_on_gpu = bool(on_gpu) or to == GPU
        if on_gpu and packet in _READS:
            _note(packet.__name__)
        if packet in _INDEXING:
            for index in filter(None.__ne__, args[1]):
                if isinstance(index, OnGpu) and index.dtype == torch.bool:
                    _note("mask_on_gpu")
                elif on_gpu and not isinstance(index, OnGpu) and index.ndim:
                    _note("to_gpu")
                    on_cpu = [tensor for tensor in on_cpu if tensor is not index]
        if on_gpu and any(tensor.ndim for tensor in on_cpu):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, cuda:0 and cpu")
    if is_result_on_gpu and not func.is_view and packet not in _ALLOCATIONS:
        launches[packet.__name__] += 1
    known = {id(tensor.numbers): tensor for tensor in on_gpu}
    made = max((tensor.made for tensor in on_gpu), default=0)
    is_beside = _streams and not _Graph.captured
    if is_beside and made > max(_streams[-1].seen, _Time.done) and packet not in _ALLOCATIONS and not func.is_view:
        raise RuntimeError(f"{func} reads what the model's stream may not have computed yet")
    if not func.is_view:
        _Time.now += not is_beside
        made = 0 if is_beside else _Time.now
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None
    if is_result_on_gpu and is_drawn and _Graph.has_generator and not _Graph.captured:
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def wrapped(part: Any) -> Any:
        if not isinstance(part, Tensor) or isinstance(part, OnGpu) or not is_result_on_gpu:
            return part
        on_device = known[id(part)] if id(part) in known else OnGpu(part)
        on_device.made = made
        return on_device

    with torch.inference_mode(False), torch.no_grad():  # tensors of this class cannot be inference tensors
        result = func(*real_args, **real_kwargs)
        if is_pinned:
            _pinned[result.untyped_storage().data_ptr()] = result
        for graph in _Graph.captured if is_result_on_gpu else ():
            graph.note(func, real_args, real_kwargs, result)
        is_work = is_result_on_gpu and not func.is_view and packet not in _ALLOCATIONS
        if _streams and is_work and not _Graph.captured:
            _streams[-1].later(func, real_args, real_kwargs, result)
        return _mapped(wrapped, result)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change each part of lists, tuples and dictionaries; torch's `tree_map` takes longer than the operations."""
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {name: _mapped(change, part) for name, part in value.items()}
    return change(value)


def _device(tensor: Any) -> torch.device:
    return GPU if isinstance(tensor, OnGpu) else CPU


class _Now:
    """An executor that runs everything at once: modes belong to a thread."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
        return future


def to_gpu(hf: nn.Module) -> Any:
    """Move a model's weights and buffers."""
    for module in hf.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(OnGpu(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnGpu(buffer)
    return hf


@contextmanager
def _lifting() -> Iterator[None]:
    """Let `torch.tensor(..., device=)` make a CPU tensor and move it, as FakeTensorMode does."""
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)


@contextmanager
def _working_in(stream: _Stream) -> Iterator[None]:
    _streams.append(stream)
    try:
        yield
    finally:
        _streams.pop()


def _refused(device: object = None) -> None:
    raise RuntimeError("another thread may be capturing a graph: wait for a stream")


@contextmanager
def simulated_gpu(exists: bool = True, free_bytes: int = 16 << 30) -> Iterator[None]:
    """Run this thread with such a GPU, which has so much memory left."""
    if not exists:
        yield
        return
    stream = _Stream()
    _pinned.clear()
    with (
        patch("torch.cuda._lazy_init", lambda: None),
        patch("torch.cuda.get_device_name", lambda device=None: "simulated"),
        patch("torch.cuda.mem_get_info", lambda device: (free_bytes, free_bytes)),
        patch("torch.cuda.Stream", _Stream),
        patch("torch.cuda.CUDAGraph", _Graph),
        patch("torch.cuda.current_stream", lambda device=None: _streams[-1] if _streams else stream),
        patch("torch.cuda.stream", _working_in),
        patch("torch.cuda.synchronize", _refused),
        _lifting(),
        patch("kvrag.reuse.load._pools", lambda process: (_Now(), _Now())),
        _Mode(),
    ):
        yield

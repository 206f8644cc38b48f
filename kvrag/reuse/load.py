"""Loading: the KV of a prompt's chunks, read layer by layer, ahead of the forward pass that needs it.

`Trace` has the durations of a prompt's steps.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, groupby, pairwise
from typing import NoReturn

import torch
from torch import Tensor

from kvrag.backend.positions import Rotation
from kvrag.backend.protocol import Backend
from kvrag.config import EngineOptions
from kvrag.errors import ChunkUnreadableError, out_of_memory
from kvrag.memory.tier import TOGETHER, Keeping, MemoryTier, Pinned
from kvrag.process import log_once, releasing_threads
from kvrag.request import Request
from kvrag.store import ChunkReader
from kvrag.store.values import Layer, unpack


class Trace:
    """Seconds per step of one request: `seconds` with nested steps, `own_seconds` without.

    Steps: `match`, `select`, `blend` in this order; within `select` and `blend`, as layers are loaded while others are
    computed, `load_stall` (waiting for chunks) and `stitch` (rotation, and layout where the reading threads did not do
    it); `load` while at least one thread was reading chunks, mostly beside the others. `cpu_seconds` = processor time
    of this thread, without nested steps.
    """

    def __init__(self, backend: Backend) -> None:
        self.seconds = dict.fromkeys(("match", "load", "load_stall", "stitch", "select", "blend"), 0.0)
        self.own_seconds, self.cpu_seconds = dict(self.seconds), dict(self.seconds)
        self._inside = 0.0, 0.0  # seconds and processor time of the steps inside of the current one
        self._backend, self._waits = backend, backend.waits
        self._mutex = threading.Lock()
        self._readers, self._reading_since = 0, 0.0

    @contextmanager
    def step(self, name: str, synchronise: bool = True) -> Iterator[None]:
        """Add the duration of the block, including the device's work, to a step."""
        before, self._inside = self._inside, (0.0, 0.0)
        started, cpu_started = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            if synchronise and self._backend.device.type == "cuda":
                # not the whole device, on which another thread may be capturing a graph
                torch.cuda.current_stream(self._backend.device).synchronize()
            elif synchronise and self._backend.device.type == "mps":
                torch.mps.synchronize()
            duration, cpu = self._add(name, started), time.thread_time() - cpu_started
            self.own_seconds[name] += duration - self._inside[0]
            self.cpu_seconds[name] += cpu - self._inside[1]
            self._inside = before[0] + duration, before[1] + cpu

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the block as reading; overlapping blocks of several threads count once. Thread-safe."""
        with self._mutex:
            if not self._readers:
                self._reading_since = time.perf_counter()
            self._readers += 1
        try:
            yield
        finally:
            with self._mutex:
                self._readers -= 1
                if not self._readers:
                    self._add("load", self._reading_since)

    def _add(self, name: str, started: float) -> float:
        duration = time.perf_counter() - started
        self.seconds[name] += duration
        return duration

    @property
    def is_contended(self) -> bool:
        """True if this thread waited for other threads' forward passes, which its durations then include."""
        return self._backend.waits > self._waits


_AHEAD = 4  # layers read before they are needed
_LANES = 4  # chunks of a layer that are read at the same time
_LEAST_SPARE, _MOST_SPARE = 256 << 20, 16 << 30  # bytes of a tier on the device by default, if there is one


@functools.cache
def _pools(process: int) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """Return the threads of a process that lay out layers, and those that read, for which the others wait."""
    return ThreadPoolExecutor(16, "kvrag-layer"), ThreadPoolExecutor(16, "kvrag-read")


_Chunks = dict[str, tuple[Tensor, Tensor]]
"""Chunk key -> position-free keys and values of one layer, each (H, T, D)."""

_Laid = tuple[Tensor, Tensor, torch.cuda.Event | None]
"""Keys and values of one layer, each (1, H, capacity, D), and the end of their copy to a GPU."""


class LayerLoader:
    """Loads the matched runs layer by layer, laid out in prompt order; background threads read ahead.

    All runs of a layer are laid out by one concatenation per side: an operation per run and layer would cost more than
    the bytes. For a GPU, it is done there, on a separate stream: concatenating in pinned memory, for one copy of all,
    took the host several times as long as the bus. Several layers are copied and laid out at once, to launch less.
    """

    def __init__(self, backend: Backend, request: Request, codec: str, trace: Trace, capacity: int) -> None:
        """Start reading the first layer of the prompt's chunks, or all of them if a pass may not wait.

        Close the loader before the prompt. A layer has `capacity` positions, including those that are not filled.
        """
        self.rotations: Sequence[Rotation] = ()  # to all positions, see `layer`
        self.codec, self.trace, self.capacity = codec, trace, capacity
        self._backend, self._runs, self._readers = backend, request.runs, list(request.readers.items())
        self._devices = backend.devices
        # the positions from the first run's start to the last run's end
        self.span = slice(self._runs[0].start, self._runs[-1].stop) if self._runs else slice(0, 0)
        self._parts = [(run.key, slice(run.offset, run.offset + run.stop - run.start)) for run in self._runs]
        self._gaps = [after.start - before.stop for before, after in pairwise(self._runs)]
        # then no read has to queue after those of a slow disk
        self._is_cold = request.cold_tokens > 0
        self._is_in_memory = codec == "native" and not self._is_cold and backend.device.type == "cpu"
        ahead = _AHEAD if backend.device.type == "cpu" else TOGETHER
        self._ahead = ahead if backend.passes_may_wait else backend.num_layers
        self._reads: dict[int, Future[dict[int, _Laid | _Chunks]]] = {}
        for device in {*self._devices} if len(request.runs) > len(request.stored) else ():
            if device.type == "cuda":  # the others are KV that passes computed
                _copy_stream(device).wait_stream(torch.cuda.current_stream(device))
        self._start(0)
        if not backend.passes_may_wait:
            self._read_ahead(0)

    def wait(self) -> None:
        """Wait until all layers are in memory, if a pass may not wait; raises as `layer`."""
        if not self._backend.passes_may_wait:
            with self.trace.step("load_stall", synchronise=False):
                for read in self._reads.values():
                    read.result()

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each (1, H, capacity, D), on its device, rotated if there are `rotations`.

        Raises DamagedChunkError and ChunkUnreadableError. Positions outside of the runs are undefined. Each layer can
        be requested once. Other threads can use the model while this one waits.
        """
        with self.trace.step("load_stall", synchronise=False):
            read = self._read([number])[number] if self._is_in_memory else self._await(number)
        with self.trace.step("stitch", synchronise=False):
            keys, values, copied = self._lay_out({number: read})[number] if isinstance(read, dict) else read
            if copied is not None:
                stream = torch.cuda.current_stream(keys.device)
                stream.wait_event(copied)
                keys.record_stream(stream)
                values.record_stream(stream)
            if self.rotations:
                self.rotations[number].rotate(keys[:, :, self.span], self.span)
        return keys, values

    def close(self) -> None:
        """Wait for pending reads, so that the readers can be closed."""
        for read in self._reads.values():
            if not read.cancel() and read.running():
                read.exception()

    def _await(self, number: int) -> _Laid | _Chunks:
        self._start(number)
        read = self._reads[number]
        self._reads[number] = Future()  # frees the tensors
        if not read.done():
            with self._backend.waiting():
                read.exception()
        self._read_ahead(number)  # not before: the pass waits for this layer
        return read.result().pop(number)

    def _read_ahead(self, number: int) -> None:
        for layer in range(number, min(number + 1 + self._ahead, self._backend.num_layers)):
            self._start(layer)

    def _start(self, number: int) -> None:
        if self._is_in_memory or not self._runs or number in self._reads:
            return
        layers = self._together(number)
        self._reads |= dict.fromkeys(layers, _pools(os.getpid())[0].submit(self._prepare, layers))

    def _together(self, first: int) -> list[int]:
        """Return the layers to copy to a GPU with the first one: fewer in the beginning, for which a pass waits."""
        device = self._devices[first]
        most = min(1 << max(first.bit_length() - 1, 0), TOGETHER) if device.type == "cuda" else 1
        layers = range(first, min(first + most, self._backend.num_layers))
        return [layer for layer in layers if layer not in self._reads and self._devices[layer] == device]

    @releasing_threads()
    def _prepare(self, layers: Sequence[int]) -> dict[int, _Laid | _Chunks]:
        read = self._read(layers)
        # all layers at once would fill a device whose memory the engine has divided up
        return {**(self._lay_out(read) if self._backend.passes_may_wait else read)}

    def _read(self, layers: Sequence[int]) -> dict[int, _Chunks]:
        if not self._is_cold:
            return {number: self._read_some(number, self._readers) for number in layers}
        parts = [self._readers[lane::_LANES] for lane in range(min(_LANES, len(self._readers)))]
        pool, read = _pools(os.getpid())[1], {number: _Chunks() for number in layers}
        lanes = [(number, pool.submit(self._read_some, number, part)) for number in layers for part in parts]
        wait([lane for _, lane in lanes])  # also if one fails: the readers are closed then
        for number, lane in lanes:
            read[number] |= lane.result()
        return read

    def _read_some(self, number: int, readers: Sequence[tuple[str, ChunkReader]]) -> _Chunks:
        chunks: _Chunks = {}
        # the stream that lays out what conversations rotate on the device
        with self.trace.reading(), _beside_passes(self._devices[number]):
            for key, reader in readers:
                try:
                    chunks[key] = reader.layer(number)
                except (MemoryError, RuntimeError) as error:
                    _raise_unreadable(key, error)
        return chunks

    def _lay_out(self, read: Mapping[int, _Chunks]) -> dict[int, _Laid]:
        """Return layers that are on one device."""
        device, heads = self._devices[min(read)], self._backend.heads
        with _beside_passes(device):
            for key, reader in self._readers:
                try:
                    layers = [chunks[key] for chunks in read.values()]
                    if self.codec != "native":
                        layers = [unpack(layer, self.codec, device) for layer in layers]
                except (MemoryError, RuntimeError) as error:
                    _raise_unreadable(key, error)
                own = [(keys[heads], values[heads]) for keys, values in layers]
                for (number, chunks), layer in zip(read.items(), _moved(own, device), strict=True):
                    chunks[key] = layer
                    if isinstance(reader, Keeping):
                        reader.moved(number, layer)
            keys_of, values_of = (self._lay_out_side(side, [*read.values()]) for side in (0, 1))
            copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return {
            number: (*laid, copied) for number, laid in zip(read, zip(keys_of, values_of, strict=True), strict=True)
        }

    def _lay_out_side(self, side: int, layers: Sequence[_Chunks]) -> list[Tensor]:
        """Return the (1, H, capacity, D) keys (side 0) or values (1) of each layer, where its chunks are."""
        stacked: dict[str, Tensor] = {}
        for key in layers[0]:
            if (chunk := _stacked([chunks[key][side] for chunks in layers])) is None:
                return [laid for chunks in layers for laid in self._lay_out_side(side, [chunks])]
            stacked[key] = chunk
        parts = [stacked[key][:, :, part] for key, part in self._parts]  # (L, H, T, D) each
        gap, spaced = _empty(parts[0], max(self._gaps, default=0)), parts[:1]
        for part, length in zip(parts[1:], self._gaps, strict=True):
            spaced += [gap[:, :, :length], part] if length else [part]
        laid = _empty(parts[0], self.capacity)
        torch.cat(spaced, dim=2, out=laid[:, :, self.span])
        return [laid[number : number + 1] for number in range(len(layers))]


def tiers(backend: Backend, options: EngineOptions) -> MemoryTier:
    """Return an engine's tier in RAM, behind one on the devices of the layers if that has a size."""
    size, devices = options["device_bytes"], {*backend.devices}
    is_on_gpus = all(device.type == "cuda" for device in devices)
    if size is None and is_on_gpus:
        free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
        # the other half is for passes, and for chunks on their way into the tier
        size = min((free - options["conversation_bytes"] - options["batch_bytes"]) // 2, _MOST_SPARE)
        if size < _LEAST_SPARE:
            log_once("the GPU has no memory left for a tier of chunks, so they come from RAM: see device_bytes")
            size = 0
    faster = MemoryTier(size, name="device") if size else None
    return MemoryTier(options["ram_bytes"], faster, allocate=Pinned if is_on_gpus else None)


def _moved(layers: Sequence[Layer], device: torch.device) -> Sequence[Layer]:
    """Return layers of a chunk on a device, by one copy of those that are in one piece of memory, in order.

    A GPU copies from pinned memory while everybody goes on. Torch hands that out again only after the copy, so a tier
    may drop the chunk at once.
    """
    parts, is_async = [*chain.from_iterable(layers)], device.type == "cuda"
    if parts[0].device == device:
        for part in parts if is_async else ():
            part.record_stream(torch.cuda.current_stream(device))  # its owner may drop it in the meantime
        return layers
    moved: list[Tensor] = []
    parts = [part.contiguous() for part in parts]
    for _, piece in groupby(parts, lambda part: (part.untyped_storage().data_ptr(), part.dtype)):
        row = list(piece)
        start = min(part.storage_offset() for part in row)
        size = max(part.storage_offset() + part.numel() for part in row) - start
        flat = row[0].as_strided((size,), (1,), start).to(device, non_blocking=is_async)
        moved += [flat.as_strided(part.shape, part.stride(), part.storage_offset() - start) for part in row]
    return list(zip(moved[::2], moved[1::2], strict=True))


def _stacked(parts: Sequence[Tensor]) -> Tensor | None:
    """Return (H, T, D) tensors as one, (L, H, T, D), without a copy; None if they are not at equal distances."""
    first, starts = parts[0], [part.storage_offset() for part in parts]
    step = (starts[-1] - starts[0]) // max(len(parts) - 1, 1)
    alike = {(part.untyped_storage().data_ptr(), part.shape, part.stride(), part.dtype) for part in parts}
    if len(alike) > 1 or starts != [starts[0] + number * step for number in range(len(parts))]:
        return None
    return first.as_strided((len(parts), *first.shape), (step, *first.stride()))


def _empty(like: Tensor, num_tokens: int) -> Tensor:
    """Return an uninitialised (L, H, num_tokens, D) tensor: fresh positions are written before they are read."""
    return like.new_empty(*like.shape[:2], num_tokens, like.shape[3])


def _raise_unreadable(key: str, error: Exception) -> NoReturn:
    """Raise a lack of memory as that chunk being unreadable, so that it is recomputed, and other errors as they are."""
    if not out_of_memory(error):
        raise error
    raise ChunkUnreadableError(key, "out of memory") from error


def _beside_passes(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for work on a GPU that does not queue behind its passes."""
    # without a GPU, torch would look for one
    return torch.cuda.stream(_copy_stream(device)) if device.type == "cuda" else nullcontext()


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that copies to this GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

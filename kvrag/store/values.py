"""Values that stores take and return, their keys and codecs, and the rule that picks the variant to serve.

Keys and values are stored as they are, or in 8 or 4 bits. A packed tensor is a row of bytes: shape and dtype, a
minimum and a scale per group, and a code per element; an element is `low + scale * code`. Keys share a scale per
channel because a few channels are far larger than the rest in every token; values share one per token (KIVI,
arXiv:2402.02750, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrag.errors import ModelError

Ids = Sequence[int] | NDArray[np.uint32]

Layer = tuple[Tensor, Tensor]
"""Keys and values of a chunk on one layer, each (H, T, D), or packed into (N,) uint8; or states, each (N,)."""

ON_REQUEST = "\x01on request"
"""Document that holds the texts of requests; not listed by `documents`, and deleted when unused."""


def chunk_key(digest: str, ids: Ids, context: Ids = (), namespace: str = "") -> str:
    """Return a chunk's key, under the fingerprint with this digest and with its `context`. It determines the KV."""
    return _hash(digest.encode(), namespace.encode(), _tokens(context), _tokens(ids))


def text_key(namespace: str, ids: Ids) -> str:
    """Return the key of a text in a namespace, independent of its context: 32 hexadecimal digits."""
    return _hash(namespace.encode(), _tokens(ids))


def _tokens(ids: Ids) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _hash(*parts: bytes) -> str:
    """Hash parts with their lengths: two lists of parts with the same concatenation have different hashes."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class ChunkRecord:
    """A stored chunk: one variant of a text.

    Attributes:
        key: `chunk_key(digest, ids, context, namespace)`; it determines everything else.
        ids: (T,) token ids.
        context: (C,) token ids between the preamble and the chunk when it was encoded; empty = encoded alone.
        layers: Per layer keys (position-free) and values on the CPU: (H, T, D) each, or packed, see `pack`. Where they
            are stored, followed by the states after the chunk, which no codec packs.
    """

    key: str
    namespace: str
    ids: NDArray[np.uint32]
    context: NDArray[np.uint32]
    layers: Sequence[Layer]


@dataclass(frozen=True, slots=True)
class Entry:
    """A text with a stored variant. `number` increases with every text; a text that is stored again gets a new one."""

    number: int
    text_key: str
    namespace: str
    ids: NDArray[np.uint32]


class Holding(NamedTuple):
    """A piece of a document: it holds a text from `source` ("" = unknown) and relies on the variant `key`."""

    text_key: str
    key: str
    source: str


@dataclass(frozen=True, slots=True)
class TextState:
    """Durable state of a text.

    Attributes:
        variants: Key of each stored variant, and the number of context tokens it was encoded with.
        sources: Every source of every document that holds the text, and the variant that it relies on; "" where
            documents that name the same source rely on different variants.
    """

    variants: Mapping[str, int]
    sources: Mapping[str, str]


def visible_variant(state: TextState, alone_only: bool) -> str | None:
    """Return the key of the variant that a prompt gets; None = the text is computed with the prompt.

    Words of one document must not reach readers of another. The variant with context is served only if the text has a
    single source, and never if `alone_only` is set.
    """
    if len(state.sources) == 1 and not alone_only:
        ((source, key),) = state.sources.items()
        if source and key in state.variants:
            return key
    return next((key for key, context_tokens in state.variants.items() if context_tokens == 0), None)


@dataclass(frozen=True, slots=True)
class NamespaceStats:
    """Contents of one namespace, and its byte budget. A text may have several chunks, one per variant."""

    namespace: str
    texts: int
    chunks: int
    tokens: int
    bytes: int
    documents: int
    max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Contents of a store; `damaged` counts the damaged chunks since it was created."""

    path: str
    fingerprint: str
    model: str
    codec: str
    chunks: int
    tokens: int
    bytes: int
    documents: int
    max_bytes: int | None
    damaged: int
    namespaces: tuple[NamespaceStats, ...] = ()


class ChunkReader(Protocol):
    """An open chunk, readable from any thread until it is deleted.

    Attributes:
        key: The requested key, verified against the file's content.
        ids: (T,) token ids.
        context_tokens: Number of context tokens it was encoded with.
        tier: "disk", "ram", "device", or "shared" for a bucket or server that machines share.
    """

    key: str
    namespace: str
    ids: NDArray[np.uint32]
    context_tokens: int
    tier: str
    num_layers: int

    @property
    def bytes_read(self) -> int:
        """Bytes read from below the RAM tier so far."""

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer as they were stored, on the CPU; unpacked and on its device, if the chunk
        is in a tier there. Do not change them.

        Raises DamagedChunkError if they differ from what was written, ChunkUnreadableError if reading fails.
        """

    def close(self) -> None:
        """Release the file."""


# ---------------------------------------------------------------- codecs

# largest code, largest group; int4 loses its accuracy when more elements share a scale
_FORMATS = {"int8": (255, 1 << 30), "int4": (15, 64)}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HEADER = 16  # H, T, D and the dtype's number, int32 each


def pack(layers: Sequence[Layer], codec: str, chunk: str) -> list[Layer]:
    """Return every layer of a chunk in stored form.

    Raises ModelError, which names the chunk, if the KV contains an infinity or a NaN: it would spoil every answer.
    """
    for number, layer in enumerate(layers):
        ranges = [high.float() - low.float() for low, high in (part.aminmax() for part in layer if part.numel())]
        if not torch.stack(ranges).isfinite().all():
            dtype = str(layer[0].dtype).removeprefix("torch.")
            raise ModelError(
                f"the model overflows in {dtype}: the KV of chunk {chunk!r} is not finite on layer {number}; "
                "load the model in bfloat16 or float32, or leave the chunk out"
            )
    if codec == "native":
        return list(layers)
    return [
        (_pack(first, codec, 1), _pack(second, codec, 2)) if first.dim() == 3 else (first, second)
        for first, second in layers
    ]


def unpack(layer: Layer, codec: str, device: torch.device) -> Layer:
    """Return keys and values as `pack` took them, each (H, T, D). Packed ones move to `device` as bytes."""
    keys, values = layer
    if codec == "native" or keys.dim() == 3:  # unpacked before
        return layer
    return _unpack(keys, codec, 1, device), _unpack(values, codec, 2, device)


def _pack(tensor: Tensor, codec: str, along: int) -> Tensor:
    levels, largest = _FORMATS[codec]
    shape, length = tensor.shape, tensor.shape[along]
    groups, size = _groups(length, largest)
    if groups * size > length:  # pad the last group
        tensor = tensor.index_select(along, torch.arange(groups * size).clamp(max=length - 1))
    x = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    x = x.view(*shape[:along], groups, size, *shape[along + 1 :])
    low, high = x.aminmax(dim=along + 1, keepdim=True)  # (H, groups, 1, D) or (H, T, groups, 1)
    # rounded up: otherwise the highest value would need a code beyond the largest
    scale = ((high / levels - low / levels) * (1 + torch.finfo(tensor.dtype).eps)).to(tensor.dtype)
    per_step = scale.to(x.dtype).reciprocal().nan_to_num(posinf=0.0)  # a scale of 0: all elements are the minimum
    codes = (x - low).mul_(per_step).round_().clamp_(max=levels).to(torch.uint8)
    if codec == "int4":
        codes = codes.flatten()
        first, second = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).chunk(2)
        codes = first | second << 4
    header = torch.tensor([*shape, _DTYPES.index(tensor.dtype)], dtype=torch.int32)
    parts = header, low.to(tensor.dtype), scale, codes  # the minimum is an element of the tensor, so casting is exact
    return torch.cat([part.flatten().view(torch.uint8) for part in parts])


def _unpack(packed: Tensor, codec: str, along: int, device: torch.device) -> Tensor:
    *shape, number = packed[:_HEADER].clone().view(torch.int32).tolist()  # cloned: a slice may start at an odd byte
    dtype, grouped = _DTYPES[number], list(shape)
    grouped[along : along + 1] = _groups(shape[along], _FORMATS[codec][1])
    common = [*grouped[: along + 1], 1, *grouped[along + 2 :]]
    packed = packed[_HEADER:].to(device, non_blocking=device.type == "cuda")
    border = 2 * torch.Size(common).numel() * dtype.itemsize
    low, scale = packed[:border].clone().view(dtype).view(2, *common).to(torch.promote_types(dtype, torch.float32))
    codes = packed[border:]
    if codec == "int4":
        codes = torch.cat([codes & 15, codes >> 4])[: torch.Size(grouped).numel()]
    x = codes.view(grouped).to(low.dtype).mul_(scale).add_(low)
    if dtype == torch.float16:
        x.clamp_(max=torch.finfo(dtype).max)  # half a step above the maximum would be infinite
    return x.to(dtype).flatten(along, along + 1).narrow(along, 0, shape[along])


def _groups(length: int, largest: int) -> tuple[int, int]:
    """Return the number and size of equal groups with little padding: 80 elements make 2 groups of 40."""
    groups = -(-length // largest)
    return groups, -(-length // groups)

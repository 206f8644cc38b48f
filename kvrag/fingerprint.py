"""Fingerprint: identity of stored KV (model weights, tokenizer, dtype, RoPE, preamble, format).

KV computed under one fingerprint is meaningless under another, so the store rejects it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

Ids = Sequence[int] | NDArray[np.uint32]

FORMAT = 3  # of the stored record, raised by a change of layout or meaning
_SAMPLES = 256  # per tensor: fine-tuning or merging an adapter changes nearly every weight, so samples detect it


@dataclass(frozen=True)
class Fingerprint:
    """Everything that determines whether stored KV may be loaded.

    `weights` hashes samples of every parameter and buffer, so it covers revisions, merged adapters and quantisation.
    `model` is a display name and not part of the digest: two names of the same weights share their KV. `adapter` is the
    digest of the adapter that chunks are encoded with; "" = none.
    """

    model: str
    weights: str
    tokenizer: str
    dtype: str
    rope: str
    preamble: tuple[int, ...]
    codec: str = "native"  # one of `kvrag.config.CODECS`
    format: int = FORMAT
    adapter: str = ""

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Fingerprint:
        """Return the fingerprint with these `parts`; unknown ones are ignored."""
        read = {field.name: json.loads(parts[field.name]) for field in fields(cls)}
        return cls(**{**read, "preamble": tuple(read["preamble"])})

    def stored_as(self, codec: str) -> Fingerprint:
        """Return the fingerprint of KV stored under this codec."""
        return replace(self, codec=codec)

    def parts(self) -> dict[str, str]:
        """Return the fields as strings, for the store and for error messages."""
        return {name: json.dumps(value) for name, value in asdict(self).items()}

    @cached_property
    def digest(self) -> str:
        """Digest of 32 hexadecimal digits."""
        parts = {name: value for name, value in self.parts().items() if name != "model"}
        return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def chunk_key(self, ids: Ids, context: Ids = (), namespace: str = "") -> str:
        """Return the key of the chunk with these token ids, encoded with `context`. The key determines the KV."""
        return chunk_key(self.digest, ids, context, namespace)


def chunk_key(digest: str, ids: Ids, context: Ids = (), namespace: str = "") -> str:
    """Return the key of a chunk under the fingerprint with this digest."""
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


def hash_weights(state: Iterable[tuple[str, object]]) -> str:
    """Hash names, shapes, dtypes and evenly spaced samples of all tensors of a model's `state_dict`.

    Buffers are included: quantised layers keep their weights there.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in state:
        if not isinstance(tensor, Tensor):  # extra state may be anything
            continue
        sample = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _SAMPLES)]
        digest.update(f"{name}{tuple(tensor.shape)}{sample.dtype}".encode())
        digest.update(sample.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()

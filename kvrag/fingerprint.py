"""Fingerprint: identity of stored KV (model weights, tokenizer, dtype, RoPE, preamble, format).

KV computed under one fingerprint is meaningless under another, so the store rejects it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor

FORMAT = 4  # of the stored record, raised by a change of layout or meaning
_SAMPLES = 256  # per tensor: fine-tuning or merging an adapter changes nearly every weight, so samples detect it


@dataclass(frozen=True)
class Fingerprint:
    """Everything that determines whether stored KV may be loaded.

    `weights` hashes samples of every parameter and buffer, so it covers revisions, merged adapters and quantisation.
    `model` is a display name and not part of the digest: two names of the same weights share their KV.
    `states`: the states at a chunk's end are stored too.
    """

    model: str
    weights: str
    tokenizer: str
    dtype: str
    rope: str
    preamble: tuple[int, ...]
    codec: str = "native"  # one of `kvrag.config.CODECS`
    format: int = FORMAT
    states: bool = False

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
        digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

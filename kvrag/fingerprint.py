"""What a stored KV belongs to: model weights, tokenizer, dtype, RoPE, preamble, format.

KV computed under one fingerprint is meaningless under another, so the store refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
import xxhash
from torch import Tensor

FORMAT = 1
"""Version of the stored record. A change of layout or meaning raises it."""

_SAMPLES = 256  # per tensor: a fine-tune or a merged adapter moves nearly every weight, so a sample sees it


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that decides whether stored KV may be loaded.

    `weights` hashes samples of every parameter, so it also sees revisions, merged adapters and quantisation.
    `model` is for people: it is not part of the digest, two names of the same weights share their KV.
    """

    model: str
    weights: str
    tokenizer: str
    dtype: str
    rope: str
    preamble: tuple[int, ...]
    codec: str = "none"
    format: int = FORMAT

    def stored_as(self, codec: str) -> Fingerprint:
        """Of the same KV under one of `kvrag.config.CODECS`; "native" is "none" here, as in the first stores."""
        return replace(self, codec="none" if codec == "native" else codec)

    def parts(self) -> dict[str, str]:
        """Field by field, as strings: what the store keeps and what an error message compares."""
        return {name: json.dumps(value) for name, value in asdict(self).items()}

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        parts = {name: value for name, value in self.parts().items() if name != "model"}
        return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()

    def chunk_key(self, ids: Sequence[int]) -> str:
        """Key of the chunk with these token ids: the key determines the bytes."""
        tokens = np.asarray(ids, dtype="<u4").tobytes()
        return blake2b(bytes.fromhex(self.digest) + tokens, digest_size=16).hexdigest()


def hash_weights(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Hash names, shapes, dtypes and evenly spaced samples of all parameters."""
    digest = xxhash.xxh3_128()
    for name, parameter in parameters:
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()

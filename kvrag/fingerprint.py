"""What a stored KV belongs to: model weights, tokenizer, dtype, RoPE, preamble, format.

KV computed under one fingerprint is meaningless under another, so the store refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
import xxhash
from torch import Tensor

FORMAT = 2
"""Version of the stored record. A change of layout or meaning raises it."""

_SAMPLES = 256  # per tensor: a fine-tune or a merged adapter moves nearly every weight, so a sample sees it


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything that decides whether stored KV may be loaded.

    `weights` hashes samples of every parameter and buffer, so it also sees revisions, merged adapters and quantisation.
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
        return _digest(self)

    def chunk_key(self, ids: Sequence[int], context: Sequence[int] = (), namespace: str = "") -> str:
        """Return the key of the chunk with these token ids, encoded behind `context`: its KV is a function of it."""
        return chunk_key(self.digest, ids, context, namespace)


@lru_cache(maxsize=64)
def _digest(fingerprint: Fingerprint) -> str:
    parts = {name: value for name, value in fingerprint.parts().items() if name != "model"}
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def chunk_key(digest: str, ids: Sequence[int], context: Sequence[int] = (), namespace: str = "") -> str:
    """Return the key of a chunk under the fingerprint with this digest."""
    return _hash(digest.encode(), namespace.encode(), _tokens(context), _tokens(ids))


def text_key(namespace: str, ids: Sequence[int]) -> str:
    """Return the key of a text in a namespace, whatever it was encoded behind: 32 hexadecimal digits."""
    return _hash(namespace.encode(), _tokens(ids))


def _tokens(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def _hash(*parts: bytes) -> str:
    """Of parts with their lengths, so that what ends one part cannot begin the next."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def hash_weights(state: Iterable[tuple[str, object]]) -> str:
    """Hash names, shapes, dtypes and evenly spaced samples of all tensors of a model's `state_dict`.

    Buffers are among them: quantised layers keep their weights there.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in state:
        if not isinstance(tensor, Tensor):  # what modules keep besides
            continue
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous()
        digest.update(sample.view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()

"""Fingerprint: identity of stored KV (model weights, tokenizer, dtype, RoPE, preamble, format).

KV computed under one fingerprint is meaningless under another, so the store rejects it. A file in the store, the owner,
names the one that it is claimed for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor

from kvrag.errors import FingerprintMismatchError, StoreError

OWNER = "fingerprint.json"
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


def owner_file(fingerprint: Fingerprint) -> bytes:
    """Return the content of the file `OWNER`; see `parse_owner`."""
    return json.dumps({"digest": fingerprint.digest, **fingerprint.parts()}, indent=1).encode()


def parse_owner(content: bytes, store: str) -> dict[str, str]:
    """Return the parts of the fingerprint and its `digest`. Raises StoreError, also for another version's store."""
    try:
        parts = json.loads(content)
        if json.loads(parts["format"]) != FORMAT:
            raise old_format(store)
        Fingerprint.of(parts)
        is_sound = re.fullmatch(r"[0-9a-f]{32}", parts["digest"])  # it becomes a folder's name
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        is_sound = None
    if not is_sound:
        raise StoreError(f"{store}/{OWNER} is damaged: delete the store and warm again")
    return dict(parts)


def check_owner(theirs: dict[str, str], fingerprint: Fingerprint, store: str) -> None:
    """Raise FingerprintMismatchError unless a store is claimed for this model and codec."""
    if theirs["digest"] == fingerprint.digest:
        return
    mine = fingerprint.parts()
    different = [name for name in mine if name != "model" and mine[name] != theirs[name]]
    way_out = "load the model with the same settings, use another store folder or prefix, or delete this one"
    if different == ["codec"]:
        way_out = f"use codec {codec_of(theirs)} instead of {fingerprint.codec}, or {way_out}"
    if different == ["states"]:
        way_out = f"{'leave out' if fingerprint.states else 'pass'} store_states, or use another store folder or prefix"
    raise FingerprintMismatchError(
        f"the store {store} holds KV of {json.loads(theirs['model'])}, not of {fingerprint.model} as it is loaded now "
        f"(different: {', '.join(different)}): {way_out}"
    )


def codec_of(parts: dict[str, str]) -> str:
    """Return the name of the codec in the settings."""
    return str(json.loads(parts.get("codec", '"native"')))


def old_format(store: str) -> StoreError:
    """Return the error for a store that another version has written."""
    return StoreError(
        f"the store {store} has another version's format, which this version cannot read: "
        "encode it again with `kvrag warm --store NEW_FOLDER DOCS`"
    )

"""Chunks that no model has encoded, and stores to keep them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrag import FileStore, KVStore, SharedStore
from kvrag.fingerprint import Fingerprint
from kvrag.store import ChunkRecord, Holding, chunkfile, visible_variant
from kvrag.store.values import chunk_key, text_key

HELPERS = str(Path(__file__).parent)
"""The folder of the helpers, for processes of their own."""

FINGERPRINT = Fingerprint("tiny", "w", "t", "float32", "[]", (1,))


def record(
    number: int,
    tokens: int = 20,
    dtype: torch.dtype = torch.float32,
    layers: int = 3,
    context: Sequence[int] = (),
    namespace: str = "",
) -> ChunkRecord:
    generator = torch.Generator().manual_seed(number)
    ids = [number * 1000 + i for i in range(tokens)]
    kv = [tuple(torch.randn(2, tokens, 4, generator=generator).to(dtype) for _ in "kv") for _ in range(layers)]
    key = chunk_key(FINGERPRINT.digest, ids, context, namespace)
    return ChunkRecord(key, namespace, np.asarray(ids, np.uint32), np.asarray(context, np.uint32), kv)


def text(wanted: ChunkRecord) -> str:
    return text_key(wanted.namespace, wanted.ids.tolist())


def holding(wanted: ChunkRecord, source: str) -> Holding:
    return Holding(text(wanted), wanted.key, source)


def packed(wanted: ChunkRecord, fingerprint: str = FINGERPRINT.digest) -> bytes:
    return b"".join(chunkfile.serialise(wanted, fingerprint))


def served(store: FileStore, wanted: ChunkRecord, alone_only: bool = False) -> str | None:
    return visible_variant(store.look_up([text(wanted)])[text(wanted)], alone_only)


def opened(path: Path, **settings: Any) -> FileStore:
    store = FileStore(path, **({"min_free_bytes": 0} | settings))
    store.bind(FINGERPRINT)
    return store


def same(store: FileStore, wanted: ChunkRecord) -> bool:
    reader = store.open(wanted.key)
    if reader is None:
        return False
    try:
        assert (reader.key, reader.num_layers) == (wanted.key, len(wanted.layers))
        assert (reader.ids.tolist(), reader.context_tokens) == (wanted.ids.tolist(), len(wanted.context))
        for number, pair in enumerate(wanted.layers):
            for ours, theirs in zip(reader.layer(number), pair, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    finally:
        reader.close()
    return True


def file_of(store: FileStore, wanted: ChunkRecord) -> Path:
    (path,) = store.path.glob(f"chunks/*/{wanted.key}-*.safetensors")
    return path


def held(source: str, *chunks: ChunkRecord) -> list[Holding]:
    return [Holding(text(chunk), chunk.key, source) for chunk in chunks]


A, B, C = record(1), record(2), record(3)


def has(store: KVStore, wanted: ChunkRecord) -> bool:
    """Whether the store has this chunk, bit by bit."""
    reader = store.open(wanted.key)
    if reader is None:
        if store.missing([wanted.key]):
            return False
        reader = store.open(wanted.key)
        assert reader is not None, "it was recorded by another machine between the two calls"
    assert (reader.key, reader.num_layers) == (wanted.key, len(wanted.layers))
    assert (reader.ids.tolist(), reader.context_tokens) == (wanted.ids.tolist(), len(wanted.context))
    for number in reversed(range(reader.num_layers)):  # in any order
        for ours, theirs in zip(reader.layer(number), wanted.layers[number], strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    assert reader.bytes_read >= sum(tensor.nbytes for layer in wanted.layers for tensor in layer)
    reader.close()
    return True


def drop_copies(store: SharedStore) -> None:
    """Delete this machine's copies of chunks."""
    store._local.remove(store._local.keys())

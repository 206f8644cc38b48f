"""Copying stores: between folders, buckets and servers, and to another codec."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import torch

from kvrag.errors import ChunkUnreadableError, DamagedChunkError, FingerprintMismatchError, SettingError, StoreError
from kvrag.fingerprint import Fingerprint
from kvrag.store.base import KVStore, Progress, no_progress
from kvrag.store.values import ChunkRecord, Holding, chunk_key, pack

_PORTION = 256 << 20  # bytes in memory at a time


@dataclass(frozen=True, slots=True)
class CopyReport:
    """Result of `copy_store`: chunks, bytes written, and documents recorded in the target."""

    copied: int
    present: int  # in the target before
    unreadable: int  # at the moment, or damaged; they are left out
    bytes: int
    documents: int


def copy_store(
    source: KVStore, target: KVStore, codec: str | None = None, progress: Progress = no_progress
) -> CopyReport:
    """Copy all chunks and documents that the target lacks. Every layer is compared with its digest as it is read.

    Documents of the same name are replaced, other documents of the target stay. Run again, an interrupted copy
    continues where it stopped. Namespaces without a budget in the target get the source's.

    Args:
        codec: Codec of the copies; None = as they are. Only chunks in native precision can be converted.

    Raises:
        FingerprintMismatchError: The target holds KV of another model or codec.
        SettingError: The codec cannot be converted.
        StoreError: A store cannot be read or written; chunks copied before are kept.
    """
    converted = _bind(source, target, codec)
    stored: list[str] = []
    documents: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for kind, page in source.contents():
        if kind == "rows":
            stored += [row[0] for row in page]
        elif kind == "holders":
            for namespace, document, *holding in page:
                documents.setdefault((namespace, document), []).append(tuple(holding))
    keys: dict[str, str] = {}
    counts = dict.fromkeys(("copied", "present", "unreadable", "bytes"), 0)
    portion: list[ChunkRecord] = []

    def write() -> None:
        counts["bytes"] += target.put(portion)
        counts["copied"] += len(portion)
        portion.clear()

    for done, key in enumerate(stored, 1):
        try:
            read = _read(source, key, converted, target)
        except (DamagedChunkError, ChunkUnreadableError):
            counts["unreadable"] += 1
            continue
        if read is None:
            continue
        keys[key], record = read
        if record:
            portion.append(record)
        else:
            counts["present"] += 1
        if sum(tensor.nbytes for record in portion for layer in record.layers for tensor in layer) > _PORTION:
            write()
        progress(done, len(stored))
    write()
    for (namespace, document), held in documents.items():
        target.set_document(document, [Holding(text, keys.get(key, key), name) for text, name, key in held], namespace)
    for namespace in source.budgets().keys() - target.budgets().keys():
        target.set_budget(namespace, source.budgets()[namespace])
    return CopyReport(documents=len(documents), **counts)


def _bind(source: KVStore, target: KVStore, codec: str | None) -> Fingerprint | None:
    """Claim the target; return the fingerprint to convert to, None = chunks are copied as they are."""
    parts = source.owner()
    if not parts:
        raise StoreError(f"{source.name} has no store: nothing was ever warmed there")
    mine = Fingerprint.of(parts)
    theirs = mine if codec is None else mine.stored_as(codec)
    if theirs != mine and mine.codec != "native":
        raise SettingError(
            f"chunks in {mine.codec} cannot be converted: copy a store in native precision, or warm again"
        )
    try:
        target.bind(theirs)
    except FingerprintMismatchError as error:
        other = Fingerprint.of(target.owner())
        if codec is None and mine.codec == "native" and mine.stored_as(other.codec).digest == other.digest:
            raise FingerprintMismatchError(f"{error}; or pass --to-codec {other.codec} to convert") from error
        raise
    return None if theirs == mine else theirs


def _read(
    source: KVStore, key: str, converted: Fingerprint | None, target: KVStore
) -> tuple[str, ChunkRecord | None] | None:
    """Return a chunk's key in the target, and the chunk unless the target has it; None if it was removed meanwhile."""
    if converted is None and not target.missing([key]):
        return key, None
    reader = source.open(key)
    if reader is None:
        return None
    with closing(reader):
        if converted is None:
            return key, reader.record()
        new = chunk_key(converted.digest, reader.ids.tolist(), reader.context.tolist(), reader.namespace)
        if not target.missing([new]):
            return new, None
        record = reader.record()
    with torch.inference_mode():
        return new, replace(record, key=new, layers=pack(record.layers, converted.codec, key))

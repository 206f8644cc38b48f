"""Storage of chunk KV: the protocol, the embedded store, the RAM tier."""

from kvrag.store.files import FileStore, StoreCheck
from kvrag.store.memory import MemoryTier
from kvrag.store.others import OtherStore, other_stores
from kvrag.store.protocol import (
    ON_REQUEST,
    ChunkReader,
    ChunkRecord,
    Entry,
    Holding,
    KeepsTexts,
    KVStore,
    NamespaceStats,
    StoreStats,
    Texts,
    TextState,
    serve,
)

__all__ = [
    "ON_REQUEST",
    "ChunkReader",
    "ChunkRecord",
    "Entry",
    "FileStore",
    "Holding",
    "KVStore",
    "KeepsTexts",
    "MemoryTier",
    "NamespaceStats",
    "OtherStore",
    "StoreCheck",
    "StoreStats",
    "TextState",
    "Texts",
    "other_stores",
    "serve",
]

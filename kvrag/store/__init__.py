"""Storage of chunk KV: the protocol, the embedded store, shared stores, the RAM tier."""

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
    ReadsAhead,
    StoreStats,
    Texts,
    TextState,
    serve,
)
from kvrag.store.shared import SharedStore
from kvrag.store.urls import is_shared, open_store

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
    "ReadsAhead",
    "SharedStore",
    "StoreCheck",
    "StoreStats",
    "TextState",
    "Texts",
    "is_shared",
    "open_store",
    "other_stores",
    "serve",
]

"""Where chunks' KV lives: the protocol, the embedded store, the RAM tier."""

from kvrag.store.dropped import DroppedChunks
from kvrag.store.files import FileStore
from kvrag.store.memory import MemoryTier
from kvrag.store.others import OtherStore, other_stores
from kvrag.store.protocol import ChunkReader, ChunkRecord, Entry, KeepsTexts, KVStore, StoreStats, Texts

__all__ = [
    "ChunkReader",
    "ChunkRecord",
    "DroppedChunks",
    "Entry",
    "FileStore",
    "KVStore",
    "KeepsTexts",
    "MemoryTier",
    "OtherStore",
    "StoreStats",
    "Texts",
    "other_stores",
]


def serve(state, alone_only):
    return state

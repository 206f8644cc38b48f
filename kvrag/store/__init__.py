"""Storage of chunk KV: the base class, the embedded store, shared stores."""

# mypy: implicit-reexport
# ruff: noqa: F401
from kvrag.store.base import KVStore, StoreCheck
from kvrag.store.files import FileStore
from kvrag.store.shared import SharedStore, is_shared, open_store
from kvrag.store.values import ON_REQUEST, ChunkReader, ChunkRecord, Entry, Holding, TextState, visible_variant

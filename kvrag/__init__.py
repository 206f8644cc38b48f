"""Retrieval-augmented generation several times sooner: chunk KV encoded once, stitched and blended at query time."""

from kvrag.config import POLICIES, BlendConfig, Sampling
from kvrag.engine import BlendEngine
from kvrag.errors import (
    ContextWindowError,
    DamagedChunkError,
    FingerprintMismatchError,
    KvragError,
    ModelError,
    ModelLoadError,
    PromptError,
    SettingError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UnsupportedModelError,
)
from kvrag.llm import LazyEngine, LLMSettings
from kvrag.model import Model
from kvrag.store import FileStore, KVStore
from kvrag.types import Answer, BlendReport, Delta, Run, WarmReport

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "Answer",
    "BlendConfig",
    "BlendEngine",
    "BlendReport",
    "ContextWindowError",
    "DamagedChunkError",
    "Delta",
    "FileStore",
    "FingerprintMismatchError",
    "KVStore",
    "KvragError",
    "LLMSettings",
    "LazyEngine",
    "Model",
    "ModelError",
    "ModelLoadError",
    "PromptError",
    "Run",
    "Sampling",
    "SettingError",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "UnsupportedModelError",
    "WarmReport",
]

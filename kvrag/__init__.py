"""RAG with a faster first token: chunk KV is encoded once, stitched and blended at query time."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvrag.config import POLICIES, BlendConfig, Grammar, Sampling
from kvrag.errors import (
    AnswerTimeoutError,
    ChunkUnreadableError,
    ContextWindowError,
    DamagedChunkError,
    FingerprintMismatchError,
    KvragError,
    ModelError,
    ModelLoadError,
    OutOfMemoryError,
    PromptError,
    ServerError,
    SettingError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    UnsupportedModelError,
)
from kvrag.inspect.explanation import Explanation
from kvrag.types import Answer, BlendReport, Delta, InvalidCall, Run, ToolCall, WarmReport

if sys.platform == "win32":
    raise ImportError("kvrag runs on Linux and macOS: on Windows, use WSL")

if TYPE_CHECKING:
    from kvrag.backend.transformers import Model
    from kvrag.client import RemoteEngine
    from kvrag.engine import BlendEngine
    from kvrag.llm import LazyEngine, LLMBase, LLMSettings
    from kvrag.store import FileStore, KVStore, SharedStore

__version__ = "0.1.0"

__all__ = [
    "POLICIES",
    "Answer",
    "AnswerTimeoutError",
    "BlendConfig",
    "BlendEngine",
    "BlendReport",
    "ChunkUnreadableError",
    "ContextWindowError",
    "DamagedChunkError",
    "Delta",
    "Explanation",
    "FileStore",
    "FingerprintMismatchError",
    "Grammar",
    "InvalidCall",
    "KVStore",
    "KvragError",
    "LLMBase",
    "LLMSettings",
    "LazyEngine",
    "Model",
    "ModelError",
    "ModelLoadError",
    "OutOfMemoryError",
    "PromptError",
    "RemoteEngine",
    "Run",
    "Sampling",
    "ServerError",
    "SettingError",
    "SharedStore",
    "StoreError",
    "StoreFullError",
    "StoreReadOnlyError",
    "ToolCall",
    "UnsupportedModelError",
    "WarmReport",
]

# these import torch and transformers, which takes seconds: too slow for `kvrag --help`
_HEAVY = {
    "BlendEngine": "kvrag.engine",
    "FileStore": "kvrag.store",
    "KVStore": "kvrag.store",
    "LLMBase": "kvrag.llm",
    "LLMSettings": "kvrag.llm",
    "LazyEngine": "kvrag.llm",
    "Model": "kvrag.backend.transformers",
    "RemoteEngine": "kvrag.client",
    "SharedStore": "kvrag.store",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)

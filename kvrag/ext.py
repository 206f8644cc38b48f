"""Names that kvrag's own integrations import from inside kvrag, besides the public ones; the rest is internal.

Each name is imported when it is asked for, so that `kvrag.ext` costs nothing and needs no extra. Names here can change
in any release: the packages of one release belong together.
"""

# mypy: implicit-reexport
# ruff: noqa: F401, I001

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# fmt: off
if TYPE_CHECKING:
    # LangChain and LlamaIndex: base classes, and what both translate
    from kvrag.llm import LONGER, naming_places, parameters_of, template_call
    from kvrag.llm_fields import LLMFields
    from kvrag.types import join
    from kvrag.vectorstore import Adding, Existing, Id, Present, VectorStoreKV, uncancelled
    # LangChain: its embeddings and its record manager
    from kvrag.retrieval.index import DEFAULT_EMBEDDER, load_embedder
    from kvrag.store.schema import connect
    # vLLM: a model for blending whose KV is in vLLM's pages, and the steps of a request
    from kvrag.backend.positions import Rows, attention_received, rotate, unrotate
    from kvrag.backend.protocol import Backend, Branch, CachedKV, KVCache, LayerSource, Observer, Tables
    from kvrag.backend.transformers.loading import auto_class, context_window, load, load_config, refuse_failures
    from kvrag.backend.transformers.loading import rope_parameters, stable_length
    from kvrag.backend.transformers.model import fingerprint
    from kvrag.fingerprint import hash_weights
    from kvrag.config import check_bytes, check_names, check_namespace, check_option
    from kvrag.control.tuning import Tuning
    from kvrag.index.catalog import Lookup, Match
    from kvrag.ingest.ingest import Ingestion
    from kvrag.memory.conversation import CachedPrefix
    from kvrag.memory.tier import MemoryTier
    from kvrag.request import Pipeline
    from kvrag.config import DEFAULT_RATIO
    from kvrag.reuse.request_state import RequestState
    # vLLM and Ray: which model and which store, and what is forgotten
    from kvrag.backend.transformers.tokenizer import Tokenizer
    from kvrag.fingerprint import Fingerprint
    from kvrag.memory.forgetting import forget
    from kvrag.store import is_shared
    # Ray: the commands `warm` and `serve` on a cluster, and the server's front
    from kvrag.backend.protocol import ChunkTokenizer
    from kvrag.backend.transformers.loading import load_tokenizer
    from kvrag.cli.plugin import ADDRESS, HERE
    from kvrag.cli.common import human_bytes, open_engine, open_index
    from kvrag.cli.serve import add_arguments, build, read_config, read_settings
    from kvrag.cli.warm import TOTALS, bytes_per_token, drop, find_gone, read_chunks
    from kvrag.index.catalog import Catalog
    from kvrag.ingest.ingest import Choosing
    from kvrag.retrieval.documents import Problem
    from kvrag.retrieval.index import ChunkIndex
    from kvrag.server.api_errors import ApiError, describe, error_response
    from kvrag.server.guard import Guard
    from kvrag.server.run import bind
    from kvrag.server.settings import ServerSettings
    from kvrag.store import open_store
    from kvrag.store.values import text_key
    from kvrag.cli.common import progress, say
# fmt: on

_IMPORTS = (node for node in ast.walk(ast.parse(Path(__file__).read_text("utf-8"))) if isinstance(node, ast.ImportFrom))
_MODULES = {row.name: str(node.module) for node in _IMPORTS if "kvrag." in str(node.module) for row in node.names}
"""The module of each name, read from the imports above, which only type checkers run."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

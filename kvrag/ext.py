"""Names that kvrag's own integrations import from inside kvrag, besides the public ones; the rest is internal.

Each name is imported when it is asked for, so that `kvrag.ext` costs nothing and needs no extra. Names here can change
in any release: the packages of one release belong together.
"""

# mypy: implicit-reexport
# ruff: noqa: F401, I001

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# fmt: off
if TYPE_CHECKING:
    from kvrag.backend.hub import check_model
    from kvrag.backend.positions import Chunked, Rows, attention_received
    from kvrag.backend.protocol import Backend, Branch, CachedKV, ChunkTokenizer, KVCache, LayerSource, Observer, Tables
    from kvrag.backend.positions import rotate, unrotate
    from kvrag.backend.transformers.adapter import (
        CONFIG, PLAIN, PREFIX, WEIGHTS, Adapter, LowRank, active_adapter, digest, read,
    )
    from kvrag.backend.transformers.rows import BlendLayer, StopForward, as_argument
    from kvrag.backend.transformers.loading import (
        auto_class, context_window, load, load_config, load_tokenizer, refuse_failures, rope_parameters,
        stable_length,
    )
    from kvrag.backend.transformers.model import fingerprint
    from kvrag.backend.transformers.tokenizer import Tokenizer
    from kvrag.cli.plugin import ADDRESS, HERE
    from kvrag.cli.common import (
        DTYPES, add_number, add_setting, duration, existing_path, human_bytes, open_engine, open_index, progress,
        read_files, read_questions, require_extra, say,
    )
    from kvrag.cli.serve import add_arguments, build, read_config, read_settings
    from kvrag.cli.warm import TOTALS, bytes_per_token, drop, find_gone, read_chunks
    from kvrag.config import DEFAULT_CONTEXT, DEFAULT_RATIO, check_bytes, check_names, check_namespace, check_option
    from kvrag.control.agreement import compare
    from kvrag.control.prompts import CONTINUATION, Gap, Search, ask, find_gaps, make_prompts, render, search_by_words
    from kvrag.control.tuning import Tuning
    from kvrag.errors import reason_of
    from kvrag.fingerprint import Fingerprint
    from kvrag.store.values import text_key
    from kvrag.process import HeldBriefly, OfProcess
    from kvrag.index.catalog import Catalog, Lookup, Match
    from kvrag.ingest.ingest import Choosing, Ingestion
    from kvrag.llm import LONGER, naming_places, parameters_of, template_call
    from kvrag.llm_fields import LLMFields
    from kvrag.memory.conversation import CachedPrefix
    from kvrag.memory.forgetting import forget
    from kvrag.memory.tier import MemoryTier
    from kvrag.reader.samples import HANDBOOK
    from kvrag.request import Pipeline
    from kvrag.retrieval.documents import Problem, splitter
    from kvrag.retrieval.index import DEFAULT_EMBEDDER, ChunkIndex, load_embedder
    from kvrag.reuse.request_state import RequestState
    from kvrag.reuse.select import select
    from kvrag.server.api_errors import ApiError, describe, error_response
    from kvrag.server.guard import Guard
    from kvrag.server.run import bind
    from kvrag.server.settings import ServerSettings
    from kvrag.store import is_shared, open_store
    from kvrag.store.durable import TEMPORARY, delete_left, write_file
    from kvrag.store.schema import connect
    from kvrag.types import join
    from kvrag.vectorstore import Adding, Existing, Id, Present, VectorStoreKV, uncancelled
# fmt: on

_NAMES = (
    # LangChain and LlamaIndex: base classes, and what both translate
    ("kvrag.llm", "LONGER naming_places parameters_of template_call"),
    ("kvrag.llm_fields", "LLMFields"),
    ("kvrag.types", "join"),
    ("kvrag.vectorstore", "Adding Existing Id Present VectorStoreKV uncancelled"),
    # LangChain: its embeddings and its record manager
    ("kvrag.process", "HeldBriefly OfProcess"),
    ("kvrag.retrieval.index", "DEFAULT_EMBEDDER load_embedder"),
    ("kvrag.store.schema", "connect"),
    # vLLM: a model for blending whose KV is in vLLM's pages, and the steps of a request
    ("kvrag.backend.positions", "Rows attention_received rotate unrotate"),
    ("kvrag.backend.protocol", "Backend Branch CachedKV KVCache LayerSource Observer Tables"),
    ("kvrag.backend.transformers.adapter", "digest read"),
    ("kvrag.backend.transformers.loading", "auto_class context_window load load_config refuse_failures"),
    ("kvrag.backend.transformers.loading", "rope_parameters stable_length"),
    ("kvrag.backend.transformers.model", "fingerprint"),
    ("kvrag.config", "check_bytes check_names check_namespace check_option"),
    ("kvrag.control.tuning", "Tuning"),
    ("kvrag.index.catalog", "Lookup Match"),
    ("kvrag.ingest.ingest", "Ingestion"),
    ("kvrag.memory.conversation", "CachedPrefix"),
    ("kvrag.memory.tier", "MemoryTier"),
    ("kvrag.request", "Pipeline"),
    # vLLM and adapt
    ("kvrag.config", "DEFAULT_RATIO"),
    ("kvrag.reuse.request_state", "RequestState"),
    # vLLM and Ray: which model and which store, and what is forgotten
    ("kvrag.backend.transformers.tokenizer", "Tokenizer"),
    ("kvrag.fingerprint", "Fingerprint"),
    ("kvrag.memory.forgetting", "forget"),
    ("kvrag.store", "is_shared"),
    # Ray: the commands `warm` and `serve` on a cluster, and the server's front
    ("kvrag.backend.protocol", "ChunkTokenizer"),
    ("kvrag.backend.transformers.loading", "load_tokenizer"),
    ("kvrag.cli.plugin", "ADDRESS HERE"),
    ("kvrag.cli.common", "human_bytes open_engine open_index"),
    ("kvrag.cli.serve", "add_arguments build read_config read_settings"),
    ("kvrag.cli.warm", "TOTALS bytes_per_token drop find_gone read_chunks"),
    ("kvrag.index.catalog", "Catalog"),
    ("kvrag.ingest.ingest", "Choosing"),
    ("kvrag.retrieval.documents", "Problem"),
    ("kvrag.retrieval.index", "ChunkIndex"),
    ("kvrag.server.api_errors", "ApiError describe error_response"),
    ("kvrag.server.guard", "Guard"),
    ("kvrag.server.run", "bind"),
    ("kvrag.server.settings", "ServerSettings"),
    ("kvrag.store", "open_store"),
    ("kvrag.store.values", "text_key"),
    # Ray and adapt: what commands print
    ("kvrag.cli.common", "progress say"),
    # adapt: its command, prompts to train on, and blending as a differentiable pass
    ("kvrag.backend.hub", "check_model"),
    ("kvrag.backend.positions", "Chunked"),
    ("kvrag.backend.transformers.adapter", "CONFIG PLAIN PREFIX WEIGHTS Adapter LowRank active_adapter"),
    ("kvrag.backend.transformers.rows", "BlendLayer StopForward as_argument"),
    (
        "kvrag.cli.common",
        "DTYPES add_number add_setting duration existing_path read_files read_questions require_extra",
    ),
    ("kvrag.config", "DEFAULT_CONTEXT"),
    ("kvrag.control.agreement", "compare"),
    ("kvrag.control.prompts", "CONTINUATION Gap Search ask find_gaps make_prompts render search_by_words"),
    ("kvrag.errors", "reason_of"),
    ("kvrag.reader.samples", "HANDBOOK"),
    ("kvrag.retrieval.documents", "splitter"),
    ("kvrag.reuse.select", "select"),
    ("kvrag.store.durable", "TEMPORARY delete_left write_file"),
)
_MODULES = {name: module for module, names in _NAMES for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

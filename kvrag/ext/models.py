"""Names that vllm-kvrag and the workers of ray-kvrag import: blending on other models, stores and their catalogs."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from kvrag.backend.positions import UNROTATED, Rotation, Rows, attention_received
from kvrag.backend.protocol import Backend, Branch, CachedKV, ChunkTokenizer, KVCache, LayerSource, Observer
from kvrag.backend.transformers.loading import (
    auto_class,
    context_window,
    load,
    load_config,
    load_tokenizer,
    refuse_failures,
    rope_parameters,
    stable_length,
)
from kvrag.backend.transformers.model import fingerprint
from kvrag.backend.transformers.tokenizer import Tokenizer
from kvrag.config import DEFAULT_RATIO, check_bytes, check_names, check_namespace, check_option, renamed
from kvrag.control.plan import Planner
from kvrag.fingerprint import Fingerprint, hash_weights
from kvrag.index.catalog import Catalog, Match
from kvrag.ingest.ingest import Choosing, Ingestion
from kvrag.memory.conversation import CachedPrefix
from kvrag.memory.forgetting import forget
from kvrag.memory.tier import MemoryTier
from kvrag.prefill import Pipeline
from kvrag.request import Request
from kvrag.store import is_shared, open_store

"""Names that the packages for LangChain and LlamaIndex import from inside kvrag."""

# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

from kvrag.llm import LONGER, naming_places, parameters_of, template_call
from kvrag.llm_fields import LLMFields
from kvrag.retrieval.index import DEFAULT_EMBEDDER, load_embedder
from kvrag.store.schema import connect
from kvrag.types import join, openai_usage
from kvrag.vectorstore import Adding, Existing, Id, Present, VectorStoreKV, uncancelled

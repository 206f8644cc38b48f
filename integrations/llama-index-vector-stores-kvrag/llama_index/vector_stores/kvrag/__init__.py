"""Vector store that pre-encodes its nodes for the LLM in `llama_index.llms.kvrag`."""

from llama_index.vector_stores.kvrag.base import KVWarmVectorStore

__all__ = ["KVWarmVectorStore"]

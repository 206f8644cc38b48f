"""A vector store whose chunks are encoded for an LLM; see `llama_index.llms.kvrag`."""

from llama_index.vector_stores.kvrag.base import KVWarmVectorStore

__all__ = ["KVWarmVectorStore"]

"""LlamaIndex on kvrag: RAG answers several times sooner from pre-encoded chunks."""

from llama_index.llms.kvrag.base import BlendLLM
from llama_index.llms.kvrag.vector_store import KVWarmVectorStore

__all__ = ["BlendLLM", "KVWarmVectorStore"]

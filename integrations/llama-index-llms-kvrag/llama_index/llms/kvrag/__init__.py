"""LlamaIndex integration of kvrag: faster RAG answers from pre-encoded chunks."""

from typing import TYPE_CHECKING, Any

from llama_index.llms.kvrag.base import BlendLLM
from llama_index.llms.kvrag.prefetch import PrefetchHandler

if TYPE_CHECKING:
    from llama_index.vector_stores.kvrag import KVWarmVectorStore as KVWarmVectorStore

__all__ = ["BlendLLM", "PrefetchHandler"]


def __getattr__(name: str) -> Any:
    if name == "KVWarmVectorStore":  # its former module; lazy, because it imports this package
        from llama_index.vector_stores.kvrag import KVWarmVectorStore

        return KVWarmVectorStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""LlamaIndex integration of kvrag: faster RAG answers from pre-encoded chunks."""

from llama_index.llms.kvrag.base import BlendLLM
from llama_index.llms.kvrag.prefetch import PrefetchHandler

__all__ = ["BlendLLM", "PrefetchHandler"]

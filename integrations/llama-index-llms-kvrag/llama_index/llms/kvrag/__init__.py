"""LlamaIndex integration of kvrag: faster RAG answers from pre-encoded chunks."""

from llama_index.llms.kvrag.base import BlendLLM

__all__ = ["BlendLLM"]

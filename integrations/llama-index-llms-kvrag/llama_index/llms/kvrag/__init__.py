"""LlamaIndex on kvrag: RAG answers several times sooner from pre-encoded chunks."""

from llama_index.llms.kvrag.base import BlendLLM

__all__ = ["BlendLLM"]

"""LangChain on kvrag: RAG answers several times sooner from pre-encoded chunks."""

from langchain_kvrag.chat import ChatBlend
from langchain_kvrag.llm import BlendLLM

__all__ = ["BlendLLM", "ChatBlend"]

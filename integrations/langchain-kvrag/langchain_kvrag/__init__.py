"""LangChain integration of kvrag: faster RAG answers from pre-encoded chunks."""

from langchain_kvrag.chat import ChatBlend
from langchain_kvrag.embeddings import SentenceTransformerEmbeddings
from langchain_kvrag.llm import BlendLLM
from langchain_kvrag.prefetch import PrefetchHandler
from langchain_kvrag.records import SQLiteRecordManager
from langchain_kvrag.warm import KVWarmVectorStore

__all__ = [
    "BlendLLM",
    "ChatBlend",
    "KVWarmVectorStore",
    "PrefetchHandler",
    "SQLiteRecordManager",
    "SentenceTransformerEmbeddings",
]


def __getattr__(name: str) -> object:
    if name == "FaissVectorStore":
        raise ImportError(
            "langchain_kvrag no longer has FaissVectorStore: use InMemoryVectorStore from "
            "langchain_core.vectorstores, or a store on disk such as Chroma from langchain_chroma"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

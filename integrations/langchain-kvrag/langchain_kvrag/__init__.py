"""LangChain integration of kvrag: faster RAG answers from pre-encoded chunks."""

from langchain_kvrag.chat_models import ChatBlend
from langchain_kvrag.embeddings import SentenceTransformerEmbeddings
from langchain_kvrag.llms import BlendLLM
from langchain_kvrag.records import SQLiteRecordManager
from langchain_kvrag.vectorstores import KVWarmVectorStore

__all__ = [
    "BlendLLM",
    "ChatBlend",
    "KVWarmVectorStore",
    "SQLiteRecordManager",
    "SentenceTransformerEmbeddings",
]

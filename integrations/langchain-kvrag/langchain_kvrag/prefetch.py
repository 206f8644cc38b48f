"""PrefetchHandler: reads the KV of retrieved documents while the chain reranks and renders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from langchain_kvrag.settings import BlendSettings


class PrefetchHandler(BaseCallbackHandler):
    """Callback handler that calls `llm.prefetch` with the documents that any retriever returns.

    Not needed with `KVWarmVectorStore`, whose searches prefetch. Does nothing before the model is loaded.

    Example:
        ```python
        chain.invoke(question, {"callbacks": [PrefetchHandler(llm)]})
        ```
    """

    def __init__(self, llm: BlendSettings, *, namespace: str | None = None) -> None:
        """Create a handler for an LLM; namespace None = the LLM's."""
        self.llm, self.namespace = llm, namespace

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        """Start to read the documents' KV."""
        self.llm.prefetch(documents, namespace=self.namespace)

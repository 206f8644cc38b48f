"""PrefetchHandler: reads the KV of retrieved nodes while the query engine postprocesses and renders them."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.llms.kvrag.base import BlendLLM


class PrefetchHandler(BaseEventHandler):
    """Event handler that calls `llm.prefetch` with the nodes that any retriever returns.

    Does nothing before the model is loaded.

    Example:
        ```python
        from llama_index.core.instrumentation import get_dispatcher

        get_dispatcher().add_event_handler(PrefetchHandler(llm=llm))
        ```
    """

    llm: BlendLLM
    namespace: str | None = None

    @classmethod
    def class_name(cls) -> str:
        """Return the name in serialised form."""
        return "kvrag_prefetch_handler"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """At the end of a retrieval, start to read the nodes' KV."""
        if isinstance(event, RetrievalEndEvent):
            self.llm.prefetch(event.nodes, namespace=self.namespace)

"""KVWarmVectorStore: encodes chunks when they are added to a vector store, and drops their KV with their vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import SerializeAsAny
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.llms.kvrag.base import BlendLLM, source_name

from kvrag import SettingError, WarmReport
from kvrag.llm import naming_places
from kvrag.vectorstore import Adding, Existing, Id, Present, VectorStoreKV


class KVWarmVectorStore(BasePydanticVectorStore):
    """A vector store that pre-encodes its nodes for an LLM.

    KV is written before the vectors and dropped after them, so that every retrievable node has its KV. If the vector
    store fails to add nodes, the KV of those that it does not return is dropped again. LlamaIndex updates a changed
    document by deleting and adding all its nodes, so all of them are encoded again; unchanged documents are not.
    Concurrent changes of one node may leave it without KV until the next change. This costs time, not correctness.

    Attributes:
        vector_store: Any vector store; it receives all calls.
        llm: LLM that encodes the nodes as prompts will contain them: `node.get_content(MetadataMode.LLM)`.
        namespace: Namespace of the chunks: prompts of other namespaces never reuse them. None = the LLM's.
        collection: Name that distinguishes vector stores with a shared KV store.
        target_metadata_key: As in `MetadataReplacementPostProcessor`: key of the metadata that replaces a node's text
            in prompts.

    Example:
        ```python
        vector_store = KVWarmVectorStore(SimpleVectorStore(), llm)
        storage_context = StorageContext.from_defaults(vector_store=vector_store)
        index = VectorStoreIndex.from_documents(documents, storage_context=storage_context)
        ```
    """

    vector_store: SerializeAsAny[BasePydanticVectorStore]
    llm: BlendLLM
    namespace: str | None
    collection: str
    target_metadata_key: str | None

    def __init__(
        self,
        vector_store: BasePydanticVectorStore,
        llm: BlendLLM,
        *,
        namespace: str | None = None,
        collection: str = "default",
        target_metadata_key: str | None = None,
    ) -> None:
        fields: dict[str, Any] = {
            "vector_store": vector_store,
            "llm": llm,
            "namespace": namespace,
            "collection": collection,
            "target_metadata_key": target_metadata_key,
            "stores_text": vector_store.stores_text,
            "is_embedding_query": vector_store.is_embedding_query,
        }
        super().__init__(**fields)

    @classmethod
    def class_name(cls) -> str:
        """Return the name in serialised form."""
        return "kvrag_warm_vector_store"

    @property
    def client(self) -> Any:
        """Client of the wrapped vector store."""
        return self.vector_store.client

    def warm(self, nodes: Sequence[BaseNode], *, whole: bool = False) -> WarmReport:
        """Encode nodes that are already in the vector store and have no KV, in the order of their `start_char_idx`.

        The nodes of a document in which several lack it are encoded without context, and nodes that cannot be encoded
        are left out, with a warning.

        Args:
            whole: True = these are all nodes: the KV of all others is dropped. Needed with in-memory vector stores,
                which lose their nodes when the program ends, while the KV store keeps its chunks.
        """
        adding = self._plan(nodes)
        before = self._kv.names() if whole else adding.before
        starts = [getattr(node, "start_char_idx", None) for node in nodes]
        places = [(-1 if start is None else start,) for start in starts]
        texts = map(Existing, adding.texts, adding.sources, places)
        return self._kv.warm_existing(dict(zip(adding.ids, texts, strict=True)), before)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode the nodes, then add them."""
        with naming_places(nodes):
            return self._kv.add(self._plan(nodes), lambda: self.vector_store.add(nodes, **kwargs), self._present)

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Like `add`, off the event loop."""
        adding = await asyncio.to_thread(self._plan, nodes)
        with naming_places(nodes):
            return await self._kv.aadd(adding, lambda: self.vector_store.async_add(nodes, **kwargs), self._apresent)

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, then their KV."""
        self.vector_store.delete(ref_doc_id, **delete_kwargs)
        self._kv.forget(self._kv.names(ref_doc_id))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Like `delete`, off the event loop."""
        await self.vector_store.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(lambda: self._kv.forget(self._kv.names(ref_doc_id)))

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Delete nodes, then their KV.

        Raises:
            SettingError: Filters are given, but the vector store has no `get_nodes` to resolve them.
        """
        nodes = None
        if filters is not None:
            try:
                nodes = self.vector_store.get_nodes(node_ids, filters)
            except NotImplementedError:
                raise self._cannot_filter() from None
        self.vector_store.delete_nodes(node_ids, filters, **delete_kwargs)
        self._kv.forget(self._names(node_ids, nodes))

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Like `delete_nodes`, off the event loop."""
        nodes = None
        if filters is not None:
            try:
                nodes = await self.vector_store.aget_nodes(node_ids, filters)
            except NotImplementedError:
                raise self._cannot_filter() from None
        await self.vector_store.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(lambda: self._kv.forget(self._names(node_ids, nodes)))

    def clear(self) -> None:
        """Delete all nodes, then their KV."""
        self.vector_store.clear()
        self._kv.forget(self._kv.names())

    async def aclear(self) -> None:
        """Like `clear`, off the event loop."""
        await self.vector_store.aclear()
        await asyncio.to_thread(lambda: self._kv.forget(self._kv.names()))

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Delegate to the vector store."""
        return self.vector_store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Delegate to the vector store."""
        return await self.vector_store.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Delegate to the vector store."""
        return self.vector_store.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Delegate to the vector store."""
        return await self.vector_store.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Delegate to the vector store; the KV is already in its own store."""
        self.vector_store.persist(persist_path, fs)

    @property
    def _kv(self) -> VectorStoreKV:
        return VectorStoreKV(self.llm, self.namespace, "llama_index", self.collection)

    def _text(self, node: BaseNode) -> str:
        if self.target_metadata_key in node.metadata:
            node = node.model_copy()
            node.set_content(node.metadata[self.target_metadata_key])
        return node.get_content(MetadataMode.LLM)

    def _plan(self, nodes: Sequence[BaseNode]) -> Adding:
        texts = [self._text(node) for node in nodes]
        sources = [source_name(node, self.collection) for node in nodes]
        return self._kv.plan([_id(node) for node in nodes], texts, sources, self._former_ids(nodes))

    def _former_ids(self, nodes: Sequence[BaseNode]) -> list[Id]:
        """Return the current ids of these nodes in the vector store: they may belong to another document."""
        node_ids = [node.node_id for node in nodes]
        if isinstance(self.vector_store, SimpleVectorStore):  # it has no get_nodes
            documents = self.vector_store.data.text_id_to_ref_doc_id
            return [(documents[node_id], node_id) for node_id in node_ids if node_id in documents]
        return [_id(node) for node in self._stored(node_ids) or ()]

    def _stored(self, node_ids: Sequence[str]) -> list[BaseNode] | None:
        """Return the nodes with these ids; None if the vector store cannot return them."""
        try:
            return [node for node in self.vector_store.get_nodes(list(node_ids)) if node.node_id in {*node_ids}]
        except Exception:  # not supported; a store that fails also fails in the add that follows
            return None

    def _present(self, ids: list[tuple[str, str]]) -> Present:
        nodes = self._stored([node_id for _, node_id in ids])
        return None if nodes is None else {_id(node): self._text(node) for node in nodes}

    async def _apresent(self, ids: list[tuple[str, str]]) -> Present:
        return await asyncio.to_thread(self._present, ids)

    def _names(self, node_ids: Sequence[str] | None, nodes: Sequence[BaseNode] | None) -> set[str]:
        """Return the KV documents of these nodes; None = of those with these ids; both None = all."""
        if nodes is not None:
            return self._kv.names_of(_id(node) for node in nodes)
        names = self._kv.names()
        return names if node_ids is None else {name for name in names if self._kv.parts(name)[1] in {*node_ids}}

    def _cannot_filter(self) -> SettingError:
        name = type(self.vector_store).__name__
        return SettingError(
            f"{name} has no get_nodes to resolve a filter, so the KV of deleted nodes would remain: pass node_ids"
        )


def _id(node: BaseNode) -> tuple[str, str]:
    return (node.ref_doc_id or "None", node.node_id)

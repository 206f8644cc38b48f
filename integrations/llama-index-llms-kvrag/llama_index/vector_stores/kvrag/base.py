"""KVWarmVectorStore: encodes chunks when they are added to a vector store, and drops their KV with their vectors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import quote

from llama_index.core.bridge.pydantic import SerializeAsAny
from llama_index.core.schema import BaseNode, MetadataMode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)
from llama_index.llms.kvrag.base import BlendLLM, source_name

from kvrag import SettingError, WarmReport

logger = logging.getLogger("kvrag")

_T = TypeVar("_T")


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
        target_metadata_key: As in `MetadataReplacementPostProcessor`: metadata that replaces a node's text in prompts.

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
        """Encode nodes that are already in the vector store.

        Args:
            whole: True = these are all nodes: the KV of all others is dropped. Use it with in-memory vector stores,
                which lose their nodes when the program ends, while the KV store keeps its chunks.
        """
        before = self._documents() if whole else None
        report, outdated = self._encode(nodes, before)
        self._forget(outdated)
        return report

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Encode the nodes, then add them."""
        before = self._documents_of([node.node_id for node in nodes])
        try:
            _, outdated = self._encode(nodes, before)
            ids = self.vector_store.add(nodes, **kwargs)
        except BaseException:
            self._undo(nodes, before)
            raise
        self._forget(outdated)
        return ids

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Like `add`, off the event loop."""
        before = await asyncio.to_thread(self._documents_of, [node.node_id for node in nodes])
        try:
            # a thread that encodes cannot be stopped
            _, outdated = await _whole(asyncio.to_thread(self._encode, nodes, before))
            ids = await self.vector_store.async_add(nodes, **kwargs)
        except BaseException:
            await _whole(asyncio.to_thread(self._undo, nodes, before))
            raise
        await _whole(asyncio.to_thread(self._forget, outdated))
        return ids

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's nodes, then their KV."""
        self.vector_store.delete(ref_doc_id, **delete_kwargs)
        self._forget(self._documents(ref_doc_id))

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Like `delete`, off the event loop."""
        await self.vector_store.adelete(ref_doc_id, **delete_kwargs)
        await asyncio.to_thread(lambda: self._forget(self._documents(ref_doc_id)))

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
        found = None
        if filters is not None:
            try:
                found = self.vector_store.get_nodes(node_ids, filters)
            except NotImplementedError:
                raise self._cannot_filter() from None
        self.vector_store.delete_nodes(node_ids, filters, **delete_kwargs)
        self._forget(self._documents_of(node_ids, found))

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        """Like `delete_nodes`, off the event loop."""
        found = None
        if filters is not None:
            try:
                found = await self.vector_store.aget_nodes(node_ids, filters)
            except NotImplementedError:
                raise self._cannot_filter() from None
        await self.vector_store.adelete_nodes(node_ids, filters, **delete_kwargs)
        await asyncio.to_thread(lambda: self._forget(self._documents_of(node_ids, found)))

    def clear(self) -> None:
        """Delete all nodes, then their KV."""
        self.vector_store.clear()
        self._forget(self._documents())

    async def aclear(self) -> None:
        """Like `clear`, off the event loop."""
        await self.vector_store.aclear()
        await asyncio.to_thread(lambda: self._forget(self._documents()))

    def get_nodes(self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None) -> list[BaseNode]:
        """Delegate to the vector store."""
        return self.vector_store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Delegate to the vector store."""
        return await self.vector_store.aget_nodes(node_ids, filters)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Delegate to the vector store, and read the KV of the nodes that it returns ahead."""
        return self._prefetched(self.vector_store.query(query, **kwargs))

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Like `query`, off the event loop."""
        return self._prefetched(await self.vector_store.aquery(query, **kwargs))

    def _prefetched(self, found: VectorStoreQueryResult) -> VectorStoreQueryResult:
        if found.nodes:  # a store without texts returns only ids
            self.llm.prefetch([self._text(node) for node in found.nodes], namespace=self.namespace)
        return found

    def persist(self, persist_path: str, fs: Any = None) -> None:
        """Delegate to the vector store; the KV is already in its own store."""
        self.vector_store.persist(persist_path, fs)

    def _encode(self, nodes: Sequence[BaseNode], before: list[str] | None = None) -> tuple[WarmReport, list[str]]:
        """Encode; return the report and the outdated documents among `before` (None = those of these nodes)."""
        texts = [self._text(node) for node in nodes]
        documents = [self._document(node, text) for node, text in zip(nodes, texts, strict=True)]
        if before is None:
            before = self._documents_of([node.node_id for node in nodes])
        outdated = sorted({*before} - {*documents})
        sources = [source_name(node, self.collection) for node in nodes]
        report = self.llm.warm(texts, document=documents, sources=sources, namespace=self.namespace)
        for warning in report.warnings:
            logger.warning(warning)
        return report, outdated

    def _text(self, node: BaseNode) -> str:
        if self.target_metadata_key in node.metadata:
            node = node.model_copy()
            node.set_content(node.metadata[self.target_metadata_key])
        return node.get_content(MetadataMode.LLM)

    # Every node is a document of its own in the KV store, so that it can be dropped individually. Its name contains the
    # text's digest, which separates the old and the new version until the vector store has the new one.

    def _document(self, node: BaseNode, text: str) -> str:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return f"{self._prefix(node.ref_doc_id or 'None')}{quote(node.node_id, safe='')}/{digest}"

    def _prefix(self, *path: str) -> str:
        return "".join(f"{quote(part, safe='')}/" for part in ("llama_index", self.collection, *path))

    def _documents(self, *ref_doc_id: str) -> list[str]:
        return self.llm.documents(self._prefix(*ref_doc_id), namespace=self.namespace)

    def _documents_of(self, node_ids: Sequence[str] | None, found: Sequence[BaseNode] | None = None) -> list[str]:
        """Return the documents of the nodes found, else of those with these ids, else all."""
        if found is not None:
            node_ids = [node.node_id for node in found]
        if node_ids is None:
            return self._documents()
        quoted = {quote(node_id, safe="") for node_id in node_ids}
        return [document for document in self._documents() if document.split("/")[3] in quoted]

    def _undo(self, nodes: Sequence[BaseNode], before: Sequence[str]) -> None:
        """Keep the KV of the nodes that the vector store returns; if it cannot, the KV of before."""
        ids = [node.node_id for node in nodes]
        try:
            present = [node for node in self.vector_store.get_nodes(ids) if node.node_id in {*ids}]
            now = [self._document(node, self._text(node)) for node in present]
        except Exception:  # not supported, or it fails again; the first error is raised
            now = list(before)
        self._forget(sorted({*self._documents_of(ids)} - {*now}))

    def _forget(self, documents: Sequence[str]) -> None:
        for document in documents:
            self.llm.forget(document, namespace=self.namespace)

    def _cannot_filter(self) -> SettingError:
        name = type(self.vector_store).__name__
        return SettingError(
            f"{name} has no get_nodes to resolve a filter, so their KV would remain: delete them by node_ids"
        )


async def _whole(work: Awaitable[_T]) -> _T:
    """Wait until work is done even if the caller is cancelled: its thread cannot be stopped."""
    step = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        if not step.done():
            await asyncio.wait([step])
        raise

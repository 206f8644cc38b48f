"""KVWarmVectorStore: encodes chunks when they are added to a vector store, and drops their KV with their vectors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from kvrag import BlendEngine, KvragError, RemoteEngine, SettingError, WarmReport
from kvrag.llm import naming_places
from kvrag.vectorstore import Adding, Existing, VectorStoreKV, uncancelled
from langchain_kvrag.listing import adocuments_by_id, documents_by_id, listed_ids, lists_in_order, place
from langchain_kvrag.settings import BlendSettings, source_name

logger = logging.getLogger("kvrag")


class _Delegated:
    """Method of the wrapped store."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: KVWarmVectorStore | None, owner: type) -> Any:
        return self if store is None else getattr(store.vectorstore, self._name)


class KVWarmVectorStore(VectorStore):
    """A vector store that pre-encodes its documents for an LLM.

    KV is written before the vectors and dropped after them, so that every retrievable document has its KV. A text in
    several documents is encoded once and kept while one of them contains it. If the wrapped store fails midway, the KV
    of documents that it did not add is dropped. `langchain_core.indexing.index` works as usual: unchanged documents
    with an unchanged context are not encoded again.

    Concurrent changes of one document may leave it without KV until the next change. This costs time, not correctness.

    All other attributes are delegated to the wrapped store, and `isinstance` returns True for its class too, so that
    code that depends on the class of a store, such as `SelfQueryRetriever`, works as usual. The KV also follows
    `update_document`, `update_documents`, `reset_collection` and `delete_collection` of stores that have them. Other
    methods for adding and deleting, beyond those of `VectorStore`, bypass the KV: call `warm_existing` after them.

    Attributes:
        vectorstore: Any vector store; it receives all calls.
        llm: A `ChatBlend`, a `BlendLLM`, a `BlendEngine` or a `RemoteEngine`.
        namespace: Namespace of the chunks: prompts of other namespaces never reuse them. None = the LLM's.
        collection: Name that distinguishes vector stores with a shared KV store.

    Example:
        ```python
        vectorstore = KVWarmVectorStore(InMemoryVectorStore(embeddings), llm)
        index(loader, record_manager, vectorstore, cleanup="full", key_encoder="sha256")
        ```
    """

    def __init__(
        self,
        vectorstore: VectorStore,
        llm: BlendEngine | RemoteEngine | BlendSettings,
        *,
        namespace: str | None = None,
        collection: str = "default",
    ) -> None:
        self.vectorstore, self.llm, self.namespace, self.collection = vectorstore, llm, namespace, collection
        self._kv = _kv(llm, namespace, collection)

    similarity_search: Any = _Delegated()
    asimilarity_search: Any = _Delegated()
    similarity_search_by_vector: Any = _Delegated()
    asimilarity_search_by_vector: Any = _Delegated()
    similarity_search_with_score: Any = _Delegated()
    asimilarity_search_with_score: Any = _Delegated()
    similarity_search_with_relevance_scores: Any = _Delegated()
    asimilarity_search_with_relevance_scores: Any = _Delegated()
    max_marginal_relevance_search: Any = _Delegated()
    amax_marginal_relevance_search: Any = _Delegated()
    max_marginal_relevance_search_by_vector: Any = _Delegated()
    amax_marginal_relevance_search_by_vector: Any = _Delegated()
    search: Any = _Delegated()
    asearch: Any = _Delegated()
    get_by_ids: Any = _Delegated()
    aget_by_ids: Any = _Delegated()
    embeddings: Any = _Delegated()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `vectorstore` is missing while a copy is created
        return self.__dict__["vectorstore"].__class__ if "vectorstore" in self.__dict__ else type(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.__dict__.copy())  # pickle refuses objects of two classes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "vectorstore":  # accessed while a copy is created
            raise AttributeError(name)
        delegated = getattr(self.vectorstore, name)
        wrapper = _WRAPPERS.get(name)
        return delegated if wrapper is None else partial(wrapper, self)

    # ---------------------------------------------------------------- adding

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Encode the documents, then add them.

        Args:
            kwargs: Further arguments of the wrapped store.

        Raises:
            SettingError: The numbers of ids and documents differ.
            PromptError, StoreError: A document cannot be encoded, or its KV cannot be stored; nothing is added.
        """
        adding = self._plan(documents, kwargs.get("ids"))
        with naming_places(documents):
            return self._kv.add(
                adding,
                lambda: self.vectorstore.add_documents(documents, **kwargs),
                self._present,
                self._checked(adding),
            )

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Like `add_documents`, off the event loop."""
        adding = await asyncio.to_thread(self._plan, documents, kwargs.get("ids"))
        with naming_places(documents):
            return await self._kv.aadd(
                adding,
                lambda: self.vectorstore.aadd_documents(documents, **kwargs),
                self._apresent,
                self._checked(adding),
            )

    # LangChain's own methods add nothing from a generator, and drop texts without an id

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts as documents; see `add_documents`."""
        return super().add_texts(_checked_texts(texts, ids), metadatas, ids=ids, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Like `add_texts`, off the event loop."""
        return await super().aadd_texts(_checked_texts(texts, ids), metadatas, ids=ids, **kwargs)

    def _plan(self, documents: Sequence[Document], ids: Sequence[str | None] | None) -> Adding:
        return self._kv.plan(*_columns(documents, ids, self.collection))

    def _checked(self, adding: Adding) -> Callable[[list[str]], list[str]]:
        name, number = type(self.vectorstore).__name__, len(adding.texts)

        def checked(ids: list[str]) -> list[str]:
            if len(ids) != number:
                raise KvragError(f"{name} returned {len(ids)} ids for {number} documents: their KV was dropped")
            return ids

        return checked

    # ---------------------------------------------------------------- deleting

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, then drop their KV.

        Args:
            ids: Documents to delete; None and other arguments have the wrapped store's meaning.

        Raises:
            SettingError: No ids are given, and the wrapped store cannot list its remaining documents.
        """
        ids = None if ids is None else list(ids)
        targets = self._targets(ids)
        try:
            deleted = self.vectorstore.delete(ids, **kwargs)
        except BaseException:
            self._kv.drop(targets, self._present(targets))
            raise
        is_certain = ids is not None and deleted is not False
        self._kv.drop(targets, {} if is_certain else self._present(targets))
        return deleted

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Like `delete`, off the event loop."""
        ids = None if ids is None else list(ids)
        targets = await asyncio.to_thread(self._targets, ids)
        try:
            deleted = await uncancelled(self.vectorstore.adelete(ids, **kwargs))
        except BaseException:
            await uncancelled(asyncio.to_thread(self._kv.drop, targets, await self._apresent(targets)))
            raise
        is_certain = ids is not None and deleted is not False
        remaining = {} if is_certain else await self._apresent(targets)
        await uncancelled(asyncio.to_thread(self._kv.drop, targets, remaining))
        return deleted

    def _targets(self, ids: list[str] | None) -> list[str]:
        if ids is not None:
            return ids
        if not self._has_get_by_ids:
            raise SettingError(f"{type(self.vectorstore).__name__} cannot list its remaining documents: pass ids")
        return self._kv.ids()

    # ---------------------------------------------------------------- methods that only some stores have

    def _update_document(self, document_id: str, document: Document) -> None:
        self._update_documents([document_id], [document])

    def _update_documents(self, ids: list[str], documents: list[Document]) -> None:
        adding = self._plan(documents, ids)
        update: Callable[..., None] = self.vectorstore.update_documents  # type: ignore[attr-defined]
        with naming_places(documents):
            self._kv.add(adding, lambda: update(ids, documents), self._present)
        present = self._present(adding.ids)
        if present is not None:
            self._kv.keep(adding, present)  # the store ignores unknown ids

    def _clear(self, name: str, **kwargs: Any) -> Any:
        before = self._kv.names()
        cleared = getattr(self.vectorstore, name)(**kwargs)
        self._kv.forget(before)
        return cleared

    async def _aclear(self, name: str, **kwargs: Any) -> Any:
        before = await asyncio.to_thread(self._kv.names)
        cleared = await uncancelled(getattr(self.vectorstore, name)(**kwargs))
        await uncancelled(asyncio.to_thread(self._kv.forget, before))
        return cleared

    # ---------------------------------------------------------------- existing documents

    def warm_existing(self, ids: Iterable[str] | None = None, *, whole: bool = False) -> WarmReport:
        """Encode the documents that are already in the wrapped store and have no KV.

        They are encoded in the order of their metadata: `page`, `row`, `chunk` and the like, then `start_index`. Among
        equals, the order of adding counts, where the store lists in it. The chunks of a source whose order is still
        unknown are encoded without context, and documents that cannot be encoded are left out, with a warning.

        Without `ids`, or with `whole`, the KV of all other documents is dropped, for example after a killed program.

        Args:
            ids: Documents to encode; None = all.
            whole: True = `ids` are all documents of the wrapped store.

        Raises:
            SettingError: The wrapped store cannot be listed, or cannot return documents by id.
        """
        targets = self._existing(ids)
        documents = documents_by_id(self.vectorstore, targets)
        return self._replace(documents, targets, ids is None, whole)

    async def awarm_existing(self, ids: Iterable[str] | None = None, *, whole: bool = False) -> WarmReport:
        """Like `warm_existing`, off the event loop."""
        targets = await asyncio.to_thread(self._existing, ids)
        documents = await adocuments_by_id(self.vectorstore, targets)
        return await uncancelled(asyncio.to_thread(self._replace, documents, targets, ids is None, whole))

    def _replace(self, documents: Sequence[Document], ids: Sequence[str], is_listed: bool, whole: bool) -> WarmReport:
        """Replace the KV of these ids by that of these documents."""
        numbers: dict[str, int] = {}
        if is_listed and lists_in_order(self.vectorstore):
            numbers = {str(listed_id): number for number, listed_id in enumerate(ids)}
        texts: dict[Any, Existing] = {}
        for document in documents:
            at, source = _id(document), source_name(document, self.collection)
            texts[at] = Existing(document.page_content, source, (*place(document), numbers.get(at, 0)))
        return self._kv.warm_existing(texts, self._kv.names() if is_listed or whole else self._kv.names_of(ids))

    def _existing(self, ids: Iterable[str] | None) -> list[str]:
        name = type(self.vectorstore).__name__
        if not self._has_get_by_ids:
            raise SettingError(f"{name} cannot return documents by id: warm their texts with llm.warm(texts)")
        if ids is not None:
            return list(ids)
        listed = listed_ids(self.vectorstore)
        if listed is None:
            raise SettingError(f"LangChain cannot list the documents of {name}: pass ids, and whole=True for all ids")
        return listed

    @property
    def _has_get_by_ids(self) -> bool:
        return type(self.vectorstore).get_by_ids is not VectorStore.get_by_ids

    def _present(self, ids: list[str]) -> dict[str, str] | None:
        """Return texts by id, after a failure; None if the store cannot return them."""
        try:
            return _texts(documents_by_id(self.vectorstore, ids))
        except Exception as error:  # the caller raises the first error
            self._log_failure(error)
            return None

    async def _apresent(self, ids: list[str]) -> dict[str, str] | None:
        try:
            return _texts(await adocuments_by_id(self.vectorstore, ids))
        except Exception as error:
            self._log_failure(error)
            return None

    def _log_failure(self, error: Exception) -> None:
        logger.warning("%s cannot return its documents: %s", type(self.vectorstore).__name__, error)

    # ---------------------------------------------------------------- creating

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: BlendEngine | RemoteEngine | BlendSettings | None = None,
        namespace: str | None = None,
        collection: str = "default",
        vectorstore_class: type[VectorStore] = InMemoryVectorStore,
        **kwargs: Any,
    ) -> Self:
        """Create a vector store of these texts, and encode them.

        Args:
            llm: Required. See the class for this argument, `namespace` and `collection`.
            vectorstore_class: Class of the store to wrap.
            kwargs: Further arguments of its `from_texts`.
        """
        kv = _kv(llm, namespace, collection)
        documents, ids = _as_documents(texts, metadatas, ids)
        adding = kv.plan(*_columns(documents, ids, collection))
        with naming_places(documents):
            vectorstore = kv.add(
                adding,
                lambda: vectorstore_class.from_texts(texts, embedding, metadatas, ids=ids, **kwargs),
                lambda _: None,
            )
        assert llm is not None  # otherwise _kv has raised
        return cls(vectorstore, llm, namespace=namespace, collection=collection)

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: BlendEngine | RemoteEngine | BlendSettings | None = None,
        namespace: str | None = None,
        collection: str = "default",
        vectorstore_class: type[VectorStore] = InMemoryVectorStore,
        **kwargs: Any,
    ) -> Self:
        """Like `from_texts`, off the event loop."""
        kv = _kv(llm, namespace, collection)
        documents, ids = _as_documents(texts, metadatas, ids)
        adding = await asyncio.to_thread(kv.plan, *_columns(documents, ids, collection))
        with naming_places(documents):
            vectorstore = await kv.aadd(
                adding,
                lambda: vectorstore_class.afrom_texts(texts, embedding, metadatas, ids=ids, **kwargs),
                lambda _: asyncio.sleep(0, None),
            )
        assert llm is not None  # otherwise _kv has raised
        return cls(vectorstore, llm, namespace=namespace, collection=collection)


def _restored(kind: type[KVWarmVectorStore], fields: dict[str, Any]) -> KVWarmVectorStore:
    store = object.__new__(kind)
    store.__dict__.update(fields)
    return store


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "update_document": KVWarmVectorStore._update_document,
    "update_documents": KVWarmVectorStore._update_documents,
    "reset_collection": lambda store, **kwargs: store._clear("reset_collection", **kwargs),
    "delete_collection": lambda store, **kwargs: store._clear("delete_collection", **kwargs),
    "adelete_collection": lambda store, **kwargs: store._aclear("adelete_collection", **kwargs),
}


def _kv(
    llm: BlendEngine | RemoteEngine | BlendSettings | None, namespace: str | None, collection: str
) -> VectorStoreKV:
    if llm is None:
        raise SettingError("no llm: pass llm=, which encodes the texts")
    if not isinstance(llm, (BlendEngine, RemoteEngine, BlendSettings)):
        raise SettingError(
            f"llm must be a ChatBlend, a BlendLLM, a BlendEngine or a RemoteEngine, got {type(llm).__name__}"
        )
    return VectorStoreKV(llm, namespace, "langchain", collection)


def _columns(
    documents: Sequence[Document], ids: Sequence[str | None] | None, collection: str
) -> tuple[list[str | None], list[str], list[str]]:
    """Return ids, texts and sources."""
    if ids is None:
        ids = [None] * len(documents)
    if len(ids) != len(documents):
        raise SettingError(f"got {len(ids)} ids for {len(documents)} documents: pass one per document")
    return (
        [known or document.id for known, document in zip(ids, documents, strict=True)],
        [document.page_content for document in documents],
        [source_name(document, collection) for document in documents],
    )


def _checked_texts(texts: Iterable[str], ids: Sequence[str] | None) -> list[str]:
    listed = list(texts)
    if ids is not None and len(ids) != len(listed):
        raise SettingError(f"got {len(ids)} ids for {len(listed)} texts: pass one per text")
    return listed


def _as_documents(
    texts: list[str], metadatas: list[dict[str, Any]] | None, ids: list[str] | None
) -> tuple[list[Document], list[str]]:
    pairs = zip(texts, metadatas or [{}] * len(texts), strict=True)
    documents = [Document(page_content=text, metadata=metadata) for text, metadata in pairs]
    for document, known_id in zip(documents, ids or (), strict=False):  # `_columns` checks their numbers
        document.id = known_id
    return documents, ids or [str(uuid.uuid4()) for _ in texts]


def _texts(documents: Iterable[Document]) -> dict[str, str]:
    """Return texts by id."""
    return {_id(document): document.page_content for document in documents}


def _id(document: Document) -> str:
    # Qdrant returns ids in the metadata
    document_id = document.metadata.get("_id") if document.id is None else document.id
    if document_id is None:
        raise SettingError("the vector store returns documents without ids: warm their texts with llm.warm(texts)")
    return str(document_id)

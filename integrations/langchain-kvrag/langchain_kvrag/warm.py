"""KVWarmVectorStore: encodes chunks when they are added to a vector store, and drops their KV with their vectors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from hashlib import blake2b
from typing import Any, Self, TypeVar
from urllib.parse import quote, unquote

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from kvrag import BlendEngine, KvragError, RemoteEngine, SettingError, WarmReport
from langchain_kvrag.listing import adocuments_by_id, documents_by_id, listed_ids
from langchain_kvrag.settings import BlendSettings, source_name
from langchain_kvrag.texts import AddsAllTexts

logger = logging.getLogger("kvrag")

_T = TypeVar("_T")
_BATCH = 256  # documents per request


class _PassedOn:
    """A method delegated to the wrapped store."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: KVWarmVectorStore | None, owner: type) -> Any:
        return self if store is None else getattr(store.vectorstore, self._name)


class _Search(_PassedOn):
    """A search delegated to the wrapped store. The KV of what it returns is read ahead."""

    def __get__(self, store: KVWarmVectorStore | None, owner: type) -> Any:
        if store is None:
            return self
        search, held = getattr(store.vectorstore, self._name), store._held

        @wraps(search)
        def searched(*args: Any, **kwargs: Any) -> Any:
            found = search(*args, **kwargs)
            held.prefetch(found)
            return found

        @wraps(search)
        async def asearched(*args: Any, **kwargs: Any) -> Any:
            found = await search(*args, **kwargs)
            held.prefetch(found)
            return found

        return asearched if self._name.startswith("a") else searched


class KVWarmVectorStore(AddsAllTexts):
    """A vector store that pre-encodes its documents for an LLM.

    KV is written before the vectors and dropped after them, so that every retrievable document has its KV. A text in
    several documents is encoded once and kept while one of them has it. If the wrapped store fails midway, the KV of
    documents that it did not add is dropped. `langchain_core.indexing.index` works as with the wrapped store: unchanged
    documents with an unchanged context are not encoded again.

    Concurrent changes of one document may leave it without KV until the next change. This costs time, not correctness.

    The KV of what a search returns is read into memory while the chain renders its prompt; see `BlendEngine.prefetch`.

    All other attributes are delegated to the wrapped store, and `isinstance` sees its class too, so that what depends
    on the kind of a store, such as `SelfQueryRetriever`, works as without the wrapper. The KV also follows
    `update_document`, `update_documents`, `reset_collection` and `delete_collection` of stores that have them. Other
    methods for adding and deleting, beyond those of `VectorStore`, bypass the KV: call `warm_existing` after them.

    Attributes:
        vectorstore: Any vector store; it receives all calls.
        llm: A `ChatBlend`, a `BlendLLM`, a `BlendEngine` or a `RemoteEngine`.
        namespace: Namespace of the chunks: prompts of other namespaces never reuse them. None = the LLM's.
        collection: Name that distinguishes vector stores with a shared KV store.

    Example:
        ```python
        vectorstore = KVWarmVectorStore(FaissVectorStore(embeddings), llm)
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
        self._held = _Held(llm, namespace, collection)

    similarity_search: Any = _Search()
    asimilarity_search: Any = _Search()
    similarity_search_by_vector: Any = _Search()
    asimilarity_search_by_vector: Any = _Search()
    similarity_search_with_score: Any = _Search()
    asimilarity_search_with_score: Any = _Search()
    similarity_search_with_relevance_scores: Any = _Search()
    asimilarity_search_with_relevance_scores: Any = _Search()
    max_marginal_relevance_search: Any = _Search()
    amax_marginal_relevance_search: Any = _Search()
    max_marginal_relevance_search_by_vector: Any = _Search()
    amax_marginal_relevance_search_by_vector: Any = _Search()
    search: Any = _Search()
    asearch: Any = _Search()
    get_by_ids: Any = _PassedOn()
    aget_by_ids: Any = _PassedOn()
    embeddings: Any = _PassedOn()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # `vectorstore` is missing while a copy is created
        return self.__dict__["vectorstore"].__class__ if "vectorstore" in self.__dict__ else type(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.__dict__.copy())  # pickle refuses objects of two classes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "vectorstore":  # accessed while a copy is created
            raise AttributeError(name)
        passed = getattr(self.vectorstore, name)
        ours = _IN_STEP.get(name)
        return passed if ours is None else partial(ours, self)

    # ---------------------------------------------------------------- adding

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Encode the documents, then add them.

        Args:
            kwargs: Further arguments of the wrapped store.

        Raises:
            SettingError: The numbers of ids and documents differ.
            PromptError, StoreError: A document cannot be encoded, or its KV cannot be stored; nothing is added.
        """
        adding = self._held.plan(documents, kwargs.get("ids"))
        try:
            self._held.warm(adding)
            added = _checked(self.vectorstore.add_documents(documents, **kwargs), adding, self.vectorstore)
        except BaseException:
            self._held.undo(adding, self._present(adding.ids))
            raise
        self._held.settle(adding, added)
        return added

    async def aadd_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Like `add_documents`, off the event loop."""
        adding = await asyncio.to_thread(self._held.plan, documents, kwargs.get("ids"))
        try:
            await _whole(asyncio.to_thread(self._held.warm, adding))
            added = await _whole(self.vectorstore.aadd_documents(documents, **kwargs))
            added = _checked(added, adding, self.vectorstore)
        except BaseException:
            await _whole(asyncio.to_thread(self._held.undo, adding, await self._apresent(adding.ids)))
            raise
        await _whole(asyncio.to_thread(self._held.settle, adding, added))
        return added

    # ---------------------------------------------------------------- deleting

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Delete documents, then drop their KV.

        Args:
            ids: Documents to delete; None and other arguments have the wrapped store's meaning.

        Raises:
            SettingError: No ids are given, and the wrapped store cannot list its remaining documents.
        """
        ids = None if ids is None else list(ids)
        asked = self._asked_for(ids)
        try:
            deleted = self.vectorstore.delete(ids, **kwargs)
        except BaseException:
            self._held.drop(asked, self._present(asked))
            raise
        sure = ids is not None and deleted is not False
        self._held.drop(asked, {} if sure else self._present(asked))
        return deleted

    async def adelete(self, ids: list[str] | None = None, **kwargs: Any) -> bool | None:
        """Like `delete`, off the event loop."""
        ids = None if ids is None else list(ids)
        asked = await asyncio.to_thread(self._asked_for, ids)
        try:
            deleted = await _whole(self.vectorstore.adelete(ids, **kwargs))
        except BaseException:
            await _whole(asyncio.to_thread(self._held.drop, asked, await self._apresent(asked)))
            raise
        sure = ids is not None and deleted is not False
        left = {} if sure else await self._apresent(asked)
        await _whole(asyncio.to_thread(self._held.drop, asked, left))
        return deleted

    def _asked_for(self, ids: list[str] | None) -> list[str]:
        if ids is not None:
            return ids
        if not self._can_tell:
            raise SettingError(f"{type(self.vectorstore).__name__} cannot list its remaining documents: pass ids")
        return self._held.ids()

    # ---------------------------------------------------------------- methods that only some stores have

    def _update_document(self, document_id: str, document: Document) -> None:
        self._update_documents([document_id], [document])

    def _update_documents(self, ids: list[str], documents: list[Document]) -> None:
        adding = self._held.plan(documents, ids)
        try:
            self._held.warm(adding)
            self.vectorstore.update_documents(ids, documents)  # type: ignore[attr-defined]
        except BaseException:
            self._held.undo(adding, self._present(adding.ids))
            raise
        present = self._present(adding.ids)
        if present is None:
            self._held.settle(adding, adding.ids)
        else:
            self._held.undo(adding, present)  # unknown ids have been ignored

    def _clear(self, name: str, **kwargs: Any) -> Any:
        held = self._held.ids()
        cleared = getattr(self.vectorstore, name)(**kwargs)
        self._held.drop(held, {})
        return cleared

    async def _aclear(self, name: str, **kwargs: Any) -> Any:
        held = await asyncio.to_thread(self._held.ids)
        cleared = await _whole(getattr(self.vectorstore, name)(**kwargs))
        await _whole(asyncio.to_thread(self._held.drop, held, {}))
        return cleared

    # ---------------------------------------------------------------- existing documents

    def warm_existing(self, ids: Iterable[str] | None = None, *, whole: bool = False) -> WarmReport:
        """Encode the documents that are already in the wrapped store.

        Without `ids`, or with `whole`, the KV of all other documents is dropped, such as the KV that a killed program
        left behind.

        Args:
            ids: Documents to encode; None = all.
            whole: True = `ids` are all documents of the wrapped store.

        Raises:
            SettingError: The wrapped store cannot be listed, or cannot return documents by id.
        """
        asked = self._listed(ids)
        found: list[Document] = []
        for start in range(0, len(asked), _BATCH):
            found += documents_by_id(self.vectorstore, asked[start : start + _BATCH])
        return self._held.replace(found, None if ids is None or whole else asked)

    async def awarm_existing(self, ids: Iterable[str] | None = None, *, whole: bool = False) -> WarmReport:
        """Like `warm_existing`, off the event loop."""
        asked = await asyncio.to_thread(self._listed, ids)
        found: list[Document] = []
        for start in range(0, len(asked), _BATCH):
            found += await adocuments_by_id(self.vectorstore, asked[start : start + _BATCH])
        return await _whole(asyncio.to_thread(self._held.replace, found, None if ids is None or whole else asked))

    def _listed(self, ids: Iterable[str] | None) -> list[str]:
        name = type(self.vectorstore).__name__
        if not self._can_tell:
            raise SettingError(f"{name} cannot return documents by id: warm their texts with llm.warm(texts)")
        if ids is not None:
            return list(ids)
        listed = listed_ids(self.vectorstore)
        if listed is None:
            raise SettingError(f"LangChain cannot list the documents of {name}: pass ids, and whole=True for all ids")
        return listed

    @property
    def _can_tell(self) -> bool:
        return type(self.vectorstore).get_by_ids is not VectorStore.get_by_ids

    def _present(self, ids: list[str]) -> dict[str, str] | None:
        """Return texts by id, after a failure; None if the store cannot return them."""
        present: dict[str, str] = {}
        try:
            for start in range(0, len(ids), _BATCH):
                present |= _texts(documents_by_id(self.vectorstore, ids[start : start + _BATCH]))
        except Exception as error:  # it may fail again; the first error is raised
            logger.warning("%s cannot return its documents: %s", type(self.vectorstore).__name__, error)
            return None
        return present

    async def _apresent(self, ids: list[str]) -> dict[str, str] | None:
        present: dict[str, str] = {}
        try:
            for start in range(0, len(ids), _BATCH):
                present |= _texts(await adocuments_by_id(self.vectorstore, ids[start : start + _BATCH]))
        except Exception as error:
            logger.warning("%s cannot return its documents: %s", type(self.vectorstore).__name__, error)
            return None
        return present

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
            llm: Required; see the class, as for `namespace` and `collection`.
            vectorstore_class: Class of the store to wrap.
            kwargs: Further arguments of its `from_texts`.
        """
        held = _Held.of(llm, namespace, collection)
        adding = held.plan(*_as_documents(texts, metadatas, ids))
        try:
            held.warm(adding)
            made = vectorstore_class.from_texts(texts, embedding, metadatas, ids=adding.ids, **kwargs)
        except BaseException:
            held.undo(adding, None)
            raise
        held.settle(adding, adding.ids)
        return cls(made, held.llm, namespace=namespace, collection=collection)

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
        held = _Held.of(llm, namespace, collection)
        adding = await asyncio.to_thread(held.plan, *_as_documents(texts, metadatas, ids))
        try:
            await _whole(asyncio.to_thread(held.warm, adding))
            made = await _whole(vectorstore_class.afrom_texts(texts, embedding, metadatas, ids=adding.ids, **kwargs))
        except BaseException:
            await _whole(asyncio.to_thread(held.undo, adding, None))
            raise
        await _whole(asyncio.to_thread(held.settle, adding, adding.ids))
        return cls(made, held.llm, namespace=namespace, collection=collection)


def _restored(kind: type[KVWarmVectorStore], fields: dict[str, Any]) -> KVWarmVectorStore:
    store = object.__new__(kind)
    store.__dict__.update(fields)
    return store


_IN_STEP: dict[str, Callable[..., Any]] = {
    "update_document": KVWarmVectorStore._update_document,
    "update_documents": KVWarmVectorStore._update_documents,
    "reset_collection": lambda store, **kwargs: store._clear("reset_collection", **kwargs),
    "delete_collection": lambda store, **kwargs: store._clear("delete_collection", **kwargs),
    "adelete_collection": lambda store, **kwargs: store._aclear("adelete_collection", **kwargs),
}


@dataclass(frozen=True)
class _Adding:
    """Documents to be added.

    Attributes:
        ids: Ids known in advance.
        names: Name of the KV document of each text; provisional without an id.
        sources: Source of each text.
        before: KV documents of these ids before the change.
    """

    ids: list[str]
    texts: list[str]
    names: list[str]
    sources: list[str]
    before: set[str]


class _Held:
    """KV held for a vector store's documents.

    Every id is a document of its own in the KV store, so that it can be dropped individually. Its name contains the
    text's digest, which separates the old and the new version until the vector store has the new one.
    """

    def __init__(self, llm: BlendEngine | RemoteEngine | BlendSettings, namespace: str | None, collection: str) -> None:
        if not isinstance(llm, (BlendEngine, RemoteEngine, BlendSettings)):
            raise SettingError(
                f"llm must be a ChatBlend, a BlendLLM, a BlendEngine or a RemoteEngine, got {type(llm).__name__}"
            )
        self.llm, self._given = llm, namespace
        self._collection, self._prefix = collection, f"langchain/{quote(collection, safe='')}/"

    @classmethod
    def of(
        cls, llm: BlendEngine | RemoteEngine | BlendSettings | None, namespace: str | None, collection: str
    ) -> _Held:
        """Like the constructor, but raise SettingError without an LLM."""
        if llm is None:
            raise SettingError("no llm: pass llm=, which encodes the texts")
        return cls(llm, namespace, collection)

    @property
    def _engine(self) -> BlendEngine | RemoteEngine:
        return self.llm._open() if isinstance(self.llm, BlendSettings) else self.llm

    @property
    def _namespace(self) -> str:
        if self._given is not None:
            return self._given
        return self.llm.namespace if isinstance(self.llm, BlendSettings) else ""

    def prefetch(self, found: Sequence[Document | tuple[Document, float]]) -> None:
        """Read the KV of what a search returned ahead, if the model is loaded."""
        engine = self.llm._opened() if isinstance(self.llm, BlendSettings) else self.llm
        if engine is not None:
            documents = (one[0] if isinstance(one, tuple) else one for one in found)
            engine.prefetch([document.page_content for document in documents], namespace=self._namespace)

    def plan(self, documents: Sequence[Document], ids: Sequence[str | None] | None) -> _Adding:
        """Return the plan for adding these documents, without changing anything."""
        if ids is None:
            ids = [None] * len(documents)
        if len(ids) != len(documents):
            raise SettingError(f"got {len(ids)} ids for {len(documents)} documents: pass one per document")
        given = [known or document.id for known, document in zip(ids, documents, strict=True)]
        texts = [document.page_content for document in documents]
        known = [one for one in given if one is not None]
        names = [self._name(one or str(uuid.uuid4()), text) for one, text in zip(given, texts, strict=True)]
        sources = [source_name(document, self._collection) for document in documents]
        return _Adding(known, texts, names, sources, self._of(known))

    def warm(self, adding: _Adding) -> WarmReport:
        """Encode the new texts; keep the old ones of these ids."""
        report = self._warm(adding.texts, adding.names, adding.sources)
        for warning in report.warnings:
            logger.warning(warning)
        return report

    def settle(self, adding: _Adding, ids: Sequence[str]) -> None:
        """Store the texts under their final ids; drop the old texts of these ids."""
        pieces = zip(adding.texts, adding.sources, strict=True)
        final = dict(zip(ids, pieces, strict=True))  # of equal ids, the last one wins
        names = [self._name(one, text) for one, (text, _) in final.items()]
        if not {*names} <= {*adding.names}:  # ids generated by the vector store
            texts, sources = zip(*final.values(), strict=True)
            self._warm(texts, names, sources)
        self._forget({*adding.names, *adding.before} - {*names})

    def undo(self, adding: _Adding, present: dict[str, str] | None) -> None:
        """Hold only the texts in the vector store; if these are unknown, the texts held before."""
        now = adding.before if present is None else {self._name(*pair) for pair in present.items()}
        self._forget({*adding.names, *adding.before} - now)

    def drop(self, ids: Iterable[str], left: dict[str, str] | None) -> None:
        """Drop the KV of the ids that are not left; nothing if these are unknown."""
        if left is not None:
            self._forget(self._of(one for one in ids if one not in left))

    def replace(self, documents: Sequence[Document], ids: Sequence[str] | None) -> WarmReport:
        """Hold exactly these documents under these ids (None = all ids)."""
        present = _texts(documents)
        sources = {_id(document): source_name(document, self._collection) for document in documents}
        before = self._of(self.ids() if ids is None else ids)
        names = [self._name(*pair) for pair in present.items()]
        report = self._warm(present.values(), names, list(sources.values()))
        self._forget(before - {*names})
        return report

    def ids(self) -> list[str]:
        """Return the ids with KV."""
        names = self._documents(self._prefix)
        return list(dict.fromkeys(unquote(name.removeprefix(self._prefix).split("/")[0]) for name in names))

    def _name(self, one: str, text: str) -> str:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return f"{self._prefix}{quote(str(one), safe='')}/{digest}"

    def _of(self, ids: Iterable[str]) -> set[str]:
        return {name for one in ids for name in self._documents(f"{self._prefix}{quote(str(one), safe='')}/")}

    def _warm(self, texts: Iterable[str], names: Sequence[str], sources: Sequence[str]) -> WarmReport:
        return self._engine.warm(texts, document=names, sources=sources, namespace=self._namespace)

    def _documents(self, prefix: str) -> list[str]:
        return self._engine.documents(prefix, namespace=self._namespace)

    def _forget(self, names: Iterable[str]) -> None:
        engine, namespace = self._engine, self._namespace
        for name in sorted(names):
            engine.forget(name, namespace=namespace)


def _as_documents(
    texts: list[str], metadatas: list[dict[str, Any]] | None, ids: list[str] | None
) -> tuple[list[Document], list[str]]:
    pairs = zip(texts, metadatas or [{}] * len(texts), strict=True)
    documents = [Document(page_content=text, metadata=metadata) for text, metadata in pairs]
    return documents, ids or [str(uuid.uuid4()) for _ in texts]


def _checked(added: list[str], adding: _Adding, vectorstore: VectorStore) -> list[str]:
    if len(added) != len(adding.texts):
        name = type(vectorstore).__name__
        raise KvragError(f"{name} returned {len(added)} ids for {len(adding.texts)} documents: their KV was dropped")
    return added


def _texts(documents: Iterable[Document]) -> dict[str, str]:
    """Return texts by id."""
    return {_id(document): document.page_content for document in documents}


def _id(document: Document) -> str:
    one = document.metadata.get("_id") if document.id is None else document.id  # Qdrant keeps ids in the metadata
    if one is None:
        raise SettingError("the vector store returns documents without ids: warm their texts with llm.warm(texts)")
    return str(one)


async def _whole(work: Awaitable[_T]) -> _T:
    """Wait until work is done even if the caller is cancelled: its thread cannot be stopped."""
    step = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        if not step.done():
            await asyncio.wait([step])
        raise

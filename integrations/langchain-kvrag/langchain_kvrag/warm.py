"""KVWarmVectorStore: chunks are encoded when they are added to a vector store, and dropped with their vectors."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Self, TypeVar
from urllib.parse import quote, unquote

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from kvrag import BlendEngine, KvragError, SettingError, WarmReport
from langchain_kvrag.faiss import FaissVectorStore
from langchain_kvrag.settings import BlendSettings, source_name
from langchain_kvrag.texts import AddsAllTexts

logger = logging.getLogger("kvrag")

_T = TypeVar("_T")
_BATCH = 256  # documents asked for at a time


class _PassedOn:
    """A method of the wrapped store."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: KVWarmVectorStore | None, owner: type) -> Any:
        return self if store is None else getattr(store.vectorstore, self._name)


class KVWarmVectorStore(AddsAllTexts):
    """A vector store whose documents an LLM has encoded beforehand.

    KV is written before the vectors and dropped after them, so that every document that is found has its KV. A text
    that stands in several documents is encoded once and kept as long as one of them has it. When the wrapped store
    fails half-way, the KV of what it did not add is dropped again. It takes part in `langchain_core.indexing.index`
    as the wrapped store does: what has not changed is not encoded again.

    Changes of the same document at once may leave it without its KV until the next one, which costs time and nothing
    else.

    Everything else is the wrapped store's own. Ways to add and delete that `VectorStore` does not have reach it
    without the KV following: call `warm_existing` afterwards.

    Attributes:
        vectorstore: Any vector store; it gets all calls.
        llm: A `ChatBlend`, a `BlendLLM` or a `BlendEngine`.
        namespace: Tells apart vector stores whose documents are in the same store of KV.

    Example:
        ```python
        vectorstore = KVWarmVectorStore(FaissVectorStore(embeddings), llm)
        index(loader, record_manager, vectorstore, cleanup="full", key_encoder="sha256")
        ```
    """

    def __init__(
        self, vectorstore: VectorStore, llm: BlendEngine | BlendSettings, *, namespace: str = "default"
    ) -> None:
        self.vectorstore, self.llm, self.namespace = vectorstore, llm, namespace
        self._held = _Held(llm, namespace)

    similarity_search: Any = _PassedOn()
    asimilarity_search: Any = _PassedOn()
    similarity_search_by_vector: Any = _PassedOn()
    asimilarity_search_by_vector: Any = _PassedOn()
    similarity_search_with_score: Any = _PassedOn()
    asimilarity_search_with_score: Any = _PassedOn()
    similarity_search_with_relevance_scores: Any = _PassedOn()
    asimilarity_search_with_relevance_scores: Any = _PassedOn()
    max_marginal_relevance_search: Any = _PassedOn()
    amax_marginal_relevance_search: Any = _PassedOn()
    max_marginal_relevance_search_by_vector: Any = _PassedOn()
    amax_marginal_relevance_search_by_vector: Any = _PassedOn()
    search: Any = _PassedOn()
    asearch: Any = _PassedOn()
    get_by_ids: Any = _PassedOn()
    aget_by_ids: Any = _PassedOn()
    embeddings: Any = _PassedOn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "vectorstore":  # asked for while a copy is being made
            raise AttributeError(name)
        return getattr(self.vectorstore, name)

    # ---------------------------------------------------------------- adding

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Encode the documents, then add them.

        Args:
            kwargs: As the wrapped store takes them.

        Raises:
            SettingError: There are not as many ids as documents.
            PromptError, StoreError: A document cannot be encoded, or its KV not be stored; nothing is added.
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
            ids: None, or other arguments, as the wrapped store understands them.

        Raises:
            SettingError: No ids are given, and the wrapped store cannot tell what it has left.
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
            raise SettingError(f"{type(self.vectorstore).__name__} cannot tell what is left after this: give ids")
        return self._held.ids()

    # ---------------------------------------------------------------- what the wrapped store has

    def warm_existing(self, ids: Iterable[str] | None = None) -> WarmReport:
        """Encode what the wrapped store has already.

        Args:
            ids: Of which documents; None = of all, and the KV of those that it does not have any more is dropped.

        Raises:
            SettingError: The wrapped store cannot be listed, or cannot get documents by their ids.
        """
        asked = self._listed(ids)
        found: list[Document] = []
        for start in range(0, len(asked), _BATCH):
            found += self.vectorstore.get_by_ids(asked[start : start + _BATCH])
        return self._held.replace(found, None if ids is None else asked)

    async def awarm_existing(self, ids: Iterable[str] | None = None) -> WarmReport:
        """Like `warm_existing`, off the event loop."""
        asked = self._listed(ids)
        found: list[Document] = []
        for start in range(0, len(asked), _BATCH):
            found += await self.vectorstore.aget_by_ids(asked[start : start + _BATCH])
        return await _whole(asyncio.to_thread(self._held.replace, found, None if ids is None else asked))

    def _listed(self, ids: Iterable[str] | None) -> list[str]:
        name = type(self.vectorstore).__name__
        if not self._can_tell:
            raise SettingError(f"{name} cannot get documents by their ids: warm their texts with the LLM itself")
        if ids is not None:
            return list(ids)
        if isinstance(self.vectorstore, FaissVectorStore):
            return self.vectorstore.ids
        if isinstance(self.vectorstore, InMemoryVectorStore):
            return list(self.vectorstore.store)
        raise SettingError(f"LangChain has no way to list what is in {name}: give ids")

    @property
    def _can_tell(self) -> bool:
        return type(self.vectorstore).get_by_ids is not VectorStore.get_by_ids

    def _present(self, ids: list[str]) -> dict[str, str] | None:
        """Texts by their ids, after a failure; None if the store cannot tell."""
        present: dict[str, str] = {}
        try:
            for start in range(0, len(ids), _BATCH):
                present |= _texts(self.vectorstore.get_by_ids(ids[start : start + _BATCH]))
        except Exception as error:  # what failed once may fail again; the first error is the one to be seen
            logger.warning("%s cannot tell what it has: %s", type(self.vectorstore).__name__, error)
            return None
        return present

    async def _apresent(self, ids: list[str]) -> dict[str, str] | None:
        present: dict[str, str] = {}
        try:
            for start in range(0, len(ids), _BATCH):
                present |= _texts(await self.vectorstore.aget_by_ids(ids[start : start + _BATCH]))
        except Exception as error:
            logger.warning("%s cannot tell what it has: %s", type(self.vectorstore).__name__, error)
            return None
        return present

    # ---------------------------------------------------------------- making

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: BlendEngine | BlendSettings | None = None,
        namespace: str = "default",
        vectorstore_class: type[VectorStore] = InMemoryVectorStore,
        **kwargs: Any,
    ) -> Self:
        """A vector store of these texts, warmed.

        Args:
            llm: Must be given.
            vectorstore_class: Of the store to wrap.
            kwargs: As its `from_texts` takes them.
        """
        held, adding = _making(texts, metadatas, ids, llm, namespace)
        try:
            held.warm(adding)
            made = vectorstore_class.from_texts(texts, embedding, metadatas, ids=adding.ids, **kwargs)
        except BaseException:
            held.undo(adding, None)
            raise
        held.settle(adding, adding.ids)
        return cls(made, held.llm, namespace=namespace)

    @classmethod
    async def afrom_texts(
        cls,
        texts: list[str],
        embedding: Embeddings,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        llm: BlendEngine | BlendSettings | None = None,
        namespace: str = "default",
        vectorstore_class: type[VectorStore] = InMemoryVectorStore,
        **kwargs: Any,
    ) -> Self:
        """Like `from_texts`, off the event loop."""
        held, adding = await asyncio.to_thread(_making, texts, metadatas, ids, llm, namespace)
        try:
            await _whole(asyncio.to_thread(held.warm, adding))
            made = await _whole(vectorstore_class.afrom_texts(texts, embedding, metadatas, ids=adding.ids, **kwargs))
        except BaseException:
            await _whole(asyncio.to_thread(held.undo, adding, None))
            raise
        await _whole(asyncio.to_thread(held.settle, adding, adding.ids))
        return cls(made, held.llm, namespace=namespace)


@dataclass(frozen=True)
class _Adding:
    """What is about to be added.

    Attributes:
        ids: Those that are known beforehand.
        names: What holds the KV of each text from now on; under a provisional one where there is no id yet.
        sources: What each text is a piece of.
        before: What holds KV for these ids now.
    """

    ids: list[str]
    texts: list[str]
    names: list[str]
    sources: list[str]
    before: set[str]


class _Held:
    """The KV that is held for a vector store's documents.

    Every id is a document of its own in the store of KV, so that it can go alone. The digest of the text in its name
    keeps what a document was apart from what it becomes, until the vector store has the latter.
    """

    def __init__(self, llm: BlendEngine | BlendSettings, namespace: str) -> None:
        if not isinstance(llm, (BlendEngine, BlendSettings)):
            raise SettingError(f"llm must be a ChatBlend, a BlendLLM or a BlendEngine, got {type(llm).__name__}")
        self.llm = llm
        self._namespace, self._prefix = namespace, f"langchain/{quote(namespace, safe='')}/"

    @property
    def _engine(self) -> BlendEngine:
        return self.llm if isinstance(self.llm, BlendEngine) else self.llm._open()

    def plan(self, documents: Sequence[Document], ids: Sequence[str | None] | None) -> _Adding:
        """Changes nothing."""
        if ids is None:
            ids = [None] * len(documents)
        if len(ids) != len(documents):
            raise SettingError(f"{len(documents)} documents need as many ids, got {len(ids)}")
        given = [known or document.id for known, document in zip(ids, documents, strict=True)]
        texts = [document.page_content for document in documents]
        known = [one for one in given if one is not None]
        names = [self._name(one or str(uuid.uuid4()), text) for one, text in zip(given, texts, strict=True)]
        sources = [source_name(document, self._namespace) for document in documents]
        return _Adding(known, texts, names, sources, self._of(known))

    def warm(self, adding: _Adding) -> WarmReport:
        """Encode, beside what these ids had before."""
        report = self._engine.warm(adding.texts, document=adding.names, sources=adding.sources)
        for warning in report.warnings:
            logger.warning(warning)
        return report

    def settle(self, adding: _Adding, ids: Sequence[str]) -> None:
        """These are the ids now; what they had before goes."""
        pieces = zip(adding.texts, adding.sources, strict=True)
        final = dict(zip(ids, pieces, strict=True))  # of equal ids the last one counts
        names = [self._name(one, text) for one, (text, _) in final.items()]
        if not {*names} <= {*adding.names}:  # ids that the vector store made
            texts, sources = zip(*final.values(), strict=True)
            self._engine.warm(texts, document=names, sources=sources)
        self._forget({*adding.names, *adding.before} - {*names})

    def undo(self, adding: _Adding, present: dict[str, str] | None) -> None:
        """Only what the vector store has is held; if it cannot tell, what was held before."""
        now = adding.before if present is None else {self._name(*pair) for pair in present.items()}
        self._forget({*adding.names, *adding.before} - now)

    def drop(self, ids: Iterable[str], left: dict[str, str] | None) -> None:
        """Of the ids that are not left; nothing if that is not known."""
        if left is not None:
            self._forget(self._of(one for one in ids if one not in left))

    def replace(self, documents: Sequence[Document], ids: Sequence[str] | None) -> WarmReport:
        """These documents are what there is under these ids, None = under all."""
        present = _texts(documents)
        sources = {_id(document): source_name(document, self._namespace) for document in documents}
        before = self._of(self.ids() if ids is None else ids)
        names = [self._name(*pair) for pair in present.items()]
        report = self._engine.warm(present.values(), document=names, sources=list(sources.values()))
        self._forget(before - {*names})
        return report

    def ids(self) -> list[str]:
        """For which KV is held."""
        names = self._engine.documents(self._prefix)
        return list(dict.fromkeys(unquote(name.removeprefix(self._prefix).split("/")[0]) for name in names))

    def _name(self, one: str, text: str) -> str:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return f"{self._prefix}{quote(str(one), safe='')}/{digest}"

    def _of(self, ids: Iterable[str]) -> set[str]:
        engine = self._engine
        return {name for one in ids for name in engine.documents(f"{self._prefix}{quote(str(one), safe='')}/")}

    def _forget(self, names: Iterable[str]) -> None:
        engine = self._engine
        for name in sorted(names):
            engine.forget(name)


def _making(
    texts: list[str],
    metadatas: list[dict[str, Any]] | None,
    ids: list[str] | None,
    llm: BlendEngine | BlendSettings | None,
    namespace: str,
) -> tuple[_Held, _Adding]:
    if llm is None:
        raise SettingError("no llm: give llm=, which encodes the texts")
    held = _Held(llm, namespace)
    ids = ids or [str(uuid.uuid4()) for _ in texts]
    documents = [
        Document(page_content=text, metadata=metadata)
        for text, metadata in zip(texts, metadatas or [{}] * len(texts), strict=True)
    ]
    return held, held.plan(documents, ids)


def _checked(added: list[str], adding: _Adding, vectorstore: VectorStore) -> list[str]:
    if len(added) != len(adding.texts):
        name = type(vectorstore).__name__
        raise KvragError(f"{name} returned {len(added)} ids for {len(adding.texts)} documents: their KV is not kept")
    return added


def _texts(documents: Iterable[Document]) -> dict[str, str]:
    """Texts by their ids."""
    return {_id(document): document.page_content for document in documents}


def _id(document: Document) -> str:
    one = document.metadata.get("_id") if document.id is None else document.id  # Qdrant's are in the metadata
    if one is None:
        raise SettingError("this vector store gives documents without ids: warm their texts with the LLM itself")
    return str(one)


async def _whole(work: Awaitable[_T]) -> _T:
    """Wait for something that goes on in a thread even if its caller is cancelled: that must not run ahead of it."""
    step = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        if not step.done():
            await asyncio.wait([step])
        raise

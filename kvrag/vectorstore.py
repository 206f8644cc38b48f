"""KV of a vector store's documents, for the frameworks' `KVWarmVectorStore` classes."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from inspect import isawaitable
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from kvrag.blocking import run
from kvrag.errors import PromptError
from kvrag.llm import LLMBase
from kvrag.store.values import text_key

if TYPE_CHECKING:
    from kvrag.llm import Engine
    from kvrag.types import WarmReport

logger = logging.getLogger("kvrag")

T = TypeVar("T")

Id = str | tuple[str, ...]  # in a vector store; a tuple starts with the names of what contains the document
Present = Mapping[Any, str] | None  # texts that a vector store has, by id; None = it cannot return them


class Existing(NamedTuple):
    """A text in a vector store.

    Attributes:
        place: In its source. Several chunks at one place = the order of the source's chunks is unknown.
    """

    text: str
    source: str
    place: tuple[float, ...]


@dataclass(frozen=True)
class Adding:
    """Documents to be added."""

    ids: list[Any]  # those known in advance
    texts: list[str]
    names: list[str]  # of the texts' KV documents; provisional without an id
    sources: list[str]
    before: set[str]  # names of these ids' KV documents before the change


class VectorStoreKV:
    """KV of a vector store's documents, written before the vectors and dropped after them.

    Each id is a document of the KV store, so that it can be dropped individually. The name contains a digest of the
    text, so that the old and the new version exist side by side until the vector store has the new one.
    """

    def __init__(self, llm: LLMBase | Engine, namespace: str | None, *path: str) -> None:
        """Bind the KV of one collection.

        Args:
            namespace: None = the LLM's.
            path: Framework and collection: the first parts of all names.
        """
        self._llm: Any = llm
        self._namespace = namespace if isinstance(llm, LLMBase) else namespace or ""
        self._prefix = _path(path)

    def plan(
        self, ids: Sequence[Id | None], texts: Sequence[str], sources: Sequence[str], former_ids: Iterable[Id] = ()
    ) -> Adding:
        """Return the plan for adding these texts, without changing anything.

        Args:
            ids: None = the vector store will create the id.
            former_ids: Ids that the vector store will drop at the same time.
        """
        known = [known_id for known_id in ids if known_id is not None]
        names = [self._name(known_id or str(uuid.uuid4()), text) for known_id, text in zip(ids, texts, strict=True)]
        return Adding(known, list(texts), names, list(sources), self.names_of([*known, *former_ids]))

    def add(
        self,
        adding: Adding,
        write: Callable[[], T],
        present: Callable[[list[Any]], Present],
        ids_of: Callable[[T], Sequence[Id]] | None = None,
    ) -> T:
        """Encode the new texts, write the vectors, then drop the earlier texts of these ids.

        If a text cannot be encoded or stored, nothing is written.

        Args:
            write: Adds the documents to the vector store.
            present: Returns the texts of these ids, after a failure.
            ids_of: Returns the final ids from the result of `write`; None = those of the plan.
        """
        return run(self._add(adding, write, present, ids_of, lambda work, *args: work(*args)))

    async def aadd(
        self,
        adding: Adding,
        write: Callable[[], Awaitable[T]],
        present: Callable[[list[Any]], Awaitable[Present]],
        ids_of: Callable[[T], Sequence[Id]] | None = None,
    ) -> T:
        """Like `add`, off the event loop."""
        return await self._add(adding, write, present, ids_of, asyncio.to_thread)

    async def _add(
        self,
        adding: Adding,
        write: Callable[[], Any],
        present: Callable[[list[Any]], Any],
        ids_of: Callable[[T], Sequence[Id]] | None,
        call: Callable[..., Any],
    ) -> T:
        try:
            await uncancelled(call(self._warm, adding.texts, adding.names, adding.sources))
            written: T = await uncancelled(write())
            ids = adding.ids if ids_of is None else ids_of(written)
        except BaseException:
            await uncancelled(call(self.keep, adding, await uncancelled(present(adding.ids))))
            raise
        await uncancelled(call(self._settle, adding, ids))
        return written

    def keep(self, adding: Adding, present: Present) -> None:
        """Keep the KV of the texts in the vector store; if these are unknown, that of the texts from before."""
        now = adding.before if present is None else {self._name(*pair) for pair in present.items()}
        self.forget({*adding.names, *adding.before} - now)

    def _settle(self, adding: Adding, ids: Sequence[Id]) -> None:
        """Store the texts under their final ids; drop the earlier texts of these ids."""
        pieces = zip(adding.texts, adding.sources, strict=True)
        final = dict(zip(ids, pieces, strict=True))  # of equal ids, the last one wins
        names = [self._name(final_id, text) for final_id, (text, _) in final.items()]
        if not {*names} <= {*adding.names}:  # ids generated by the vector store
            self._warm([text for text, _ in final.values()], names, [source for _, source in final.values()])
        self.forget({*adding.names, *adding.before} - {*names})

    def warm_existing(self, texts: Mapping[Any, Existing], before: set[str]) -> WarmReport:
        """Encode those of these texts, by id, that have no KV, and drop the KV documents `before` of all others.

        Stored KV is kept as it is: in the order in which a vector store lists its texts, it may have other contexts.
        The other texts of a source are encoded with their context, or alone if the order of its chunks is unknown.
        """
        named = {self._name(doc_id, text.text): text for doc_id, text in texts.items()}
        stored = self._stored(named, before)
        sources: dict[str, str] = {}  # of the texts to encode
        unknown = []
        ordered = sorted(named, key=lambda name: (named[name].source, named[name].place))
        for source, group in groupby(ordered, key=lambda name: named[name].source):
            chunks = list(group)
            missing = [name for name in chunks if name not in stored]
            is_unknown = len({named[name].place for name in chunks}) < len(chunks)
            if source and missing and is_unknown:
                unknown.append(source)
            elif source and missing:
                missing = chunks  # a text's context is the text before it, stored or not
            sources |= dict.fromkeys(missing, "" if is_unknown else source)
        sources |= dict.fromkeys(named.keys() - before - sources.keys(), "")  # without a token: for the report
        to_encode = [named[name].text for name in sources]
        report = self._warm(to_encode, list(sources), list(sources.values()), skip_invalid=True)
        self.forget(before - named.keys())
        kept = {text.text for text in named.values()} - {named[name].text for name in sources}
        report = replace(report, chunks=report.chunks + len(kept), reused=report.reused + len(kept))
        if unknown and report.new:
            warning = (
                f"{len(unknown)} sources (such as {unknown[0]}) have chunks in an unknown order: those without KV were "
                "encoded without context; set their start_index (LlamaIndex: start_char_idx), or add them through "
                "KVWarmVectorStore"
            )
            logger.warning(warning)
            report = replace(report, warnings=(*report.warnings, warning))
        return report

    def _stored(self, named: Mapping[str, Existing], before: set[str]) -> set[str]:
        """Return the names of the texts with KV for their sources, and of those without a token.

        Of a server, only the names of the documents are known.
        """
        engine: Any = self._llm
        namespace = self._namespace or ""
        if isinstance(engine, LLMBase):
            engine, namespace = engine._open(), engine._in(self._namespace)
        if not hasattr(engine, "store"):
            return before & named.keys()
        ids: dict[str, list[int]] = {}
        for name, text in named.items():
            with suppress(PromptError):  # warming skips it
                ids[name] = engine.encode(text.text)
        keys = {name: text_key(namespace, ids[name]) for name in ids}
        states = engine.store.look_up(list(dict.fromkeys(keys.values())))

        def has_kv(name: str) -> bool:
            state = states[keys[name]]
            held = {state.sources.get(source) for source in (named[name].source, "")}  # "": encoded alone
            return name in before and not held.isdisjoint(state.variants)

        return {name for name in ids if not ids[name] or has_kv(name)}

    def drop(self, ids: Iterable[Id], left: Present) -> None:
        """Drop the KV of the ids that the vector store no longer has; of none if these are unknown."""
        if left is not None:
            self.forget(self.names_of(doc_id for doc_id in ids if doc_id not in left))

    def forget(self, names: Iterable[str]) -> None:
        """Drop KV documents."""
        for name in sorted(names):
            self._llm.forget(name, namespace=self._namespace)

    def ids(self) -> list[str]:
        """Return the first part of each id with KV."""
        return list(dict.fromkeys(self.parts(name)[0] for name in self.names()))

    def names(self, path: Id = ()) -> set[str]:
        """Return the names of the KV documents whose ids start with these parts."""
        return {*self._llm.documents(self._prefix + _path(path), namespace=self._namespace)}

    def names_of(self, ids: Iterable[Id]) -> set[str]:
        """Return the names of the KV documents of these ids."""
        return {name for doc_id in dict.fromkeys(ids) for name in self.names(doc_id)}

    def parts(self, name: str) -> list[str]:
        """Return the parts of the id in the name of a KV document."""
        return [unquote(part) for part in name.removeprefix(self._prefix).split("/")[:-1]]

    def _name(self, of: Id, text: str) -> str:
        digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        return self._prefix + _path(of) + digest

    def _warm(self, texts: Sequence[str], names: Sequence[str], sources: Sequence[str], **options: bool) -> WarmReport:
        report = self._llm.warm(texts, document=names, sources=sources, namespace=self._namespace, **options)
        for warning in report.warnings:
            logger.warning(warning)
        return report


async def uncancelled(work: Awaitable[T]) -> T:
    """Wait until work is done even if the caller is cancelled: its thread cannot be stopped."""
    if not isawaitable(work):  # the result of a synchronous call
        return work
    step = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        if not step.done():
            await asyncio.wait([step])
        raise


def _path(parts: Id) -> str:
    return "".join(f"{quote(str(part), safe='')}/" for part in (parts if isinstance(parts, tuple) else [parts]))

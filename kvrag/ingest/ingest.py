"""Ingestion: from texts to chunks in the store.

A text is encoded with the preceding text of its source as context, so that its KV resolves pronouns and references. A
text that several sources hold is encoded alone, so that readers of one source never get words of another. The decision
uses the durable state, and is checked again after this document has been recorded as a holder. If two processes store
the same text, the second one sees both holders and encodes the text alone before `warm` returns.

A document's texts that are too short to be matched are stored as well, so that it can be forgotten with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvrag.backend.protocol import Backend, Outline
from kvrag.config import BlendConfig, NamedText, check_names, named_texts
from kvrag.errors import ContextWindowError, PromptError, SettingError, StoreError
from kvrag.fingerprint import Fingerprint
from kvrag.index.catalog import Catalog
from kvrag.ingest.encode import encode
from kvrag.process import reporting_memory
from kvrag.store import ON_REQUEST, ChunkRecord, Holding, KVStore
from kvrag.store.base import Progress, no_progress
from kvrag.store.values import chunk_key, pack, text_key
from kvrag.types import WarmReport
from kvrag.words import counted

_PORTION_BYTES = 512 << 20  # chunks are encoded in portions of about this much KV, so that similar lengths share passes
_PUT_BYTES, _PUT_S = 64 << 20, 5.0  # ... and stored after this much KV or this many seconds; a pass may take longer
_LEAST_OVERLAP = 8  # tokens; shorter overlaps are coincidence
_GROWTH = 5, 12  # minimum and maximum before a context is cut back: longer ones cost more attention than they save
_CUTS = 4  # between them, about one cut in this many tokens; all three in units of `context_tokens`
_ROUNDS = 4  # of encoding chunks that other processes evicted or began to share


@dataclass(frozen=True, slots=True)
class _Piece:
    """A text at its place in a source and a document, later the chosen variant of it."""

    document: str
    source: str
    text_key: str
    ids: list[int]
    context: list[int]  # that precedes it in its source, or that the variant is encoded with
    chunk_key: str = ""  # of the variant


@dataclass
class _Tally:
    """Stores the chunks that a call of `warm` encodes, several at once, and counts tokens, bytes and texts."""

    store: KVStore
    progress: Progress
    least: int  # tokens of a text that is counted: shorter ones are not reused
    text_keys: set[str] = field(default_factory=set)
    tokens: int = 0
    bytes: int = 0
    done: int = 0  # tokens, including those of chunks that other processes stored meanwhile
    total: int = 0
    waiting: list[ChunkRecord] = field(default_factory=list)
    size: int = 0  # of the waiting chunks, in bytes before a codec packs them
    stored: float = 0.0  # when chunks were stored

    def count(self, chunks: Iterable[_Piece | ChunkRecord]) -> int:
        """Return the number of tokens of those that are counted."""
        return sum(len(chunk.ids) for chunk in chunks if len(chunk.ids) >= self.least)

    def put(self) -> None:
        """Store the waiting chunks, and report the progress."""
        records, self.waiting, self.size = self.waiting, [], 0
        if records:
            self.bytes += self.store.put(records)
            self.text_keys.update(text_key(record.namespace, record.ids) for record in records)
            self.tokens += self.count(records)
            self.done += self.count(records)
        self.progress(self.done, self.total)
        self.stored = time.perf_counter()


class Choosing:
    """Chooses the variants of a document's texts. Runs no model."""

    def __init__(self, model: Outline, store: KVStore, config: BlendConfig, fingerprint: Fingerprint) -> None:
        self._outline, self._store, self._config, self._fingerprint = model, store, config, fingerprint

    def tokenize(
        self, texts: Iterable[NamedText], namespace: str = "", least: int | None = None
    ) -> list[tuple[list[int], str | None]]:
        """Return each text's token ids, and its chunk key if encoded alone: None for fewer than `least` tokens.

        `least` is by default the number by which a text is matched.
        """
        least = self._config.min_run if least is None else least
        return [self._tokenized(number, text, namespace, least) for number, text in enumerate(texts)]

    def _tokenized(self, number: int, text: NamedText, namespace: str, least: int) -> tuple[list[int], str | None]:
        chunk = f"chunk {number}" + f" of document {text.document!r}" * bool(text.document)
        chunk += f" from {text.source!r}" * (text.source not in ("", text.document))
        try:
            ids = self._outline.tokenizer.encode(text.text)
            self._outline.check_window(len(ids) + len(self._outline.preamble), chunk)
        except PromptError as error:
            error.chunk = number
            if not isinstance(error, ContextWindowError):  # which names it
                error.args = (f"{chunk}: {error}",)
            raise
        return ids, chunk_key(self._fingerprint.digest, ids, (), namespace) if len(ids) >= least else None

    def is_warm(self, texts: Sequence[str], document: str, namespace: str = "") -> bool:
        """Return whether `warm` with these texts of a document would encode nothing and change nothing."""
        named = named_texts(texts, document)
        pieces = self._pieces(named, self.tokenize(named, namespace, least=1), namespace, {})
        choices, missing = self._choose(pieces, namespace, set())
        held = self._store.documents(document, namespace).get(document, [])
        return not missing and held == sorted({choice.chunk_key for choice in choices})

    def _pieces(
        self,
        texts: Sequence[NamedText],
        tokenized: Sequence[tuple[list[int], str | None]],
        namespace: str,
        before: dict[str, list[int]],
    ) -> list[_Piece]:
        """Return the pieces to store: each text once per document and source, at its first position."""
        pieces: dict[tuple[str, str, str], _Piece] = {}
        contexts = self._preceding([ids for ids, _ in tokenized], [text.source for text in texts], before)
        for (_, document, source), (ids, key), context in zip(texts, tokenized, contexts, strict=True):
            if key:
                piece = _Piece(document, source, text_key(namespace, ids), ids, context)
                pieces.setdefault((document, source, piece.text_key), piece)
        return list(pieces.values())

    def _preceding(
        self, texts: Sequence[list[int]], sources: Sequence[str], before: dict[str, list[int]]
    ) -> Iterator[list[int]]:
        """Yield the text that precedes each text in its source.

        The context grows with the source and is cut back to `context_tokens` at intervals. In between, consecutive
        contexts share a prefix, which is computed only once.
        """
        blank = self._outline.tokenizer.encode("\n\n")
        limit = self._config.context_tokens
        for source, ids in zip(sources, texts, strict=True):
            context = before.get(source, [])
            if shared := _overlap(context, ids):
                context = context[:-shared]
            elif context:
                context = [*context, *blank]
            if self._cuts(context, ids):
                room = self._outline.context_window - len(self._outline.preamble) - len(ids)
                context = context[max(0, len(context) - min(limit, room)) :]
            before[source] = [*context, *ids] if source and limit else []
            yield context

    def _cuts(self, context: Sequence[int], ids: Sequence[int]) -> bool:
        """Return whether the context is cut back before this text.

        Between minimum and maximum growth, a hash of the text decides: soon after an edit, the cuts are at the same
        texts as before. If the length alone decided, an edit would shift all cuts up to the end of the document.
        """
        length = len(self._outline.preamble) + len(context) + len(ids)
        if length > min(self._outline.context_window, self._outline.stable_length):  # beyond that, nothing is shared
            return True
        limit = self._config.context_tokens
        grown = len(context) - limit
        least, most = (factor * limit for factor in _GROWTH)
        return grown > most or (grown > least and int(text_key("", ids), 16) % (_CUTS * limit) < len(ids))

    def _choose(self, pieces: Sequence[_Piece], namespace: str, shared: set[str]) -> tuple[list[_Piece], list[_Piece]]:
        """Choose the variant of each piece: with context, or encoded alone if the text is held elsewhere too.

        Adds texts that are held elsewhere, with another context under the same source, to `shared`. Also returns those
        of the variants that are not stored, each once.
        """
        states = self._store.look_up(list(dict.fromkeys(piece.text_key for piece in pieces)))
        sources = {key: set(state.sources) for key, state in states.items()}
        for piece in pieces:
            sources[piece.text_key].add(piece.source)
        shared.update(key for key, state in states.items() if "" in state.sources.values())
        several = shared | {key for key, names in sources.items() if len(names) > 1}
        variants = [replace(piece, context=[]) if piece.text_key in several else piece for piece in pieces]
        key = partial(chunk_key, self._fingerprint.digest)
        choices = [replace(piece, chunk_key=key(piece.ids, piece.context, namespace)) for piece in variants]
        missing = {c.chunk_key: c for c in choices if c.chunk_key not in states[c.text_key].variants}
        return choices, list(missing.values())


class Ingestion(Choosing):
    """Fills the store of one engine. Thread-safe; several processes may fill one store."""

    def __init__(self, model: Backend, store: KVStore, config: BlendConfig, fingerprint: Fingerprint) -> None:
        super().__init__(model, store, config, fingerprint)
        self._model, self._warming = model, threading.Lock()

    def warm(
        self,
        texts: Iterable[str],
        document: str | Sequence[str] = "",
        sources: str | Sequence[str] | None = None,
        namespace: str = "",
        progress: Progress = no_progress,
        replace: bool = True,
        before: dict[str, list[int]] | None = None,
        skip_invalid: bool = False,
    ) -> WarmReport:
        """See BlendEngine.warm. Texts that came with a prompt have the document `ON_REQUEST`.

        Args:
            replace: False = add the texts to those of their documents.
            before: Token ids that precede the texts, by source, from an earlier call; changed for the next one.
        """
        started = time.perf_counter()
        given, named, tokenized, warnings = named_texts(texts, document, sources), [], [], list[str]()
        min_run = self._config.min_run
        least = min_run if document == ON_REQUEST else 1  # so that a document can be forgotten with its short texts
        for number, text in enumerate(given):
            try:
                tokenized.append(self._tokenized(number, text, namespace, least))
                named.append(text)
            except PromptError as error:
                if not skip_invalid:
                    raise
                warnings.append(f"skipped: {error}")
        pieces = self._pieces(named, tokenized, namespace, {} if before is None else before)
        # also one without texts
        documents = {text.document for text in given} | ({document} if isinstance(document, str) else set())
        tally = _Tally(self._store, progress, min_run)

        shared: set[str] = set()
        choices, missing = self._choose(pieces, namespace, shared)
        for _ in range(_ROUNDS):
            self._encode_and_put(missing, namespace, tally)
            self._hold(choices, documents, namespace, replace)
            # re-check after recording the holders: others may have stored, shared or evicted these texts
            previous = choices
            choices, missing = self._choose(pieces, namespace, shared)
            if choices == previous and (not missing or not self._has_room(missing, namespace)):
                break

        skipped = len({tuple(ids) for ids, _ in tokenized if len(ids) < min_run})
        matched = {piece.text_key for piece in pieces if len(piece.ids) >= min_run}
        new = len(matched & tally.text_keys)
        if skipped:
            warnings.append(
                f"{counted(skipped, 'chunk')} with fewer than {min_run} tokens will not be reused: "
                "they are computed with the rest of the prompt"
            )
        if missing:
            warnings.append(
                f"{len(missing)} of these chunks were evicted at once: the store's byte budget is too small for "
                "all of them, raise max_bytes or the namespace's budget"
            )
        return WarmReport(
            chunks=len(matched) + skipped,
            tokens=tally.tokens,
            bytes=tally.bytes,
            new=new,
            reused=len(matched) - new,
            skipped=skipped,
            seconds=time.perf_counter() - started,
            warnings=tuple(warnings),
        )

    def warm_documents(self, texts: Sequence[str], namespace: str, lookup: Catalog) -> tuple[dict[str, str], str]:
        """Encode the documents of an answer that are not stored.

        Returns their text keys by chunk key, and a note if they cannot be stored: the answer does not depend on it.
        """
        tokenized = self.tokenize(named_texts(texts), namespace)
        text_keys = [text_key(namespace, ids) for ids, _ in tokenized]

        def find_missing() -> dict[str, tuple[str, str]]:
            usable = lookup.usable(text_keys)
            chunks = zip(texts, text_keys, tokenized, strict=True)
            # a text that is too short to be reused has no key
            return {key: (name, text) for text, name, (_, key) in chunks if key and name not in usable}

        missing, note = dict[str, tuple[str, str]](), ""
        try:
            if find_missing():
                with self._warming:  # parallel answers with the same documents encode them once
                    if missing := find_missing():
                        self.warm([text for _, text in missing.values()], ON_REQUEST, "", namespace)
                        lookup.refresh()
        except StoreError as error:
            note = f"documents could not be stored: {error}"
        return {key: name for key, (name, _) in missing.items()}, note

    def forget(self, document: str, namespace: str = "") -> list[str]:
        """Delete a document's chunks unless another one has them; return their keys. See `kvrag.memory.forgetting`."""
        check_names(document)
        if not document:
            raise SettingError("forget needs the name of a document")
        return self._store.set_document(document, [], namespace)

    def forget_requests(self, text_keys: Collection[str], namespace: str) -> list[str]:
        """Delete those of these texts that only prompts brought; return the keys of the removed chunks."""
        return self._store.forget_requests(namespace, lambda requests: [key for key in requests if key in text_keys])

    def _hold(self, choices: Sequence[_Piece], documents: Iterable[str], namespace: str, replace: bool) -> None:
        """Record each document's holdings durably; chunks that no document relies on any more are removed."""
        held: dict[str, list[Holding]] = {document: [] for document in documents}
        for choice in choices:
            held[choice.document].append(Holding(choice.text_key, choice.chunk_key, choice.source))
        for document, holdings in held.items():
            self._store.set_document(document, holdings, namespace, replace=replace)

    def _has_room(self, missing: Sequence[_Piece], namespace: str) -> bool:
        """Return whether the missing chunks fit into the store. If they fit, they were not evicted for lack of room."""
        stats = self._store.stats()
        needed = sum(len(choice.ids) for choice in missing) * stats.bytes / max(stats.tokens, 1)
        rooms = [(stats.bytes, stats.max_bytes)]
        rooms += [(part.bytes, part.max_bytes) for part in stats.namespaces if part.namespace == namespace]
        return all(most is None or used + needed <= most for used, most in rooms)

    def _encode_and_put(self, missing: Sequence[_Piece], namespace: str, tally: _Tally) -> None:
        tally.total += tally.count(missing)
        if missing or not tally.total:
            tally.progress(tally.done, tally.total)
        for portion in _portions(missing, self._model):
            # another process may be warming the same corpus
            wanted = set(self._store.missing([choice.chunk_key for choice in portion]))
            new = [choice for choice in portion if choice.chunk_key in wanted]
            tally.done += tally.count(choice for choice in portion if choice.chunk_key not in wanted)
            with reporting_memory():
                self._encode(new, namespace, tally)

    def _encode(self, choices: Sequence[_Piece], namespace: str, tally: _Tally) -> None:
        """Encode and store chunks; when this is interrupted, those that are encoded are stored first."""
        chunks, contexts = [choice.ids for choice in choices], [choice.context for choice in choices]
        is_alone = self._model.num_processes == 1  # several store together, so that all do at the same chunk
        tally.stored = time.perf_counter()
        try:
            for number, layers in encode(self._model, chunks, contexts):
                ids, context = (np.asarray(tokens[number], np.uint32) for tokens in (chunks, contexts))
                beginning = f"{self._model.tokenizer.decode(chunks[number][:12])}..."
                packed = pack(layers, self._fingerprint.codec, beginning)
                tally.waiting.append(ChunkRecord(choices[number].chunk_key, namespace, ids, context, packed))
                tally.size += _size(self._model, len(ids))
                is_large = tally.size >= _PUT_BYTES
                if is_large or (is_alone and time.perf_counter() - tally.stored >= _PUT_S):
                    tally.put()
        except BaseException:
            if is_alone:
                tally.put()
            raise
        tally.put()


def _overlap(before: list[int], ids: list[int]) -> int:
    """Return the number of tokens at the end of a text that a splitter repeated at the beginning of the next one.

    The first token may differ, because it lacks the space before it.
    """
    for num in range(min(len(before), len(ids)), _LEAST_OVERLAP - 1, -1):
        if before[-num + 1 :] == ids[1:num]:
            return num
    return 0


def _size(model: Backend, num_tokens: int) -> int:
    """Return the bytes of an encoded chunk, before a codec packs it."""
    return num_tokens * model.bytes_per_token + model.bytes_per_chunk


def _portions(choices: Sequence[_Piece], model: Backend) -> Iterator[list[_Piece]]:
    """Yield the choices in portions of about `_PORTION_BYTES`, in reading order.

    Chunks that share a context stay together: otherwise the context would be computed again.
    """
    portion: list[_Piece] = []
    size = 0
    for choice in choices:
        if size >= _PORTION_BYTES and len(choice.context) <= len(portion[-1].context):
            yield portion
            portion, size = [], 0
        portion.append(choice)
        size += _size(model, len(choice.ids))
    if portion:
        yield portion

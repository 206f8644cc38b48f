"""Ingestion: texts to chunks that the store has, each encoded behind what stands before it in its document."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig
from kvrag.control.tuning import Tuning
from kvrag.errors import DamagedChunkError, SettingError, StoreError
from kvrag.fingerprint import Fingerprint
from kvrag.ingest.encode import BATCH_TOKENS, encode, row_lengths
from kvrag.reuse.match import anchors
from kvrag.store import ChunkRecord, DroppedChunks, KVStore
from kvrag.store.codec import pack
from kvrag.types import WarmReport

_PUT_TOKENS = 32768  # chunks are stored in portions of about this many tokens: what a killed ingestion may lose
_LEAST_OVERLAP = 8  # fewer common tokens are chance


@dataclass(frozen=True)
class Texts:
    """Texts as they are stored.

    Attributes:
        ids: Each text's tokens.
        keys: Each text's chunk key, None if it is too short to be matched.
        skipped: How many different ones are too short.
        warnings: What is to be said about them.
    """

    ids: list[list[int]]
    keys: list[str | None]
    skipped: int
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class _Context:
    """The source that a chunk is a piece of, "" = not known, None = several, and what of it stands before the chunk."""

    source: str | None
    ids: list[int]


_ALONE = _Context(None, [])


class Ingestion:
    """Fills the store of one engine. Thread-safe; several processes may fill one store."""

    def __init__(
        self, model: Model, store: KVStore, config: BlendConfig, codec: str, fingerprint: Fingerprint, tuning: Tuning
    ) -> None:
        self._model, self._store, self._config, self._codec = model, store, config, codec
        self._fingerprint, self._tuning = fingerprint, tuning
        self._dropped = DroppedChunks()

    def tokenize(self, texts: Iterable[str], namespace: str = "") -> Texts:
        """Raises as `BlendEngine.warm` does of texts that cannot be chunks."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            given = "one string" if isinstance(texts, str) else repr(texts)
            raise SettingError(f"texts must be a list of chunks, not {given:.80}")
        tokens: list[list[int]] = []
        keys: list[str | None] = []
        short: set[str] = set()
        least = self._config.min_run
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise SettingError(f"chunk {number} is a {type(text).__name__}, not a string")
            ids = self._model.tokenizer.encode(text)
            self._model.check_window(len(ids) + len(self._model.tokenizer.preamble), f"chunk {number}")
            tokens.append(ids)
            if len(ids) < least:
                short.add(text)
            keys.append(None if len(ids) < least else self._fingerprint.chunk_key(ids))
        warnings = []
        if short:
            warnings.append(
                f"{len(short)} chunks have fewer than {least} tokens and will not be reused: "
                "they are computed with the rest of the prompt"
            )
        return Texts(tokens, keys, len(short), warnings)

    def warm(
        self,
        texts: Iterable[str],
        document: str | Sequence[str],
        sources: str | Sequence[str] | None,
        namespace: str = "",
        progress: Callable[[int, int], None] = lambda done, total: None,
        on_request: bool = False,
    ) -> WarmReport:
        """See BlendEngine.warm."""
        started = time.perf_counter()
        given = self.tokenize(texts)
        chunks = {key: ids for key, ids in zip(given.keys, given.ids, strict=True) if key}
        names = [document] * len(given.keys) if isinstance(document, str) else document
        if len(names) != len(given.keys):
            raise SettingError(
                f"{len(names)} names of documents for {len(given.keys)} texts: give one for each, or one string"
            )
        if sources is None or isinstance(sources, str):
            sources = names if sources is None else [sources] * len(given.keys)
        if len(sources) != len(given.keys):
            raise SettingError(f"{len(sources)} sources for {len(given.keys)} texts: give one for each, or one string")
        contexts = self._contexts(sources, given)
        whole = {document: list[str]()} if isinstance(document, str) else {}  # also if nothing is left of it
        documents = whole | _by_document(names, given.keys)
        new: set[str] = set()
        size = 0
        missing = self._look_up(chunks, contexts)
        done, total = 0, sum(len(chunks[key]) for key in missing)
        progress(0, total)
        for _ in range(2):
            lengths = [len(chunks[key]) for key in missing]
            for portion in _portions(missing, lengths, _PUT_TOKENS):
                # another process may be warming the same corpus
                now = self._store.missing(portion)
                size += self._encode_and_put({key: chunks[key] for key in now}, contexts)
                new.update(now)
                done += sum(len(chunks[key]) for key in portion)
                progress(done, max(done, total))
            for name, held in documents.items():
                self._store.set_document(name, held)
            # until now nobody held what was found, and who dropped another document may have taken it along
            missing = self._look_up(chunks, contexts)
            if not missing or not self._has_room(sum(len(chunks[key]) for key in missing)):
                break
        self._dropped.clear()
        self._tuning.keep_speed()
        warnings = given.warnings
        if missing:
            warnings.append(
                f"{len(missing)} of these chunks were evicted at once: the store's byte budget is too small for "
                "them all"
            )
        return WarmReport(
            chunks=len(chunks) + given.skipped,
            tokens=sum(len(chunks[key]) for key in new),
            bytes=size,
            new=len(new),
            reused=len(chunks) - len(new),
            skipped=given.skipped,
            seconds=time.perf_counter() - started,
            warnings=tuple(warnings),
        )

    def forget(self, document: str, namespace: str = ""):
        """See BlendEngine.forget."""
        if not document:
            raise SettingError("forget needs a document's name")
        for key in self._store.documents(document).get(document, []):
            with contextlib.suppress(StoreError):  # what cannot be read need not come back
                if reader := self._store.open(key):
                    self._dropped.keep(key, reader)
        n = self._store.set_document(document, [])
        return [""] * n

    def close(self) -> None:
        """Let go of what was dropped a moment ago."""
        self._dropped.clear()

    def _look_up(self, chunks: dict[str, list[int]], contexts: dict[str, _Context]) -> list[str]:
        """Keys that the store lacks, once it has again what was dropped a moment ago, and no more what stands behind
        another source's text: from now on that stands alone."""
        for key, ids in chunks.items():
            if reader := self._dropped.take(key):
                try:
                    if reader.source not in ("", contexts[key].source):
                        continue
                    layers = [reader.layer(number) for number in range(reader.num_layers)]
                    described = np.asarray(ids, np.uint32), anchors(ids)
                    record = ChunkRecord(key, *described, layers, reader.context, reader.source)
                    self._store.put([record])
                except DamagedChunkError:
                    pass  # it is encoded again
                finally:
                    reader.close()
        shared = self._in_other_sources(chunks.keys() - set(self._store.missing(list(chunks))), contexts)
        if shared:
            self._store.remove(shared)
            contexts.update(dict.fromkeys(shared, _ALONE))
        return self._store.missing(list(chunks))

    def _has_room(self, tokens: int) -> bool:
        """Whether so many tokens fit in: what is gone and would fit was not evicted."""
        stats = self._store.stats()
        needed = tokens * stats.bytes / max(stats.tokens, 1)
        return stats.max_bytes is None or stats.bytes + needed <= stats.max_bytes

    def _contexts(self, sources: Sequence[str], given: Texts) -> dict[str, _Context]:
        """What each chunk is encoded behind.

        That grows up to twice `context_tokens` before it is cut back to them: until then it begins alike for one chunk
        after another, and is computed once for them all.
        """
        contexts: dict[str, _Context] = {}
        before: dict[str, list[int]] = {}
        blank = self._model.tokenizer.encode("\n\n")
        limit, window = self._config.context_tokens, self._model.context_window - len(self._model.tokenizer.preamble)
        for source, ids, key in zip(sources, given.ids, given.keys, strict=True):
            context = before.get(source, [])
            if shared := _overlap(context, ids):
                context = context[:-shared]
            elif context:
                context = [*context, *blank]
            room = window - len(ids)
            if len(context) > min(2 * limit, room):
                context = context[len(context) - min(limit, room) :]
            before[source] = [*context, *ids] if source and limit else []
            if key and contexts.setdefault(key, _Context(source, context)).source != source:
                contexts[key] = _ALONE
        return contexts

    def _in_other_sources(self, keys: Iterable[str], contexts: dict[str, _Context]) -> list[str]:
        """Stored chunks that stand behind text of another source."""
        shared = []
        for key in keys:
            if contexts[key].source != "" and self._config.context_tokens:
                with contextlib.suppress(StoreError):  # what cannot be read is found out when it is used
                    if reader := self._store.open(key):
                        reader.close()
                        if reader.source not in ("", contexts[key].source):
                            shared.append(key)
        return shared

    def _encode_and_put(self, chunks: dict[str, list[int]], contexts: dict[str, _Context]) -> int:
        keys, records = list(chunks), []
        before = [contexts[key].ids for key in keys]
        started, waits = time.perf_counter(), self._model.lock.waits
        encoded = list(encode(self._model, list(chunks.values()), before))
        if self._model.lock.waits == waits:  # what others computed meanwhile would count as ours
            lengths = row_lengths(self._model, list(chunks.values()), before)
            passes = math.ceil(sum(lengths) / BATCH_TOKENS)
            self._tuning.observe_encoding(lengths, passes, time.perf_counter() - started)
        for number, layers in encoded:
            ids = chunks[keys[number]]
            packed = pack(layers, self._codec, f"{self._model.tokenizer.decode(ids[:12])}...")
            context = contexts[keys[number]]
            source = context.source if context.source and context.ids else ""
            described = np.asarray(ids, np.uint32), anchors(ids)
            records.append(ChunkRecord(keys[number], *described, packed, len(context.ids), source))
        return self._store.put(records) if records else 0


def _by_document(names: Sequence[str], keys: Sequence[str | None]) -> dict[str, list[str]]:
    """Each document's keys."""
    held: dict[str, list[str]] = {name: [] for name in names}
    for name, key in zip(names, keys, strict=True):
        if key is not None:
            held[name].append(key)
    return held


def _overlap(before: list[int], ids: list[int]) -> int:
    """How many tokens at the end of a text are the beginning of the next one, which a splitter made overlap with it.

    The first of them may be another there, for want of the space before it.
    """
    for num in range(min(len(before), len(ids)), _LEAST_OVERLAP - 1, -1):
        if before[-num + 1 :] == ids[1:num]:
            return num
    return 0


def _portions(keys: Sequence[str], tokens: Sequence[int], size: int) -> Iterator[list[str]]:
    """Keys in portions of about `size` tokens, in reading order: what stands before chunks is computed once for those
    of a portion."""
    portion: list[str] = []
    total = 0
    for key, count in zip(keys, tokens, strict=True):
        portion.append(key)
        total += count
        if total >= size:
            yield portion
            portion, total = [], 0
    if portion:
        yield portion

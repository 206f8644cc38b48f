"""Learning from prompts: texts that are seen twice become chunks, while no answer is in progress."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import cast

from cachetools import FIFOCache

from kvrag.config import named_texts
from kvrag.errors import KvragError
from kvrag.index.catalog import Catalog
from kvrag.ingest.ingest import Ingestion
from kvrag.listen.listener import Listener
from kvrag.request import Request
from kvrag.scheduling.waiting import Idle, is_cancelled
from kvrag.store.values import ON_REQUEST, text_key
from kvrag.types import LearnStats, Messages, TokenIds

logger = logging.getLogger("kvrag")

LEAST_TOKENS = 64  # shorter texts save too little
_LEAST_LETTERS = 2 * LEAST_TOKENS  # a text with fewer is not tokenised
_SEEN = 1 << 16  # texts seen once that are remembered, by their digests
_WAITING = 256  # prompts; more are ignored


class Learner(Listener):
    """Encodes texts that were seen in two prompts of a namespace.

    A text is a message of a tool, or a paragraph of another message. Only those after the last answer count, because
    the earlier ones were in the previous prompt of the conversation. Learned chunks have no document: they expire like
    those of `documents=`, and go with a document that contains the same text.
    """

    name = "learned"

    def __init__(self, ingestion: Ingestion, lookup: Catalog, idle: Idle, notice: Callable[[], None]) -> None:
        """Start without texts.

        Args:
            notice: Marks prompts of which texts were removed from the store, see `Request`.
        """
        self._ingestion, self._lookup, self._idle, self._notice = ingestion, lookup, idle, notice
        self._seen: FIFOCache[bytes, str] = FIFOCache(_SEEN)  # namespaces by digest
        self._keys: set[str] = set()  # of the chunks learned
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by namespace
        self._counting = threading.Lock()
        self._has_warned = False
        self._times_forgotten = Counter[str]()  # by namespace

    def prefilled(self, request: Request, prompt: str | Messages | TokenIds) -> None:
        """Count what a prompt reused, and look at its new texts later.

        The first error is logged as a warning, all are counted.
        """
        namespace = request.namespace
        self._count(namespace, reused=sum(len(run) for run in request.report.runs if run.key in self._keys))
        is_forgotten = partial(self._is_forgotten, request, self._times_forgotten[namespace])
        look = partial(self._look, prompt, namespace, is_forgotten)
        self._count(namespace, ignored=int(not self._idle.add(request, look, "learn", _WAITING)))

    def stats(self, namespace: str | None) -> LearnStats:
        """See `Listener`."""
        with self._counting:
            seen = sum(namespace in (None, name) for name in self._seen.values())
            found = [counts for name, counts in self._counts.items() if namespace in (None, name)]
            counts = sum(found, Counter[str]())
            names = ("learned", "tokens", "failed", "ignored", "reused")
            return LearnStats(seen, **{name: counts[name] for name in names})

    def forget_learned(self, namespace: str) -> None:
        """Forget which texts of a namespace were seen once, and its prompts that wait."""
        with self._counting:
            self._times_forgotten[namespace] += 1
            for digest in [digest for digest, name in self._seen.items() if name == namespace]:
                del self._seen[digest]

    def _count(self, namespace: str, **more: int) -> None:
        with self._counting:
            self._counts[namespace].update(more)

    def _is_forgotten(self, request: Request, times_forgotten: int) -> bool:
        self._notice()
        return request.is_forgotten or times_forgotten != self._times_forgotten[request.namespace]

    def _look(self, prompt: str | Messages | TokenIds, namespace: str, is_forgotten: Callable[[], bool]) -> None:
        is_cancelled.set(lambda: self._idle.is_over)  # answers that begin do not end it
        for text in dict.fromkeys(new_texts(prompt)):
            if self._idle.is_over or is_forgotten():
                return
            try:
                if self._is_known(text, namespace):
                    self._encode(text, namespace, is_forgotten)
            except Exception as error:  # no answer depends on it
                if self._idle.is_over:
                    return
                self._count(namespace, failed=1)
                level = logging.INFO if self._has_warned else logging.WARNING  # a full disk stays so for a while
                logger.log(level, "a text of a prompt could not be learned: %s (logged once)", error)
                self._has_warned = True

    def _is_known(self, text: str, namespace: str) -> bool:
        """Return whether the text was seen before; remember it."""
        digest = hashlib.blake2b(f"{namespace}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._counting:
            if self._seen.pop(digest, None) is not None:
                return True
            self._seen[digest] = namespace
            return False

    def _encode(self, text: str, namespace: str, is_forgotten: Callable[[], bool]) -> None:
        try:
            ((ids, key),) = self._ingestion.tokenize(named_texts([text]), namespace)
        except KvragError:  # longer than the window
            return
        text_id = text_key(namespace, ids)
        if key is None or len(ids) < LEAST_TOKENS or self._lookup.usable([text_id]):
            return
        self._idle.pause()
        if self._idle.is_over or is_forgotten():
            return
        report = self._ingestion.warm([text], ON_REQUEST, "", namespace)
        self._lookup.refresh()
        if is_forgotten():  # while it was encoded
            self._ingestion.forget_requests([text_id], namespace)
            self._lookup.refresh()
            return
        self._keys.add(key)
        self._count(namespace, learned=report.new, tokens=report.tokens)


def new_texts(prompt: str | Messages | TokenIds) -> Iterator[str]:
    """Yield the texts of a prompt after its last answer: messages of tools, and paragraphs of others."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    new = takewhile(lambda message: isinstance(message, dict) and message["role"] != "assistant", reversed(messages))
    for message in cast(Messages, list(new)[::-1]):
        content = message.get("content")
        if isinstance(content, str):
            parts: Sequence[str] = [content] if message["role"] == "tool" else re.split(r"\n\s*\n", content)
            yield from (part.strip() for part in parts if len(part.strip()) >= _LEAST_LETTERS)

"""The corpus of a server: documents that were encoded, and can be retrieved.

A document's id is a name in a database, never a path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvrag.engine import BlendEngine
from kvrag.retrieval.documents import page_numbers
from kvrag.retrieval.index import ChunkIndex
from kvrag.scheduling.waiting import check_cancelled
from kvrag.server.api_errors import ApiError
from kvrag.store.base import no_progress

_MAX_ID = 256


class Corpus:
    """Documents of one namespace, in an engine's store and in a chunk index. Thread-safe, but one `add` at a time."""

    def __init__(
        self,
        engine: BlendEngine,
        index: ChunkIndex,
        split: Callable[[Sequence[str]], list[str]],
        namespace: str = "",
    ) -> None:
        """Open a corpus; `split` splits texts into chunks."""
        self.index, self.namespace = index, namespace
        self._engine, self._split = engine, split
        self._changing = threading.Lock()
        self._encoded = ""  # the document that is being encoded, or that could not be

    def add(self, document: str, texts: Sequence[str], pages: Sequence[int] = ()) -> dict[str, Any]:
        """Encode a document, in the form of a `Content`. It replaces the document with the same id.

        If this is cancelled, the KV so far is kept: adding the document again continues.
        """
        chunks = self._split(texts)
        self._encoded = document
        # KV first: every retrievable chunk has its KV
        self._engine.warm(chunks, document=document, namespace=self.namespace, progress=no_progress)
        with self._changing:
            if self._encoded != document:
                self._engine.forget(document, namespace=self.namespace)
                raise ApiError(409, f"{document} was deleted while it was encoded", "conflict")
            numbers = page_numbers(chunks, texts, pages)
            self.index.add(chunks, document, lambda done, total: check_cancelled(), numbers)
            self._encoded = ""
        return self.status(document)

    def remove(self, document: str) -> None:
        """Delete a document and its chunks' KV, even if it is being encoded."""
        with self._changing:
            if self._encoded == document:
                self._encoded = ""
            else:
                self.status(document)  # raises if it does not exist
            self.index.remove(document)
            self._engine.forget(document, namespace=self.namespace)

    def status(self, document: str) -> dict[str, Any]:
        """Return the status of a document; raise ApiError if it does not exist."""
        if not (found := self.statuses(document)):
            raise ApiError(404, f"unknown document {document!r:.280}: see GET /v1/corpus", "document_not_found")
        return found[0]

    def statuses(self, document: str | None = None) -> list[dict[str, Any]]:
        """Return the status of all documents, or of one if it exists, sorted by id.

        Each has the number of its chunks, and the tokens of those that are stored.
        """
        counts = self.index.counts()
        tokens = self._engine.store.count_tokens(document or "", namespace=self.namespace)
        names = sorted({*counts} - {""}) if document is None else [document]
        ready = {"object": "corpus.document", "status": "ready"}
        sizes = {name: {"chunks": counts[name], "tokens": tokens.get(name, 0)} for name in names if name in counts}
        return [{"id": name, **ready, **size} for name, size in sizes.items()]


def check_id(document: str) -> None:
    """Raise ApiError unless this is a valid document id."""
    if not 0 < len(document) <= _MAX_ID or not document.isprintable() or {".", ".."} & set(document.split("/")):
        allowed = f"1 to {_MAX_ID} printable characters, without '.' or '..' between slashes"
        raise ApiError(400, f"a document id needs {allowed}, got {document!r:.80}", "invalid_value", "id")

"""SentenceTransformerEmbeddings: vectors from any sentence-transformers model, by default one that needs no network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings

from kvrag import SettingError
from kvrag.retrieval.index import DEFAULT_EMBEDDER, load_embedder


class SentenceTransformerEmbeddings(Embeddings):
    """Embeds with a sentence-transformers model, which is loaded at once. Thread-safe.

    Attributes:
        model: What it was loaded from.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_EMBEDDER,
        *,
        batch_size: int = 32,
        normalize: bool = True,
        **settings: Any,
    ) -> None:
        """Load the model.

        Args:
            model: A hub name or a folder; the default is all-MiniLM-L6-v2, which comes as a package.
            normalize: Vectors have length 1.
            settings: Passed on to `SentenceTransformer`, such as `device`, `revision` or `prompts`.

        Raises:
            KvragError: It cannot be loaded, or the extra `sentence-transformers` is not installed.
        """
        if batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.batch_size, self.normalize = str(model), batch_size, normalize
        self._encoder = load_embedder(self.model, "langchain-kvrag[sentence-transformers]", **settings)
        self._lock = threading.Lock()  # a fast tokenizer that one thread is setting up refuses another

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One vector per text, with the model's prompt for documents if it has one."""
        return self._embed(self._encoder.encode_document, list(texts)) if texts else []

    def embed_query(self, text: str) -> list[float]:
        """The text's vector, with the model's prompt for queries if it has one."""
        (vector,) = self._embed(self._encoder.encode_query, [text])
        return vector

    def _embed(self, encode: Callable[..., Any], texts: list[str]) -> list[list[float]]:
        with self._lock:
            return encode(
                texts, batch_size=self.batch_size, normalize_embeddings=self.normalize, show_progress_bar=False
            ).tolist()

"""SentenceTransformerEmbeddings: embeddings of any sentence-transformers model; the default works offline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.embeddings import Embeddings

from kvrag import SettingError
from kvrag.retrieval.index import DEFAULT_EMBEDDER, load_embedder


# instead of HuggingFaceEmbeddings, which ignores a model's prompts, fails in threads, and pins huggingface-hub<2
class SentenceTransformerEmbeddings(Embeddings):
    """Embeddings of a sentence-transformers model, loaded on construction. Thread-safe.

    Attributes:
        model: Name or folder of the model.
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
            model: A hub name or a folder; default: all-MiniLM-L6-v2, which is installed as a package.
            normalize: Return vectors of length 1.
            settings: Passed to `SentenceTransformer`, such as `device`, `revision` or `prompts`.

        Raises:
            KvragError: The model cannot be loaded, or the extra `sentence-transformers` is not installed.
        """
        if batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, got {batch_size}")
        self.model, self.batch_size, self.normalize = str(model), batch_size, normalize
        self._encoder = load_embedder(self.model, "langchain-kvrag[sentence-transformers]", **settings)
        self._lock = threading.Lock()  # fast tokenizers fail if two threads use them at once

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text, using the model's prompt for documents if it has one."""
        return self._embed(self._encoder.encode_document, list(texts)) if texts else []

    def embed_query(self, text: str) -> list[float]:
        """Return the text's vector, using the model's prompt for queries if it has one."""
        (vector,) = self._embed(self._encoder.encode_query, [text])
        return vector

    def _embed(self, encode: Callable[..., Any], texts: list[str]) -> list[list[float]]:
        with self._lock:
            return encode(
                texts, batch_size=self.batch_size, normalize_embeddings=self.normalize, show_progress_bar=False
            ).tolist()

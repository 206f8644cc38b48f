"""An ingestion with its store, and texts that must not leak into each other."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvrag import BlendConfig, FileStore, Model
from kvrag.ingest.encode import encode
from kvrag.ingest.ingest import Ingestion
from kvrag.store import visible_variant
from kvrag.store.values import chunk_key, text_key

SECRET = "The password of the vault of Tran Works is swordfish, and nobody but Kan Dror may ever know about it."
OTHER_SECRET = "Zel Vinford has hidden three gold bars under the old bridge of Stinmouth, as her diary tells us."
SHARED = "She lives there with a goat, two cats and a banjo, and she opens the door to nobody before noon at all."


@dataclass
class Warmer:
    """An ingestion and its store, as an engine has them."""

    model: Model
    store: FileStore
    ingestion: Ingestion

    def warm(self, *texts: str, **settings: Any) -> Any:
        return self.ingestion.warm(list(texts), **settings)

    def text(self, text: str, namespace: str = "") -> str:
        return text_key(namespace, self.model.tokenizer.encode(text))

    def served(self, text: str, namespace: str = "", alone_only: bool = False) -> str | None:
        key = self.text(text, namespace)
        return visible_variant(self.store.look_up([key])[key], alone_only)

    def alone(self, text: str, namespace: str = "") -> str:
        return chunk_key(self.model.fingerprint.digest, self.model.tokenizer.encode(text), (), namespace)

    def values(self, text: str, namespace: str = "") -> torch.Tensor:
        """Of the variant served, on the second layer."""
        key = self.served(text, namespace)
        assert key is not None
        reader = self.store.open(key)
        assert reader is not None
        with closing(reader):
            return reader.layer(1)[1]

    def context_tokens(self, text: str) -> int:
        key = self.served(text)
        assert key is not None
        reader = self.store.open(key)
        assert reader is not None
        with closing(reader):
            return reader.context_tokens


def warmer_on(model: Model, folder: Path, max_bytes: int | None = None, **config: Any) -> Warmer:
    store = FileStore(folder, max_bytes=max_bytes, min_free_bytes=0)
    store.bind(model.fingerprint)
    settings = BlendConfig(**config)
    return Warmer(model, store, Ingestion(model, store, settings, model.fingerprint))


def encoded_alone(model: Model, text: str) -> torch.Tensor:
    ((_, layers),) = encode(model, [model.tokenizer.encode(text)])
    return layers[1][1]

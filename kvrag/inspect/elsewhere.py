"""Other stores nearby: find a text that was warmed for another model, dtype or codec."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from kvrag.errors import StoreError
from kvrag.fingerprint import Fingerprint
from kvrag.inspect.explanation import Reason
from kvrag.reuse.match import match
from kvrag.reuse.segment import Segment
from kvrag.store import Entry, FileStore, KVStore, entries_of, other_stores, read_owner

logger = logging.getLogger("kvrag")


def segment_of(ids: Sequence[int]) -> Segment:
    """Return a segment that contains one text."""
    return Segment.of([Entry(1, "", "", np.asarray(ids, np.uint32))])


class Elsewhere:
    """The other stores nearby, of any model, dtype or codec. They are read on first use."""

    def __init__(self, store: KVStore, fingerprint: Fingerprint, min_run: int, namespace: str) -> None:
        self._namespace = namespace
        self._path = store.path if isinstance(store, FileStore) else None
        self._parts, self._min_run = fingerprint.parts(), min_run
        self._other_tokenizers: list[Path] = []

    @cached_property
    def _stores(self) -> list[tuple[str, Segment]]:
        """Return descriptions and segments of the stores with the same tokenizer."""
        stores = []
        for path in other_stores(self._path) if self._path else ():
            try:
                parts = read_owner(path)
                if parts.get("tokenizer") != self._parts["tokenizer"]:
                    self._other_tokenizers.append(path)
                    continue
                segment = Segment.of(entries_of(path))
            except StoreError as error:
                logger.warning("%s is skipped: %s", path, error)
                continue
            different = [name for name in self._parts if name != "model" and self._parts[name] != parts.get(name)]
            settings = ", ".join(f"{name} {_short(parts, name)}" for name in different)
            loaded = f"with {settings}" if settings else "as it is loaded now"
            stores.append((f"{path}, for {_short(parts, 'model')} {loaded}", segment))
        return stores

    @property
    def not_searched(self) -> str:
        """Return a clause about the stores that could not be searched, or ""."""
        paths = ", ".join(map(str, self._other_tokenizers))
        return f" (not searched, another tokenizer: {paths})" if paths else ""

    def find(self, ids: Sequence[int]) -> tuple[Reason, str] | None:
        """Return the first store that contains at least half of a text."""
        for name, segment in self._stores:
            if 2 * sum(map(len, match([segment], ids, self._min_run, self._namespace))) >= len(ids):
                return "warmed elsewhere", f"in {name}: open that store with its settings, or warm the text here too"
        return None


def _short(parts: dict[str, str], name: str) -> str:
    value = str(json.loads(parts.get(name, '"?"')))
    return value if name == "model" or len(value) <= 12 else f"{value[:8]}..."

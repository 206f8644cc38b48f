"""Counts of the answers of each namespace, stored beside the chunks: a restart does not reset them.

Nothing else of prompts and answers is stored, and of a namespace's name only a digest.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvrag.control import cost
from kvrag.errors import StoreError
from kvrag.store import KVStore
from kvrag.store.values import text_key

FILE = "answers.json"
FIRST_TOKENS = 32  # of the latest answers: doubts are expected by these
_NAMESPACES = 256  # per store
_TRIED = 8  # of so many prompts, one is planned without doubts: else their end would not be noticed
_NEW = ["", "", 1.0]


@dataclass
class Counts:
    """Counts of one namespace. The first three are stored.

    `last` has a "1" for each of the last checked answers that was kept, and a "0" for a lost one; `doubts` a "1" for
    each of the last answers whose first token was in doubt. `factor` is of the margin.
    """

    last: str = ""
    doubts: str = ""
    factor: float = 1.0
    chosen: int = 0
    kept: int = 0
    lost: int = 0
    failed: int = 0
    planned: int = 0

    def expect_doubt(self) -> float:
        """Return how probable doubt of the next answer's first token is, as if one more answer was without."""
        self.planned += 1
        return self.doubts.count("1") / (len(self.doubts) + 1) if self.planned % _TRIED else 0.0


class AnswerCounts(dict[str, Counts]):
    """Counts by namespace. Single operations change them, which need no lock."""

    def __init__(self, store: KVStore, fingerprint: str) -> None:
        """Read those of a model."""
        super().__init__()
        self._store, self._fingerprint, self._stored = store, fingerprint, dict[str, Any]()
        with cost.recalling(store, FILE):
            self._stored = cost.read(store.read_text(FILE))

    def __missing__(self, namespace: str) -> Counts:
        counts = Counts()
        with cost.recalling(self._store, FILE):
            last, doubts, factor = self._stored.get(self._key(namespace), _NEW)
            counts.last, counts.doubts, counts.factor = str(last), str(doubts), cost.positive(factor)
        return self.setdefault(namespace, counts)  # another thread may have been faster

    def keep(self) -> None:
        """Store those that have changed; other processes' counts of other namespaces stay."""
        entries = {self._key(name): [each.last, each.doubts, each.factor] for name, each in tuple(self.items())}
        if changed := {key: entry for key, entry in entries.items() if entry != self._stored.get(key, _NEW)}:
            with suppress(StoreError):  # no answer depends on it
                self._store.change_text(FILE, lambda text: cost.write(text, changed, _NAMESPACES))
                self._stored |= changed

    def _key(self, namespace: str) -> str:
        return f"{self._fingerprint} {text_key(namespace, ())}"

"""Lookup: where the tokens of a prompt are stored, and which variant of each text may be used for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvrag.index.catalog import Catalog
from kvrag.index.segment import Ids
from kvrag.store import KVStore, visible_variant
from kvrag.types import Run


class Match(NamedTuple):
    """A run of a stored chunk in a prompt."""

    run: Run
    text_key: str
    context_tokens: int  # that the chunk was encoded with
    keys: frozenset[str] = frozenset()  # of the chunks that the KV depends on, if it is from an earlier prompt

    @property
    def is_stored(self) -> bool:
        """True if the chunk is in the store; False if it is from an earlier prompt."""
        return bool(self.text_key)


class Lookup(Catalog):
    """A catalog that looks up the chunks that prompts may reuse. Thread-safe.

    Texts are matched on the catalog's snapshot; the variant to use depends on the store's current state.
    """

    def __init__(self, store: KVStore, alone_only: bool) -> None:
        """Open the catalog of a store. `alone_only`: use only chunks that were encoded without context."""
        super().__init__(store)
        self._alone_only = alone_only

    def find(
        self,
        ids: Sequence[int],
        min_run: int,
        namespace: str = "",
        kept: int = 0,
        withheld: set[str] | None = None,
    ) -> list[Match]:
        """Return the runs of stored chunks in a prompt after its first `kept` tokens, ascending and disjoint.

        Adds the keys of the matched texts without a usable variant to `withheld`.
        """
        runs = self.match(ids[kept:], min_run, namespace)
        variants = self._variants(run.key for run in runs)
        if withheld is not None:
            withheld.update(text_key for text_key, variant in variants.items() if variant is None)
        return [
            Match(Run(run.start + kept, run.stop + kept, variant[0], run.offset), run.key, variant[1])
            for run in runs
            if (variant := variants.get(run.key))
        ]

    def find_chunks(self, ids: Sequence[int], min_run: int, namespace: str = "") -> list[tuple[Run, Ids]]:
        """Return the runs of stored chunks in a prompt, each with the token ids of its chunk."""
        self.update()
        chunks = []
        for run, text_key, *_ in self.find(ids, min_run, namespace):
            with suppress(KeyError):  # removed in the meantime
                chunks.append((run, self.ids(text_key)))
        return chunks

    def usable(self, text_keys: Iterable[str]) -> dict[str, str]:
        """Return the chunk key of each text's usable variant, by text key; texts without one are left out."""
        return {text_key: variant[0] for text_key, variant in self._variants(text_keys).items() if variant}

    def _variants(self, text_keys: Iterable[str]) -> dict[str, tuple[str, int] | None]:
        """Return chunk key and context tokens of each text's usable variant, by text key; None without one."""
        variants: dict[str, tuple[str, int] | None] = {}
        for text_key, state in self._store.look_up(list(dict.fromkeys(text_keys))).items():
            chunk_key = visible_variant(state, self._alone_only)
            variants[text_key] = None if chunk_key is None else (chunk_key, state.variants[chunk_key])
        return variants

    def withdrawn(self, variants: Mapping[str, str]) -> list[str]:
        """Return those of the chunk keys (by text key) that may no longer be used: other sources have the text too."""
        usable = self.usable(variants) if variants else {}
        return [chunk_key for text_key, chunk_key in variants.items() if usable.get(text_key) != chunk_key]

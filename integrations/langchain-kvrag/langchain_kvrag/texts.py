"""Corrected versions of LangChain's `add_texts` and `aadd_texts`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from langchain_core.vectorstores import VectorStore

from kvrag import SettingError


class AddsAllTexts(VectorStore):
    """`add_texts` and `aadd_texts` that add every text.

    LangChain's own accept any iterable, but add nothing from a generator, and no more texts than there are ids.
    """

    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts as documents; see `add_documents`."""
        return super().add_texts(_listed(texts, ids), metadatas, ids=ids, **kwargs)

    async def aadd_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Like `add_texts`, off the event loop."""
        return await super().aadd_texts(_listed(texts, ids), metadatas, ids=ids, **kwargs)


def _listed(texts: Iterable[str], ids: Sequence[str] | None) -> list[str]:
    listed = list(texts)
    if ids is not None and len(ids) != len(listed):
        raise SettingError(f"got {len(ids)} ids for {len(listed)} texts: pass one per text")
    return listed

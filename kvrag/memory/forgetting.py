"""Forgetting, in one place.

The promise: after `forget()` has returned, no tier, conversation, answer that begins, learned text, history,
explanation or other process holds KV or text of the document. Answers in progress complete with what they have read,
and nothing of it is kept. It is kept in these steps:

1. The texts are deleted from the store, then the copies of them that prompts brought (`forget`). Other processes see
   the store's counter of removals change before their next prompt (`Forgetting.notice`).
2. What this process has in memory goes at once: chunks in the tiers, conversations from the chunk or text on, and, of
   requests in progress or kept for explanations, the permission to keep or explain them (`Request.is_forgotten`);
   with it goes the work on them that waits for idle time.
3. A request may have read a chunk before it was deleted and kept it after: when it has read its chunks, what the store
   no longer has is dropped again (`Forgetting.reading`).
4. A cached prefix is used only if the store still serves the variants that it was blended from (`find_prefix`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from kvrag.config import BlendConfig
from kvrag.errors import StoreError
from kvrag.index.catalog import Catalog
from kvrag.index.match import Decode, DeletedTexts
from kvrag.index.segment import Tokens
from kvrag.memory.conversation import CachedPrefix, Conversations
from kvrag.memory.tier import MemoryTier
from kvrag.store import Entry, KVStore


def forget(
    remove: Callable[[], list[str]],
    namespace: str,
    store: KVStore,
    catalog: Catalog,
    decode: Decode,
    drop: Callable[[list[str]], object],
) -> int:
    """Delete texts and their copies from a store; return how many chunks they had.

    Args:
        remove: Deletes the texts, and returns the keys of their chunks.
        drop: Called with the keys of chunks that have just been deleted: drops what is in memory. First for the texts,
            so that a prompt which stores a copy from then on is marked.
    """
    removed, texts = catalog.removing(remove)
    drop(removed)
    find = DeletedTexts(texts, decode).find
    copies = store.forget_requests(namespace, partial(catalog.containing, find))
    catalog.refresh()
    drop(copies)
    store.clean()
    return len(removed)


class Forgetting:
    """Drops what an engine has in memory of deleted texts. Thread-safe.

    Attributes:
        then: Called after requests were marked as forgotten.
    """

    def __init__(
        self,
        store: KVStore,
        lookup: Catalog,
        tier: MemoryTier,
        conversations: Conversations,
        decode: Decode,
    ) -> None:
        self._store, self._lookup, self._tier, self._conversations = store, lookup, tier, conversations
        self._decode, self.then = decode, list[Callable[[], None]]()
        self._removals = store.removals()  # the store's counter, as last noticed
        self._texts = lookup.removed = deque[Entry]()
        self._dropping = threading.Lock()  # held while the KV of removed texts is dropped

    def forget(self, remove: Callable[[], list[str]], namespace: str) -> int:
        """Delete texts, see `forget`, and all that is in memory of them."""

        def drop(keys: Collection[str]) -> None:
            self.free(keys)
            self.notice()

        return forget(remove, namespace, self._store, self._lookup, self._decode, drop)

    def free(self, keys: Collection[str]) -> None:
        """Free the KV of these chunks and of the conversations that contain it."""
        self._tier.drop(keys)
        self._conversations.drop(keys)
        self._drop_records()

    def notice(self, removals: int | None = None) -> None:
        """Free KV that was removed from the store, possibly by another process, if its counter has changed."""
        removals = self._store.removals() if removals is None else removals
        if removals != self._removals:
            self._free_removed()
            self._lookup.update()
            self._removals = removals  # not before: other prompts must not find chunks that are about to be freed
        with self._dropping:
            if texts := [self._texts.popleft() for _ in range(len(self._texts))]:
                self._conversations.drop_texts(DeletedTexts(texts, self._decode))
                self._drop_records()

    def _drop_records(self) -> None:
        for drop in self.then:
            drop()

    @contextmanager
    def reading(self, removals: int) -> Iterator[None]:
        """Chunks are read in this block, after the counter of removals was noticed."""
        self.notice(removals)
        try:
            yield
        finally:  # chunks removed in the meantime may have been read after they were freed
            self._free_removed(since=removals)

    def find_prefix(self, ids: Tokens, config: BlendConfig, namespace: str) -> CachedPrefix | None:
        """Return a prompt's cached prefix; conversations with chunks that may no longer be used are dropped."""
        while prefix := self._conversations.find(ids, config, namespace):
            withdrawn = self._lookup.withdrawn(prefix.with_context)
            if not withdrawn:
                return prefix
            self._conversations.drop(withdrawn)
        return None

    def _free_removed(self, since: int | None = None) -> None:
        """Free KV that is no longer stored, unless the store's counter is still `since`.

        If the store cannot be asked, all KV is freed.
        """
        try:
            if since is None or self._store.removals() != since:
                self.free(self._store.missing(sorted(self._kept())))
        except StoreError:
            self.free(self._kept())

    def _kept(self) -> set[str]:
        return {*self._tier.keys(), *self._conversations.keys()}

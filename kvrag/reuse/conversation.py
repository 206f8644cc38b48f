"""Live conversations: the KV of a prompt and its answer is a cached prefix of the next prompt.

A conversation is recognised by its tokens alone, because frameworks send the whole history with every turn and no
id. Stored KV is never changed: the next turn copies the common prefix, so that two continuations of one conversation
do not interfere.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrag.backend.protocol import KVCache
from kvrag.config import BlendConfig

_MOST = 64  # conversations; a prompt is compared with each of them


class Turn(NamedTuple):
    """One prompt of a conversation."""

    start: int
    asked: int  # end of the question; between it and `stop` is the chat template's generation prompt
    stop: int


@dataclass(frozen=True, eq=False)
class Conversation:
    """Prompts and answers with their KV."""

    ids: NDArray[np.int64]  # (N,)
    cache: KVCache  # complete for them
    exact: int  # number of leading positions with full prefill's KV
    config: BlendConfig  # settings that the other positions were blended with
    turns: tuple[Turn, ...]  # each a prefix of the next
    namespace: str = ""
    keys: frozenset[str] = frozenset()  # of the chunks whose KV it contains
    with_context: Mapping[str, str] = field(default_factory=dict)  # as `Prompt.with_context`

    def prefix(self, prompt: NDArray[np.int64], config: BlendConfig) -> CachedPrefix:
        """Return the prefix that a prompt with `config` can reuse.

        Only whole turns are reused: chunks are blended for the question that follows them.
        """
        common = _common(prompt[:-1], self.ids)  # the last token is always computed: its logits are needed
        length, turns = 0, 0
        for turn, end in zip(self.turns, [*(turn.start for turn in self.turns[1:]), len(self.ids)], strict=True):
            if common < turn.asked or len(prompt) <= turn.stop:
                break
            length, turns = min(common, end), turns + 1
        if length > self.exact and not self._is_as_good_as(config):
            length = self.exact
        return CachedPrefix(self, length, self.turns[:turns], is_all=length == common)

    def _is_as_good_as(self, config: BlendConfig) -> bool:
        assert self.config.ratio is not None  # both are filled in by a plan
        assert config.ratio is not None
        has_same_settings = replace(self.config, ratio=config.ratio, controller=config.controller) == config
        return has_same_settings and self.config.ratio >= config.ratio


@dataclass(frozen=True)
class CachedPrefix:
    """The first `length` positions of a conversation, for a prompt with the same first tokens."""

    conversation: Conversation
    length: int
    turns: tuple[Turn, ...]  # those in these positions
    is_all: bool  # whether the prompt has no further tokens in common with the conversation

    @property
    def exact(self) -> int:
        """Number of leading positions with full prefill's KV."""
        return min(self.length, self.conversation.exact)


class Conversations:
    """The most recent conversations, bounded in bytes and number. Thread-safe.

    Those of more than `longest` tokens are not kept: beyond it, the model's RoPE depends on the length of the prompt,
    and KV computed at another length cannot be reused.
    """

    def __init__(self, max_bytes: int, longest: int) -> None:
        self._max_bytes, self._longest = max_bytes, longest
        # most recently used last; replaced and never changed, because garbage collection can end an abandoned stream,
        # which keeps its conversation, at any point, even in here
        self._kept: list[Conversation] = []
        self._begun: weakref.WeakKeyDictionary[object, frozenset[str]] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()

    def find(self, ids: Sequence[int], config: BlendConfig, namespace: str = "") -> CachedPrefix | None:
        """Return the longest prefix of a prompt that can be reused; None if it is not worth it."""
        if len(ids) > self._longest:
            return None
        prompt = np.asarray(ids)
        prefixes = (kept.prefix(prompt, config) for kept in self._kept if kept.namespace == namespace)
        best = max(prefixes, key=lambda prefix: prefix.length, default=None)
        if best is None or best.length < config.min_run:
            return None
        with self._lock:
            if best.conversation in self._kept:
                self._kept = [*_without(best.conversation, self._kept), best.conversation]
        return best

    def begin(self, answer: Hashable, keys: frozenset[str]) -> None:
        """Record the keys of the chunks whose KV an answer in progress contains, for as long as `answer` lives."""
        with self._lock:
            self._begun[answer] = keys

    def keep(self, answer: Hashable, conversation: Conversation, prefix: CachedPrefix | None) -> None:
        """Keep the conversation of an answer that has begun in place of the one it continues; drop the oldest ones.

        It is not kept if one of its chunks was dropped since.
        """
        with self._lock:
            is_too_large = conversation.cache.num_bytes > self._max_bytes or len(conversation.ids) > self._longest
            if is_too_large or answer not in self._begun:
                return
            replaced = prefix.conversation if prefix is not None and prefix.is_all else None
            kept = [*_without(replaced, self._kept), conversation][-_MOST:]
            while sum(older.cache.num_bytes for older in kept) > self._max_bytes:
                del kept[0]
            self._kept = kept

    def keys(self) -> set[str]:
        """Return the keys of the chunks whose KV is in a conversation or in an answer in progress."""
        with self._lock:
            return set[str]().union(*(conversation.keys for conversation in self._kept), *self._begun.values())

    def drop(self, keys: Iterable[str]) -> None:
        """Drop the conversations that contain KV of these chunks, also those of answers in progress at their end."""
        dropped = set(keys)
        with self._lock:
            for answer in [answer for answer, reused in self._begun.items() if reused & dropped]:
                self._begun.pop(answer, None)
            self._kept = [conversation for conversation in self._kept if not conversation.keys & dropped]

    def __len__(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Drop all conversations, and keep none from now on."""
        with self._lock:
            self._max_bytes = 0
            self._kept = []


def _without(removed: Conversation | None, conversations: Sequence[Conversation]) -> list[Conversation]:
    return [conversation for conversation in conversations if conversation is not removed]


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Return the length of the common prefix of two sequences."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length

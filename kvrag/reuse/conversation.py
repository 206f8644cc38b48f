"""Live conversations: the KV of a prompt and its answer is the beginning of the next prompt's.

A conversation is recognised by its tokens alone, since frameworks send the whole history with every turn and no name.
What is kept is never changed again: the next turn copies the part it has in common with it, so that two answers to one
conversation cannot get in each other's way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrag.backend.transformers import BlendCache
from kvrag.config import BlendConfig, check_bytes

_MOST = 64  # conversations: a prompt is compared with each


class Turn(NamedTuple):
    """One prompt of a conversation: where it went beyond the turns before, where its question and where it ended.

    Between `asked` and `stop` is what the chat template writes for the answer to begin.
    """

    start: int
    asked: int
    stop: int


@dataclass(frozen=True, eq=False)
class Conversation:
    """Prompts and answers with their KV.

    Attributes:
        ids: (N,) tokens.
        cache: Complete for them.
        exact: So many of the first positions have full prefill's KV ...
        config: ... and the others what blending by these settings gave, or better.
        turns: The prompts, each the beginning of the next.
    """

    ids: NDArray[np.int64]
    cache: BlendCache
    exact: int
    config: BlendConfig
    turns: tuple[Turn, ...]

    @functools.cached_property
    def num_bytes(self) -> int:
        """What keeping it takes."""
        return self.cache.num_bytes

    def beginning(self, prompt: NDArray[np.int64], config: BlendConfig) -> Beginning:
        """What a prompt that is to be blended by `config` may take over.

        Only whole turns: chunks were blended for the question that followed them, and serve no other one.
        """
        common = _common(prompt[:-1], self.ids)  # the last token is what the prompt is computed for
        length, turns = 0, 0
        for turn, end in zip(self.turns, [*(turn.start for turn in self.turns[1:]), len(self.ids)], strict=True):
            if common < turn.asked or len(prompt) <= turn.stop:
                break
            length, turns = min(common, end), turns + 1
        if not self._is_as_good_as(config):
            length = min(length, self.exact)
        return Beginning(self, length, self.turns[:turns], is_all=length == common)

    def _is_as_good_as(self, config: BlendConfig) -> bool:
        assert self.config.ratio is not None  # settled, both of them
        assert config.ratio is not None
        mine, theirs = (replace(each, ratio=None, controller="off") for each in (self.config, config))
        return mine == theirs and self.config.ratio >= config.ratio


@dataclass(frozen=True)
class Beginning:
    """The first `length` positions of a conversation, for a prompt that begins with the same tokens.

    Attributes:
        turns: What they contain.
        is_all: The prompt has nothing else in common with the conversation.
    """

    conversation: Conversation
    length: int
    turns: tuple[Turn, ...]
    is_all: bool

    @property
    def exact(self) -> int:
        """How many of the positions have full prefill's KV."""
        return min(self.length, self.conversation.exact)


class Conversations:
    """The latest conversations, bounded in bytes and number. Thread-safe."""

    def __init__(self, max_bytes: int, longest: int) -> None:
        """Hold nothing yet.

        Args:
            max_bytes: Bound of all KV kept; 0 = keep none.
            longest: No longer ones, nor longer prompts: beyond that the model's RoPE follows the length of the prompt,
                and what was computed under another length is of no use.
        """
        self._max_bytes, self._longest = check_bytes("conversation_bytes", max_bytes), longest
        # the one used last comes last; replaced and never changed, since garbage collection may end a forgotten stream,
        # which keeps its conversation, anywhere, here as well
        self._kept: list[Conversation] = []
        self._lock = threading.RLock()

    def find(self, ids: Sequence[int], config: BlendConfig) -> Beginning | None:
        """The longest beginning of a prompt that may be taken over, if it is worth it."""
        if len(ids) > self._longest:
            return None
        prompt = np.asarray(ids)
        found = [conversation.beginning(prompt, config) for conversation in self._kept]
        best = max(found, key=lambda beginning: beginning.length, default=None)
        if best is None or best.length < config.min_run:
            return None
        with self._lock:
            if best.conversation in self._kept:
                self._kept = [*_without(best.conversation, self._kept), best.conversation]
        return best

    def keep(self, conversation: Conversation, beginning: Beginning | None) -> None:
        """Take one in, in place of the one it goes on from, and let go of the oldest that there is no room for."""
        with self._lock:
            if conversation.num_bytes > self._max_bytes or len(conversation.ids) > self._longest:
                return
            replaced = beginning.conversation if beginning is not None and beginning.is_all else None
            kept = [*_without(replaced, self._kept), conversation]
            while len(kept) > _MOST or _num_bytes(kept) > self._max_bytes:
                del kept[0]
            self._kept = kept

    @property
    def num_bytes(self) -> int:
        """What is kept."""
        return _num_bytes(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Let go of all, and keep none from now on."""
        with self._lock:
            self._max_bytes = 0
            self._kept = []


def _without(one: Conversation | None, conversations: Sequence[Conversation]) -> list[Conversation]:
    return [conversation for conversation in conversations if conversation is not one]


def _num_bytes(conversations: Sequence[Conversation]) -> int:
    return sum(conversation.num_bytes for conversation in conversations)


def _common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length

"""RequestState prompts: the most recent ones, kept for explanations, and a warning when they reuse little."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from cachetools import LRUCache

from kvrag.errors import KvragError, PromptError
from kvrag.reuse.request_state import RequestState
from kvrag.types import BlendReport

logger = logging.getLogger("kvrag")

_ANSWERS = 32  # per namespace
_NAMESPACES = 256
_LONG = 512  # tokens of a prompt that probably contains retrieved text
_LITTLE = 0.1  # reused share that is suspiciously low


class History:
    """The most recent prompts of each namespace, as they were answered. Thread-safe."""

    def __init__(self) -> None:
        self._answers: LRUCache[str, deque[RequestState]] = LRUCache(_NAMESPACES)
        self._lock = threading.Lock()

    def add(self, answered: RequestState) -> None:
        """Add an answered prompt; drop the least recently used namespace beyond the limit."""
        with self._lock:
            self._answers.setdefault(answered.namespace, deque(maxlen=_ANSWERS)).append(answered)

    def drop_forgotten(self) -> None:
        """Drop the prompts with a text that has been deleted."""
        with self._lock:
            for namespace, answers in list(self._answers.items()):
                left = [answered for answered in answers if not answered.is_forgotten]
                if len(left) < len(answers):
                    self._answers[namespace] = deque(left, maxlen=_ANSWERS)

    def find(self, namespace: str, report: BlendReport | dict[str, Any] | None) -> RequestState:
        """Return the prompt of a report, or the last one of the namespace. Raises PromptError if it is unknown."""
        with self._lock:
            answers = [answered for answered in self._answers.get(namespace, ()) if not answered.is_forgotten]
        if not answers:
            raise PromptError(
                "there is no answer in this namespace yet, or texts in it were deleted: pass a prompt to explain"
            )
        for answered in reversed(answers):
            known = answered.report
            if report is None or report == (known if isinstance(report, BlendReport) else known.to_dict()):
                return answered
        raise PromptError(
            f"this answer is not among the last {_ANSWERS} of the namespace, or a text in it was deleted: "
            "pass its prompt to explain"
        )


class Watch:
    """Logs one warning when prompts reuse suspiciously little. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_warned = False
        self._misses = 0

    def look(self, answered: RequestState, explain: Callable[[], tuple[str, bool]]) -> None:
        """Check an answered prompt; `explain` returns why little was reused, and if a changed chunk was recognised.

        A long prompt with little reuse gives a warning if a changed chunk is recognised in it. Otherwise it may be a
        prompt without retrieved text, such as an agent's first one; then two in a row give a warning.
        """
        report = answered.report
        kept = report.conversation_tokens  # such as the system prompt, and earlier turns
        if self._has_warned or report.policy == "full" or report.prompt_tokens - kept < _LONG:
            return
        if report.reused_tokens - kept >= _LITTLE * (report.prompt_tokens - kept):
            self._misses = 0
            return
        try:
            reason, has_changed = explain()
        except KvragError:
            return  # the store was closed or is unreadable; the answer is not affected
        with self._lock:
            self._misses += 1
            if self._has_warned or not (has_changed or self._misses > 1):
                return
            self._has_warned = True
        logger.warning(
            "only %d of %d tokens of a prompt were reused: %s. Inspect the last prompt with `print(engine.explain())` "
            "or with `explain()` of the LLM class, and any other with `kvrag explain PROMPT`. (Logged once.)",
            report.reused_tokens,
            report.prompt_tokens,
            reason,
        )

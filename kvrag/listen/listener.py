"""The interface of all listeners, and the small ones: the most recent prompts, and a warning that little is reused."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cachetools import LRUCache

from kvrag.config import Sampling
from kvrag.errors import PromptError
from kvrag.request import Request
from kvrag.types import BlendReport, Messages, TokenIds

logger = logging.getLogger("kvrag")

_ANSWERS = 32  # per namespace
_NAMESPACES = 256
_LONG = 512  # tokens of a prompt that probably contains retrieved text
_LITTLE = 0.1  # reused share that is suspiciously low

Prefill = Callable[[Request], None]
"""`BlendEngine.prefill`, for a request."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A complete answer.

    Attributes:
        request: As it was prefilled and decoded, still with its KV.
        tokens: Those of the answer.
        is_ended: An end token came after them.
        has_grammar: The tokens were chosen with a grammar.
        prefill: For other requests.
    """

    request: Request
    sampling: Sampling
    tokens: Sequence[int]
    is_ended: bool
    has_grammar: bool
    prefill: Prefill


class Listener:
    """Watches answers. Thread-safe: answers of several threads call it at the same time.

    Attributes:
        name: Of its statistics in `BlendEngine.stats`; "" = it has none.
    """

    name = ""

    def prefilled(self, request: Request, prompt: str | Messages | TokenIds) -> None:
        """Note a prompt before its first token."""

    def answered(self, answer: Answered) -> None:
        """Note an answer. Not called for those that were abandoned."""

    def forgotten(self) -> None:
        """Drop the requests with `is_forgotten`: texts of them were deleted."""

    def forget_learned(self, namespace: str) -> None:
        """Drop what came from the namespace's prompts."""

    def stats(self, namespace: str | None) -> object:
        """Return statistics of a namespace; None = of all."""


class RecentRequests(Listener):
    """The most recent prompts of each namespace, as they were answered, for explanations."""

    def __init__(self) -> None:
        self._answers: LRUCache[str, deque[Request]] = LRUCache(_NAMESPACES)
        self._lock = threading.Lock()

    def prefilled(self, request: Request, prompt: str | Messages | TokenIds) -> None:
        """Add a prompt; drop the least recently used namespace beyond the limit."""
        with self._lock:
            self._answers.setdefault(request.namespace, deque(maxlen=_ANSWERS)).append(request)

    def forgotten(self) -> None:
        """See `Listener`."""
        with self._lock:
            for namespace, answers in list(self._answers.items()):
                left = (answered for answered in answers if not answered.is_forgotten)
                self._answers[namespace] = deque(left, maxlen=_ANSWERS)

    def find(self, namespace: str, report: BlendReport | dict[str, Any] | None) -> Request:
        """Return the prompt of a report, or the last one of the namespace. Raises PromptError if it is unknown."""
        with self._lock:
            answers = [answered for answered in self._answers.get(namespace, ()) if not answered.is_forgotten]
        for answered in reversed(answers):
            if report in (None, answered.report, answered.report.to_dict()):
                return answered
        raise PromptError(
            f"there is no such answer among the last {_ANSWERS} of the namespace, or a text in it was deleted: "
            "pass a prompt to explain"
        )


class Watch(Listener):
    """Logs one warning when prompts reuse suspiciously little, after two long ones.

    One may be without retrieved text, such as an agent's first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses = 0

    def answered(self, answer: Answered) -> None:
        """See `Listener`."""
        report, config = answer.request.report, answer.request.config
        kept = report.conversation_tokens  # such as the system prompt, and earlier turns
        rest = report.prompt_tokens - kept
        blends_history = config.edited_history != "exact"  # unwarmed text is normal then
        if blends_history or report.policy == "full" or rest < _LONG:
            return
        with self._lock:
            if self._misses == 2:  # it has warned
                return
            self._misses = self._misses + 1 if report.stored_tokens - kept < _LITTLE * rest else 0
            if self._misses < 2:
                return
        logger.warning(
            "only %d of %d tokens of a prompt are stored: `print(engine.explain())`, `explain()` of the LLM class and "
            "`kvrag explain PROMPT` say why. (Logged once.)",
            report.stored_tokens,
            report.prompt_tokens,
        )

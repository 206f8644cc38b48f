"""The most recent prompts, for explanations."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from cachetools import LRUCache

from kvrag.errors import PromptError
from kvrag.listen.listener import Listener
from kvrag.request import Request
from kvrag.types import BlendReport, Messages, TokenIds

_ANSWERS = 32  # per namespace
_NAMESPACES = 256


class RecentRequests(Listener):
    """The most recent prompts of each namespace, as they were answered."""

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
        if not answers:
            raise PromptError(
                "there is no answer in this namespace yet, or texts in it were deleted: pass a prompt to explain"
            )
        for answered in reversed(answers):
            if report in (None, answered.report, answered.report.to_dict()):
                return answered
        raise PromptError(
            f"this answer is not among the last {_ANSWERS} of the namespace, or a text in it was deleted: "
            "pass its prompt to explain"
        )

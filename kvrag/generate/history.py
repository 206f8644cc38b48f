"""The most recent answers, kept for explanations."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

from kvrag.errors import PromptError
from kvrag.inspect.explain import Call
from kvrag.types import BlendReport

_ANSWERS = 32  # per namespace
_NAMESPACES = 256


class History:
    """The most recent prompts of each namespace, as they were answered. Thread-safe."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, deque[Call]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Keep an answered prompt, in place of the oldest."""
        with self._lock:
            self._calls.setdefault(call.namespace, deque(maxlen=_ANSWERS)).append(call)
            self._calls.move_to_end(call.namespace)
            if len(self._calls) > _NAMESPACES:
                self._calls.popitem(last=False)

    def find(self, namespace: str, report: BlendReport | dict[str, Any] | None) -> Call:
        """Return the prompt of a report; None = the last prompt of the namespace.

        Raises:
            PromptError: The answer is unknown.
        """
        with self._lock:
            calls = list(self._calls.get(namespace, ()))
        if not calls:
            raise PromptError("there is no answer in this namespace yet: pass a prompt to explain")
        for call in reversed(calls):
            if report is None or report == (call.report if isinstance(report, BlendReport) else call.report.to_dict()):
                return call
        raise PromptError(f"this answer is not among the last {_ANSWERS} of the namespace: pass its prompt to explain")

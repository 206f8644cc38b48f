"""The latest answers, kept to be explained."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

from kvrag.errors import PromptError
from kvrag.inspect.explain import Call
from kvrag.types import BlendReport

_ANSWERS = 32  # of each namespace
_NAMESPACES = 256


class History:
    """The latest prompts of each namespace, as they were answered. Thread-safe."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, deque[Call]] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, namespace: str, call: Call) -> None:
        """Keep an answered prompt, in place of the oldest."""
        with self._lock:
            self._calls.setdefault(namespace, deque(maxlen=_ANSWERS)).append(call)
            self._calls.move_to_end(namespace)
            if len(self._calls) > _NAMESPACES:
                self._calls.popitem(last=False)

    def find(self, namespace: str, report: BlendReport | dict[str, Any] | None) -> Call:
        """Return the prompt that the report is about; None = the last one of the namespace.

        Raises:
            PromptError: There is no such answer.
        """
        with self._lock:
            calls = list(self._calls.get(namespace, ()))
        if not calls:
            raise PromptError("nothing has been answered yet by this engine: give explain a prompt")
        for call in reversed(calls):
            if report is None or report == (call.report if isinstance(report, BlendReport) else call.report.to_dict()):
                return call
        raise PromptError(f"this answer is not among the last {_ANSWERS} of the engine: give explain its prompt")

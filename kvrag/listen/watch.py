"""A warning when prompts reuse suspiciously little."""

from __future__ import annotations

import logging
import threading

from kvrag.listen.listener import Answered, Listener

logger = logging.getLogger("kvrag")

_LONG = 512  # tokens of a prompt that probably contains retrieved text
_LITTLE = 0.1  # reused share that is suspiciously low


class Watch(Listener):
    """Logs one warning, after two long prompts: one may be without retrieved text, such as an agent's first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._misses = 0

    def answered(self, answer: Answered) -> None:
        """See `Listener`."""
        report, config = answer.request.report, answer.request.config
        kept = report.conversation_tokens  # such as the system prompt, and earlier turns
        rest = report.prompt_tokens - kept
        if config.edited_history != "exact":  # where edited histories are blended, unwarmed text is normal
            return
        if report.policy == "full" or rest < _LONG:
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

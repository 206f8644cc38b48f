"""Full prefill's KV for the next turns of conversations, computed when idle."""

from __future__ import annotations

from kvrag.backend.transformers import Model
from kvrag.listen.listener import Answered, Listener
from kvrag.scheduling.idle import Idle


class ExactWhenIdle(Listener):
    """Prefills conversations whose KV is not exact in full while no answer is in progress."""

    def __init__(self, model: Model, idle: Idle, most_bytes: int) -> None:
        """Start without work.

        Args:
            most_bytes: Of the KV of a conversation that can be kept.
        """
        self._idle, self._most_tokens = idle, min(most_bytes // model.bytes_per_token, model.context_window - 1)
        self._most_tokens = min(self._most_tokens, model.stable_length - 1)

    def answered(self, answer: Answered) -> None:
        """See `Listener`."""
        request = answer.request
        is_short = len(request.ids) + len(answer.tokens) <= self._most_tokens
        if is_short and request.config.reuses_prompts and not request.is_exact:
            self._idle.add(request, answer.keep_exact)

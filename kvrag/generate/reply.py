"""The answer to a request while it is decoded: its format, its tokens so far, its report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from kvrag.backend.transformers import Model
from kvrag.config import Sampling
from kvrag.generate.decode import decode
from kvrag.generate.grammar import constrain
from kvrag.generate.thoughts import Thoughts
from kvrag.generate.tools import Prepared
from kvrag.reuse.request_state import RequestState
from kvrag.types import Delta


class Reply:
    """Answer of one request.

    Attributes:
        tokens: Those decoded so far.
        generation_prompt: Number of tokens at the end of the prompt that the next turn may not have.
    """

    def __init__(self, model: Model, prepared: Prepared, sampling: Sampling, request: RequestState) -> None:
        """Begin; adds to the request's notes what the grammar does not enforce.

        Raises SettingError for a grammar that is invalid.
        """
        tokenizer, ids = model.tokenizer, list(request.token_ids)
        self._model, self._sampling, self._request = model, sampling, request
        self._thoughts, self._parser = Thoughts.of(tokenizer, ids), prepared.parser(tokenizer, ids)
        before = self._thoughts.grammar(prepared.template, bool(prepared.tools)) if self._thoughts else ""
        grammar, left_out = prepared.grammar, prepared.left_out
        self._constraint = constrain(model, grammar, before, left_out) if grammar else None
        request.notes = [*request.notes, *(self._constraint.notes if self._constraint else ())]
        self._room = min(sampling.max_new_tokens, model.context_window - len(ids))
        # computed now, since a stream may be closed at any point; the answer may change a plain prompt's last token
        self.generation_prompt = 1 if prepared.is_plain else tokenizer.generation_prompt_length(**prepared.template)
        self.tokens: list[int] = []
        self._num_thought, self._has_begun = 0, False

    @property
    def most_bytes(self) -> int:
        """Bytes of its KV at full length."""
        num_tokens, threshold = len(self._request.ids), self._model.recompute_threshold
        longest = num_tokens + self._room
        if threshold is not None and num_tokens <= threshold < longest:
            longest += threshold  # two caches, see `Row.recompute`
        return longest * self._model.bytes_per_token

    def decode(self, started: float) -> Iterator[Delta]:
        """Yield the deltas of a request whose cache is complete; the last one has the report.

        Args:
            started: When the first token was asked for, on the clock of `time.perf_counter`.
        """
        request, alone = self._request, self._request.config.deterministic
        start = self._model, request.ids, request.cache, request.logits, self._sampling
        control_tokens = {token for part in (self._thoughts, self._parser) if part for token in part.control_tokens}
        for delta in decode(*start, self._constraint, control_tokens, self._thoughts, alone, request.completion):
            if not self._has_begun:
                self._has_begun = True
                request.note_first_token(time.perf_counter() - started)
            self.tokens += delta.token_ids
            self._num_thought += delta.reasoning_tokens
            delta = self._parser.parse(delta) if self._parser else delta
            if delta.finish_reason:
                request.note_completed()
                notes = (*request.report.notes, *self._notes(delta))
                delta = replace(delta, report=replace(request.report, notes=notes))
            yield delta

    def _notes(self, delta: Delta) -> Iterator[str]:
        """Yield notes if the thought left no room for an answer, or the window cut it off."""
        if delta.finish_reason == "length" and self._num_thought == len(self.tokens):
            yield "the answer ended within the model's thought: raise max_new_tokens, or pass reasoning=False"
        if delta.finish_reason == "length" and self._room < self._sampling.max_new_tokens:
            tokens = f"{self._room} of {self._sampling.max_new_tokens} tokens"
            yield f"the answer has {tokens}: the window has no more room, use fewer or shorter chunks"

"""Decoding: the answer of a request, and continuous batching.

The answers of one model that are decoded at the same time share every step. `SharedSteps` decides which consumer runs
the next one, and `Batch` what it computes. `Reply` is one answer: its format, its tokens so far, its report.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import Model
from kvrag.config import Sampling
from kvrag.errors import ModelError, OutOfMemoryError, SettingError
from kvrag.generate.grammar import Constraint, constrain
from kvrag.generate.parse import Thoughts
from kvrag.generate.prompt import Prepared
from kvrag.generate.row import Row
from kvrag.process import per_process, release_team
from kvrag.reuse.blend import Completion
from kvrag.reuse.request_state import RequestState
from kvrag.scheduling.waiting import SharedSteps
from kvrag.types import Delta

AHEAD = 16
"""Tokens that an answer may be ahead of its consumer: a slow consumer delays no others, and work ahead is bounded."""

_MAX_ROWS = 64  # per pass
_WAITS, _WAIT_S = 20, 0.05  # until an answer without memory is given up, although other answers may still free some


def decode(
    model: Model,
    ids: Tensor,
    cache: KVCache,
    logits: Tensor,
    sampling: Sampling,
    constraint: Constraint | None = None,
    control_tokens: Collection[int] = (),
    thoughts: Thoughts | None = None,
    alone: bool = False,
    completion: Completion | None = None,
) -> Iterator[Delta]:
    """Generate with `model.generate`'s own processors, in steps that all answers of the model share.

    Appends to `cache`, also between the requests of the consumer, until the iterator is closed, and at most one token
    afterwards. Never changes a position that is complete.

    Args:
        ids: (T,) token ids of the prompt, for which `cache` is complete.
        logits: (1, V) after the prompt's last token.
        constraint: Grammar that the answer must match. It is changed.
        control_tokens: Those that stay in the text, for `thoughts` and a parser of tool calls.
        thoughts: Splits the answer from its thoughts. It is changed.
        alone: Share no step, so that the answer does not depend on others: kernels round by the number of rows.
        completion: Recomputes the rest of the prompt before a token of which the model is unsure.

    Yields:
        One Delta per token. Its text is empty while a character or a stop string is incomplete. The last one has
            `finish_reason` set and no report.
    """
    if unknown := [token for token in sampling.logit_bias or () if token >= logits.shape[-1]]:
        raise SettingError(f"logit_bias: unknown token {unknown[0]}: this model has tokens 0 to {logits.shape[-1] - 1}")
    row = Row(model, ids, cache, sampling, constraint, control_tokens, thoughts, logits.device, alone, completion)
    row.begin(logits)
    batch = _batch_of(model)
    try:
        delta: Delta | None = None
        while delta is None or delta.finish_reason is None:  # not `row.is_done`, which another thread sets later
            delta = batch.take(row)
            yield delta
    finally:
        batch.leave(row)


class Batch:
    """The rows of one model that are decoded together. Thread-safe."""

    def __init__(self) -> None:
        self._rows: dict[Row, None] = {}  # in order of arrival; changed by single operations, which need no lock
        self._max_rows = _MAX_ROWS
        self._steps = SharedSteps()

    def take(self, row: Row) -> Delta:
        """Return the next delta of a row; run steps until there is one."""
        while not row.deltas:
            if row.error is not None:
                raise row.fail()
            if row.is_unsure:
                row.complete()
                continue
            self._rows[row] = None
            self._steps.run_until(lambda: bool(row.deltas or row.error or row.is_unsure), lambda: self._step(row))
        return row.deltas.popleft()

    def leave(self, row: Row) -> None:
        """Remove a row. Takes no lock: garbage collection may close an abandoned answer in any thread."""
        self._rows.pop(row, None)
        self._max_rows = _MAX_ROWS  # there may be more memory now
        for other in tuple(self._rows):
            other.is_parked = False

    def _step(self, leader: Row) -> None:
        """Compute the next token of every row that is not too far ahead of its consumer."""
        unfinished = [row for row in tuple(self._rows) if not row.is_done and row.error is None]
        rows = [row for row in unfinished if len(row.deltas) < AHEAD and not (row.is_parked or row.is_unsure)]
        if not rows:  # no memory for the leader's row, and the others depend on their consumers
            if len(self._rows) > 1 and leader.num_waits < _WAITS:
                leader.num_waits += 1
                time.sleep(_WAIT_S)
                return
            rows = [leader]
        size, together = self._max_rows, [row for row in rows if row.can_share_steps]
        groups = [together[start : start + size] for start in range(0, len(together), size)]
        try:
            for group in groups + [[row] for row in rows if not row.can_share_steps]:
                self._advance(group, is_last=len(rows) == 1)
        finally:
            if len(self._rows) > 1:
                release_team()  # another thread may run the next step

    def _advance(self, rows: Sequence[Row], is_last: bool) -> None:
        """Compute the next token of these rows in one pass, or in smaller passes if it fails."""
        lengths = [row.cache.get_seq_length() for row in rows]
        try:
            if rows[0].is_recomputed:  # then it is alone
                logits = rows[0].recompute()
            else:
                logits = rows[0].model.forward_each([row.token for row in rows], [row.cache for row in rows])
        except BaseException as error:
            _rewind(rows, lengths)  # some layers may have been written
            if not isinstance(error, Exception):
                raise
            self._retry(rows, error, is_last)
        else:
            _append_tokens(rows, lengths, logits)

    def _retry(self, rows: Sequence[Row], error: Exception, is_last: bool) -> None:
        """Compute the rows of a failed pass in two passes. One alone waits for memory, or ends with the error."""
        if len(rows) > 1:
            self._max_rows = half = (len(rows) + 1) // 2
            error.__traceback__ = None  # its frames would keep the tensors of the failed pass
            self._advance(rows[:half], is_last=False)
            self._advance(rows[half:], is_last=False)
        elif isinstance(error, OutOfMemoryError) and not is_last:
            rows[0].is_parked = True
        else:
            rows[0].error = error


def _append_tokens(rows: Sequence[Row], lengths: Sequence[int], logits: Tensor) -> None:
    """Draw a token for each row and append it. An error ends only its own row, an interrupt takes the others back."""
    done, drawn = 0, list[Tensor]()
    try:
        for row, row_logits in zip(rows, logits, strict=True):
            try:
                drawn.append(row.draw(row_logits[None]))
            except Exception as error:
                row.error = error
                drawn.append(row_logits.new_zeros(4, dtype=torch.double))
        numbers = torch.stack(drawn).tolist()  # waits only once for the device
        for row, row_logits, own in zip(rows, logits, numbers, strict=True):
            done += 1
            try:
                if row.error is None:
                    row.advance(row_logits[None], own)
            except Exception as error:
                row.error = error
            except BaseException:  # Ctrl-C, and the row may belong to another thread
                row.error = ModelError("the answer was interrupted")
                raise
    finally:
        _rewind(rows[done:], lengths[done:])  # after an interrupt, their tokens are computed again


def _rewind(rows: Sequence[Row], lengths: Sequence[int]) -> None:
    for row, length in zip(rows, lengths, strict=True):
        row.cache.set_length(length)


_batches = per_process(lambda: weakref.WeakKeyDictionary[Model, Batch]())


def _batch_of(model: Model) -> Batch:
    return _batches().setdefault(model, Batch())


class Reply:
    """Answer of one request.

    Attributes:
        tokens: Those decoded so far.
        is_ended: An end token came after them.
        generation_prompt: Number of tokens at the end of the prompt that the next turn may not have.
    """

    def __init__(self, model: Model, prepared: Prepared, sampling: Sampling, request: RequestState) -> None:
        """Begin; adds to the request's notes what the grammar does not enforce.

        Raises SettingError for a grammar that is invalid.
        """
        tokenizer, ids = model.tokenizer, list(request.token_ids)
        self._model, self._sampling, self._request = model, sampling, request
        self._thoughts, self._parser = prepared.thoughts(tokenizer, ids), prepared.parser(tokenizer, ids)
        before = self._thoughts.grammar(prepared.template, bool(prepared.tools)) if self._thoughts else ""
        grammar, left_out = prepared.grammar, prepared.left_out
        self._constraint = constrain(model, grammar, before, left_out) if grammar else None
        request.notes = [*request.notes, *(self._constraint.notes if self._constraint else ())]
        self._room = min(sampling.max_new_tokens, model.context_window - len(ids))
        # computed now, since a stream may be closed at any point; the answer may change a plain prompt's last token
        self.generation_prompt = 1 if prepared.is_plain else tokenizer.generation_prompt_length(**prepared.template)
        self.tokens: list[int] = []
        self.is_ended = False
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
                self.is_ended = not delta.token_ids
                request.note_completed()
                request.report = replace(request.report, notes=(*request.report.notes, *self._notes(delta)))
                delta = replace(delta, report=request.report)
            yield delta

    def _notes(self, delta: Delta) -> Iterator[str]:
        """Yield notes if the thought left no room for an answer, or the window cut it off."""
        if delta.finish_reason == "length" and self._num_thought == len(self.tokens):
            yield "the answer ended within the model's thought: raise max_new_tokens, or pass reasoning=False"
        if delta.finish_reason == "length" and self._room < self._sampling.max_new_tokens:
            tokens = f"{self._room} of {self._sampling.max_new_tokens} tokens"
            yield f"the answer has {tokens}: the window has no more room, use fewer or shorter chunks"

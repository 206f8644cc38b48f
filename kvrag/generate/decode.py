"""Decoding: the answer of a request, and continuous batching.

The answers of one model that are decoded at the same time share every step, see `Batch`. `Row` is one answer in it,
from logits to tokens and text. `Reply` is the answer of a request: its format, its tokens so far, its report.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import Model
from kvrag.backend.transformers.tokenizer import TextStream
from kvrag.config import Sampling
from kvrag.errors import ModelError, OutOfMemoryError, SettingError, out_of_memory
from kvrag.generate.grammar import Constraint, constrain
from kvrag.generate.parse import Thoughts
from kvrag.generate.prompt import Prepared
from kvrag.process import check_process, release_team
from kvrag.request import Request
from kvrag.reuse.blend import LateRecompute
from kvrag.scheduling.waiting import is_cancelled
from kvrag.types import Delta, FinishReason, TokenLogprob

AHEAD = 16
"""Tokens that an answer may be ahead of its consumer: a slow consumer delays no others, and work ahead is bounded."""

_MAX_ROWS = 64  # per pass
_STATES = 4  # of an answer: before and after the generation prompt, and the last step


def decode(row: Row) -> Iterator[Delta]:
    """Generate with `model.generate`'s own processors, in steps that all answers of the model share.

    Appends to the row's cache, also between the requests of the consumer, until the iterator is closed, and at most one
    token afterwards. Never changes a position that is complete.

    Yields:
        One Delta per token. Its text is empty while a character or a stop string is incomplete. The last one has
            `finish_reason` set and no report.
    """
    batch = _batch_of(row.model)
    try:
        delta: Delta | None = None
        while delta is None or delta.finish_reason is None:  # not `row.is_done`, which another thread sets later
            delta = batch.take(row)
            yield delta
    finally:
        batch.leave(row)


class Batch:
    """The rows of one model that are decoded together. Thread-safe.

    There is no thread for the steps. A consumer that needs a step runs it for all, unless another one is doing so
    already. Nothing is computed while no consumer waits.
    """

    def __init__(self) -> None:
        self._rows: dict[Row, None] = {}  # in order of arrival; changed by single operations, which need no lock
        self._max_rows = _MAX_ROWS
        self._is_led, self._process = False, os.getpid()
        self._changed = threading.Condition()

    def take(self, row: Row) -> Delta:
        """Return the next delta of a row; run steps until there is one."""
        while not row.deltas:
            if row.error is not None:
                raise row.fail()
            if row.is_unsure:
                row.recompute_more()
                continue
            self._rows[row] = None
            self._step_or_wait(row)
        return row.deltas.popleft()

    def _step_or_wait(self, row: Row) -> None:
        """Run a step; wait while another consumer does so, until the row has a delta, an error or a doubt."""
        check_process(self._process, "this answer")
        leads = False

        def is_ready() -> bool:
            return bool(row.deltas or row.error or row.is_unsure)

        try:
            with self._changed:
                self._changed.wait_for(lambda: is_ready() or not self._is_led)
                if not is_ready():
                    leads = self._is_led = True
            if leads:
                self._step()
        finally:
            if leads:
                with self._changed:
                    self._is_led = False
                    self._changed.notify_all()

    def leave(self, row: Row) -> None:
        """Remove a row. Takes no lock: garbage collection may close an abandoned answer in any thread."""
        self._rows.pop(row, None)
        self._max_rows = _MAX_ROWS  # there may be more memory now

    def _step(self) -> None:
        """Compute the next token of every row that is not too far ahead of its consumer."""
        unfinished = [row for row in tuple(self._rows) if not (row.is_done or row.error or row.is_unsure)]
        rows = [row for row in unfinished if len(row.deltas) < AHEAD]
        size, together = self._max_rows, [row for row in rows if row.can_share_steps]
        groups = [together[start : start + size] for start in range(0, len(together), size)]
        try:
            for group in groups + [[row] for row in rows if not row.can_share_steps]:
                self._advance(group)
        finally:
            if len(self._rows) > 1:
                release_team()  # another thread may run the next step

    def _advance(self, rows: Sequence[Row], is_repeated: bool = False) -> None:
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
            self._retry(rows, error, is_repeated)
        else:
            _append_tokens(rows, lengths, logits)

    def _retry(self, rows: Sequence[Row], error: Exception, is_repeated: bool) -> None:
        """Repeat a failed pass if that frees memory, then as two passes; a row alone ends with the error."""
        if not is_repeated and _relieved(rows, error):
            self._advance(rows, is_repeated=True)
            return
        if len(rows) == 1:
            rows[0].error = error
            return
        self._max_rows = half = (len(rows) + 1) // 2
        error.__traceback__ = None  # its frames would keep the tensors of the failed pass
        self._advance(rows[:half], is_repeated)
        self._advance(rows[half:], is_repeated)


def _relieved(rows: Sequence[Row], error: Exception) -> bool:
    """If memory ran out, free what only makes prompts faster; return whether there was some."""
    if not out_of_memory(error):
        return False
    freed = [relieve() is not None for relieve in {row.relieve for row in rows}]
    if is_relieved := rows[0].model.relieve() or any(freed):
        error.__traceback__ = None  # its frames would keep the tensors of the failed pass
    return is_relieved


def _append_tokens(rows: Sequence[Row], lengths: Sequence[int], logits: Tensor) -> None:
    """Draw a token for each row and append it. An error ends only its own row, an interrupt takes the others back."""
    done, drawn = 0, list[Tensor]()
    try:
        for row, row_logits in zip(rows, logits, strict=True):
            try:
                drawn.append(row.draw(row_logits[None]))
            except Exception as error:
                row.error = error
                drawn.append(row_logits.new_zeros(6))
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


_batches = weakref.WeakKeyDictionary[Model, dict[int, Batch]]()  # by process


def _batch_of(model: Model) -> Batch:
    return _batches.setdefault(model, {}).setdefault(os.getpid(), Batch())


class Row:
    """A row of the batch: one answer, its cache, and the deltas that its consumer has not taken yet.

    Attributes:
        cache: Complete for all tokens but `token`, the last one.
        deltas: One per token, in order; the last one has `finish_reason` set and no report.
        is_unsure: The model is not sure enough of the next token. The row takes part in no step until
            `recompute_more`.
    """

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        cache: KVCache,
        logits: Tensor,
        sampling: Sampling,
        constraint: Constraint | None = None,
        control_tokens: Collection[int] = (),
        thoughts: Thoughts | None = None,
        alone: bool = False,
        late: LateRecompute | None = None,
        relieve: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin an answer, and draw its first token.

        Args:
            ids: (T,) token ids of the prompt, for which `cache` is complete.
            logits: (1, V) after the prompt's last token.
            constraint: Grammar that the answer must match. It is changed.
            control_tokens: Those that stay in the text, for `thoughts` and a parser of tool calls.
            thoughts: Splits the answer from its thoughts. It is changed.
            alone: Share no step, so that the answer does not depend on others: kernels round by the number of rows.
            late: Recomputes more of the prompt before a token of which the model is unsure.
            relieve: See `Request.relieve`.
        """
        if unknown := [token for token in sampling.logit_bias or () if token >= logits.shape[-1]]:
            known = f"this model has tokens 0 to {logits.shape[-1] - 1}"
            raise SettingError(f"logit_bias: unknown token {unknown[0]}: {known}")
        self.model, self.cache, self._alone, self._is_cancelled = model, cache, alone, is_cancelled.get()
        self.deltas: deque[Delta] = deque()
        self._late, self._num_tokens, self.relieve = late, 0, relieve
        self.is_done = self.is_unsure = False
        self.error: Exception | None = None
        self._sampling, self._constraint = sampling, constraint
        self._process, self._do_sample = model.logits_processor(sampling, len(ids))
        self._penalize = self._process
        if late and self._do_sample:
            self._penalize, _ = model.logits_processor(replace(sampling, temperature=0.0), len(ids))
        self._num_prompt = self._length = len(ids)
        self._tokens_left = min(sampling.max_new_tokens, model.context_window - len(ids))
        self._buffer = torch.empty(1, len(ids) + self._tokens_left, dtype=ids.dtype, device=logits.device)
        self._buffer[0, : len(ids)] = ids
        self.token = int(ids[-1])
        self._state: Tensor | None = None  # of the generator, before the last draw
        self._generator = None if sampling.seed is None else torch.Generator(logits.device).manual_seed(sampling.seed)
        self._ends = torch.tensor(sorted(model.eos_ids), dtype=torch.long, device=logits.device)
        self._text = _Text(TextStream(model.tokenizer.hf, control_tokens), sampling.stop, thoughts)
        self.advance(logits, self.draw(logits).tolist())

    @property
    def is_recomputed(self) -> bool:
        """True if the next step recomputes all KV, as `model.generate` does."""
        return self._length - 1 == self.model.recompute_threshold

    @property
    def can_share_steps(self) -> bool:
        """True if the next step can compute other rows too."""
        return not self._alone and self.model.can_share_steps(self._length - 1) and not self.is_recomputed

    @property
    def _ids(self) -> Tensor:
        """(1, T) token ids of the prompt and of the answer so far."""
        return self._buffer[:, : self._length]

    def recompute(self) -> Tensor:
        """Compute the KV of all tokens again, in a new cache; return (1, V) logits.

        The old cache stays valid for shorter prompts: the next turn after an abandoned answer may begin with it.
        """
        cache = self.model.new_cache(self._length)
        context = copy_context()  # of the thread that runs the step, whose own consumer may be another one
        context.run(is_cancelled.set, self._is_cancelled)
        logits = context.run(self.model.forward, self._ids, cache)
        self.cache = cache
        self._late = None  # it would change the old cache
        return logits

    def recompute_more(self) -> None:
        """Recompute more of the prompt, or all of it, and take the next token. Waits for the model."""
        late = self._late
        assert late is not None
        try:
            logits = late.recompute(self._ids[0], self._num_tokens)
        except OutOfMemoryError as error:
            # the states before the first rows may be lost
            if self.model.keeps_states or not _relieved([self], error):
                raise
            logits = late.recompute(self._ids[0], self._num_tokens)
        before, drawn = self._doubt, self.draw(logits).tolist()
        late.judge(self._num_tokens, before, (int(drawn[4]), drawn[3]))
        if late.completed:
            self._late = None  # from here on no margin has to be computed
        self.advance(logits, drawn)

    def advance(self, logits: Tensor, drawn: Sequence[float]) -> None:
        """Append the token that `draw` has drawn by the (1, V) logits after the last one, unless it `is_unsure`."""
        *_, margin, best, ends = drawn
        # between ending and going on, little but a full stop depends on the chunks: decision 37
        sure = math.inf if ends else margin
        self.is_unsure = self._late is not None and self._late.is_unsure(self._num_tokens, sure)
        self._doubt = int(best), margin
        if not self.is_unsure:
            self._append(logits, drawn)
        elif self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)  # the token is drawn again

    def _append(self, logits: Tensor, drawn: Sequence[float]) -> None:
        raw, highest, number, *_ = drawn
        if not math.isfinite(raw):
            raise ModelError(
                "the model's logits are NaN or infinite: a value overflowed; load it with dtype='bfloat16' or 'float32'"
            )
        if not math.isfinite(highest):
            raise SettingError("no token can be sampled: relax the sampling settings or the model's generation config")
        token = int(number)
        if token in self.model.eos_ids:
            self._add(Delta(self._text.rest(), (), "stop", **self._text.thought()))
            return
        self._num_tokens += 1
        num_top = self._sampling.logprobs
        logprobs = () if num_top is None else (logprob(logits, token, num_top),)
        text = self._text.push(token)
        self._tokens_left -= 1
        is_complete = self._text.stopped or (self._constraint is not None and self._constraint.push(token))
        finish: FinishReason | None = None
        if is_complete or self._tokens_left <= 0:
            text += "" if self._text.stopped else self._text.rest()
            finish = "stop" if is_complete or self._text.stopped else "length"
        else:
            self._buffer[0, self._length] = self.token = token
            self._length += 1
        self._add(Delta(text, (token,), finish, logprobs=logprobs, **self._text.thought()))

    @torch.inference_mode()
    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token by the (1, V) logits after the last one, with `model.generate`'s own processors.

        Returns (6,) without waiting for the device: the largest logit before and after them, which is NaN if any is,
        the token, by how many nats the likeliest token is more likely than the next one, which it is, and whether one
        of both ends the answer. In float32: it holds any token exactly, and Apple's GPUs have no float64.
        """
        raw_max, sampling = logits.max(), self._sampling
        if sampling.frequency_penalty or sampling.presence_penalty:
            frequency, presence = sampling.frequency_penalty or 0.0, sampling.presence_penalty or 0.0
            logits = penalize(logits, self._ids[0, self._num_prompt :], frequency, presence)
        if self._constraint is not None:  # first, so that top_k and top_p choose among the allowed tokens
            logits = self._constraint.mask(logits)
        margin, best, ends = self._margin(logits)
        logits = self._process(self._ids, logits)
        likely = logits
        if self._do_sample:
            if self._late and self._generator:
                self._state = self._generator.get_state()
            # torch.multinomial draws the same, but on a GPU a NaN would make all later work fail
            likely = logits.softmax(dim=-1) / torch.empty_like(logits).exponential_(generator=self._generator)
        return torch.stack([raw_max, logits.max(), likely.argmax().float(), margin, best, ends])

    def _margin(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (): by how many nats the likeliest allowed token leads, before any temperature, which it is, and
        whether it or the next one ends the answer."""
        if self._late is None:
            return (logits.new_zeros(()),) * 3
        (first, second), tokens = (part[0] for part in self._penalize(self._ids, logits).topk(2))
        return first - second, tokens[0].float(), torch.isin(tokens, self._ends).any().float()

    def fail(self) -> Exception:
        """End the answer; return its error, which then no longer keeps the cache alive."""
        assert self.error is not None
        error, self.error, self.is_done = self.error, None, True
        return error

    def _add(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.is_done = delta.finish_reason is not None


class _Text:
    """Incremental text of an answer up to a stop string; holds back text that may be the beginning of one.

    Thoughts are no part of it, and have no stop strings.
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...], thoughts: Thoughts | None) -> None:
        self._stream, self._stop, self._thoughts = stream, stop, thoughts
        self._held = ""  # possibly the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is now final."""
        more = self._stream.push(token)
        text = self._before_stop(self._thoughts.push(more) if self._thoughts else more)
        if self.stopped:
            return text
        held = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the text held back, at the end of the answer."""
        rest = self._stream.rest()
        return self._before_stop(self._thoughts.push(rest, 0) + self._thoughts.end() if self._thoughts else rest)

    def thought(self) -> dict[str, Any]:
        """Return `reasoning` and `reasoning_tokens` of the next Delta."""
        return self._thoughts.take() if self._thoughts else {}

    def _before_stop(self, more: str) -> str:
        text, self._held = self._held + more, ""
        starts = [start for start in (text.find(stop) for stop in self._stop) if start >= 0]
        self.stopped = bool(starts)
        return text[: min(starts)] if starts else text


def penalize(logits: Tensor, answer: Tensor, frequency: float, presence: float) -> Tensor:
    """Return (1, V) logits, lower for the (N,) tokens of the answer so far.

    `frequency` is subtracted once per occurrence, `presence` once per token that occurred.
    """
    ones = torch.ones_like(answer, dtype=logits.dtype)
    counts = torch.zeros_like(logits[0]).scatter_add_(0, answer, ones)  # (V,); bincount waits for the device
    return logits - frequency * counts - presence * (counts > 0)


def logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return the log probability of a token, and those of the `num_top` likeliest tokens, by (1, V) logits."""
    logprobs = logits[0].log_softmax(dim=-1)  # (V,)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


class Reply:
    """Answer of one request.

    Attributes:
        tokens: Those decoded so far.
        is_ended: An end token came after them.
        generation_prompt: Number of tokens at the end of the prompt that the next turn may not have.
    """

    def __init__(self, model: Model, prepared: Prepared, sampling: Sampling, request: Request) -> None:
        """Begin; adds to the request's notes what the grammar does not enforce.

        Raises SettingError for a grammar that is invalid.
        """
        tokenizer, ids = model.tokenizer, request.ids.tolist()
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
        self._num_thought = 0

    @property
    def most_bytes(self) -> int:
        """Bytes of its KV at full length, and of states."""
        num_tokens, threshold = len(self._request.ids), self._model.recompute_threshold
        longest = num_tokens + self._room
        if threshold is not None and num_tokens <= threshold < longest:
            longest += threshold  # two caches, see `Row.recompute`
        return longest * self._model.bytes_per_token + _STATES * self._model.state_bytes

    def decode(self, started: float) -> Iterator[Delta]:
        """Yield the deltas of a request whose cache is complete; the last one has the report.

        Args:
            started: When the first token was asked for, on the clock of `time.perf_counter`.
        """
        request, alone = self._request, self._request.config.deterministic
        start = self._model, request.ids, request.cache, request.logits, self._sampling
        control_tokens = {token for part in (self._thoughts, self._parser) if part for token in part.control_tokens}
        row = Row(*start, self._constraint, control_tokens, self._thoughts, alone, request.late, request.relieve)
        for number, delta in enumerate(decode(row)):
            if number == 0:
                request.note_first_token(time.perf_counter() - started)
            request.note_completed()  # at once: the consumer may leave
            self.tokens += delta.token_ids
            self._num_thought += delta.reasoning_tokens
            delta = self._parser.parse(delta) if self._parser else delta
            if delta.finish_reason:
                self.is_ended = not delta.token_ids
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

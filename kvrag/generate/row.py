"""One answer while it is decoded: from logits to tokens and text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import Model
from kvrag.backend.transformers.tokenizer import TextStream
from kvrag.config import Sampling
from kvrag.errors import ModelError, SettingError
from kvrag.generate.grammar import Constraint
from kvrag.generate.logits import bias, logprob, penalize
from kvrag.generate.parse import Thoughts
from kvrag.reuse.blend import Completion
from kvrag.scheduling.waiting import is_left
from kvrag.types import Delta, FinishReason


class Row:
    """A row of the batch: one answer, its cache, and the deltas that its consumer has not taken yet.

    Attributes:
        cache: Complete for all tokens but `token`, the last one.
        deltas: One per token, in order; the last one has `finish_reason` set and no report.
        is_unsure: The model is not sure enough of the next token. The row takes part in no step until `complete`.
        is_parked: It ran out of memory and waits until another row leaves.
        num_waits: Number of waits of its consumer for memory.
    """

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        cache: KVCache,
        sampling: Sampling,
        constraint: Constraint | None,
        control_tokens: Collection[int],
        thoughts: Thoughts | None,
        device: torch.device,
        alone: bool,
        completion: Completion | None,
    ) -> None:
        """Begin an answer to (T,) token ids with logits on this device; see `kvrag.generate.decode.decode`."""
        self.model, self.cache, self._alone, self._has_left = model, cache, alone, is_left.get()
        self.deltas: deque[Delta] = deque()
        self._completion, self._num_tokens = completion, 0
        self.is_done = self.is_parked = self.is_unsure = False
        self.num_waits = 0
        self.error: Exception | None = None
        self._sampling, self._constraint = sampling, constraint
        self._process, self._do_sample = model.logits_processor(sampling, len(ids))
        self._penalize = self._process
        if completion and self._do_sample:
            self._penalize, _ = model.logits_processor(replace(sampling, temperature=0.0), len(ids))
        self._num_prompt = self._length = len(ids)
        self._left = min(sampling.max_new_tokens, model.context_window - len(ids))
        self._buffer = torch.empty(1, len(ids) + self._left, dtype=ids.dtype, device=device)
        self._buffer[0, : len(ids)] = ids
        self.token = int(ids[-1])
        self._state: Tensor | None = None  # of the generator, before the last draw
        self._generator = None if sampling.seed is None else torch.Generator(device).manual_seed(sampling.seed)
        self._text = _Text(model.tokenizer.stream(control_tokens), sampling.stop, thoughts)

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
        context.run(is_left.set, self._has_left)
        logits = context.run(self.model.forward, self._ids, cache)
        self.cache = cache
        self._completion = None  # it would change the old cache
        return logits

    def begin(self, logits: Tensor) -> None:
        """Take the (1, V) logits after the prompt."""
        self.advance(logits, self.draw(logits).tolist())

    def complete(self) -> None:
        """Recompute the rest of the prompt, and take the next token. Waits for the model."""
        assert self._completion is not None
        logits = self._completion.complete(self._ids[0], self._num_tokens)
        self._completion = None  # from here on no margin has to be computed
        self.advance(logits, self.draw(logits).tolist())

    def advance(self, logits: Tensor, drawn: Sequence[float]) -> None:
        """Append the token that `draw` has drawn by the (1, V) logits after the last one, unless it `is_unsure`."""
        *_, margin = drawn
        self.is_unsure = self._completion is not None and self._completion.is_unsure(self._num_tokens, margin)
        if not self.is_unsure:
            self._append(logits, drawn)
        elif self._generator is not None and self._state is not None:
            self._generator.set_state(self._state)  # the token is drawn again

    def _append(self, logits: Tensor, drawn: Sequence[float]) -> None:
        raw, highest, number, _ = drawn
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
        self._left -= 1
        is_complete = self._text.stopped or (self._constraint is not None and self._constraint.push(token))
        finish: FinishReason | None = None
        if is_complete or self._left <= 0:
            text += "" if self._text.stopped else self._text.rest()
            finish = "stop" if is_complete or self._text.stopped else "length"
        else:
            self._buffer[0, self._length] = self.token = token
            self._length += 1
        self._add(Delta(text, (token,), finish, logprobs=logprobs, **self._text.thought()))

    @torch.inference_mode()
    def draw(self, logits: Tensor) -> Tensor:
        """Draw the next token by the (1, V) logits after the last one, with `model.generate`'s own processors.

        Returns (4,) float64 without waiting for the device: the largest logit before and after them, which is NaN if
        any is, the token, and by how many nats the likeliest token is more likely than the next one.
        """
        raw_max, logits = logits.max(), self._allowed(logits)
        margin = self._margin(logits)
        logits = self._process(self._ids, logits)
        likely = logits
        if self._do_sample:
            if self._completion and self._generator:
                self._state = self._generator.get_state()
            # torch.multinomial draws the same, but on a GPU a NaN would make all later work fail
            likely = logits.softmax(dim=-1) / torch.empty_like(logits).exponential_(generator=self._generator)
        return torch.stack([raw_max.double(), logits.max().double(), likely.argmax().double(), margin])

    def _allowed(self, logits: Tensor) -> Tensor:
        """Return (1, V) logits with penalties and biases, without what the grammar forbids."""
        if self._sampling.frequency_penalty or self._sampling.presence_penalty:
            frequency, presence = self._sampling.frequency_penalty or 0.0, self._sampling.presence_penalty or 0.0
            logits = penalize(logits, self._ids[0, self._num_prompt :], frequency, presence)
        if self._sampling.logit_bias:
            logits = bias(logits, self._sampling.logit_bias)
        # first, so that top_k and top_p choose among the allowed tokens
        return logits if self._constraint is None else self._constraint.mask(logits)

    def _margin(self, logits: Tensor) -> Tensor:
        """Return () float64: by how many nats the likeliest allowed token leads, before any temperature."""
        if self._completion is None:
            return logits.new_zeros((), dtype=torch.double)
        first, second = self._penalize(self._ids, logits).topk(2).values[0].double()
        return first - second

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

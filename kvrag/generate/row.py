"""One answer while it is decoded: from logits to tokens and text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import Model
from kvrag.backend.transformers.tokenizer import TextStream
from kvrag.config import Sampling
from kvrag.errors import ModelError, SettingError
from kvrag.generate.grammar import Constraint
from kvrag.generate.sample import bias, logprob, penalize
from kvrag.types import Delta, FinishReason


class Row:
    """A row of the batch: one answer, its cache, and the deltas that its consumer has not taken yet.

    Attributes:
        cache: Complete for all tokens but the last.
        token: The last token.
        deltas: One per token, in order; the last one has `finish_reason` set and no report.
        is_done: The answer is complete.
        error: What ended the answer instead.
        is_parked: It ran out of memory and waits until another row leaves.
        num_waits: Number of waits for that.
    """

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        cache: KVCache,
        sampling: Sampling,
        constraint: Constraint | None,
        control_tokens: bool,
        device: torch.device,
    ) -> None:
        """Begin an answer to (T,) token ids with logits on this device; see `kvrag.generate.decode.decode`."""
        self.model, self.cache = model, cache
        self.deltas: deque[Delta] = deque()
        self.is_done = self.is_parked = False
        self.num_waits = 0
        self.error: Exception | None = None
        self._sampling, self._constraint = sampling, constraint
        self._process, self._do_sample = model.logits_processor(sampling, len(ids))
        self._num_prompt = self._length = len(ids)
        self._left = min(sampling.max_new_tokens, model.context_window - len(ids))
        self._room = torch.empty(1, len(ids) + self._left, dtype=ids.dtype, device=device)
        self._room[0, : len(ids)] = ids
        self.token = int(ids[-1])
        self._generator = None if sampling.seed is None else torch.Generator(device).manual_seed(sampling.seed)
        self._text = _Text(model.tokenizer.stream(control_tokens), sampling.stop)

    @property
    def is_recomputed(self) -> bool:
        """True if the next step recomputes all KV, as `model.generate` does."""
        return self._length - 1 == self.model.recompute_threshold

    @property
    def can_share_steps(self) -> bool:
        """True if the next step can compute other rows too."""
        return self.model.can_share_steps(self._length - 1) and not self.is_recomputed

    @property
    def _ids(self) -> Tensor:
        """(1, T) token ids of the prompt and of the answer so far."""
        return self._room[:, : self._length]

    def recompute(self) -> Tensor:
        """Compute the KV of all tokens anew, in a cache of its own; return (1, V) logits.

        The old one is still what a shorter prompt has: the next turn of an abandoned answer may begin with it.
        """
        cache = self.model.new_cache(self._length)
        logits = self.model.forward(self._ids, cache)
        self.cache = cache
        return logits

    def advance(self, logits: Tensor) -> None:
        """Add the next token by the (1, V) logits after the last one, with `model.generate`'s own processors."""
        adjusted = _adjust(logits, self._ids[0, self._num_prompt :], self._sampling)
        token = _pick(self._process, self._ids, adjusted, self._do_sample, self._generator, self._constraint)
        if token in self.model.eos_ids:
            self._finish(Delta(self._text.rest(), (), "stop"))
            return
        wanted = self._sampling.logprobs
        known = () if wanted is None else (logprob(logits, token, wanted),)
        text = self._text.push(token)
        if self._text.stopped:
            self._finish(Delta(text, (token,), "stop", logprobs=known))
            return
        self._left -= 1
        is_complete = self._constraint is not None and self._constraint.push(token)
        if is_complete or self._left <= 0:
            text += self._text.rest()
            finish: FinishReason = "stop" if is_complete or self._text.stopped else "length"
            self._finish(Delta(text, (token,), finish, logprobs=known))
            return
        self._room[0, self._length] = self.token = token
        self._length += 1
        self.deltas.append(Delta(text, (token,), logprobs=known))

    def fail(self) -> Exception:
        """End the answer; return its error, which then no longer keeps the cache alive."""
        assert self.error is not None
        error, self.error, self.is_done = self.error, None, True
        return error

    def _finish(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.is_done = True


@torch.inference_mode()
def _adjust(logits: Tensor, answer: Tensor, sampling: Sampling) -> Tensor:
    """Return (1, V) logits with the penalties for the (N,) tokens of the answer, and the biases."""
    if sampling.frequency_penalty or sampling.presence_penalty:
        logits = penalize(logits, answer, sampling.frequency_penalty or 0.0, sampling.presence_penalty or 0.0)
    return bias(logits, sampling.logit_bias) if sampling.logit_bias else logits


@torch.inference_mode()
def _pick(
    process: Callable[[Tensor, Tensor], Tensor],
    ids: Tensor,
    logits: Tensor,
    do_sample: bool,
    generator: torch.Generator | None,
    constraint: Constraint | None,
) -> int:
    """Return the next token's id from (1, T) ids so far and (1, V) logits."""
    raw_highest = logits.max()
    if constraint is not None:
        logits = constraint.mask(logits)  # first, so that top_k and top_p choose among the allowed tokens
    logits = process(ids, logits)
    seen = torch.stack([raw_highest.double(), logits.max().double(), logits.argmax().double()])
    raw, highest, likeliest = seen.tolist()  # one wait for the device; a maximum is NaN if any logit is
    if not math.isfinite(raw):
        raise ModelError(
            "the model's logits are NaN or infinite: a value overflowed; load it with dtype='bfloat16' or 'float32'"
        )
    if not math.isfinite(highest):
        raise SettingError("no token can be sampled: relax the sampling settings or the model's generation config")
    if not do_sample:
        return int(likeliest)
    return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=generator))


class _Text:
    """Incremental text of an answer; holds back text that may be the beginning of a stop string.

    Attributes:
        stopped: A stop string was found; the text before it has been returned.
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...]) -> None:
        self._stream, self._stop = stream, stop
        self._held = ""  # possibly the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that is now final."""
        text = self._before_stop(self._stream.push(token))
        if self.stopped:
            return text
        held = max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the text held back, at the end of the answer."""
        return self._before_stop(self._stream.rest())

    def _before_stop(self, more: str) -> str:
        text, self._held = self._held + more, ""
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        self.stopped = bool(found)
        return text[: min(found)] if found else text

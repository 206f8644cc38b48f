"""Decoding: from a complete cache to text, one token per step of the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def decode(
    model: Model,
    ids: Tensor,
    cache: KVCache,
    logits: Tensor,
    sampling: Sampling,
    constraint: Constraint | None = None,
    control_tokens: bool = False,
) -> Iterator[Delta]:
    """Generate with `model.generate`'s own processors. Changes `cache`.

    Args:
        ids: (T,) token ids of the prompt.
        cache: Complete for the prompt.
        logits: (1, V) after the prompt's last token.
        constraint: Grammar that the answer must match. It is changed.
        control_tokens: Keep control tokens in the text, for a parser of tool calls.

    Raises:
        SettingError: `sampling.logit_bias` names a token that the model does not have.

    Yields:
        One Delta per token. Its text is empty while a character or a stop string is incomplete. The last one has
            `finish_reason` set and no report.
    """
    if unknown := [token for token in sampling.logit_bias or () if token >= logits.shape[-1]]:
        raise SettingError(f"logit_bias: unknown token {unknown[0]}: this model has tokens 0 to {logits.shape[-1] - 1}")
    process, do_sample = model.logits_processor(sampling, len(ids))
    num_prompt = len(ids)
    generator = None if sampling.seed is None else torch.Generator(logits.device).manual_seed(sampling.seed)
    ids = ids[None].to(logits.device)
    text = _Text(model.tokenizer.stream(control_tokens), sampling.stop)
    room = min(sampling.max_new_tokens, model.context_window - ids.shape[1])
    for left in range(room - 1, -1, -1):
        adjusted = _adjust(logits, ids[0, num_prompt:], sampling)
        token = _pick(process, ids, adjusted, do_sample, generator, constraint)
        if token in model.eos_ids:
            break
        known = () if sampling.logprobs is None else (logprob(logits, token, sampling.logprobs),)
        delta = text.push(token)
        if text.stopped:
            yield Delta(delta, (token,), "stop", logprobs=known)
            return
        is_complete = constraint is not None and constraint.push(token)
        if is_complete or left == 0:
            delta += text.rest()
            finish: FinishReason = "stop" if is_complete or text.stopped else "length"
            yield Delta(delta, (token,), finish, logprobs=known)
            return
        yield Delta(delta, (token,), logprobs=known)
        step = torch.tensor([[token]], device=ids.device)
        ids = torch.cat([ids, step], dim=1)
        if ids.shape[1] - 1 == model.recompute_threshold:
            cache.set_length(0)
            step = ids
        logits = model.forward(step, cache)
    yield Delta(text.rest(), (), "stop")


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
    if not _is_drawable(logits):
        raise ModelError(
            "the model's logits are NaN or infinite: a value overflowed; load it with dtype='bfloat16' or 'float32'"
        )
    if constraint is not None:
        logits = constraint.mask(logits)  # first, so that top_k and top_p choose among the allowed tokens
    logits = process(ids, logits)
    if not _is_drawable(logits):
        raise SettingError("no token can be sampled: relax the sampling settings or the model's generation config")
    if not do_sample:
        return int(logits.argmax())
    return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=generator))


def _is_drawable(logits: Tensor) -> bool:
    return bool(logits.max().isfinite())  # NaN if any logit is NaN


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

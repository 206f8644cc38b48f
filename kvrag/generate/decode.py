"""From a complete cache to text, one token at a time, pulled by the consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvrag.backend.protocol import KVCache
from kvrag.backend.transformers import Model
from kvrag.config import Sampling
from kvrag.errors import ModelError
from kvrag.generate.grammar import Constraint
from kvrag.types import Delta


def decode(
    model: Model,
    ids: Tensor,
    cache: KVCache,
    logits: Tensor,
    sampling: Sampling,
    constraint: Constraint | None = None,
    control_tokens: bool = False,
) -> Iterator[Delta]:
    """Generate with `model.generate`'s own processors; changes `cache`.

    Args:
        ids: (T,) the prompt.
        cache: Complete for the prompt.
        logits: (1, V) after the prompt's last token.
        constraint: What the answer must keep to; it is changed.
        control_tokens: Leave them in the text, for those who parse it.

    Yields:
        One Delta per token; its text may be empty while a character or a stop string is incomplete. The last one has
        `finish_reason` set and no report.
    """
    process, do_sample = model.logits_processor(sampling, len(ids))
    generator = None if sampling.seed is None else torch.Generator(logits.device).manual_seed(sampling.seed)
    ids = ids[None].to(logits.device)
    text = _Text(model, sampling.stop, control_tokens)
    room = min(sampling.max_new_tokens, model.context_window - ids.shape[1])
    for left in range(room - 1, -1, -1):
        token = _pick(process, ids, logits, do_sample, generator, constraint)
        if token in model.eos_ids:
            break
        delta = text.push(token)
        if text.stopped:
            yield Delta(delta, (token,), "stop")
            return
        if constraint is not None and constraint.push(token):
            yield Delta(delta + text.rest(), (token,), "stop")
            return
        if left == 0:
            yield Delta(delta + text.rest(), (token,), "length")
            return
        yield Delta(delta, (token,))
        step = torch.tensor([[token]], device=ids.device)
        ids = torch.cat([ids, step], dim=1)
        if ids.shape[1] - 1 == model.starts_over_at:
            cache.set_length(0)
            step = ids
        logits = model.forward(step, cache)
    yield Delta(text.rest(), (), "stop")


@torch.inference_mode()
def _pick(
    process: Callable[[Tensor, Tensor], Tensor],
    ids: Tensor,
    logits: Tensor,
    do_sample: bool,
    generator: torch.Generator | None,
    constraint: Constraint | None,
) -> int:
    """(1, T) ids so far and (1, V) logits -> the next token's id."""
    if torch.isnan(logits).any():
        raise ModelError("the model's logits are NaN: a value overflowed; load it with dtype='bfloat16' or 'float32'")
    if constraint is not None:
        logits = constraint.mask(logits)  # first, so that top_k and top_p choose among what is allowed
    logits = process(ids, logits)
    if not do_sample:
        return int(logits.argmax())
    return int(torch.multinomial(logits.softmax(dim=-1), 1, generator=generator))


class _Text:
    """Ids in, text out as soon as it cannot change any more: whole characters, and no beginning of a stop string."""

    def __init__(self, model: Model, stop: tuple[str, ...], control_tokens: bool) -> None:
        self._model, self._stop, self._control_tokens = model, stop, control_tokens
        self._ids: list[int] = []
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token, return the text that is now certain."""
        self._ids.append(token)
        text = self._decoded()
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            return self._send(text[: min(found)])
        return self._send(text[: len(text) - self._uncertain(text)])

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._send(self._decoded())

    def _decoded(self) -> str:
        return self._model.tokenizer.decode(self._ids, self._control_tokens)

    def _send(self, text: str) -> str:
        delta, self._sent = text[self._sent :], max(self._sent, len(text))
        return delta

    def _uncertain(self, text: str) -> int:
        """How many characters at the end may still turn into another character or into a stop string."""
        whole = len(text.rstrip("\ufffd"))
        beginning = max(
            (n for stop in self._stop for n in range(1, len(stop)) if text[:whole].endswith(stop[:n])), default=0
        )
        return len(text) - whole + beginning

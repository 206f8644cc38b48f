"""Agreement with full prefill: one measurement and one rule for calibration and `python -m benchmarks answers`.

A prompt is prefilled in full once and answered greedily. Each cell, a policy at a ratio, then prefills the same ids.
The tokens of full prefill's answer are fed to its cache (teacher forcing), and the likeliest next tokens are compared
at every step: as long as all agree, the cell's own greedy answer is the same.

Only the first token decides. Later tokens follow a prefix that full prefill wrote, so they are easier and not
independent; they are reported as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Sampling
from kvrag.errors import ModelError
from kvrag.generate.decode import decode
from kvrag.reuse.request_state import RequestState

TARGET = 0.99
"""Share of first tokens that must agree by default."""
END = -1
"""Stands for every end token in `Record.tokens`."""
_Z = 1.96  # 95 %

Prefill = Callable[[list[int], BlendConfig], RequestState]
"""From prompt ids to a complete cache, like `BlendEngine.prefill`."""


@dataclass(frozen=True, slots=True)
class Record:
    """Result of one cell for one prompt.

    Attributes:
        tokens: Likeliest token at each position of full prefill's answer; of an own answer, its tokens.
        text: Their text up to the first that differs; of an own answer, all of it.
        kl: KL of the first token's distribution to full prefill's, in nats.
        inexact_tokens: Reused tokens that may deviate from full prefill.
        ttft_s: Seconds from ids to the first token.
    """

    tokens: list[int]
    text: str
    kl: float
    prompt_tokens: int
    reused_tokens: int
    inexact_tokens: int
    recomputed_tokens: int
    ttft_s: float


def compare(
    model: Model,
    prefill: Prefill,
    ids: list[int],
    configs: Sequence[BlendConfig],
    sampling: Sampling,
    own_answers: bool = False,
) -> Iterator[Record]:
    """Yield full prefill's record of a prompt, then one for each of `configs`, as they are measured.

    Args:
        sampling: Greedy; limits the answer.
        own_answers: Decode the answer of every cell, instead of feeding it full prefill's.

    Raises:
        ModelError: Logits are NaN.
    """
    reference: Tensor | None = None
    answer: list[int] = []
    for config in (BlendConfig(policy="full", controller="off"), *configs):
        started = time.perf_counter()
        prefilled = prefill(ids, config)
        int(_without_nan(prefilled.logits).argmax())  # waits for a GPU
        ttft_s = time.perf_counter() - started
        if reference is None or own_answers:
            tokens, text = _answer(model, prefilled, sampling)
        else:
            tokens = _likeliest(model, prefilled, answer)
            differing = (at for at, (ours, full) in enumerate(zip(tokens, answer, strict=True)) if ours != full)
            same = next(differing, len(answer))
            text = model.tokenizer.decode([token for token in tokens[: same + 1] if token != END])
        if reference is None:
            reference, answer = prefilled.logits, tokens
        report = prefilled.report
        counts = report.prompt_tokens, report.reused_tokens, len(prefilled.inexact), report.recomputed_tokens
        yield Record(tokens, text, divergence(reference, prefilled.logits), *counts, ttft_s)


def _answer(model: Model, prefilled: RequestState, sampling: Sampling) -> tuple[list[int], str]:
    deltas = list(decode(model, prefilled.ids, prefilled.cache, prefilled.logits, sampling))
    tokens = [token for delta in deltas for token in delta.token_ids]
    if not deltas[-1].token_ids:
        tokens.append(END)
    return tokens, "".join(delta.text for delta in deltas)


def _likeliest(model: Model, prefilled: RequestState, answer: Sequence[int]) -> list[int]:
    """Return the cache's likeliest token at each position of the answer, with the answer as input."""
    logits = prefilled.logits
    if len(answer) > 1:
        following = model.forward_all(torch.tensor([answer[:-1]]), prefilled.cache)[0]
        logits = torch.cat([logits, following])  # (S, V)
    best = _without_nan(logits).argmax(dim=-1).tolist()
    return [END if token in model.eos_ids else token for token in best]


def _without_nan(logits: Tensor) -> Tensor:
    if torch.isnan(logits).any():
        raise ModelError("the model's logits are NaN: a value overflowed; load it with dtype='bfloat16' or 'float32'")
    return logits


def divergence(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats between two next-token distributions, given as logits."""
    p, q = (logits.double().flatten().log_softmax(0) for logits in (full, other))
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    return max(0.0, float(terms.sum()))


def wilson(hits: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927), valid for few samples and for shares near 1."""
    share, z2 = hits / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def choose(ratios: Sequence[float], shares: Sequence[float], target: float) -> float | None:
    """Return the smallest ratio whose share reaches the target together with the next larger one's; None if none does.

    Args:
        ratios: Ascending.
        shares: Share of first tokens that agree, or the lower end of its interval, at each ratio.
    """
    reached = [share >= target for share in shares]
    pairs = zip(ratios, pairwise([*reached, True]), strict=True)
    return next((ratio for ratio, both in pairs if all(both)), None)

"""Agreement with full prefill: the measure of calibration, of checked answers and of `python -m benchmarks answers`.

A prompt is prefilled in full once and answered greedily. Each cell, a policy at a ratio, then prefills the same ids.
The tokens of full prefill's answer are fed to its cache (teacher forcing), and the likeliest next tokens are compared
at every step: as long as all agree, the cell's own greedy answer is the same.

An answer is *kept* if no decided token of it changed. A token is decided if full prefill's two likeliest differ by at
least a nat: near ties, such as the first words of many answers, are resolved by rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import BlendConfig, Sampling
from kvrag.errors import ModelError
from kvrag.generate.decode import decode
from kvrag.reuse.request_state import RequestState

TARGET = 0.98
"""Share of the answers that must be kept by default."""
DECIDED = 1.0
"""Nats by which full prefill's likeliest token of a decided position is more likely than the next one."""
TOKENS = 32
"""Tokens of an answer that are compared by default."""
END = -1
"""Stands for every end token in `Record.tokens`."""
_Z = 1.96  # 95 %

Prefill = Callable[[list[int], BlendConfig], RequestState]
"""From prompt ids to a complete cache, like `BlendEngine.prefill`."""


@dataclass(frozen=True, slots=True)
class Record:
    """Result of one cell for one prompt.

    Attributes:
        tokens: Likeliest token at each position of full prefill's answer.
        margins: By how many nats each is more likely than the next one.
        text: Their text up to the first that differs; of an own answer, all of it.
        kl: KL of the first token's distribution to full prefill's, in nats.
        reused_tokens: Those with stored KV, recomputed or not.
        inexact_tokens: Reused tokens that may deviate from full prefill.
        ttft_s: Seconds from ids to the first token.
    """

    tokens: list[int]
    margins: list[float]
    text: str
    kl: float
    prompt_tokens: int
    reused_tokens: int
    inexact_tokens: int
    recomputed_tokens: int
    ttft_s: float


def is_kept(agrees: Iterable[bool], margins: Iterable[float]) -> bool:
    """Return whether no decided token changed, by the tokens that agree and full prefill's margins."""
    return all(same or margin < DECIDED for same, margin in zip(agrees, margins, strict=True))


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
        own_answers: Decode the answer of every cell that differs from full prefill's, for its text.

    Raises:
        ModelError: Logits are NaN.
    """
    reference: Tensor | None = None
    answer, full_text = list[int](), ""
    for config in (BlendConfig(policy="full", controller="off"), *configs):
        started = time.perf_counter()
        prefilled = prefill(ids, config)
        int(_without_nan(prefilled.logits).argmax())  # waits for a GPU
        ttft_s = time.perf_counter() - started
        if reference is None:
            answer, full_text = own_answer(model, prefilled, sampling)
            prefilled.cache.set_length(len(ids))
        tokens, margins = likeliest(model, prefilled, answer, sampling)
        if reference is None:
            reference, tokens = prefilled.logits, answer
        same = next((at for at, token in enumerate(tokens) if token != answer[at]), len(answer))
        if same == len(answer):
            text = full_text
        elif own_answers:
            prefilled.cache.set_length(len(ids))
            _, text = own_answer(model, prefilled, sampling)
        else:
            text = model.tokenizer.decode([token for token in tokens[: same + 1] if token != END])
        report = prefilled.report
        counts = report.prompt_tokens, report.stored_tokens, len(prefilled.inexact), report.recomputed_tokens
        yield Record(tokens, margins, text, divergence(reference, prefilled.logits), *counts, ttft_s)


def own_answer(model: Model, prefilled: RequestState, sampling: Sampling) -> tuple[list[int], str]:
    """Return the tokens of the greedy answer, with `END` for an end token, and its text."""
    deltas = list(decode(model, prefilled.ids, prefilled.cache, prefilled.logits, sampling))
    tokens = [token for delta in deltas for token in delta.token_ids]
    if not deltas[-1].token_ids:
        tokens.append(END)
    return tokens, "".join(delta.text for delta in deltas)


def likeliest(
    model: Model, prefilled: RequestState, answer: Sequence[int], sampling: Sampling, ends_are_sure: bool = False
) -> tuple[list[int], list[float]]:
    """Return the likeliest token at each position of the answer, with the answer as input, and its margin.

    Args:
        ends_are_sure: The margin between an end token and another one is infinite, as for answers in progress.
    """
    logits, given = prefilled.logits, torch.tensor([answer[:-1]], dtype=torch.long)
    if len(answer) > 1:
        logits = torch.cat([logits, model.forward_all(given, prefilled.cache)[0]])  # (S, V)
    _without_nan(logits)
    length = len(prefilled.ids)
    ids = torch.cat([prefilled.ids[None], given], dim=1).to(logits.device)
    process, _ = model.logits_processor(sampling, length)
    scores = [process(ids[:, : length + at], logits[at : at + 1]) for at in range(len(answer))]
    best = torch.cat(scores).topk(2)
    tokens = [[END if token in model.eos_ids else token for token in pair] for pair in best.indices.tolist()]
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    if ends_are_sure:
        margins = [math.inf if END in pair else margin for pair, margin in zip(tokens, margins, strict=True)]
    return [first for first, _ in tokens], margins


def _without_nan(logits: Tensor) -> Tensor:
    if torch.isnan(logits).any():
        raise ModelError("the model's logits are NaN: a value overflowed; load it with dtype='bfloat16' or 'float32'")
    return logits


def divergence(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats between two next-token distributions, given as logits."""
    p, q = (logits.cpu().double().flatten().log_softmax(0) for logits in (full, other))
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    return max(0.0, float(terms.sum()))


def wilson(hits: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927), valid for few samples and for shares near 1."""
    share, z2 = hits / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def choose(ratios: Sequence[float], shares: Sequence[float], target: float) -> float | None:
    """Return the smallest ratio whose share of kept answers reaches the target; None if none does.

    Args:
        ratios: Ascending.
        shares: Share of the answers that are kept, or the lower end of its interval, at each ratio.
    """
    return next((ratio for ratio, share in zip(ratios, shares, strict=True) if share >= target), None)

"""Comparison of cells, policies at ratios, with full prefill, for `python -m benchmarks answers`.

A prompt is prefilled in full once and answered greedily. Each cell then prefills the same ids. The tokens of full
prefill's answer are fed to its cache (teacher forcing), and the likeliest next tokens are compared at every step: as
long as all agree, the cell's own greedy answer is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvrag.backend.transformers import Model, Tokenizer
from kvrag.config import BlendConfig, Sampling
from kvrag.control.prompts import WORD
from kvrag.listen.check import END, likeliest, own_answer
from kvrag.request import Request

Prefill = Callable[[list[int], BlendConfig], Request]
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
        int(prefilled.logits.argmax())  # waits for a GPU
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


def divergence(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats between two next-token distributions, given as logits."""
    p, q = (logits.cpu().double().flatten().log_softmax(0) for logits in (full, other))
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    return max(0.0, float(terms.sum()))


def choose(ratios: Sequence[float], shares: Sequence[float], target: float) -> float | None:
    """Return the smallest ratio whose share of kept answers reaches the target; None if none does.

    Args:
        ratios: Ascending.
        shares: Share of the answers that are kept, or the lower end of its interval, at each ratio.
    """
    return next((ratio for ratio, share in zip(ratios, shares, strict=True) if share >= target), None)


def ask(tokenizer: Tokenizer, chunks: Sequence[str], question: str) -> list[int]:
    """Return the ids of a prompt of chunks and a question."""
    text = "\n\n".join([*chunks, f"Question: {question}"])
    return tokenizer.render(tokenizer.as_prompt(text if tokenizer.has_chat_template else f"{text}\n\nAnswer:"))


def first_word(text: str) -> str:
    """Return the first word of a text; "" without one."""
    word = WORD.search(text)
    return word.group() if word else ""

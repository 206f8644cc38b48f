"""Decoding of several answers together, one after the other, and by `model.generate`, interleaved in one run.

Prompts have different lengths. They are prefilled before the clock starts. Together, each answer has a consumer thread
of its own.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.backend.transformers.shapes import random_model
from kvrag.bench.ttft import run_settings
from kvrag.config import Sampling
from kvrag.generate.decode import decode
from kvrag.openmp import release_team
from kvrag.types import Delta

_LONGER = 7  # tokens that each prompt has more than the one before
_RATIOS = (
    ("alone", "generate"),
    ("together", "alone"),
    ("compiled_alone", "alone"),
    ("compiled_together", "together"),
)


@dataclass(frozen=True)
class DecodeResult:
    """Tokens per second, medians over the rounds, and the medians of the ratios within a round."""

    generate: float
    alone: float
    together: float
    alone_to_generate: float
    together_to_alone: float
    settings: dict[str, Any]
    compiled_alone: float | None = None
    compiled_together: float | None = None
    compiled_alone_to_alone: float | None = None
    compiled_together_to_together: float | None = None


@dataclass(frozen=True)
class DecodeSetup:
    """Answers of a random model of a real shape.

    Attributes:
        model, layers: The shape, and how many of its layers (None = all).
        rows: Answers that are decoded together.
        prompt_tokens: Length of the shortest prompt.
        answer_tokens: Length of an answer.
        repeats: Rounds; the medians count.
        compiled: Also measure compiled steps, see `Model.from_pretrained`.
    """

    model: str = "qwen2.5-0.5b"
    layers: int | None = None
    rows: int = 8
    prompt_tokens: int = 96
    answer_tokens: int = 24
    repeats: int = 3
    compiled: bool = False


def measure(
    setup: DecodeSetup, progress: Callable[[str], None] = lambda line: None, net: Model | None = None
) -> DecodeResult:
    """Measure on a random model of that shape; medians over the rounds after one warm-up round.

    Args:
        net: The model, if it exists already. Its answers will not end early any more.
    """
    if net is None:
        progress(f"building a random model of {setup.model}'s shape")
        net = random_model(setup.model, setup.layers)
    nets = {"": net}
    if setup.compiled:
        progress("compiling the decode steps")
        nets["compiled_"] = Model(net.hf, net.tokenizer.hf, net.name, compile_decode=True)
    for each in nets.values():
        each.__dict__["eos_ids"] = frozenset()  # every answer has its full length
    prompts = [torch.randint(1000, (setup.prompt_tokens + _LONGER * row,)) for row in range(setup.rows)]
    rates: dict[str, list[float]] = defaultdict(list)
    for repeat in range(setup.repeats + 1):
        progress(f"round {repeat} of {setup.repeats}" if repeat else "warm-up round")
        measured = {"generate": _generate(net, prompts[0], setup.answer_tokens)}
        for kind, each in nets.items():
            measured[f"{kind}alone"] = _rate(each, prompts[:1], setup.answer_tokens)
            measured[f"{kind}together"] = _rate(each, prompts, setup.answer_tokens)
        for name, rate in measured.items() if repeat else ():
            rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        f"{name}_to_{other}": statistics.median(a / b for a, b in zip(rates[name], rates[other], strict=True))
        for name, other in _RATIOS
        if name in rates
    }
    given = {name: getattr(setup, name) for name in ("rows", "prompt_tokens", "answer_tokens", "repeats")}
    return DecodeResult(**medians, **ratios, settings=run_settings(net) | given)


def _rate(net: Model, prompts: Sequence[Tensor], num_tokens: int) -> float:
    """Return the tokens per second of all answers, without their first tokens."""
    answers = [_begin(net, ids, num_tokens) for ids in prompts]
    release_team()  # as the engine does after a prefill
    with ThreadPoolExecutor(len(answers)) as pool:
        started = time.perf_counter()
        counts = list(pool.map(lambda answer: sum(1 for _ in answer), answers))
        return sum(counts) / (time.perf_counter() - started)


def _begin(net: Model, ids: Tensor, num_tokens: int) -> Iterator[Delta]:
    cache = net.new_cache(len(ids) + num_tokens)
    logits = net.forward(ids[None], cache)
    answer = decode(net, ids, cache, logits, Sampling(num_tokens, temperature=0))
    next(answer)
    return answer


@torch.inference_mode()
def _generate(net: Model, ids: Tensor, num_tokens: int) -> float:
    """Return the tokens per second of `model.generate`, without the prefill and the first token."""

    def seconds(count: int) -> float:
        started = time.perf_counter()
        inputs = ids[None].to(net.device)
        count_exactly = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        net.hf.generate(inputs, attention_mask=torch.ones_like(inputs), **count_exactly)
        return time.perf_counter() - started

    first = seconds(1)
    return (num_tokens - 1) / (seconds(num_tokens) - first)

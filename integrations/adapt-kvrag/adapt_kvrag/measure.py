"""Effect of an adapter: the same prompts over KV stored without it and with it, compared with full prefill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from tempfile import TemporaryDirectory

from kvrag import BlendConfig, BlendEngine, Model, Sampling
from kvrag.ext import DEFAULT_RATIO, Adapter, Gap, compare

_WANTED = 0.8  # of the divergence may be left on held-out prompts
_WORSE = 1.05  # times the divergence before, on text of another kind


@dataclass(frozen=True, slots=True)
class Effect:
    """Agreement with full prefill at one ratio, without an adapter and with it.

    Attributes:
        kl: Mean KL of the first token's distribution, in nats.
        first: Number of prompts whose first token is full prefill's.
    """

    ratio: float
    kl: tuple[float, float]
    first: tuple[int, int]
    prompts: int


def measure(
    model: Model,
    adapter: Adapter,
    documents: Mapping[str, Sequence[str]],
    prompts: Sequence[Gap],
    context_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Effect]:
    """Answer prompts by plain reuse and by the default, without the adapter and with it.

    Args:
        documents: The chunks of each document, in reading order; only documents that prompts contain are encoded.

    Raises:
        ModelError: Logits are NaN.
    """
    default = BlendConfig(ratio=DEFAULT_RATIO, controller="off", context_tokens=context_tokens)
    configs = [replace(default, policy="none"), default]
    needed = {chunk for prompt in prompts for chunk in prompt.chunks}
    corpus = {name: chunks for name, chunks in documents.items() if not needed.isdisjoint(chunks)}
    done, total = 0, 2 * (len(corpus) + len(prompts))
    kl: list[tuple[list[float], list[float]]] = [([], []) for _ in configs]
    first = [[0, 0] for _ in configs]
    adapted = Model(model.hf, model.tokenizer.hf, model.name, True, adapter=adapter)
    for column, one in enumerate((model, adapted)):
        with (
            TemporaryDirectory(prefix="kvrag-adapt-", ignore_cleanup_errors=True) as folder,
            BlendEngine(one, folder, default) as engine,
        ):
            for name, chunks in corpus.items():
                engine.warm(chunks, document=name)
                progress(done := done + 1, total)
            for prompt in prompts:
                full, *records = compare(one, engine.prefill, prompt.ids, configs, Sampling(1, 0.0))
                for row, record in enumerate(records):
                    kl[row][column].append(record.kl)
                    first[row][column] += record.tokens[0] == full.tokens[0]
                progress(done := done + 1, total)
    return [
        Effect(ratio, (fmean(before), fmean(after)), (counts[0], counts[1]), len(prompts))
        for ratio, (before, after), counts in zip((0.0, DEFAULT_RATIO), kl, first, strict=True)
    ]


def verdict(own: Sequence[Effect], other: Sequence[Effect]) -> str:
    """Return why an adapter is not worth using; "" if it is.

    Args:
        own, other: Results of `measure` on held-out prompts about the documents, and about text of another kind.
    """
    before, after = own[-1].kl
    if not after <= _WANTED * before:  # also if it is NaN
        return (
            f"on held-out prompts the divergence from full prefill went from {before:.3f} to {after:.3f} nats, "
            "which is not a fifth less: give more documents or more --minutes"
        )
    before, after = other[-1].kl
    if not after <= _WORSE * before:
        return (
            f"on text of another kind the divergence from full prefill rose from {before:.3f} to {after:.3f} nats: "
            "give documents of more kinds"
        )
    return ""

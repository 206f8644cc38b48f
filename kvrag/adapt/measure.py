"""Effect of an adapter: the same prompts over KV stored without it and with it, compared with full prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory

from kvrag.backend.transformers.adapter import Adapter
from kvrag.backend.transformers.model import Model
from kvrag.config import DEFAULT_RATIO, BlendConfig, Sampling
from kvrag.control.agreement import compare
from kvrag.engine import BlendEngine
from kvrag.reuse.stitch import Prefilled

_TOKENS = 8  # of an answer
_WANTED = 0.8  # of the divergence may be left on held-out prompts
_WORSE = 1.05  # is more than noise on text of another kind


@dataclass(frozen=True, slots=True)
class Effect:
    """Agreement with full prefill: mean KL of the first token in nats, and the number of equal first tokens."""

    adapted: bool
    ratio: float
    kl: float
    first: int
    prompts: int


def measure(
    model: Model,
    adapter: Adapter,
    documents: Mapping[str, Sequence[str]],
    prompts: Sequence[list[int]],
    context_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Effect]:
    """Answer prompts about documents by plain reuse and by the default, without the adapter and with it.

    Args:
        documents: The chunks of each document, in reading order.
        prompts: Token ids.
    """
    default = BlendConfig(ratio=DEFAULT_RATIO, controller="off", context_tokens=context_tokens)
    configs = [replace(default, policy="none"), default]
    adapted = Model(model.hf, model.tokenizer.hf, model.name, True, adapter=adapter)
    with ExitStack() as stack:
        engines = []
        for one in (model, adapted):
            folder = stack.enter_context(TemporaryDirectory(prefix="kvrag-adapt-", ignore_cleanup_errors=True))
            engine = stack.enter_context(BlendEngine(one, folder, default))
            for done, (name, chunks) in enumerate(documents.items()):
                progress(done, len(documents))
                engine.warm(chunks, document=name)
            engines.append(engine)
        totals = [[0.0, 0] for _ in range(4)]
        for number, ids in enumerate(prompts):
            progress(number, len(prompts))
            prefill = partial(_prefill, iter([engines[0], *(engine for engine in engines for _ in configs)]))
            full, *records = compare(model, prefill, ids, 2 * configs, Sampling(_TOKENS, 0.0))
            for total, record in zip(totals, records, strict=True):
                total[0] += record.kl
                total[1] += record.tokens[0] == full.tokens[0]
    cells = [(is_adapted, ratio) for is_adapted in (False, True) for ratio in (0.0, DEFAULT_RATIO)]
    return [
        Effect(*cell, kl / len(prompts), int(first), len(prompts))
        for cell, (kl, first) in zip(cells, totals, strict=True)
    ]


def _prefill(turns: Iterator[BlendEngine], ids: list[int], config: BlendConfig) -> Prefilled:
    """Prefill with the next engine, in the order of `compare`."""
    return next(turns).prefill(ids, config)


def verdict(own: Sequence[Effect], other: Sequence[Effect]) -> str:
    """Return why an adapter is not worth using; "" if it is.

    Args:
        own, other: Results of `measure` on held-out prompts about the documents, and about text of another kind.
    """
    before, after = own[1], own[3]
    if not after.kl <= _WANTED * before.kl:  # also if it is NaN
        return (
            f"on held-out prompts the divergence from full prefill fell from {before.kl:.3f} to {after.kl:.3f} nats, "
            "by less than a fifth: give more documents or more --minutes"
        )
    if other and not other[3].kl <= _WORSE * other[1].kl:
        return (
            f"on text of another kind the divergence from full prefill rose from {other[1].kl:.3f} to "
            f"{other[3].kl:.3f} nats: give documents of more kinds"
        )
    return ""

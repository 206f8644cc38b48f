"""Agreement with full prefill: which tokens a prefilled prompt gives to an answer, and whether the answer is kept.

An answer is *kept* if no decided token of it changed. A token is decided if full prefill's two likeliest differ by at
least a nat: near ties, such as the first words of many answers, are resolved by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvrag.backend.transformers import Model
from kvrag.config import Sampling
from kvrag.errors import ModelError
from kvrag.generate.decode import Row, decode
from kvrag.request import Request

TARGET = 0.98
"""Share of the answers that must be kept by default."""
DECIDED = 1.0
"""Nats by which full prefill's likeliest token of a decided position is more likely than the next one."""
TOKENS = 32
"""Tokens of an answer that are compared by default."""
END = -1
"""Stands for every end token."""
_Z = 1.96  # 95 %


def is_kept(agrees: Iterable[bool], margins: Iterable[float]) -> bool:
    """Return whether no decided token changed, by the tokens that agree and full prefill's margins."""
    return all(same or margin < DECIDED for same, margin in zip(agrees, margins, strict=True))


def own_answer(model: Model, prefilled: Request, sampling: Sampling) -> tuple[list[int], str]:
    """Return the tokens of the greedy answer, with `END` for an end token, and its text."""
    deltas = list(decode(Row(model, prefilled.ids, prefilled.cache, prefilled.logits, sampling)))
    tokens = [token for delta in deltas for token in delta.token_ids]
    if not deltas[-1].token_ids:
        tokens.append(END)
    return tokens, "".join(delta.text for delta in deltas)


def likeliest(
    model: Model, prefilled: Request, answer: Sequence[int], sampling: Sampling, ends_are_sure: bool = False
) -> tuple[list[int], list[float]]:
    """Return the likeliest token at each position of the answer, with the answer as input, and its margin.

    Args:
        ends_are_sure: The margin between an end token and another one is infinite, as for answers in progress.
    """
    logits, given = prefilled.logits, torch.tensor([answer[:-1]], dtype=torch.long)
    if len(answer) > 1:
        logits = torch.cat([logits, model.forward_all(given, prefilled.cache)[0]])  # (S, V)
    without_nan(logits)
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


def without_nan(logits: Tensor) -> Tensor:
    """Return the logits; raise ModelError if one is NaN."""
    if torch.isnan(logits).any():
        raise ModelError("the model's logits are NaN: a value overflowed; load it with dtype='bfloat16' or 'float32'")
    return logits


def wilson(hits: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson, 1927), valid for few samples and for shares near 1."""
    share, z2 = hits / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)

"""OpenAI's sampling features as functions on logits: penalties, biases, log probabilities."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvrag.types import TokenLogprob


def penalize(logits: Tensor, answer: Tensor, frequency: float, presence: float) -> Tensor:
    """Return (1, V) logits, lower for the (N,) tokens of the answer so far.

    `frequency` is subtracted once per occurrence, `presence` once per token that occurred.
    """
    ones = torch.ones_like(answer, dtype=logits.dtype)
    counts = torch.zeros_like(logits[0]).scatter_add_(0, answer, ones)  # (V,); bincount waits for the device
    return logits - frequency * counts - presence * (counts > 0)


def bias(logits: Tensor, biases: Mapping[int, float]) -> Tensor:
    """Return (1, V) logits with the biases, by token id, added."""
    biased = logits.clone()
    ids = torch.tensor(list(biases), device=logits.device)
    biased[:, ids] += torch.tensor(list(biases.values()), dtype=logits.dtype, device=logits.device)
    return biased


def logprob(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Return the log probability of a token, and those of the `num_top` likeliest tokens, by (1, V) logits."""
    logprobs = logits[0].log_softmax(dim=-1)  # (V,)
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)

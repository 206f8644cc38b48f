"""Metrics: answer quality, divergence of distributions, and confidence intervals."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.float64]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Normalise like SQuAD: lower case, no punctuation, no articles, single spaces (Rajpurkar et al., 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalised text is one of the normalised answers, else 0."""
    return float(normalise(text) in {normalise(answer) for answer in answers})


def token_f1(text: str, answers: Sequence[str]) -> float:
    """Return the F1 of the bags of words, the best over the answers."""
    return max(_token_f1(normalise(text).split(), normalise(answer).split()) for answer in answers)


def _token_f1(ours: list[str], theirs: list[str]) -> float:
    return f_measure(sum((Counter(ours) & Counter(theirs)).values()), len(ours), len(theirs))


def f_measure(common: int, ours: int, theirs: int) -> float:
    """Return the F-measure of two texts, by the numbers of their common words and of their own."""
    if not ours or not theirs:
        return float(ours == theirs)  # two empty texts are equal
    return 2 * common / (ours + theirs)


def divergence(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats between two next-token distributions, given as logits."""
    p, q = (logits.double().flatten().log_softmax(0) for logits in (full, other))
    terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)
    return max(0.0, float(terms.sum()))


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % interval; all None where it is undefined."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Bootstrap:
    """Percentile intervals by bootstrap over contexts.

    Questions about one context are not independent, so a context is drawn with all of its samples. One object uses the
    same resamples for all intervals, so comparisons within it are paired.
    """

    def __init__(self, contexts: NDArray[np.int64], seed: int, resamples: int = 2000) -> None:
        """Draw the resamples.

        Args:
            contexts: (N,) number of each sample's context.
        """
        _, places = np.unique(contexts, return_inverse=True)
        self.num_contexts = size = int(places.max()) + 1
        drawn = np.random.default_rng(seed).integers(size, size=(resamples, size))
        self._times = np.stack([np.bincount(row, minlength=size)[places] for row in drawn])  # (resamples, N)
        self._totals = self._times.sum(axis=1)

    def mean(self, values: Values) -> Interval:
        """Return the interval of the mean of (N,) values."""
        return self.of(lambda means: means, values)

    def of(self, combine: Callable[..., Values], *columns: Values) -> Interval:
        """Return the interval of a function of the means of several (N,) columns, such as their ratio."""
        with np.errstate(divide="ignore", invalid="ignore"):
            value = combine(*(np.asarray(column.mean()) for column in columns))
            drawn = combine(*(self._times @ column / self._totals for column in columns))
        return _interval(value, drawn)

    def median_ratio(self, above: Values, below: Values) -> Interval:
        """Return the interval of the median of one column over the median of another."""
        value = np.asarray(np.median(above) / np.median(below))
        return _interval(value, self._medians(above) / self._medians(below))

    def _medians(self, values: Values) -> Values:
        order = np.argsort(values)
        last = self._times[:, order].cumsum(axis=1)  # where the copies of each sample end among the sorted draws
        low, high = ((last > middle[:, None]).argmax(axis=1) for middle in ((self._totals - 1) // 2, self._totals // 2))
        return (values[order[low]] + values[order[high]]) / 2


def _interval(value: Values, drawn: Values) -> Interval:
    if not np.isfinite(value):
        return Interval(None)
    drawn = drawn[np.isfinite(drawn)]
    low, high = np.percentile(drawn, (2.5, 97.5)) if len(drawn) else (value, value)
    return Interval(float(value), float(low), float(high))

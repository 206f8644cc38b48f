"""Metrics of answers beyond exact match, and confidence intervals over contexts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.quality.grid import Values, normalise

Interval = dict[str, float | None]
"""`value` with its 95 % interval, `low` to `high`; all None where it is undefined."""


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


def rouge_l(text: str, answers: Sequence[str]) -> float:
    """Return the F-measure of the longest common subsequence of words (Lin, 2004), the best over the answers."""
    return max(_rouge_l(_words(text), _words(answer)) for answer in answers)


def _rouge_l(ours: list[str], theirs: list[str]) -> float:
    row = [0] * (len(theirs) + 1)  # longest common subsequence with each prefix of theirs
    for word in ours:
        before = row
        row = [0]
        for column, other in enumerate(theirs):
            row.append(before[column] + 1 if word == other else max(before[column + 1], row[-1]))
    return f_measure(row[-1], len(ours), len(theirs))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


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
        if not np.isfinite(value):
            return dict.fromkeys(("value", "low", "high"))
        low, high = np.percentile(drawn[np.isfinite(drawn)], (2.5, 97.5))
        return {"value": float(value), "low": float(low), "high": float(high)}

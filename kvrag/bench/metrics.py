"""Exact match, and confidence intervals over contexts."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Interval = dict[str, float | None]
"""`value` with its 95 % interval, `low` to `high`; all None where it is undefined."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Normalise like SQuAD: lower case, no punctuation, no articles, single spaces (Rajpurkar et al., 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the normalised text is one of the normalised answers, else 0."""
    return float(normalise(text) in {normalise(answer) for answer in answers})


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

"""Popularity of chunks, and the contents of least-recently-used caches, for corpora too large to list."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_HEAD = 4096  # ranks that are summed one by one; the relative error of the integral after them is about 1 / _HEAD²
_BINS = 2000  # of equal ratio, for the ranks after the head


class Zipf:
    """Zipf's law: the chunk of rank r (1 = the most popular) is asked for in proportion to r ** -exponent.

    The first ranks are exact. After them a rank stands for the integral from r - 1/2 to r + 1/2, so that sums and
    samples take the same time for a thousand chunks and a hundred million.
    """

    def __init__(self, count: int, exponent: float, head: int = _HEAD) -> None:
        self.count, self.exponent = count, exponent
        head = min(head, count)
        weights = np.arange(1, head + 1, dtype=np.float64) ** -exponent
        self._begin = head + 0.5  # of the integral
        self._total = float(weights.sum() + self._integral(np.float64(count + 0.5)))
        self._cumulative = weights.cumsum() / self._total

    def share(self, ranks: Ints | Floats) -> Floats:
        """Return the share of all requests that goes to each of these ranks."""
        return np.asarray(ranks, dtype=np.float64) ** -self.exponent / self._total

    def sample(self, rng: np.random.Generator, size: tuple[int, ...]) -> Ints:
        """Draw ranks by the inverse of the cumulative distribution."""
        at = rng.random(size)
        head = np.searchsorted(self._cumulative, at, side="right") + 1
        area = np.maximum(at - self._cumulative[-1], 0.0) * self._total
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            rest = self._begin * np.exp(area)
        else:
            rest = np.maximum(self._begin**power + power * area, np.finfo(float).tiny) ** (1 / power)
        ranks = np.where(head <= len(self._cumulative), head, np.floor(rest + 0.5).clip(max=self.count))
        return ranks.astype(np.int64)

    def groups(self, last: int) -> tuple[Floats, Floats]:
        """Return (share of each chunk, number of chunks) for groups of about equally popular chunks, up to a rank."""
        head = min(len(self._cumulative), last)
        shares, numbers = self.share(np.arange(1, head + 1)), np.ones(head)
        if head == last:
            return shares, numbers
        edges = np.geomspace(self._begin, last + 0.5, _BINS + 1)
        sizes = np.diff(edges)
        area = np.diff(self._integral(edges))
        return np.append(shares, area / sizes / self._total), np.append(numbers, sizes)

    def _integral(self, to: Floats | np.float64) -> Floats:
        """Return the weight from the end of the head."""
        power = 1 - self.exponent
        if abs(power) < 1e-9:
            return np.log(to / self._begin)
        return (to**power - self._begin**power) / power


def lru_age(popularity: Zipf, last: int, capacity: float, home: float = 1.0, caches: int = 1) -> float:
    """Return the age at which a least-recently-used cache drops a chunk, in requests to all caches.

    This is Che's approximation (Che, Tung and Wang, 2002): a cache of C chunks holds those that were asked for within
    the last T requests, with T such that C chunks are expected. It is exact for many chunks and independent requests.

    Args:
        last: Rank of the last chunk that is ever cached.
        capacity: Chunks in each cache.
        home: Share of a chunk's requests that go to one of the caches, the chunk's home; the others get equal shares
            of the rest. 1 / caches = requests go anywhere.
    """
    if capacity < 1:
        return 0.0
    if capacity >= last:
        return math.inf
    shares, numbers = popularity.groups(last)
    classes = [(1 / caches, home), (1 - 1 / caches, (1 - home) / max(caches - 1, 1))]

    def held(age: float) -> float:
        return sum(float(-(share * numbers * np.expm1(-shares * part * age)).sum()) for share, part in classes)

    low, high = 0.0, float(capacity)
    while held(high) < capacity:
        low, high = high, 2 * high
        if high > 1e300:  # chunks that are never sent to this cache do not fill it
            return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if held(middle) < capacity else (low, middle)
    return high

"""Texts and the postings that lead to them: the immutable unit of the catalog, in memory or memory-mapped.

Every text is indexed by a few of its 8-grams, chosen by winnowing (Schleimer et al., SIGMOD 2003): in every window
of 8 consecutive 8-gram hashes the smallest is kept, so that a text and a prompt that share 15 tokens share an anchor.
Hashes are salted with the text's namespace: namespaces share no postings.

A posting is one 64-bit number, `hash << 32 | address`, where the address counts tokens from the segment's beginning.
Postings are sorted; a directory over the hash's top bits leads to them in one step. A file holds the arrays one after
another and a footer that says where each begins. Ids are compared after every lookup, so damaged postings can hide a
text but never produce a wrong run.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag.errors import StoreError
from kvrag.store.protocol import Entry

GRAM = 8
WINDOW = 8
PAD = 32  # tokens before the first and behind the last text, so that a window around any address lies inside
MAX_TOKENS = 1 << 31  # addresses have 32 bits
_REPEATS = 4  # postings of one hash in one text: a rule of dashes has the same gram everywhere
_PER_BUCKET = 2  # postings that share an entry of the directory, on average
_BATCH = 1 << 16  # tokens hashed at once: temporaries stay in the CPU's cache
_PORTION = 1 << 22  # postings or tokens merged at once
_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = [pow(_MULTIPLIER, GRAM - 1 - i, 1 << 64) for i in range(GRAM)]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MAGIC = b"kvrag segment 1\n"
_TAIL = 16 + len(_MAGIC)  # the footer's length and digest

Ids = NDArray[np.uint32]
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]


class DamagedSegmentError(StoreError):
    """The file is not what was written."""


def gram_hashes(ids: Ids) -> Hashes:
    """(T,) ids -> (T-7,) hashes of all 8-grams."""
    count = len(ids) - GRAM + 1
    if count < 1:
        return np.empty(0, np.uint64)
    tokens = ids.astype(np.uint64)
    tokens += np.uint64(1)
    hashes = np.zeros(count, np.uint64)
    for i, power in enumerate(_POWERS):
        hashes += tokens[i : i + count] * np.uint64(power)
    hashes ^= hashes >> np.uint64(29)  # polynomial hashes of similar grams are similar: mix before taking minima
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> _SHIFT
    return hashes


@lru_cache(4096)
def salt(namespace: str) -> int:
    """64 bits that set the hashes of a namespace apart."""
    return int.from_bytes(hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def salted(hashes: Hashes, salts: Hashes | np.uint64) -> Hashes:
    """32-bit hashes, in 64-bit numbers."""
    mixed = hashes ^ salts
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= _SHIFT
    return mixed


def window_minima(hashes: Hashes, window: int = WINDOW) -> NDArray[np.int64]:
    """Position of the first smallest 32-bit hash of every window; ascending, with repetitions."""
    least = hashes << _SHIFT
    least |= np.arange(len(hashes), dtype=np.uint64)
    size = 1
    while size < window:
        step = min(size, window - size)
        least = np.minimum(least[:-step], least[step:])
        size += step
    return (least & _LOW).astype(np.int64)


def _postings(ids: Ids, starts: Numbers, salts: Hashes, window: int) -> Hashes:
    """Unsorted postings of texts that lie one after another in `ids`, addresses from its beginning."""
    lengths = np.diff(starts)
    left = np.repeat(starts[1:], lengths) - np.arange(starts[0], starts[-1])  # tokens from here to the text's end
    hashes = salted(gram_hashes(ids), np.repeat(salts, lengths)[: max(len(ids) - GRAM + 1, 0)])
    chosen = np.zeros(len(hashes), bool)
    if len(hashes) >= window:
        minima = window_minima(hashes, window)
        chosen[minima[left[: len(minima)] >= GRAM + window - 1]] = True
    ends = (starts - starts[0])[:-1], (starts - starts[0])[1:] - GRAM  # so that short texts have anchors too
    for end in ends:
        chosen[end[lengths >= GRAM]] = True
    at = np.flatnonzero(chosen)
    return hashes[at] << _SHIFT | at.astype(np.uint64)


@dataclass(frozen=True)
class Segment:
    """Texts, their postings, and which of them are alive. Immutable; arrays may be views of a mapped file.

    Attributes:
        ids: (N,) uint32, all texts one after another, padded at both ends.
        postings: (M,) uint64, `hash << 32 | address`, ascending.
        directory: (2**b + 1,) uint32, where the postings of each value of the hash's top bits begin.
        starts: (R + 1,) int64, addresses where texts begin; the last is where the last one ends.
        numbers: (R,) int64, the store's numbers, ascending.
        keys: (R,) text keys, ASCII.
        spaces: (R,) uint32, rows of `namespaces`.
        alive: (R,) bool.
        last: All texts up to this number are in this segment or an earlier one, or were gone when it was made.
        name: File name, "" in memory.
    """

    ids: Ids
    postings: Hashes
    directory: NDArray[np.uint32]
    starts: Numbers
    numbers: Numbers
    keys: NDArray[np.bytes_]
    spaces: NDArray[np.uint32]
    namespaces: tuple[str, ...]
    alive: NDArray[np.bool_]
    last: int = 0
    name: str = ""

    @classmethod
    def of(cls, entries: Sequence[Entry], window: int = WINDOW) -> Segment:
        """Index texts, given in ascending order of their numbers."""
        lengths = np.array([len(entry.ids) for entry in entries], np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)]) + PAD
        if starts[-1] >= MAX_TOKENS:
            raise ValueError(f"{starts[-1]:,} tokens are too many for one segment")
        pad = np.zeros(PAD, np.uint32)
        ids = np.concatenate([pad, *(np.asarray(entry.ids, np.uint32) for entry in entries), pad])
        namespaces = sorted({entry.namespace for entry in entries})
        number = {namespace: i for i, namespace in enumerate(namespaces)}
        spaces = np.array([number[entry.namespace] for entry in entries], np.uint32)
        salts = np.array([salt(namespace) for namespace in namespaces], np.uint64)[spaces]
        parts, row = [np.empty(0, np.uint64)], 0
        while row < len(entries):
            stop = max(int(np.searchsorted(starts, starts[row] + _BATCH)), row + 1)
            stop = min(stop, len(entries))
            begin = starts[row]
            part = _postings(ids[begin : starts[stop]], starts[row : stop + 1], salts[row:stop], window)
            parts.append(part + np.uint64(begin))
            row = stop
        postings = np.concatenate(parts)
        postings.sort()
        postings = _thinned(postings, starts)
        return cls(
            ids=ids,
            postings=postings,
            directory=_directory([postings], len(postings)),
            starts=starts,
            numbers=np.array([entry.number for entry in entries], np.int64),
            keys=np.array([entry.text.encode() for entry in entries] or [b""], np.bytes_)[: len(entries)],
            spaces=spaces,
            namespaces=tuple(namespaces),
            alive=np.ones(len(entries), bool),
            last=entries[-1].number if entries else 0,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def raw(self) -> memoryview:
        """The ids' bytes, four a token."""
        return memoryview(self.ids).cast("B")

    @cached_property
    def num_alive(self) -> int:
        """How many texts are alive."""
        return int(self.alive.sum())

    def find(self, hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First posting and number of postings of every hash."""
        shift = np.uint64(32 - (len(self.directory) - 1).bit_length() + 1)
        bucket = (hashes >> shift).astype(np.int64)
        low = self.directory.take(bucket).astype(np.int64)
        high = self.directory.take(bucket + 1).astype(np.int64)
        np.minimum(high, len(self.postings), out=high)  # a damaged directory leads nowhere
        first = _bound(self.postings, hashes << _SHIFT, low, high)
        return first, _bound(self.postings, (hashes << _SHIFT) | _LOW, first, high, right=True) - first

    def row(self, key: str) -> int | None:
        """Where a text is, None if it is not here or not alive."""
        rows = np.flatnonzero(self.keys == key.encode())
        rows = rows[self.alive[rows]]
        return int(rows[-1]) if len(rows) else None

    def text(self, row: int) -> Ids:
        """A text's ids."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def key(self, row: int) -> str:
        """A text's key."""
        return bytes(self.keys[row]).decode()

    def without(self, numbers: Numbers) -> Segment:
        """Return the same segment without some texts."""
        if len(self) == 0 or len(numbers) == 0:
            return self
        rows = np.searchsorted(self.numbers, numbers).clip(max=len(self) - 1)
        rows = rows[self.numbers[rows] == numbers]
        return self.keeping(rows, False) if self.alive[rows].any() else self

    def keeping(self, rows: NDArray[Any], alive: bool) -> Segment:
        """Return the same segment with some rows set alive or dead."""
        changed = self.alive.copy()
        changed[rows] = alive
        return replace(self, alive=changed)

    def entries(self) -> Iterator[Entry]:
        """The texts that are alive."""
        for row in np.flatnonzero(self.alive).tolist():
            yield Entry(int(self.numbers[row]), self.key(row), self.namespaces[self.spaces[row]], self.text(row))


def _bound(postings: Hashes, wanted: Hashes, low: Numbers, high: Numbers, right: bool = False) -> Numbers:
    """Binary search, each in its own bounds: `np.searchsorted` would touch 30 places of a large file per hash."""
    low, high = low.copy(), high.copy()
    active = np.flatnonzero(low < high)
    compare: Callable[..., NDArray[np.bool_]] = np.less_equal if right else np.less
    while len(active):
        a, b = low[active], high[active]
        middle = (a + b) >> 1
        before = compare(postings.take(middle), wanted[active])
        a, b = np.where(before, middle + 1, a), np.where(before, b, middle)
        low[active], high[active] = a, b
        active = active[a < b]
    return low


def _thinned(postings: Hashes, starts: Numbers) -> Hashes:
    """Keep the first few postings of a hash in one text."""
    hashes = postings >> _SHIFT
    again = np.flatnonzero(hashes[_REPEATS:] == hashes[:-_REPEATS]) + _REPEATS
    if len(again) == 0:
        return postings
    rows, earlier = (
        np.searchsorted(starts, (postings[at] & _LOW).astype(np.int64), "right") for at in (again, again - _REPEATS)
    )
    return np.delete(postings, again[rows == earlier])


def _directory(portions: Iterable[Hashes], count: int) -> NDArray[np.uint32]:
    """Where the postings of each value of the hash's top bits begin."""
    bits = min(max(count // _PER_BUCKET, 1).bit_length(), 28)
    directory = np.zeros((1 << bits) + 1, np.uint32)
    for postings in portions:
        buckets, counts = np.unique(postings >> np.uint64(64 - bits), return_counts=True)
        directory[buckets.astype(np.int64) + 1] += counts.astype(np.uint32)
    return np.cumsum(directory, dtype=np.uint32)

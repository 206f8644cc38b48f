"""Segments: texts and their postings, the immutable unit of the catalog.

Every text is indexed by some of its 8-grams, chosen by winnowing (Schleimer et al., SIGMOD 2003): the smallest hash of
every window of 8 consecutive 8-gram hashes is kept, so a text and a prompt that share 15 tokens share an anchor. Hashes
are salted with the text's namespace, so namespaces share no postings.

A posting is one 64-bit number, `hash << 32 | address`; the address counts tokens from the start of the segment.
Postings are sorted, for binary search. Ids are compared after every lookup.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvrag.store.values import Entry

GRAM = 8
WINDOW = 8
PAD = 32  # tokens before the first and after the last text, so that a window around any address lies inside
MAX_TOKENS = 1 << 31  # addresses have 32 bits
_REPEATS = 4  # postings of one hash in one text: a rule of dashes has the same gram everywhere
_BATCH = 1 << 16  # tokens hashed at once: temporaries stay in the CPU's cache
_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = [pow(_MULTIPLIER, GRAM - 1 - i, 1 << 64) for i in range(GRAM)]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

Ids = NDArray[np.uint32]
Tokens = Sequence[int] | NDArray[np.integer[Any]]
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]


def gram_hashes(ids: Ids) -> Hashes:
    """Return the (T-7,) hashes of all 8-grams of (T,) ids."""
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
    """Return the 64-bit salt of a namespace's hashes."""
    return int.from_bytes(hashlib.blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def salted(hashes: Hashes, salts: Hashes | np.uint64) -> Hashes:
    """Return salted 32-bit hashes, in 64-bit numbers."""
    mixed = hashes ^ salts
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed >>= _SHIFT
    return mixed


def window_minima(hashes: Hashes) -> NDArray[np.int64]:
    """Return the position of the first smallest 32-bit hash of every window; ascending, with repetitions."""
    minima = hashes << _SHIFT
    minima |= np.arange(len(hashes), dtype=np.uint64)
    for step in (1, 2, 4):  # windows of 2, 4 and 8
        minima = np.minimum(minima[:-step], minima[step:])
    return (minima & _LOW).astype(np.int64)


def _postings(ids: Ids, starts: Numbers, salts: Hashes) -> Hashes:
    """Return unsorted postings of consecutive texts. `starts` are their addresses in `ids`, and the last one's end."""
    ids = ids[starts[0] : starts[-1]]
    lengths = np.diff(starts)
    left = np.repeat(starts[1:], lengths) - np.arange(starts[0], starts[-1])  # tokens from here to the text's end
    hashes = salted(gram_hashes(ids), np.repeat(salts, lengths)[: max(len(ids) - GRAM + 1, 0)])
    chosen = np.zeros(len(hashes), bool)
    if len(hashes) >= WINDOW:
        minima = window_minima(hashes)
        chosen[minima[left[: len(minima)] >= GRAM + WINDOW - 1]] = True
    ends = (starts - starts[0])[:-1], (starts - starts[0])[1:] - GRAM  # so that short texts have anchors too
    for end in ends:
        chosen[end[lengths >= GRAM]] = True
    at = np.flatnonzero(chosen)
    return hashes[at] << _SHIFT | (at + starts[0]).astype(np.uint64)


@dataclass(frozen=True)
class Segment:
    """Texts, their postings, and their liveness. Immutable."""

    ids: Ids  # (N,) all texts in sequence, padded at both ends
    postings: Hashes  # (M,) `hash << 32 | address`, ascending
    starts: Numbers  # (R + 1,) addresses of the starts of the texts, and of the end of the last one
    numbers: Numbers  # (R,) the store's numbers, ascending
    keys: NDArray[np.bytes_]  # (R,) text keys
    spaces: NDArray[np.uint32]  # (R,) rows of `namespaces`
    namespaces: tuple[str, ...]
    alive: NDArray[np.bool_]  # (R,)

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Segment:
        """Index texts, in ascending order of their numbers."""
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
            stop = min(max(int(np.searchsorted(starts, starts[row] + _BATCH)), row + 1), len(entries))
            parts.append(_postings(ids, starts[row : stop + 1], salts[row:stop]))
            row = stop
        return cls(
            ids=ids,
            postings=_thinned(np.sort(np.concatenate(parts)), starts),
            starts=starts,
            numbers=np.array([entry.number for entry in entries], np.int64),
            keys=np.array([entry.text_key.encode() for entry in entries] or [b""], np.bytes_)[: len(entries)],
            spaces=spaces,
            namespaces=tuple(namespaces),
            alive=np.ones(len(entries), bool),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def find(self, hashes: Hashes) -> tuple[Numbers, Numbers]:
        """Return the first posting and the number of postings of every hash; fastest if the hashes are ascending."""
        lowest = hashes << _SHIFT
        firsts = np.searchsorted(self.postings, lowest)
        return firsts, np.searchsorted(self.postings, lowest | _LOW, "right") - firsts

    def text(self, row: int) -> Ids:
        """Return the ids of a text."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def text_key(self, row: int) -> str:
        """Return the key of a text."""
        return bytes(self.keys[row]).decode()

    def entries(self, chosen: NDArray[np.bool_]) -> Iterator[Entry]:
        """Yield the chosen ones of its (R,) texts."""
        for row in np.flatnonzero(chosen).tolist():
            namespace = self.namespaces[self.spaces[row]]
            yield Entry(int(self.numbers[row]), self.text_key(row), namespace, self.text(row))


def _thinned(postings: Hashes, starts: Numbers) -> Hashes:
    """Keep the first few postings of a hash in one text."""
    hashes = postings >> _SHIFT
    repeated = np.flatnonzero(hashes[_REPEATS:] == hashes[:-_REPEATS]) + _REPEATS
    if len(repeated) == 0:
        return postings
    addresses = postings[np.stack([repeated, repeated - _REPEATS])] & _LOW
    rows, earlier_rows = np.searchsorted(starts, addresses.astype(np.int64), "right")
    return np.delete(postings, repeated[rows == earlier_rows])


def join(segments: Sequence[Segment]) -> Segment:
    """Return one segment of all live texts."""
    return Segment.of([entry for segment in segments for entry in segment.entries(segment.alive)])

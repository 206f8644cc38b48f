"""Segments: texts and their postings, the immutable unit of the catalog, in memory or memory-mapped.

Every text is indexed by some of its 8-grams, chosen by winnowing (Schleimer et al., SIGMOD 2003): the smallest hash of
every window of 8 consecutive 8-gram hashes is kept, so a text and a prompt that share 15 tokens share an anchor. Hashes
are salted with the text's namespace, so namespaces share no postings.

A posting is one 64-bit number, `hash << 32 | address`; the address counts tokens from the start of the segment.
Postings are sorted, and a directory over the hash's top bits finds them in one step. A file holds the arrays in
sequence and a footer with their offsets. Ids are compared after every lookup, so damaged postings can hide a text but
never produce a wrong run.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvrag.errors import StoreError
from kvrag.store.durable import temporary
from kvrag.store.values import Entry

GRAM = 8
WINDOW = 8
PAD = 32  # tokens before the first and after the last text, so that a window around any address lies inside
MAX_TOKENS = 1 << 31  # addresses have 32 bits
_REPEATS = 4  # postings of one hash in one text: a rule of dashes has the same gram everywhere
_PER_BUCKET = 8  # postings that share an entry of the directory, on average, at most
_NEAR = 2 * _PER_BUCKET  # postings compared from a bucket's start; few buckets are larger
_BATCH = 1 << 16  # tokens hashed at once: temporaries stay in the CPU's cache
_PORTION = 1 << 22  # postings or tokens merged at once
_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = [pow(_MULTIPLIER, GRAM - 1 - i, 1 << 64) for i in range(GRAM)]
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MAGIC = b"kvrag segment 3\n"
_TAIL = 16 + len(_MAGIC)  # the footer's length and digest

Ids = NDArray[np.uint32]
Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]


class DamagedSegmentError(StoreError):
    """A segment's file is missing or differs from what was written."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"the catalog's file cannot be used ({reason})")


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


def spread(hashes: Hashes) -> Hashes:
    """Map 32-bit hashes one to one: winnowing chose small ones, and the directory needs them evenly distributed."""
    return (hashes * np.uint64(0x9E3779B1)) & _LOW


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
    return spread(hashes[at]) << _SHIFT | (at + starts[0]).astype(np.uint64)


@dataclass(frozen=True)
class Segment:
    """Texts, their postings, and their liveness. Immutable; arrays may be views of a mapped file.

    All texts up to number `last` are in this segment or an earlier one, or were removed before its creation.
    """

    ids: Ids  # (N,) all texts in sequence, padded at both ends
    postings: Hashes  # (M,) `hash << 32 | address`, ascending
    directory: NDArray[np.uint32]  # (2**b + 1,) start of the postings of each value of the hash's top bits
    starts: Numbers  # (R + 1,) addresses of the starts of the texts, and of the end of the last one
    numbers: Numbers  # (R,) the store's numbers, ascending
    keys: NDArray[np.bytes_]  # (R,) text keys
    spaces: NDArray[np.uint32]  # (R,) rows of `namespaces`
    namespaces: tuple[str, ...]
    alive: NDArray[np.bool_]  # (R,)
    last: int = 0
    position: int = 0  # of the store's log of removals, when it was written
    is_mapped: bool = False  # from a file
    digests: Mapping[str, str] = field(default_factory=dict)  # of the arrays in the file

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
        postings = _thinned(np.sort(np.concatenate(parts)), starts)
        counts = _zero_counts(len(postings))
        _count(counts, postings)
        return cls(
            ids=ids,
            postings=postings,
            directory=np.cumsum(counts, dtype=np.uint32),
            starts=starts,
            numbers=np.array([entry.number for entry in entries], np.int64),
            keys=np.array([entry.text_key.encode() for entry in entries] or [b""], np.bytes_)[: len(entries)],
            spaces=spaces,
            namespaces=tuple(namespaces),
            alive=np.ones(len(entries), bool),
            last=entries[-1].number if entries else 0,
        )

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def raw(self) -> memoryview:
        """Bytes of the ids, four per token."""
        return self.ids.data.cast("B")

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts, live or not."""
        return int(self.starts[-1]) - PAD

    @cached_property
    def num_alive(self) -> int:
        """Number of live texts."""
        return int(self.alive.sum())

    def find(self, hashes: Hashes) -> tuple[Numbers, Numbers]:
        """Return the first posting and the number of postings of every hash."""
        if len(self.postings) == 0:
            return np.zeros(len(hashes), np.int64), np.zeros(len(hashes), np.int64)
        shift = np.uint64(32 - (len(self.directory) - 1).bit_length() + 1)
        bucket = (hashes >> shift).astype(np.int64)
        low = self.directory.take(bucket).astype(np.int64)
        high = self.directory.take(bucket + 1).astype(np.int64)
        near = low + np.arange(_NEAR)[:, None]
        same = self.postings.take(near, mode="clip") >> _SHIFT == hashes  # (_NEAR, A)
        same &= near < np.minimum(high, len(self.postings))  # a damaged directory yields no postings
        first, count = low.copy(), np.count_nonzero(same, axis=0)
        found = np.flatnonzero(count)
        first[found] += same[:, found].argmax(axis=0)
        large = np.flatnonzero(high - low > _NEAR)
        if len(large):
            smallest = hashes[large] << _SHIFT
            first[large] = np.searchsorted(self.postings, smallest)
            count[large] = np.searchsorted(self.postings, smallest | _LOW, "right") - first[large]
        return first, count.clip(0)

    def row(self, text_key: str) -> int | None:
        """Return the row of a text; None if it is missing or not live."""
        rows = np.flatnonzero(self.keys == text_key.encode())
        rows = rows[self.alive[rows]]
        return int(rows[-1]) if len(rows) else None

    def text(self, row: int) -> Ids:
        """Return the ids of a text."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def text_key(self, row: int) -> str:
        """Return the key of a text."""
        return bytes(self.keys[row]).decode()

    def _rows(self, numbers: Numbers) -> Numbers:
        """Return the rows of the texts with these numbers that it has."""
        if len(self) == 0:
            return np.empty(0, np.int64)
        rows = np.searchsorted(self.numbers, numbers).clip(max=len(self) - 1)
        return rows[self.numbers[rows] == numbers]

    def entries(self, numbers: Numbers) -> Iterator[Entry]:
        """Yield those of its live texts that have one of these numbers."""
        for row in self._rows(numbers):
            if self.alive[row]:
                namespace = self.namespaces[self.spaces[row]]
                yield Entry(int(self.numbers[row]), self.text_key(row), namespace, self.text(row))

    def without(self, numbers: Numbers) -> Segment:
        """Return the same segment without some texts."""
        rows = self._rows(numbers)
        alive = self.alive.copy()
        alive[rows] = False
        return replace(self, alive=alive) if self.alive[rows].any() else self

    def check(self, names: Iterable[str] = ()) -> None:
        """Raise DamagedSegmentError if the digest of an array (default: of any) has changed."""
        for name in names or self.digests:
            if xxhash.xxh3_64_hexdigest(getattr(self, name).view(np.uint8).data) != self.digests[name]:
                raise DamagedSegmentError(f"{name} are damaged")


def _thinned(postings: Hashes, starts: Numbers) -> Hashes:
    """Keep the first few postings of a hash in one text."""
    hashes = postings >> _SHIFT
    repeated = np.flatnonzero(hashes[_REPEATS:] == hashes[:-_REPEATS]) + _REPEATS
    if len(repeated) == 0:
        return postings
    addresses = postings[np.stack([repeated, repeated - _REPEATS])] & _LOW
    rows, earlier_rows = np.searchsorted(starts, addresses.astype(np.int64), "right")
    return np.delete(postings, repeated[rows == earlier_rows])


def _zero_counts(num_postings: int) -> NDArray[np.uint32]:
    """Return a zero per value of the hashes' top bits, and one before. More postings take more bits."""
    bits = min(max(num_postings // _PER_BUCKET, 1).bit_length(), 28)
    return np.zeros((1 << bits) + 1, np.uint32)


def _count(counts: NDArray[np.uint32], postings: Hashes) -> None:
    """Add sorted postings to the counts of the values of their hashes' top bits."""
    if len(postings):
        bits = (len(counts) - 1).bit_length() - 1
        values = (postings >> np.uint64(64 - bits)).astype(np.int64)
        sizes = np.bincount(values - values[0])
        counts[values[0] + 1 :][: len(sizes)] += sizes.astype(np.uint32)


def _merge(segments: Sequence[Segment]) -> tuple[dict[str, Any], dict[str, Iterable[NDArray[Any]]]]:
    """Return `last` and `namespaces` of one segment with the live texts of several, and the portions of its arrays.

    The arrays are to be read in their order.
    """
    rows = [np.flatnonzero(segment.alive) for segment in segments]
    pairs = list(zip(segments, rows, strict=True))
    starts = np.concatenate([[0], *(np.diff(segment.starts)[alive] for segment, alive in pairs)]).cumsum() + PAD
    namespaces = sorted({name for segment in segments for name in segment.namespaces})
    number = {name: i for i, name in enumerate(namespaces)}
    spaces = [np.array([number[name] for name in segment.namespaces], np.uint32) for segment in segments]
    counts = _zero_counts(sum(len(segment.postings) for segment in segments))
    arrays: dict[str, Iterable[NDArray[Any]]] = {
        "ids": _live_ids(segments),
        "postings": _live_postings(segments, rows, starts, counts),
        "directory": (np.cumsum(counts, dtype=np.uint32) for _ in range(1)),  # known after the postings
        "starts": [starts],
        "numbers": [np.concatenate([segment.numbers[alive] for segment, alive in pairs])],
        "keys": [np.concatenate([segment.keys[alive] for segment, alive in pairs])],
        "spaces": [np.concatenate([of[s.spaces[alive]] for of, (s, alive) in zip(spaces, pairs, strict=True)])],
    }
    return {"last": max(segment.last for segment in segments), "namespaces": namespaces}, arrays


def _live_ids(segments: Sequence[Segment]) -> Iterator[Ids]:
    """Yield the tokens of all live texts, padded."""
    pad = np.zeros(PAD, np.uint32)
    yield pad
    for segment in segments:
        borders = np.flatnonzero(np.diff(segment.alive.astype(np.int8), prepend=0, append=0))
        for first, last in borders.reshape(-1, 2).tolist():  # stretches of texts that are alive
            for begin in range(segment.starts[first], segment.starts[last], _PORTION):
                yield segment.ids[begin : min(begin + _PORTION, segment.starts[last])]
    yield pad


def _live_postings(
    segments: Sequence[Segment], rows: Sequence[Numbers], starts: Numbers, counts: NDArray[np.uint32]
) -> Iterator[Hashes]:
    """Yield the postings of the live texts, which are in these rows, in ascending order, and count them.

    `starts` are the new addresses of the texts.
    """
    shifts, begin = list[Hashes](), 0  # added to the addresses of each row
    for segment, alive in zip(segments, rows, strict=True):
        moved = np.zeros(len(segment) + 1, np.int64)
        moved[alive] = starts[begin : begin + len(alive)] - segment.starts[alive]
        shifts.append(moved.astype(np.uint64))
        begin += len(alive)
    total = sum(len(segment.postings) for segment in segments)
    borders = np.linspace(0, 1 << 32, total // _PORTION + 2).astype(np.uint64)[1:-1] << _SHIFT
    cuts = [[0, *np.searchsorted(s.postings, borders).tolist(), len(s.postings)] for s in segments]
    for number in range(len(borders) + 1):
        parts = []
        for segment, shift, cut in zip(segments, shifts, cuts, strict=True):
            portion = segment.postings[cut[number] : cut[number + 1]]
            if segment.num_alive == len(segment):
                parts.append(portion + shift[0])
                continue
            row = np.searchsorted(segment.starts, (portion & _LOW).astype(np.int64), "right") - 1
            parts.append((portion + shift[row])[segment.alive.take(row, mode="clip")])
        merged = np.concatenate(parts)
        merged.sort()
        _count(counts, merged)
        yield merged


def join(segments: Sequence[Segment]) -> Segment:
    """Return one segment, in memory, of all live texts."""
    facts, portions = _merge(segments)
    return _assembled(facts, {name: np.concatenate([*parts]) for name, parts in portions.items()})


def write(segments: Sequence[Segment], path: Path, position: int = 0, check: Callable[[], None] = lambda: None) -> None:
    """Write all live texts as one file; raises DamagedSegmentError.

    Args:
        position: Of the store's log of removals, which the segments follow up to there.
        check: Called before every portion; an error that it raises ends the writing.
    """
    for segment in segments:
        segment.check()
    facts, portions = _merge(segments)
    footer: dict[str, Any] = {**facts, "position": position, "window": WINDOW, "arrays": {}}
    with temporary(path.parent) as (descriptor, tmp):
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            for name, parts in portions.items():
                footer["arrays"][name] = _write_array(file, parts, check)
            text = json.dumps(footer).encode()
            file.write(text + len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text) + _MAGIC)
        os.fsync(descriptor)
        os.replace(tmp, path)


def _write_array(file: IO[bytes], portions: Iterable[NDArray[Any]], check: Callable[[], None]) -> dict[str, Any]:
    file.write(bytes(-file.tell() % 64))
    begin, digest, dtype = file.tell(), xxhash.xxh3_64(), ""
    for portion in portions:
        check()
        dtype = portion.dtype.str
        raw = np.ascontiguousarray(portion).view(np.uint8).data
        file.write(raw)
        digest.update(raw)
    return {"dtype": dtype, "begin": begin, "bytes": file.tell() - begin, "digest": digest.hexdigest()}


def read(path: Path) -> Segment:
    """Map a segment's file; raises DamagedSegmentError. The long arrays are checked when it is merged."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        end = len(mapped) - _TAIL
        length, digest = int.from_bytes(mapped[end : end + 8], "little"), mapped[end + 8 : end + 16]
        text = mapped[end - length : end]
        if mapped[end + 16 :] != _MAGIC or xxhash.xxh3_64_digest(text) != digest:
            raise ValueError("its footer is damaged")
        footer = json.loads(text)
        if footer["window"] != WINDOW:
            raise ValueError(f"indexed with windows of {footer['window']}")
        arrays = {
            name: np.frombuffer(mapped, d["dtype"], d["bytes"] // np.dtype(d["dtype"]).itemsize, d["begin"])
            for name, d in footer["arrays"].items()
        }
        digests = {name: d["digest"] for name, d in footer["arrays"].items()}
        segment = _assembled(footer, arrays, position=footer["position"], is_mapped=True, digests=digests)
        segment.check(("starts", "numbers", "keys", "spaces"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedSegmentError(error) from error
    return segment


def _assembled(facts: Mapping[str, Any], arrays: Mapping[str, Any], **file: Any) -> Segment:
    """Return a segment of these arrays, with all texts alive. `facts` has `last` and `namespaces`."""
    alive = np.ones(len(arrays["numbers"]), bool)
    return Segment(**arrays, namespaces=tuple(facts["namespaces"]), alive=alive, last=facts["last"], **file)

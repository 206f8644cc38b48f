"""Find stretches of a prompt that are identical, token for token, to stretches of ingested chunks.

Every chunk is indexed by a few of its 8-grams, chosen by winnowing (Schleimer et al., SIGMOD 2003): in every window
of 8 consecutive 8-gram hashes the smallest is kept, so that two texts which share 15 tokens share an anchor. The
prompt's 8-grams are looked up, each hit is extended by comparing ids, and a greedy cover picks the longest runs.
Where a run ends though its chunk goes on, the chunk is followed over a small gap: chains escape quotes and line breaks
(HTML, JSON, repr) or reflow white space, and what stands between two such places is still the chunk's own text.
Matching tokens instead of text keeps the prompt's ids exactly those of the plain model, whatever the chain pasted
around the chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvrag.types import Run

GRAM = 8
_WINDOW = 8
_MAX_POSTINGS = 32  # per hash and segment: boilerplate that stands in every chunk tells little about where it is from
_GAP = 12  # tokens of a gap on either side: an escaped character and what it merges with
_AGAIN = 4  # as many equal tokens behind a gap are no chance
_MULTIPLIER = 0x9E3779B97F4A7C15
_POWERS = np.array([pow(_MULTIPLIER, GRAM - 1 - i, 1 << 64) for i in range(GRAM)], dtype=np.uint64)
_ANCHOR = np.dtype([("hash", "<u8"), ("offset", "<u4")])

Ids = NDArray[np.uint32]
Hashes = NDArray[np.uint64]


def gram_hashes(ids: Ids) -> Hashes:
    """(T,) ids -> (T-7,) hashes of all 8-grams."""
    if len(ids) < GRAM:
        return np.empty(0, np.uint64)
    grams = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + np.uint64(1), GRAM)
    hashes = (grams * _POWERS).sum(axis=1, dtype=np.uint64)
    hashes ^= hashes >> np.uint64(29)  # polynomial hashes of similar grams are similar: mix before taking minima
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    return hashes ^ (hashes >> np.uint64(32))


def anchors(ids: Sequence[int]) -> bytes:
    """The chunk's chosen 8-grams as packed (hash, offset) pairs: what the store keeps beside the chunk."""
    hashes = gram_hashes(np.asarray(ids, np.uint32))
    if len(hashes) == 0:
        return b""
    if len(hashes) <= _WINDOW:
        chosen = np.array([int(hashes.argmin())])
    else:
        windows = np.lib.stride_tricks.sliding_window_view(hashes, _WINDOW)
        chosen = np.arange(len(windows)) + windows.argmin(axis=1)
    offsets = np.unique(np.concatenate([chosen, [0, len(hashes) - 1]]))
    packed = np.empty(len(offsets), _ANCHOR)
    packed["hash"], packed["offset"] = hashes[offsets], offsets
    return packed.tobytes()


class _Segment:
    """Postings sorted by hash."""

    def __init__(self, hashes: Hashes, chunks: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        order = np.argsort(hashes, kind="stable")
        self.hashes, self.chunks, self.offsets = hashes[order], chunks[order], offsets[order]

    def __len__(self) -> int:
        return len(self.hashes)

    def find(self, hashes: Hashes) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(prompt position, chunk number, chunk offset) of every hit."""
        left = np.searchsorted(self.hashes, hashes, "left")
        count = np.minimum(np.searchsorted(self.hashes, hashes, "right") - left, _MAX_POSTINGS)
        position = np.repeat(np.arange(len(hashes)), count)
        within = np.arange(len(position)) - np.repeat(np.cumsum(count) - count, count)
        posting = np.repeat(left, count) + within
        return position, self.chunks[posting], self.offsets[posting]


class MatchIndex:
    """Which ingested chunk says what, by tokens. Adding is cheap; not thread-safe."""

    def __init__(self) -> None:
        self._keys: list[str | None] = []  # None: removed
        self._ids: list[Ids] = []
        self._number: dict[str, int] = {}
        self._segments: list[_Segment] = []

    def __len__(self) -> int:
        return len(self._number)

    def __contains__(self, key: str) -> bool:
        return key in self._number

    def add(self, entries: Iterable[tuple[str, Ids, bytes]]) -> None:
        """Add chunks as (key, token ids, `anchors` of them); known keys are left as they are."""
        hashes, chunks, offsets = [], [], []
        for key, ids, packed in entries:
            if key in self._number:
                continue
            number = self._number[key] = len(self._keys)
            self._keys.append(key)
            self._ids.append(ids)
            pairs = np.frombuffer(packed, _ANCHOR)
            hashes.append(pairs["hash"])
            offsets.append(pairs["offset"].astype(np.int64))
            chunks.append(np.full(len(pairs), number, np.int64))
        if not hashes:
            return
        self._segments.append(_Segment(np.concatenate(hashes), np.concatenate(chunks), np.concatenate(offsets)))
        # merging like a binary counter keeps the number of segments logarithmic and every posting moved seldom
        while len(self._segments) > 1 and len(self._segments[-1]) * 2 >= len(self._segments[-2]):
            last, before = self._segments.pop(), self._segments.pop()
            self._segments.append(
                _Segment(
                    np.concatenate([before.hashes, last.hashes]),
                    np.concatenate([before.chunks, last.chunks]),
                    np.concatenate([before.offsets, last.offsets]),
                )
            )

    def ids(self, key: str) -> Ids:
        """Token ids of a chunk that has been added and not removed."""
        return self._ids[self._number[key]]

    def remove(self, key: str) -> None:
        """Forget a chunk; its postings stay behind and lead nowhere."""
        number = self._number.pop(key, None)
        if number is not None:
            self._keys[number] = None
            self._ids[number] = np.empty(0, np.uint32)

    def match(self, ids: Sequence[int], min_run: int) -> list[Run]:
        """Runs, disjoint and ascending; the longest win where they overlap.

        They have at least `min_run` tokens, except those that go on with the chunk of another one after a small gap.
        """
        prompt = np.asarray(ids, np.uint32)
        hashes = gram_hashes(prompt)
        if len(hashes) == 0 or not self._segments:
            return []
        hits = [segment.find(hashes) for segment in self._segments]
        position, chunk, offset = (np.concatenate(parts) for parts in zip(*hits, strict=True))
        order = np.lexsort((position, position - offset, chunk))
        position, chunk, offset = position[order], chunk[order], offset[order]
        candidates: list[Run] = []
        last: tuple[int, int, int] = (-1, 0, 0)  # chunk, diagonal, end of the run found there
        for p, c, o in zip(position.tolist(), chunk.tolist(), offset.tolist(), strict=True):
            if (c, p - o) == last[:2] and p < last[2]:
                continue  # inside the run that the previous anchor of this diagonal was extended to
            run = self._extend(prompt, p, c, o)
            if run is not None:
                last = (c, p - o, run.stop)
                if len(run) >= min_run:
                    candidates.append(run)
        return self._bridge(prompt, _cover(candidates, min_run))

    def _bridge(self, prompt: Ids, runs: list[Run]) -> list[Run]:
        """Add what goes on behind the runs, and before them, after a gap."""
        bridged: list[Run] = []
        start = 0  # of the free space before the run
        for number, run in enumerate(runs):
            ids = self.ids(run.key)
            bridged += [
                Run(run.start - at - length, run.start - at, run.key, run.offset - offset - length)
                for at, offset, length in _onward(prompt[start : run.start][::-1], ids[: run.offset][::-1])
            ][::-1]
            bridged.append(run)
            stop = runs[number + 1].start if number + 1 < len(runs) else len(prompt)
            end = run.offset + len(run)
            behind = [
                Run(run.stop + at, run.stop + at + length, run.key, end + offset)
                for at, offset, length in _onward(prompt[run.stop : stop], ids[end:])
            ]
            bridged += behind
            start = bridged[-1].stop
        return bridged

    def _extend(self, prompt: Ids, position: int, number: int, offset: int) -> Run | None:
        key, ids = self._keys[number], self._ids[number]
        if key is None:
            return None
        forward = _common(prompt[position:], ids[offset:])
        if forward < GRAM:
            return None  # equal hashes of different grams
        back = _common(prompt[:position][::-1], ids[:offset][::-1])
        return Run(position - back, position + forward, key, offset - back)


def _common(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def _onward(prompt: Ids, ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Stretches (position, offset, length) that follow each other after gaps, the first one after a gap too."""
    p = o = 0
    while min(len(prompt) - p, len(ids) - o) >= _AGAIN:
        same = prompt[p : p + _GAP + _AGAIN, None] == ids[None, o : o + _GAP + _AGAIN]
        rows, columns = (size - _AGAIN + 1 for size in same.shape)
        begins = np.logical_and.reduce([same[i : i + rows, i : i + columns] for i in range(_AGAIN)])
        hits = np.argwhere(begins)
        if len(hits) == 0:
            return
        dp, do = hits[hits.sum(axis=1).argmin()].tolist()
        p, o = p + dp, o + do
        length = _common(prompt[p:], ids[o:])
        yield p, o, length
        p, o = p + length, o + length


def _cover(candidates: list[Run], min_run: int) -> list[Run]:
    """Greedy: take the longest run, cut the others back to what is still uncovered, again."""
    rank: Callable[[Run], tuple[int, int, int]] = lambda run: (-len(run), run.start, run.offset)  # noqa: E731
    heap = [(rank(run), i, run) for i, run in enumerate(candidates)]
    heapq.heapify(heap)
    serial = len(heap)
    taken: list[Run] = []
    while heap:
        _, _, run = heapq.heappop(heap)
        free = [(run.start, run.stop)]
        for other in taken:
            free = [part for start, stop in free for part in _outside(start, stop, other)]
        if free == [(run.start, run.stop)]:
            taken.append(run)
            continue
        for start, stop in free:
            if stop - start >= min_run:
                part = Run(start, stop, run.key, run.offset + start - run.start)
                heapq.heappush(heap, (rank(part), serial, part))
                serial += 1
    return sorted(taken, key=lambda run: run.start)


def _outside(start: int, stop: int, run: Run) -> list[tuple[int, int]]:
    pieces = [(start, min(stop, run.start)), (max(start, run.stop), stop)]
    return [(a, b) for a, b in pieces if a < b]

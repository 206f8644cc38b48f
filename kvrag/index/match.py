"""Find runs of prompt tokens that are identical to tokens of stored texts.

Matching tokens instead of text keeps the prompt's ids exactly those of the plain model, regardless of the text around
the chunks. The prompt is winnowed like the texts (see `kvrag.index.segment`), its anchors are looked up, and each hit
is extended by comparing ids.

The work is linear in the prompt, independent of what is stored. Anchors with few postings are tried first: one token
that distinguishes a text from ten thousand near-duplicates leads to that text alone. Each anchor has a limited number
of candidates. Each candidate is extended only over tokens that no run covers yet, and the longest one wins. Candidates
that share less than a run are dropped before, in one vectorised step.

This is done twice. The KV of a token depends on everything before it in its text, so a run from the inside of a text
depends on words that may not be in the prompt, and an attacker can store another user's text after words of their own
(HijackKV, arXiv:2607.19957). Texts that are in the prompt from their beginning to at least half of their
length are therefore matched first, up to where they end, and all others only where these leave gaps.

Where a run ends before its text does, the text is followed over a small gap: chains escape quotes and line breaks
(HTML, JSON, repr) or reflow white space, and the tokens between two such places still belong to the text.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from kvrag.index.segment import (
    GRAM,
    PAD,
    WINDOW,
    Ids,
    Numbers,
    Segment,
    Tokens,
    gram_hashes,
    salt,
    salted,
    window_minima,
)
from kvrag.store import Entry
from kvrag.types import Run

_CANDIDATES = 16  # per anchor: boilerplate that is in every text says little about its origin
_PER_TOKEN = 2  # candidates looked at, per token of the prompt; beyond, each anchor has one
_COMPARED = 1  # candidates compared token by token, per token of the prompt; beyond, each anchor has one
_GAP = 12  # tokens of a gap on either side: an escaped character and the tokens it merges with
_AGAIN = 4  # this many equal tokens after a gap rule out coincidence
_EDGE = 4  # tokens at a text's beginning that merge with the text before it in the prompt
_FROM_START = 1 / 8  # candidates compared from their beginning, per token of the prompt; beyond, none
_LEAST = 128  # candidates compared from their beginning, at least, in short prompts
_STEP = 4  # comparisons that following a text over a gap counts as
_PER_STEP = 64  # tokens covered by other runs that count as one comparison
_GOLDEN = 0x9E3779B1  # 2**32 divided by the golden ratio: its multiples are spread evenly, modulo 2**32
_BLOCK = 4096  # candidates compared at once: temporaries stay in the CPU's cache


@dataclass(frozen=True, slots=True)
class _Run:
    """A run and the text that it is from; `position + shift` is the address of a token in the text's segment."""

    start: int
    stop: int
    shift: int
    segment: int
    row: int  # of the text
    first: int  # address of the text ...
    last: int  # ... and of its end


_Place = tuple[int, int, int, int, int]
"""Segment, row and address of a candidate, and the addresses where its text begins and ends."""

_Candidates = NDArray[np.int64]
"""(7, N) grams of the prompt that are also in a text, in the order of trial; those of one anchor follow each other.

Each has its position in the prompt, its segment, row and address, the addresses where the text begins and ends, and
whether the prompt seems to have the text from its beginning.
"""


def match(segments: Sequence[Segment], ids: Tokens, min_run: int, namespace: str = "") -> list[Run]:
    """Return disjoint, ascending runs of the namespace's live texts; their `key` is a text key.

    Runs have at least `min_run` tokens, except continuations of another run after a small gap. No stretch of `min_run`
    tokens (15 or more) outside of the runs is part of a text, unless its anchors have more than 16 postings. Under the
    same condition, a text whose first half is in the prompt is not matched by the inside of another text, except for a
    rest shorter than `min_run` beside another run. Prompts with very many candidates can lose that preference.
    """
    prompt = np.ascontiguousarray(ids, np.uint32)
    min_run = max(min_run, GRAM)
    if len(prompt) < min_run or not segments:
        return []
    candidates = _find_candidates(segments, prompt, min_run, namespace)
    cover = _Cover(segments, prompt.tobytes(), min_run)
    cover.add(candidates[:, candidates[-1].astype(bool)], from_start=True)
    cover.add(candidates, from_start=False)
    return [Run(r.start, r.stop, segments[r.segment].text_key(r.row), r.start + r.shift - r.first) for r in cover.runs]


# ---------------------------------------------------------------- candidates


def _find_candidates(segments: Sequence[Segment], prompt: Ids, min_run: int, namespace: str) -> _Candidates:
    """Return the candidates of the prompt's anchors, starting with the rarest anchor."""
    hashes = salted(gram_hashes(prompt), np.uint64(salt(namespace)))
    if min_run >= GRAM + WINDOW - 1:
        minima = window_minima(hashes)
        positions = minima[np.concatenate([[True], minima[1:] != minima[:-1]])]
    else:
        positions = np.arange(len(hashes))  # shorter stretches need not share an anchor
    grams, gram = np.unique(hashes[positions], return_inverse=True)  # repeated ones are looked up once
    firsts, counts = (np.stack(parts) for parts in zip(*(segment.find(grams) for segment in segments), strict=True))
    stops = counts.cumsum(axis=0)  # (S, G): an anchor's postings, those of one segment after those of another
    anchors, choices = _choose(stops[-1, gram], _PER_TOKEN * len(prompt))
    choice_grams = gram[anchors]
    numbers = np.zeros(len(choices), np.int16)  # the segment of each
    for stop in stops:
        numbers += stop[choice_grams] <= choices
    window = min(min_run, PAD)
    padding = np.zeros(PAD, np.uint32)
    padded = np.concatenate([padding, prompt, padding])
    # (T, W) tokens around every position: `window - GRAM` tokens before it and `window` from it on
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * window - GRAM)[PAD - window + GRAM :]
    parts, orders = [np.empty((7, 0), np.int64)], [np.empty(0, np.int64)]
    for number, segment in enumerate(segments):
        order = np.flatnonzero(numbers == number)
        if not len(order):
            continue
        at = number, choice_grams[order]
        chosen = segment.postings.take(firsts[at] + choices[order] - (stops[at] - counts[at]))
        address = (chosen & np.uint64(0xFFFFFFFF)).astype(np.int64)
        position = positions[anchors[order]]
        shared = _share_a_run(windows, position, segment, address, window)
        order, address, position = order[shared], address[shared], position[shared]
        row = np.searchsorted(segment.starts, address, "right") - 1
        space = segment.namespaces.index(namespace) if namespace in segment.namespaces else -1
        is_live = segment.alive[row] & (segment.spaces[row] == space)
        first, last = segment.starts[row], segment.starts[row + 1]
        has_start = _have_start(prompt, position, segment, address, first)
        columns = position, np.full(len(row), number), row, address, first, last, has_start
        parts.append(np.stack(columns)[:, is_live])
        orders.append(order[is_live])
    return np.concatenate(parts, axis=1)[:, np.argsort(np.concatenate(orders), kind="stable")]


def _choose(counts: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Choose postings from the number that each anchor has, the rarest anchor first, about `most` of all.

    Returns:
        The anchor of each chosen posting, and its number among the anchor's postings, ascending.
    """
    order = np.argsort(counts, kind="stable")
    order = order[np.searchsorted(counts[order], 1) :]  # anchors with postings
    total = counts[order]
    take = np.minimum(total, _CANDIDATES)
    take[np.cumsum(take) > most] = 1
    rank = np.repeat(np.arange(len(order)), take)
    within = np.arange(len(rank)) - np.repeat(np.cumsum(take) - take, take)
    # spread evenly over all postings, others for each anchor, so that a text is found among many that contain it
    turn = (np.arange(len(order)) * _GOLDEN & 0xFFFFFFFF) * total >> 32
    return order[rank], (within * total[rank] + np.where(take > 1, turn, 0)[rank]) // take[rank]


def _share_a_run(
    windows: NDArray[np.uint32], position: Numbers, segment: Segment, address: Numbers, window: int
) -> NDArray[np.int64]:
    """Return the candidates whose gram and enough tokens around it for a run (or the window) are equal."""
    back, shared = window - GRAM, [np.empty(0, np.int64)]
    text_windows = np.lib.stride_tricks.sliding_window_view(segment.ids, 2 * window - GRAM)
    for begin in range(0, len(position), _BLOCK):
        p, o = position[begin : begin + _BLOCK], address[begin : begin + _BLOCK]
        same = windows[p] == text_windows[(o - back).clip(0, len(text_windows) - 1)]
        forward = np.where(same[:, back:].all(axis=1), window, same[:, back:].argmin(axis=1))
        enough = forward >= GRAM
        if back:
            before = same[:, :back][:, ::-1]
            enough &= forward + np.where(before.all(axis=1), back, before.argmin(axis=1)) >= window
        shared.append(begin + np.flatnonzero(enough))
    return np.concatenate(shared)


def _have_start(
    prompt: Ids, position: Numbers, segment: Segment, address: Numbers, first: Numbers
) -> NDArray[np.bool_]:
    """Return whether the prompt has one gram of each candidate's text, the first after `_EDGE` tokens, in its place.

    Otherwise it does not have the text from its beginning, and the candidate need not be compared from there.
    """
    grams, text_grams = (np.lib.stride_tricks.sliding_window_view(ids, GRAM) for ids in (prompt, segment.ids))
    at = position - (address - first) + _EDGE
    same = (grams[at.clip(0, len(grams) - 1)] == text_grams[(first + _EDGE).clip(0, len(text_grams) - 1)]).all(axis=1)
    return (address - first <= _EDGE) | ((at >= 0) & same)


# ---------------------------------------------------------------- cover


class _Cover:
    """The runs found so far, ascending and disjoint."""

    def __init__(self, segments: Sequence[Segment], prompt: bytes, min_run: int) -> None:
        self.runs: list[_Run] = []
        self._texts = [segment.ids.data.cast("B") for segment in segments]  # four bytes per token
        self._prompt, self._end, self._min_run = prompt, len(prompt) // 4, min_run
        self._budget = 0  # comparisons left

    def add(self, candidates: _Candidates, from_start: bool) -> None:
        """Add the best candidate of each anchor in turn, up to other runs; then what continues these over gaps.

        With `from_start`, only texts whose first half is in the prompt are taken.
        """
        starts = [run.start for run in self.runs]
        bridged = frozenset(starts)
        is_covered = bytearray(self._end)
        for run in self.runs:
            is_covered[run.start : run.stop] = b"\1" * (run.stop - run.start)
        candidates = candidates[:, ~np.frombuffer(is_covered, bool)[candidates[0]]]
        groups = np.flatnonzero(np.diff(candidates[0], prepend=-1)).tolist()  # of one anchor each
        anchors, places = candidates[0, groups].tolist(), candidates[1:-1].T
        self._budget = max(int(_FROM_START * self._end), _LEAST) if from_start else _COMPARED * self._end
        for p, (group, next_group) in zip(anchors, pairwise([*groups, candidates.shape[1]]), strict=True):
            if from_start and self._budget <= 0:
                break
            if is_covered[p]:
                continue
            k = bisect_right(starts, p)
            low, high = self.runs[k - 1].stop if k else 0, starts[k] if k < len(starts) else self._end
            if p + GRAM > high or high - low < self._min_run:
                continue  # too little is left of the gap
            tried = slice(group, next_group if self._budget > 0 else group + 1)
            best = self._best(p, places[tried].tolist(), low, high, from_start)
            if best is not None:
                self.runs.insert(k, best)
                starts.insert(k, best.start)
                is_covered[best.start : best.stop] = b"\1" * (best.stop - best.start)
        self._bridge(bridged)

    def _best(self, p: int, places: Sequence[_Place], low: int, high: int, from_start: bool) -> _Run | None:
        """Return the best run around `p` that lies between `low` and `high`; None if all are too short.

        The longest is the best, of several the one that is closest to the end of its text. With `from_start`, no more
        than `_EDGE` tokens may be missing before the run, and runs with fewer are better than longer ones.
        """
        best, rating, least = None, (-_EDGE, 0, 0), self._min_run
        for place in places:
            run = self._extend(p, place, low, high, least)
            if run is None:
                continue
            missing = self._missing(run, low) if from_start else 0
            length, rest = run.stop - run.start, run.last - run.stop - run.shift
            rated = -missing, length, -rest
            if rated <= rating or (from_start and not self._has_first_half(run, high)):
                continue
            best, rating = run, rated
            if not missing:  # otherwise a shorter one can be better
                least = length + (not rest)
        return best

    def _extend(self, p: int, place: _Place, low: int, high: int, least: int) -> _Run | None:
        """Return the run around `p`, between `low` and `high`; None if it has fewer than `least` tokens."""
        segment, row, address, first, last = place
        most_back, most = min(p - low, address - first), min(high - p, last - address)
        if most_back + most < least:
            return None
        self._budget -= 1
        text = self._texts[segment]
        forward = _equal(self._prompt, p, text, address, most, 1)
        if forward < GRAM or most_back + forward < least:
            return None
        back = _equal(self._prompt, p, text, address, most_back, -1)
        if back + forward < least:
            return None
        return _Run(p - back, p + forward, address - p, segment, row, first, last)

    def _missing(self, run: _Run, low: int) -> int:
        """Return how many tokens at the beginning of a run's text are missing before it in the prompt.

        The tokens of the run before, which ends at `low`, can be this text, too.
        """
        address = run.start + run.shift
        missing = address - run.first
        if not missing or run.start > low:
            return missing
        covered = _equal(self._prompt, low, self._texts[run.segment], address, min(low, missing), -1)
        self._budget -= covered // _PER_STEP
        return missing - covered

    def _has_first_half(self, run: _Run, high: int) -> bool:
        """Return whether the prompt has a run's text up to its half, over as many gaps as the budget allows.

        The tokens of the next run, which starts at `high`, can be this text, too.
        """
        stop, half = run.stop + run.shift, (run.first + run.last) // 2
        if stop < half and run.stop == high:
            most = min(self._end - high, half - stop)
            stop += _equal(self._prompt, high, self._texts[run.segment], stop, most, 1)
        pieces = islice(_onward(self._texts, self._prompt, run, high, 1), max(self._budget // _STEP, 0))
        while stop < half and (piece := next(pieces, None)):
            stop = piece.stop + piece.shift
            self._budget -= _STEP
        return stop >= half

    def _bridge(self, done: frozenset[int]) -> None:
        """Add the continuations of the runs after, and before, a gap; `done`: starts of runs that have theirs."""
        runs: list[_Run] = []
        borders = [*(run.start for run in self.runs), self._end]
        for run, border in zip(self.runs, borders[1:], strict=True):
            if run.start in done:
                runs.append(run)
                continue
            runs += [*_onward(self._texts, self._prompt, run, runs[-1].stop if runs else 0, -1)][::-1]
            runs += [run, *_onward(self._texts, self._prompt, run, border, 1)]
        self.runs = runs


def _onward(texts: Sequence[memoryview], prompt: bytes, run: _Run, border: int, direction: int) -> Iterator[_Run]:
    """Yield stretches of the run's text that follow each other after gaps, up to a border in the prompt.

    Every step covers `_AGAIN` tokens or is the last, so the work is linear.
    """
    raw = texts[run.segment]
    p, text_border = (run.stop, run.last) if direction > 0 else (run.start, run.first)
    o = p + run.shift
    while min(abs(border - p), abs(text_border - o)) >= _AGAIN:
        gap = _next(prompt, p, border, raw, o, text_border)
        if gap is None:
            return
        p, o = p + direction * gap[0], o + direction * gap[1]
        most = min(abs(border - p), abs(text_border - o))
        length = _equal(prompt, p, raw, o, most, direction)
        start = p if direction > 0 else p - length
        yield _Run(start, start + length, o - p, run.segment, run.row, run.first, run.last)
        p, o = p + direction * length, o + direction * length


def _next(prompt: bytes, p: int, border: int, raw: memoryview, o: int, text_border: int) -> tuple[int, int] | None:
    """Return the distance of the nearest equal tokens in both; None if they are too far."""
    prompt_tokens, text_tokens = _near(prompt, p, border), _near(raw, o, text_border)
    best, nearest, size = None, 2 * _GAP + 1, 4 * _AGAIN
    for j in range(len(text_tokens) // 4 - _AGAIN + 1):
        if j >= nearest:
            break
        gram = text_tokens[4 * j : 4 * j + size]
        i = prompt_tokens.find(gram)
        while i % 4 and i > 0:  # between two tokens
            i = prompt_tokens.find(gram, i + 1)
        if i >= 0 and i // 4 + j < nearest:
            best, nearest = (i // 4, j), i // 4 + j
    return best


def _near(raw: bytes | memoryview, at: int, border: int) -> bytes:
    """Return the tokens that a gap and its continuation may contain, nearest first, towards a border on either side."""
    if border >= at:
        return bytes(raw[4 * at : 4 * min(at + _GAP + _AGAIN, border)])
    return memoryview(raw[4 * max(at - _GAP - _AGAIN, border) : 4 * at]).cast("I")[::-1].tobytes()


def _equal(a: bytes | memoryview, i: int, b: bytes | memoryview, j: int, most: int, direction: int) -> int:
    """Return the number of equal tokens from `i` and `j` on (direction 1) or before them (-1), at most `most`."""
    done, size = 0, 64
    while done < most:
        size = min(size, most - done)
        begin = done if direction > 0 else -done - size
        x, y = (int.from_bytes(raw[4 * (k + begin) : 4 * (k + begin + size)], "little") for raw, k in ((a, i), (b, j)))
        if x != y:
            different = x ^ y
            if direction > 0:
                return done + ((different & -different).bit_length() - 1) // 32
            return done + size - 1 - (different.bit_length() - 1) // 32
        done += size
        size = min(4 * size, 4096)
    return done


# ---------------------------------------------------------------- deleted texts

Decode = Callable[[Sequence[int]], str]

_RECOGNISED = 16  # tokens in a row by which a text is recognised: the fewest that the matcher guarantees to find
_EDGES = 4  # tokens at either end of a text that are others where it is pasted


class DeletedTexts:
    """Texts that were deleted from the store.

    A long one is recognised by a part of it. A short one may have no tokens in common with the prompt it was pasted
    into, so it is looked for as it reads.
    """

    def __init__(self, texts: Sequence[Entry], decode: Decode) -> None:
        self._decode = decode
        self._segments = [Segment.of(sorted(texts, key=lambda text: text.number))] if texts else []
        self._short: defaultdict[str, set[str]] = defaultdict(set)  # by namespace
        for text in texts:
            if len(text.ids) < _RECOGNISED + 2 * _EDGES:
                self._short[text.namespace].add(decode(text.ids.tolist()).strip())
        self.namespaces = {text.namespace for text in texts}

    def find(self, ids: Tokens, namespace: str) -> int | None:
        """Return the position at which the first of them begins, negative if before; None if there is none."""
        if namespace not in self.namespaces:
            return None
        prompt = np.asarray(ids, np.uint32)
        starts = [run.start - run.offset for run in match(self._segments, prompt, _RECOGNISED, namespace)]
        if short := self._short[namespace] - {""}:
            starts += self._read(prompt.tolist(), short)
        return min(starts, default=None)

    def _read(self, ids: list[int], short: set[str]) -> Iterator[int]:
        whole = self._decode(ids)
        for text in short:
            if text in whole:
                stop = bisect_left(range(len(ids)), True, key=lambda stop: text in self._decode(ids[:stop]))
                yield next(start for start in range(stop, -1, -1) if text in self._decode(ids[start:stop]))

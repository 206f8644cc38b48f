"""Find runs of prompt tokens that are identical to tokens of stored texts.

Matching tokens instead of text keeps the prompt's ids exactly those of the plain model, regardless of the text around
the chunks. The prompt is winnowed like the texts (see `kvrag.reuse.segment`), its anchors are looked up, and each hit
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

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvrag.reuse.segment import (
    GRAM,
    PAD,
    WINDOW,
    Hashes,
    Ids,
    Numbers,
    Segment,
    gram_hashes,
    salt,
    salted,
    spread,
    window_minima,
)
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
    """A run and the location of its text."""

    start: int
    stop: int
    segment: int
    row: int  # of the text
    address: int  # of the run's first token
    first: int  # of the text ...
    last: int  # ... and its end


_Candidates = NDArray[np.int64]
"""(8, N) places that share a stretch with the prompt, in the order of trial. Each has the rank of its anchor, its
position in the prompt, segment, row and address, the addresses where its text begins and ends, and whether the prompt
seems to have the text from its beginning, see `_have_start`."""


def match(segments: Sequence[Segment], ids: Sequence[int] | Ids, min_run: int, namespace: str = "") -> list[Run]:
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
    hashes = salted(gram_hashes(prompt), np.uint64(salt(namespace)))
    if min_run >= GRAM + WINDOW - 1:
        minima = window_minima(hashes)
        positions = minima[np.concatenate([[True], minima[1:] != minima[:-1]])]
    else:
        positions = np.arange(len(hashes))  # shorter stretches need not share an anchor
    candidates = _look_up(segments, prompt, positions, spread(hashes[positions]), min_run, namespace)
    has_start = candidates[-1].astype(bool)
    raw = prompt.tobytes()
    runs: list[_Run] = []
    for tried, from_start in ((candidates[:, has_start], True), (candidates, False)):
        runs = _bridge(segments, raw, _cover(segments, raw, tried, min_run, runs, from_start), frozenset(runs))
    return [Run(r.start, r.stop, segments[r.segment].text_key(r.row), r.address - r.first) for r in runs]


def _look_up(
    segments: Sequence[Segment], prompt: Ids, positions: Numbers, hashes: Hashes, min_run: int, namespace: str
) -> _Candidates:
    """Return the candidates of all anchors, starting with the rarest anchor."""
    postings = [segment.find(hashes) for segment in segments]
    total = np.sum([count for _, count in postings], axis=0)
    order = np.argsort(total, kind="stable")
    order = order[np.searchsorted(total[order], 1) :]  # anchors with postings, the rarest first
    total = total[order]
    take = np.minimum(total, _CANDIDATES)
    take[np.cumsum(take) > _PER_TOKEN * len(prompt)] = 1
    rank = np.repeat(np.arange(len(order)), take)
    within = np.arange(len(rank)) - np.repeat(np.cumsum(take) - take, take)
    # spread evenly over all postings, others for each anchor, so that a text is found among many that contain it
    turn = (np.arange(len(order)) * _GOLDEN & 0xFFFFFFFF) * total >> 32
    choice = (within * total[rank] + np.where(take > 1, turn, 0)[rank]) // take[rank]
    anchor = order[rank]
    window = min(min_run, PAD)
    padding = np.zeros(PAD, np.uint32)
    padded = np.concatenate([padding, prompt, padding])
    # (T, W) tokens around every position: `window - GRAM` tokens before it and `window` from it on
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * window - GRAM)[PAD - window + GRAM :]
    parts = [np.empty((8, 0), np.int64)]
    before = np.zeros(len(hashes), np.int64)
    for number, (segment, (begin, count)) in enumerate(zip(segments, postings, strict=True)):
        at = choice - before[anchor]
        before += count
        indices = np.flatnonzero((at >= 0) & (at < count[anchor]))
        if len(indices) == 0:
            continue
        posting = segment.postings.take(begin[anchor[indices]] + at[indices])
        address = (posting & np.uint64(0xFFFFFFFF)).astype(np.int64)
        position = positions[anchor[indices]]
        shared = _share_a_run(windows, position, segment, address, window)
        indices, address, position = indices[shared], address[shared], position[shared]
        row = np.searchsorted(segment.starts, address, "right") - 1
        inside = (row >= 0) & (row < len(segment))
        row = row.clip(0, len(segment) - 1)
        space = segment.namespaces.index(namespace) if namespace in segment.namespaces else -1
        inside &= segment.alive[row] & (segment.spaces[row] == space)
        first, last = segment.starts[row], segment.starts[row + 1]
        from_start = _have_start(prompt, position, segment, address, first)
        columns = rank[indices], position, np.full(len(indices), number), row, address, first, last, from_start
        parts.append(np.stack(columns)[:, inside])
    candidates = np.concatenate(parts, axis=1)
    return candidates[:, np.argsort(candidates[0], kind="stable")]


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


def _share_a_run(
    windows: NDArray[np.uint32], position: Numbers, segment: Segment, address: Numbers, window: int
) -> NDArray[np.int64]:
    """Return the candidates whose gram and enough tokens around it for a run (or the window) are equal."""
    back, shared = window - GRAM, []
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


def _cover(
    segments: Sequence[Segment], prompt: bytes, c: _Candidates, min_run: int, taken: list[_Run], from_start: bool
) -> list[_Run]:
    """Add the best candidate of each anchor in turn, up to other runs; ascending.

    The longest candidate is the best, of several the one that is closest to the end of its text. With `from_start`,
    only texts whose first half is in the prompt are taken. No more than `_EDGE` tokens may be missing before the run,
    and candidates with fewer are better than longer ones.
    """
    end = len(prompt) // 4
    is_covered = bytearray(end)
    for run in taken:
        is_covered[run.start : run.stop] = b"\1" * (run.stop - run.start)
    c = c[:, ~np.frombuffer(is_covered, bool)[c[1]]]
    if c.shape[1] == 0:
        return taken
    rank, position, *columns, _ = c
    groups = np.flatnonzero(np.diff(rank, prepend=-1)).tolist()  # the candidates of one anchor each
    positions = position[groups].tolist()
    segment, row, address, first, last = (column.tolist() for column in columns)
    taken, starts = list(taken), [run.start for run in taken]
    budget = max(int(_FROM_START * end), _LEAST) if from_start else _COMPARED * end
    for p, i, j in zip(positions, groups, [*groups[1:], len(segment)], strict=True):
        if from_start and budget <= 0:
            break
        if is_covered[p]:
            continue
        k = bisect_right(starts, p)
        low = taken[k - 1].stop if k else 0
        high = starts[k] if k < len(starts) else end
        if p + GRAM > high or high - low < min_run:
            continue  # too little is left of the gap
        best, rating, least = None, (-_EDGE, 0, 0), min_run
        for n in range(i, j if budget > 0 else i + 1):
            o, most_back, most = address[n], min(p - low, address[n] - first[n]), min(high - p, last[n] - address[n])
            if most_back + most < least:
                continue
            budget -= 1
            raw = segments[segment[n]].raw
            forward = _equal(prompt, p, raw, o, most, 1)
            if forward < GRAM or most_back + forward < least:
                continue
            back = _equal(prompt, p, raw, o, most_back, -1)
            if back + forward < least:
                continue
            run = _Run(p - back, p + forward, segment[n], row[n], o - back, first[n], last[n])
            missing = 0
            if from_start:
                missing, steps = _missing(prompt, raw, run, low)
                budget -= steps
            rated = -missing, back + forward, o + forward - last[n]
            if rated <= rating:
                continue
            if from_start:
                has_half, steps = _has_first_half(segments, prompt, run, high, budget // _STEP)
                budget -= steps * _STEP
                if not has_half:
                    continue
            best, rating = run, rated
            if not missing:  # otherwise a shorter one can be better
                least = back + forward + (o + forward == last[n])
        if best is not None:
            taken.insert(k, best)
            starts.insert(k, best.start)
            is_covered[best.start : best.stop] = b"\1" * (best.stop - best.start)
    return taken


def _missing(prompt: bytes, raw: memoryview, run: _Run, low: int) -> tuple[int, int]:
    """Return how many tokens at the beginning of a run's text are missing before it in the prompt, and the cost.

    The tokens of the run before, which ends at `low`, can be this text, too.
    """
    missing = run.address - run.first
    if not missing or run.start > low:
        return missing, 0
    covered = _equal(prompt, low, raw, run.address, min(low, missing), -1)
    return missing - covered, covered // _PER_STEP


def _has_first_half(segments: Sequence[Segment], prompt: bytes, run: _Run, high: int, steps: int) -> tuple[bool, int]:
    """Return whether the prompt has a run's text up to its half, and the gaps crossed to find out, at most `steps`.

    The tokens of the next run, which starts at `high`, can be this text, too.
    """
    stop, half = run.address + run.stop - run.start, (run.first + run.last) // 2
    if stop < half and run.stop == high:
        stop += _equal(prompt, high, segments[run.segment].raw, stop, min(len(prompt) // 4 - high, half - stop), 1)
    crossed, pieces = 0, _onward(segments, prompt, run, high, 1)
    while stop < half and crossed < steps and (piece := next(pieces, None)):
        stop = piece.address + piece.stop - piece.start
        crossed += 1
    return stop >= half, crossed


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


def _bridge(segments: Sequence[Segment], prompt: bytes, runs: list[_Run], done: frozenset[_Run]) -> list[_Run]:
    """Add the continuations of the runs after, and before, a gap; those of the runs in `done` are there already."""
    bridged: list[_Run] = []
    begin, end = 0, len(prompt) // 4
    for number, run in enumerate(runs):
        if run in done:
            bridged.append(run)
            begin = run.stop
            continue
        bridged += [*_onward(segments, prompt, run, begin, -1)][::-1]
        bridged.append(run)
        bridged += _onward(segments, prompt, run, runs[number + 1].start if number + 1 < len(runs) else end, 1)
        begin = bridged[-1].stop
    return bridged


def _onward(segments: Sequence[Segment], prompt: bytes, run: _Run, border: int, direction: int) -> Iterator[_Run]:
    """Yield stretches of the run's text that follow each other after gaps, up to a border in the prompt.

    Every step covers `_AGAIN` tokens or is the last, so the work is linear.
    """
    raw = segments[run.segment].raw
    if direction > 0:
        p, o, text_border = run.stop, run.address + run.stop - run.start, run.last
    else:
        p, o, text_border = run.start, run.address, run.first
    while min(abs(border - p), abs(text_border - o)) >= _AGAIN:
        gap = _next(prompt, p, border, raw, o, text_border)
        if gap is None:
            return
        p, o = p + direction * gap[0], o + direction * gap[1]
        most = min(abs(border - p), abs(text_border - o))
        length = _equal(prompt, p, raw, o, most, direction)
        start, address = (p, o) if direction > 0 else (p - length, o - length)
        yield _Run(start, start + length, run.segment, run.row, address, run.first, run.last)
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

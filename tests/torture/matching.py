"""The matcher compared with a brute-force definition, and its CPU time on hostile texts.

Random cases have few tokens in the vocabulary, periods, near-duplicates and gaps. Short runs have fewer
texts in the hostile corpora.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvrag.index.match import _AGAIN, _GAP, match
from kvrag.index.segment import GRAM, WINDOW, Segment
from kvrag.store.values import Entry
from kvrag.types import Run
from torture.campaign import Campaign

_CANDIDATES = 16  # postings of an anchor up to which the matcher guarantees to find everything
_SLOWEST = 40  # times the CPU time of an ordinary prompt of the same length
_NOISE_S = 0.02  # of CPU time
_MOST_S = 0.15  # of CPU time, whatever is stored
_HOSTILE = 40  # random cases per timed one


def run(campaign: Campaign) -> None:
    """Check random cases one after the other, and time a hostile one now and then."""
    slowest = 0.0
    for number in campaign.numbers():
        rng = campaign.random(number)
        with campaign.case(number):
            if number % _HOSTILE == _HOSTILE - 1:
                slowest = max(slowest, _time_a_hostile_case(rng))
                campaign.kinds["hostile texts, timed"] += 1
            else:
                _check_a_random_case(rng)
    campaign.result.figures["slowest, of an ordinary prompt's CPU time"] = f"{slowest:.1f}x"


def _segments(texts: Sequence[list[int]], portions: int) -> list[Segment]:
    entries = [Entry(i, f"{i}", "", np.asarray(text, np.uint32)) for i, text in enumerate(texts, 1)]
    size = -(-len(entries) // portions)
    return [Segment.of(entries[start : start + size]) for start in range(0, len(entries), size)]


def _check_a_random_case(rng: random.Random) -> None:
    texts, prompt = _texts(rng), list[int]()
    for _ in range(rng.randint(1, 12)):
        text, length = rng.choice(texts), rng.randint(1, 90)
        start = rng.choice([0, rng.randrange(len(text))])
        piece = text[start : start + length]
        if rng.random() < 0.2:  # escaped: some tokens were replaced by others
            every, gap = rng.randint(5, 20), rng.randint(1, _GAP)
            piece = [t for i, token in enumerate(piece) for t in ([9_999_999] * gap if i % every == 0 else [token])]
        prompt += [rng.randrange(40) for _ in range(rng.choice([0, 0, 1, 5]))] + piece
    min_run = rng.choice([8, 12, 15, 16, 16, 16, 24])
    runs = match(_segments(texts, rng.randint(1, 4)), prompt, min_run)
    _check_runs(runs, prompt, texts, min_run)
    if min_run >= GRAM + WINDOW - 1:
        _check_completeness(runs, prompt, texts, min_run)


def _texts(rng: random.Random) -> list[list[int]]:
    alphabet, texts = rng.choice([1, 2, 4, 30, 1000, 2**32 - 1]), list[list[int]]()
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.2:
            unit = [rng.randrange(alphabet) for _ in range(rng.randint(1, 20))]
            texts.append((unit * 90)[: rng.randint(GRAM, 90)])
        elif kind < 0.4 and texts:  # a near-duplicate
            texts.append([rng.randrange(alphabet) if rng.random() < 0.05 else token for token in rng.choice(texts)])
        elif kind < 0.5 and texts:  # another text after own words
            texts.append([rng.randrange(alphabet) for _ in range(rng.randint(1, 30))] + rng.choice(texts))
        else:
            texts.append([rng.randrange(alphabet) for _ in range(rng.randint(GRAM, 120))])
    return texts


def _check_runs(runs: Sequence[Run], prompt: list[int], texts: Sequence[list[int]], min_run: int) -> None:
    end = 0
    for run in runs:
        assert end <= run.start < run.stop <= len(prompt), f"not ascending and disjoint: {runs}"
        text = texts[int(run.key) - 1]
        assert prompt[run.start : run.stop] == text[run.offset : run.offset + len(run)], f"other tokens: {run}"
        if len(run) < min_run:
            assert len(run) >= _AGAIN, f"a short run: {run}"
            # a run of another text can be in the gap between
            others = (other for other in runs if other is not run)
            assert any(_continues(run, other) for other in others), f"a short run that continues none: {run}"
        end = run.stop


def _continues(run: Run, other: Run) -> bool:
    first, second = sorted((run, other), key=lambda each: each.start)
    gaps = second.start - first.stop, second.offset - first.offset - len(first)
    return first.key == second.key and all(0 <= gap <= _GAP for gap in gaps)


def _check_completeness(runs: Sequence[Run], prompt: list[int], texts: Sequence[list[int]], min_run: int) -> None:
    """Check that no `min_run` tokens of a text are outside of all runs, unless all of their grams are frequent."""
    covered = {position for run in runs for position in range(run.start, run.stop)}
    grams = Counter(tuple(text[i : i + GRAM]) for text in texts for i in range(len(text) - GRAM + 1))
    stretches = {tuple(text[i : i + min_run]) for text in texts for i in range(len(text) - min_run + 1)}
    for start in range(len(prompt) - min_run + 1):
        stretch = tuple(prompt[start : start + min_run])
        if stretch in stretches and not covered & {*range(start, start + min_run)}:
            most = max(grams[stretch[i : i + GRAM]] for i in range(min_run - GRAM + 1))
            assert most > _CANDIDATES, f"{min_run} tokens of a text at {start} were not found, postings {most}"


def _time_a_hostile_case(rng: random.Random) -> float:
    """Return the CPU time of a hostile prompt as a multiple of an ordinary one's of the same length."""
    length, count = rng.choice([4000, 12_000]), rng.choice([200, 1000])
    name, texts, prompt, min_run = _hostile(rng, length, count)
    ordinary = [[rng.randrange(50_000) for _ in range(128)] for _ in range(count)]
    usual = [token for text in rng.choices(ordinary, k=length // 128 + 1) for token in text][: len(prompt)]
    portions = rng.choice([2, 200])
    took, took_usual = _cpu_time(texts, prompt, min_run, portions), _cpu_time(ordinary, usual, 16, portions)
    slower = took / max(took_usual, 1e-4)
    assert took < min(_SLOWEST * took_usual + _NOISE_S, _MOST_S), (
        f"{name} in {portions} segments: {took:.3f} s of CPU time, {slower:.0f}x an ordinary prompt's"
    )
    return slower


def _hostile(rng: random.Random, length: int, count: int) -> tuple[str, list[list[int]], list[int], int]:
    """Return texts with much in common, and a prompt of them."""

    def near_duplicates() -> list[list[int]]:
        base, every = [rng.randrange(50_000) for _ in range(128)], rng.choice([17, 20, 128])
        return [[rng.randrange(50_000) if rng.random() < 1 / every else token for token in base] for _ in range(count)]

    def few_tokens() -> list[list[int]]:
        alphabet = rng.choice([1, 2, 3, 4])
        return [[rng.randrange(alphabet) for _ in range(128)] for _ in range(count)]

    def periods() -> list[list[int]]:
        return [[i % (2 + number % 7) for i in range(128)] for number in range(count)]

    def boilerplate() -> list[list[int]]:
        shared = [rng.randrange(50_000) for _ in range(100)]
        return [shared + [rng.randrange(50_000) for _ in range(28)] for _ in range(count)]

    def glued() -> list[list[int]]:
        victim = [rng.randrange(50_000) for _ in range(100)]
        return [[rng.randrange(50_000) for _ in range(28)] + victim for _ in range(count)]

    make = rng.choice([near_duplicates, few_tokens, periods, boilerplate, glued])
    texts = make()
    prompt = [token for text in rng.choices(texts, k=length // len(texts[0]) + 1) for token in text][:length]
    if rng.random() < 0.5:  # changed again, or with gaps
        every = rng.choice([5, 9, 17])
        prompt = [9_999_999 if i % every == 0 else token for i, token in enumerate(prompt)]
    return make.__name__, texts, prompt, rng.choice([8, 16])


def _cpu_time(texts: Sequence[list[int]], prompt: list[int], min_run: int, portions: int) -> float:
    segments, times = _segments(texts, portions), []
    gc.collect()
    for _ in range(3):
        started = time.process_time()
        match(segments, prompt, min_run)
        times.append(time.process_time() - started)
    return min(times)

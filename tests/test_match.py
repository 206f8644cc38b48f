"""Properties of the matcher on random prompts, each checked against a slow definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvrag.reuse.match import _AGAIN, _GAP, MatchIndex, anchors, gram_hashes
from kvrag.types import Run

MIN_RUN = 16


def _index(chunks: dict[str, list[int]], portions: int = 1) -> MatchIndex:
    index = MatchIndex()
    keys = list(chunks)
    size = -(-len(keys) // portions) or 1
    for start in range(0, len(keys), size):
        index.add((key, np.asarray(chunks[key], np.uint32), anchors(chunks[key])) for key in keys[start : start + size])
    return index


def _check_runs(runs: list[Run], prompt: list[int], chunks: dict[str, list[int]], min_run: int = MIN_RUN) -> None:
    """What holds for every list of runs."""
    end = 0
    for number, run in enumerate(runs):
        assert run.start >= end, "ascending and disjoint"
        if len(run) < min_run:
            assert len(run) >= _AGAIN
            neighbours = runs[max(number - 1, 0) : number] + runs[number + 1 : number + 2]
            assert any(_goes_on(*sorted((run, other), key=lambda run: run.start)) for other in neighbours)
        assert prompt[run.start : run.stop] == chunks[run.key][run.offset : run.offset + len(run)]
        end = run.stop
    assert end <= len(prompt)


def _goes_on(run: Run, other: Run) -> bool:
    """Whether the second is the same chunk a small gap later."""
    gaps = other.start - run.stop, other.offset - run.offset - len(run)
    return run.key == other.key and all(0 <= gap <= _GAP for gap in gaps)


def _covered(runs: list[Run]) -> set[int]:
    return {position for run in runs for position in range(run.start, run.stop)}


def _random_chunks(rng: random.Random, count: int, vocabulary: int = 30000) -> dict[str, list[int]]:
    return {f"c{i}": [rng.randrange(vocabulary) for _ in range(rng.randrange(16, 300))] for i in range(count)}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_pasted_is_found(seed: int) -> None:
    rng = random.Random(seed)
    chunks = _random_chunks(rng, rng.randrange(1, 40))
    index = _index(chunks, portions=rng.randrange(1, 6))
    prompt, expected = [], set()
    for key in rng.choices(list(chunks), k=rng.randrange(1, 12)):
        chunk = chunks[key]
        start = rng.randrange(0, max(1, len(chunk) // 3)) if rng.random() < 0.5 else 0
        stop = rng.randrange(len(chunk) * 2 // 3, len(chunk)) if rng.random() < 0.5 else len(chunk)
        prompt += [rng.randrange(30000) for _ in range(rng.randrange(0, 30))]
        if stop - start >= MIN_RUN:
            expected |= set(range(len(prompt), len(prompt) + stop - start))
        prompt += chunk[start:stop]
    prompt += [rng.randrange(30000) for _ in range(20)]
    runs = index.match(prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    assert expected <= _covered(runs)


@pytest.mark.parametrize("length", [15, 16, 17, 23, 40])
@pytest.mark.parametrize("seed", range(10))
def test_a_common_stretch_of_min_run_tokens_is_always_found_and_a_shorter_one_never_reported(
    seed: int, length: int
) -> None:
    rng = random.Random(seed)
    chunks = {"a": [rng.randrange(30000) for _ in range(400)]}
    start = rng.randrange(400 - length)
    before, after = [rng.randrange(30000, 60000) for _ in range(37)], [rng.randrange(30000, 60000) for _ in range(11)]
    prompt = before + chunks["a"][start : start + length] + after
    runs = _index(chunks).match(prompt, MIN_RUN)
    assert runs == ([Run(37, 37 + length, "a", start)] if length >= MIN_RUN else [])


@pytest.mark.parametrize("seed", range(20))
def test_overlapping_chunks_and_few_tokens_in_the_vocabulary(seed: int) -> None:
    """As a splitter with overlap makes them; with so few tokens grams repeat and hits lie everywhere."""
    rng = random.Random(seed)
    vocabulary = rng.choice([2, 3, 10, 200])
    text = [rng.randrange(vocabulary) for _ in range(1500)]
    chunks = {f"c{i}": text[start : start + 120] for i, start in enumerate(range(0, 1400, 90))}
    index = _index(chunks, portions=3)
    prompt = [*text[300:700], vocabulary, *text[100:260], vocabulary + 1]
    runs = index.match(prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    if vocabulary == 200:
        # greedy trimming may leave a rest shorter than a run at each of the borders
        assert len(_covered(runs)) >= 560 - MIN_RUN * len(runs)


def _escaped(rng: random.Random, chunk: list[int], every: int) -> tuple[list[int], set[int]]:
    """A chunk one of whose tokens in `every` has become several others, and the positions that are still its own."""
    prompt: list[int] = []
    own = set()
    for number, token in enumerate(chunk):
        if number % every == every - 1:
            prompt += [rng.randrange(30000, 40000) for _ in range(rng.randrange(1, _GAP))]
        else:
            own.add(len(prompt))
            prompt.append(token)
    return prompt, own


@pytest.mark.parametrize("every", [5, 9, 16])
def test_a_chunk_is_followed_over_escaped_characters(every: int) -> None:
    """In both directions from the one stretch of `MIN_RUN` tokens that they have left whole."""
    rng = random.Random(every)
    chunk, other = ([rng.randrange(30000) for _ in range(240)] for _ in range(2))
    before, own = _escaped(rng, chunk[:110], every)
    after, more = _escaped(rng, chunk[130:], every)
    prompt = [7, 8, *before, *chunk[110:130], *after, *other]
    end = len(before) + 20
    own |= {*range(len(before), end), *(end + position for position in more)}
    own = {2 + position for position in own} | set(range(len(prompt) - 240, len(prompt)))
    chunks = {"a": chunk, "b": other}
    runs = _index(chunks).match(prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    assert own - _covered(runs) <= {position for position in own if position >= len(prompt) - 245 - every}
    assert len(_covered(runs)) >= len(own) - _AGAIN


def test_too_wide_a_gap_is_not_crossed_and_what_follows_a_cut_chunk_is_not_its_own() -> None:
    chunk = list(range(100))
    far = [*chunk[:40], *range(1000, 1001 + _GAP), *chunk[40:50], *range(2000, 2050)]
    near = [*chunk[:40], *range(1000, 1000 + _GAP), *chunk[40:50], *range(2000, 2050)]
    assert _index({"a": chunk}).match(far, MIN_RUN) == [Run(0, 40, "a", 0)]
    assert _index({"a": chunk}).match(near, MIN_RUN) == [Run(0, 40, "a", 0), Run(52, 62, "a", 40)]
    cut = [*chunk[:40], *range(1000, 1020), *chunk[90:93]]
    assert _index({"a": chunk}).match(cut, MIN_RUN) == [Run(0, 40, "a", 0)]


def test_the_longest_run_wins_and_the_others_are_trimmed() -> None:
    text = list(range(200))
    chunks = {"long": text[50:150], "before": text[0:80], "after": text[130:200]}
    runs = _index(chunks).match(text, MIN_RUN)
    assert runs == [Run(0, 50, "before", 0), Run(50, 150, "long", 0), Run(150, 200, "after", 20)]


def test_a_run_inside_another_is_cut_in_two() -> None:
    outer, inner = list(range(100)), list(range(1000, 1060))
    prompt = outer[:50] + inner + outer[50:]
    runs = _index({"outer": outer, "inner": inner}).match(prompt, MIN_RUN)
    assert [(run.key, len(run)) for run in runs] == [("outer", 50), ("inner", 60), ("outer", 50)]


def test_the_same_chunk_twice_gives_two_runs() -> None:
    chunk = list(range(40))
    runs = _index({"a": chunk}).match([*chunk, 99, *chunk], MIN_RUN)
    assert runs == [Run(0, 40, "a", 0), Run(41, 81, "a", 0)]


def test_equal_chunks_under_two_keys_are_used_once() -> None:
    chunk = list(range(40))
    runs = _index({"a": chunk, "b": chunk}).match(chunk, MIN_RUN)
    assert runs == [Run(0, 40, "a", 0)]


def test_boilerplate_in_every_chunk_hides_nothing() -> None:
    rng = random.Random(0)
    header, footer = [rng.randrange(9999) for _ in range(40)], [rng.randrange(9999) for _ in range(40)]
    chunks = {f"c{i}": [*header, *(rng.randrange(30000) for _ in range(60)), *footer] for i in range(300)}
    index = _index(chunks, portions=7)
    for picked in (["c0", "c299"], ["c150", "c3", "c150"], ["c299"]):
        prompt = [token for key in picked for token in chunks[key]]
        runs = index.match(prompt, MIN_RUN)
        _check_runs(runs, prompt, chunks)
        assert len(_covered(runs)) == len(prompt)
        assert set(picked) <= {run.key for run in runs}


def test_removed_chunks_are_not_matched_and_can_come_back() -> None:
    rng = random.Random(1)
    chunks = _random_chunks(rng, 20)
    index = _index(chunks, portions=4)
    gone = list(chunks)[::2]
    for key in gone:
        index.remove(key)
        index.remove(key)
    assert len(index) == 10
    assert "c0" not in index
    assert "c1" in index
    prompt = [token for chunk in chunks.values() for token in chunk]
    runs = index.match(prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    assert {run.key for run in runs} == set(chunks) - set(gone)
    index.add((key, np.asarray(chunks[key], np.uint32), anchors(chunks[key])) for key in gone)
    runs = index.match(prompt, MIN_RUN)
    assert len(_covered(runs)) == len(prompt)


def test_hundreds_of_small_additions_are_merged_and_lose_nothing() -> None:
    rng = random.Random(2)
    chunks = _random_chunks(rng, 400)
    index = _index(chunks, portions=400)
    assert len(index._segments) <= 10
    for key in rng.sample(list(chunks), 40):
        assert index.match(chunks[key], MIN_RUN) == [Run(0, len(chunks[key]), key, 0)]


def test_known_keys_are_left_as_they_are() -> None:
    index = _index({"a": list(range(40))})
    index.add([("a", np.arange(100, 140, dtype=np.uint32), anchors(list(range(100, 140))))])
    assert index.match(list(range(100, 140)), MIN_RUN) == []
    assert len(index.match(list(range(40)), MIN_RUN)) == 1


@pytest.mark.parametrize("prompt", [[], [1], list(range(7)), list(range(8)), list(range(1000))])
def test_nothing_to_match(prompt: list[int]) -> None:
    assert MatchIndex().match(prompt, MIN_RUN) == []
    assert _index({"a": list(range(5000, 5040))}).match(prompt, MIN_RUN) == []


def test_repetitive_text_is_matched_without_exploding() -> None:
    """Rules of dashes, empty table cells: one token many times, in chunk and prompt."""
    chunks = {f"c{i}": [7] * 300 + list(range(100 * i, 100 * i + 50)) for i in range(1, 40)}
    index = _index(chunks, portions=5)
    prompt = [7] * 4000 + chunks["c20"] + [7] * 1000
    runs = index.match(prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    at = prompt.index(2000)
    assert any(run.start <= at < run.stop and run.key == "c20" for run in runs)


def test_large_token_ids_and_anchors_of_short_chunks() -> None:
    for length in (8, 9, 15, 16, 17):
        ids = [2**32 - 1 - i for i in range(length)]
        packed = anchors(ids)
        assert len(packed) >= 12
        assert len(packed) % 12 == 0
        assert len(gram_hashes(np.asarray(ids, np.uint32))) == length - 7
    assert anchors(list(range(7))) == b""
    assert anchors([]) == b""


def test_a_chunk_is_indexed_by_few_of_its_grams() -> None:
    rng = random.Random(0)
    ids = [rng.randrange(30000) for _ in range(5000)]
    assert len(anchors(ids)) / 12 < 5000 * 0.26  # two of nine grams, on average


def test_equal_hashes_of_different_grams_are_told_apart() -> None:
    real, other = list(range(30)), list(range(100, 130))
    index = MatchIndex()
    index.add([("a", np.asarray(other, np.uint32), anchors(real))])  # hashes say `real`, ids say `other`
    assert index.match(real, MIN_RUN) == []

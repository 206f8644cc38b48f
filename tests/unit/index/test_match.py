"""Properties of the matcher on random prompts, each checked against a brute-force definition."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrag.index import match as match_module
from kvrag.index.match import _AGAIN, _COMPARED, _EDGE, _GAP, match
from kvrag.index.segment import GRAM, WINDOW, Segment, gram_hashes, join
from kvrag.store.values import Entry
from kvrag.types import Run

MIN_RUN = 16


def _segments(chunks: dict[str, list[int]], portions: int = 1) -> list[Segment]:
    entries = [Entry(i, key, "", np.asarray(ids, np.uint32)) for i, (key, ids) in enumerate(chunks.items(), 1)]
    size = -(-len(entries) // portions) or 1
    return [Segment.of(entries[start : start + size]) for start in range(0, len(entries), size)]


def _check_runs(runs: list[Run], prompt: list[int], chunks: dict[str, list[int]], min_run: int = MIN_RUN) -> None:
    """Check the properties of every list of runs."""
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
    """Return whether the second run continues the first one's chunk after a small gap."""
    gaps = other.start - run.stop, other.offset - run.offset - len(run)
    return run.key == other.key and all(0 <= gap <= _GAP for gap in gaps)


def _covered(runs: list[Run]) -> set[int]:
    return {position for run in runs for position in range(run.start, run.stop)}


def _random_chunks(rng: random.Random, count: int, vocabulary: int = 30000) -> dict[str, list[int]]:
    return {f"c{i}": [rng.randrange(vocabulary) for _ in range(rng.randrange(16, 300))] for i in range(count)}


@pytest.mark.parametrize("seed", range(30))
def test_pasted_chunks_are_found(seed: int) -> None:
    rng = random.Random(seed)
    chunks = _random_chunks(rng, rng.randrange(1, 40))
    segments = _segments(chunks, portions=rng.randrange(1, 6))
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
    runs = match(segments, prompt, MIN_RUN)
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
    runs = match(_segments(chunks), prompt, MIN_RUN)
    assert runs == ([Run(37, 37 + length, "a", start)] if length >= MIN_RUN else [])


@pytest.mark.parametrize("seed", range(20))
def test_overlapping_chunks_and_few_tokens_in_the_vocabulary(seed: int) -> None:
    """Like chunks of a splitter with overlap; with so few tokens, grams repeat and there are many hits."""
    rng = random.Random(seed)
    vocabulary = rng.choice([2, 3, 10, 200])
    text = [rng.randrange(vocabulary) for _ in range(1500)]
    chunks = {f"c{i}": text[start : start + 120] for i, start in enumerate(range(0, 1400, 90))}
    segments = _segments(chunks, portions=3)
    prompt = [*text[300:700], vocabulary, *text[100:260], vocabulary + 1]
    runs = match(segments, prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    if vocabulary == 200:
        # greedy trimming may leave a rest shorter than a run at each of the borders
        assert len(_covered(runs)) >= 560 - MIN_RUN * len(runs)


def _escaped(rng: random.Random, chunk: list[int], every: int) -> tuple[list[int], set[int]]:
    """A chunk with one token in `every` replaced by several others, and the positions of unchanged tokens."""
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
def test_a_chunk_is_matched_across_escaped_characters(every: int) -> None:
    """In both directions from the only unchanged stretch of `MIN_RUN` tokens."""
    rng = random.Random(every)
    chunk, other = ([rng.randrange(30000) for _ in range(240)] for _ in range(2))
    before, own = _escaped(rng, chunk[:110], every)
    after, more = _escaped(rng, chunk[130:], every)
    prompt = [7, 8, *before, *chunk[110:130], *after, *other]
    end = len(before) + 20
    own |= {*range(len(before), end), *(end + position for position in more)}
    own = {2 + position for position in own} | set(range(len(prompt) - 240, len(prompt)))
    chunks = {"a": chunk, "b": other}
    runs = match(_segments(chunks), prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    assert own - _covered(runs) <= {position for position in own if position >= len(prompt) - 245 - every}
    assert len(_covered(runs)) >= len(own) - _AGAIN


def test_too_wide_a_gap_is_not_crossed_and_what_follows_a_cut_chunk_is_not_its_own() -> None:
    chunk = list(range(100))
    far = [*chunk[:40], *range(1000, 1001 + _GAP), *chunk[40:50], *range(2000, 2050)]
    near = [*chunk[:40], *range(1000, 1000 + _GAP), *chunk[40:50], *range(2000, 2050)]
    assert match(_segments({"a": chunk}), far, MIN_RUN) == [Run(0, 40, "a", 0)]
    assert match(_segments({"a": chunk}), near, MIN_RUN) == [Run(0, 40, "a", 0), Run(52, 62, "a", 40)]
    cut = [*chunk[:40], *range(1000, 1020), *chunk[90:93]]
    assert match(_segments({"a": chunk}), cut, MIN_RUN) == [Run(0, 40, "a", 0)]


def test_overlapping_runs_are_trimmed() -> None:
    text = list(range(200))
    chunks = {"middle": text[50:150], "before": text[0:80], "after": text[130:200]}
    runs = match(_segments(chunks), text, MIN_RUN)
    assert runs == [Run(0, 80, "before", 0), Run(80, 150, "middle", 30), Run(150, 200, "after", 20)]


def test_of_the_candidates_of_one_anchor_the_longest_wins() -> None:
    text = list(range(200))
    chunks = {"short": text[50:90], "long": text[40:150], "middle": text[45:120]}
    assert match(_segments(chunks, portions=3), text, MIN_RUN) == [Run(40, 150, "long", 0)]


def test_a_run_inside_another_is_cut_in_two() -> None:
    outer, inner = list(range(100)), list(range(1000, 1060))
    prompt = outer[:50] + inner + outer[50:]
    runs = match(_segments({"outer": outer, "inner": inner}), prompt, MIN_RUN)
    assert [(run.key, len(run)) for run in runs] == [("outer", 50), ("inner", 60), ("outer", 50)]


def test_the_same_chunk_twice_gives_two_runs() -> None:
    chunk = list(range(40))
    runs = match(_segments({"a": chunk}), [*chunk, 99, *chunk], MIN_RUN)
    assert runs == [Run(0, 40, "a", 0), Run(41, 81, "a", 0)]


def test_equal_chunks_under_two_keys_are_used_once() -> None:
    chunk = list(range(40))
    runs = match(_segments({"a": chunk, "b": chunk}), chunk, MIN_RUN)
    assert runs == [Run(0, 40, "a", 0)]


def test_boilerplate_in_every_chunk_hides_nothing() -> None:
    rng = random.Random(0)
    header, footer = [rng.randrange(9999) for _ in range(40)], [rng.randrange(9999) for _ in range(40)]
    chunks = {f"c{i}": [*header, *(rng.randrange(30000) for _ in range(60)), *footer] for i in range(300)}
    segments = _segments(chunks, portions=7)
    for picked in (["c0", "c299"], ["c150", "c3", "c150"], ["c299"]):
        prompt = [token for key in picked for token in chunks[key]]
        runs = match(segments, prompt, MIN_RUN)
        _check_runs(runs, prompt, chunks)
        assert len(_covered(runs)) == len(prompt)
        assert set(picked) <= {run.key for run in runs}


def test_removed_chunks_are_not_matched() -> None:
    rng = random.Random(1)
    chunks = _random_chunks(rng, 20)
    gone = set(list(chunks)[::2])
    left = np.arange(2, 21, 2)
    whole = _segments(chunks, portions=4)
    segments = [replace(segment, alive=np.isin(segment.numbers, left)) for segment in whole]
    prompt = [token for chunk in chunks.values() for token in chunk]
    for some in (segments, [join(segments)]):
        assert sum(segment.alive.sum() for segment in some) == 10
        runs = match(some, prompt, MIN_RUN)
        _check_runs(runs, prompt, chunks)
        assert {run.key for run in runs} == set(chunks) - gone


def test_the_right_one_of_ten_thousand_near_duplicates_is_found() -> None:
    """Although every gram that it shares with others has more postings than an anchor has candidates."""
    rng = random.Random(3)
    base = [rng.randrange(30000) for _ in range(200)]
    chunks = {}
    for number in range(3000):
        chunk = list(base)
        for i in range(rng.randrange(30), 200, 30):
            chunk[i] = rng.randrange(30000)
        chunks[f"c{number}"] = chunk
    segments = _segments(chunks, portions=2)
    for key in rng.sample(list(chunks), 20):
        assert match(segments, chunks[key], MIN_RUN) == [Run(0, 200, key, 0)]


@pytest.mark.parametrize("prompt", [[], [1], list(range(7)), list(range(8)), list(range(1000))])
def test_nothing_to_match(prompt: list[int]) -> None:
    assert match([], prompt, MIN_RUN) == []
    assert match([Segment.of([])], prompt, MIN_RUN) == []
    assert match(_segments({"a": list(range(5000, 5040))}), prompt, MIN_RUN) == []


def test_repetitive_text_is_matched_without_exploding() -> None:
    """Rules of dashes, empty table cells: one token many times, in chunk and prompt."""
    chunks = {f"c{i}": [7] * 300 + list(range(100 * i, 100 * i + 50)) for i in range(1, 40)}
    segments = _segments(chunks, portions=5)
    prompt = [7] * 4000 + chunks["c20"] + [7] * 1000
    runs = match(segments, prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    at = prompt.index(2000)
    assert any(run.start <= at < run.stop and run.key == "c20" for run in runs)


def test_large_token_ids_and_short_chunks() -> None:
    for length in (8, 9, 15, 16, 17):
        ids = [2**32 - 1 - i for i in range(length)]
        assert len(gram_hashes(np.asarray(ids, np.uint32))) == length - 7
        assert match(_segments({"a": ids}), [5, *ids, 5], GRAM) == [Run(1, 1 + length, "a", 0)]
    for length in (0, 7):
        assert len(Segment.of([Entry(1, "a", "", np.arange(length, dtype=np.uint32))]).postings) == 0


def test_chunks_are_indexed_by_few_of_their_grams() -> None:
    rng = random.Random(0)
    (segment,) = _segments({"random": [rng.randrange(30000) for _ in range(5000)]})
    assert len(segment.postings) < 5000 * 0.26  # two of nine grams, on average
    (segment,) = _segments({"rule": [7] * 5000})
    assert len(segment.postings) < 10


def test_equal_hashes_of_different_grams_are_distinguished() -> None:
    (segment,) = _segments({"a": list(range(30))})
    lying = replace(segment, ids=segment.ids + np.uint32(100))
    assert match([lying], list(range(30)), MIN_RUN) == []


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Texts, including periodic ones and variants of others, and a prompt of their pieces."""
    alphabet, num_texts = draw(st.sampled_from([2, 4, 30, 1000])), draw(st.integers(1, 8))
    pieces, least, most = draw(st.integers(1, 8)), draw(st.integers(1, 20)), draw(st.integers(20, 60))
    rng = random.Random(draw(st.integers(0, 2**32)))
    texts: list[list[int]] = []
    for _ in range(num_texts):
        kind = rng.random()
        if kind < 0.2:
            unit = [rng.randrange(alphabet) for _ in range(rng.randrange(1, 20))]
            texts.append((unit * 70)[: rng.randrange(GRAM, 70)])
        elif kind < 0.4 and texts:
            texts.append([rng.randrange(alphabet) if rng.random() < 0.05 else token for token in rng.choice(texts)])
        else:
            texts.append([rng.randrange(alphabet) for _ in range(rng.randrange(GRAM, 90))])
    prompt: list[int] = []
    for _ in range(pieces):
        text, length = rng.choice(texts), rng.randint(least, most)
        start = rng.randrange(max(len(text) - length, 1))
        prompt += [rng.randrange(alphabet + 1) for _ in range(rng.choice([0, 0, 1, 5]))]
        prompt += text[start : start + length]
    return texts, prompt


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(_cases(), st.sampled_from([8, 12, 15, 16, 24]), st.integers(1, 4))
def test_the_matchers_guarantees(case: tuple[list[list[int]], list[int]], min_run: int, portions: int) -> None:
    """Every run is identical, and no `min_run` tokens of a text are missed unless one of their grams is frequent."""
    texts, prompt = case
    chunks = {f"c{i}": text for i, text in enumerate(texts)}
    runs = match(_segments(chunks, portions), prompt, min_run)
    _check_runs(runs, prompt, chunks, min_run)
    if min_run < GRAM + WINDOW - 1:
        return
    covered = _covered(runs)
    grams = Counter(tuple(text[i : i + GRAM]) for text in texts for i in range(len(text) - GRAM + 1))
    stretches = {tuple(text[i : i + min_run]) for text in texts for i in range(len(text) - min_run + 1)}
    for start in range(len(prompt) - min_run + 1):
        stretch = tuple(prompt[start : start + min_run])
        if stretch not in stretches or covered & {*range(start, start + min_run)}:
            continue
        assert max(grams[stretch[i : i + GRAM]] for i in range(min_run - GRAM + 1)) > 2, (start, stretch)


@pytest.mark.parametrize("chunk", [[7] * 512, [0, 1] * 256, [i.bit_count() & 1 for i in range(512)]])
def test_the_work_is_linear_in_the_prompt_whatever_is_stored(chunk: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(*args: object) -> int:
        nonlocal compared
        compared += args[-1] == 1  # forward
        return equal(*args)

    equal = match_module._equal
    monkeypatch.setattr(match_module, "_equal", counted)
    segments = _segments({f"c{i}": chunk for i in range(1000)}, portions=3)
    for count in (1, 10):
        prompt, compared = chunk[:300] * count, 0
        runs = match(segments, prompt, MIN_RUN)
        assert sum(map(len, runs)) >= 0.99 * len(prompt)
        assert compared <= (_COMPARED + 1) * len(prompt)


def test_the_work_per_segment_depends_on_what_it_has_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 segments, a prompt that repeats itself is looked up once, and few of them are compared."""
    rng = random.Random(0)
    base = _ids(rng, 128)
    texts = {f"{i}": [rng.randrange(30000) if rng.random() < 1 / 17 else token for token in base] for i in range(10)}
    texts |= {f"other {i}": _ids(rng, 128) for i in range(190)}
    segments, looked_up, compared = _segments(texts, portions=200), list[int](), 0
    find, share = Segment.find, match_module._share_a_run

    def counted_find(segment: Segment, hashes: Any) -> Any:
        looked_up.append(len(hashes))
        return find(segment, hashes)

    def counted_share(*args: Any) -> Any:
        nonlocal compared
        compared += 1
        return share(*args)

    monkeypatch.setattr(Segment, "find", counted_find)
    monkeypatch.setattr(match_module, "_share_a_run", counted_share)
    prompt = [*texts["3"], *texts["7"]] * 20
    runs = match(segments, prompt, MIN_RUN)
    assert {run.key for run in runs} == {"3", "7"}
    assert sum(map(len, runs)) == len(prompt)
    assert max(looked_up) <= 2 * 128
    assert compared <= 10


# ---------------------------------------------------------------- texts inside of others


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(30000) for _ in range(count)]


def _glued(victim: list[int], other: list[int], rng: random.Random) -> dict[str, list[int]]:
    """Chunks of an attacker: victims' texts after the attacker's own words (HijackKV)."""
    return {
        "before": _ids(rng, 40) + victim,
        "after": victim + _ids(rng, 40),
        "both": _ids(rng, 40) + victim + _ids(rng, 40),
        "neighbours": _ids(rng, 40) + victim + [1, 2] + other,
        "longer": [*_ids(rng, 40), 1, 2, *victim, 1, 2],
        "its end": _ids(rng, 40) + victim[-60:] + [1, 2] + other[:60],
    }


@pytest.mark.parametrize("attacker_is_first", [True, False])
@pytest.mark.parametrize("portions", [1, 4])
@pytest.mark.parametrize("glue", ["before", "after", "both", "neighbours", "longer", "its end", "all"])
def test_a_text_is_not_taken_from_the_inside_of_another(glue: str, portions: int, attacker_is_first: bool) -> None:
    """Its KV there depends on words that are not in the prompt."""
    for seed in range(20):
        rng = random.Random(seed)
        victims = {"victim": _ids(rng, rng.randrange(70, 200)), "other": _ids(rng, rng.randrange(70, 200))}
        glued = _glued(victims["victim"], victims["other"], rng)
        stored = glued if glue == "all" else {glue: glued[glue]}
        stored = {**stored, **victims} if attacker_is_first else {**victims, **stored}
        prompt = [*_ids(rng, 9), 1, 2, *victims["victim"], 1, 2, *victims["other"], 1, 2, *_ids(rng, 9)]
        end = 11 + len(victims["victim"])
        runs = match(_segments(stored, portions), prompt, MIN_RUN)
        wanted = [Run(11, end, "victim", 0), Run(end + 2, end + 2 + len(victims["other"]), "other", 0)]
        if runs[0].key == "after":
            runs[0] = replace(runs[0], key="victim")  # with the same context, namely none
        assert runs == wanted


@pytest.mark.parametrize("missing", [1, 2, _EDGE])
def test_a_text_with_merged_ends_is_not_taken_from_the_inside_of_another(missing: int) -> None:
    rng = random.Random(missing)
    victim = _ids(rng, 90)
    chunks = {"glued": _ids(rng, 50) + victim + [1, 2], "victim": victim}
    prompt = [*_ids(rng, 20), *victim[missing:-1], 9, *_ids(rng, 20)]
    assert match(_segments(chunks), prompt, MIN_RUN) == [Run(20, 109 - missing, "victim", missing)]


def test_an_escaped_text_is_not_taken_from_the_inside_of_another() -> None:
    rng = random.Random(0)
    victim = _ids(rng, 120)
    chunks = {"glued": _ids(rng, 50) + victim, "victim": victim}
    prompt = [*_ids(rng, 20), *victim[:30], 7, 7, 7, *victim[31:60], 7, 7, *victim[61:], *_ids(rng, 20)]
    for stored in (chunks, dict(reversed(chunks.items()))):
        runs = match(_segments(stored), prompt, MIN_RUN)
        assert [(run.key, run.offset, len(run)) for run in runs] == [
            ("victim", 0, 30), ("victim", 31, 29), ("victim", 61, 59)
        ]  # fmt: skip


@pytest.mark.parametrize("count", [17, 300])
def test_a_text_is_not_taken_from_the_inside_of_many_others(count: int) -> None:
    """Of so many texts, an anchor's candidates are only a few, but different ones for every anchor."""
    rng = random.Random(0)
    victim = _ids(rng, 200)
    chunks = {f"glued {i}": _ids(rng, 20) + victim for i in range(count)}
    for stored in ({"victim": victim, **chunks}, {**chunks, "victim": victim}):
        runs = match(_segments(stored), [*_ids(rng, 100), *victim, *_ids(rng, 100)], MIN_RUN)
        assert runs == [Run(100, 300, "victim", 0)]


def test_a_text_covered_by_another_is_still_in_the_prompt() -> None:
    """Overlapping chunks, and an attacker's chunk that ends like the second."""
    rng = random.Random(0)
    text = _ids(rng, 300)
    chunks = {"glued": _ids(rng, 50) + text[150:] + [1, 2], "first": text[:200], "second": text[150:]}
    prompt = [*text, 1, 2, 3]
    for first in (chunks, dict(reversed(chunks.items()))):
        runs = match(_segments(first), prompt, MIN_RUN)
        assert {run.key for run in runs} == {"first", "second"}
        assert sum(map(len, runs)) == len(text)


def test_a_part_of_a_text_is_matched_inside_it_if_nothing_else_matches() -> None:
    rng = random.Random(0)
    text = _ids(rng, 400)
    assert match(_segments({"a": text}), text[100:300], MIN_RUN) == [Run(0, 200, "a", 100)]
    chunks = {"a": text[:250], "next": text[200:]}  # as a splitter with overlap makes them
    assert match(_segments(chunks), text[30:250], MIN_RUN) == [Run(0, 220, "a", 30)]


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_reuse_of_whole_texts_depends_on_the_prompt_alone(seed: int, portions: int) -> None:
    """By the brute-force definition, every token of a whole text is reused with the tokens before it as its context.

    An exception are borders: a rest shorter than a run may be the end of another text's run.
    """
    rng = random.Random(seed)
    texts = [_ids(rng, rng.randrange(20, 90)) for _ in range(4)]
    for _ in range(rng.randrange(8)):
        a, b = rng.sample(texts[:4], 2)
        texts.append(_ids(rng, rng.randrange(30)) + a[rng.randrange(9) :] + b[: rng.randrange(90)])
    rng.shuffle(texts)
    prompt: list[int] = []
    for text in rng.choices(texts, k=6):
        prompt += text[: rng.choice([len(text), rng.randrange(len(text))])] + _ids(rng, rng.choice([0, 1, 5]))
    chunks = {f"c{i}": text for i, text in enumerate(texts)}
    runs = match(_segments(chunks, portions), prompt, MIN_RUN)
    _check_runs(runs, prompt, chunks)
    whole: set[int] = set()
    for text in texts:
        for start in range(len(prompt) - len(text) + 1):
            if prompt[start : start + len(text)] == text:
                whole |= {*range(start, start + len(text))}
    for run in runs:
        begin = run.start - run.offset
        head = prompt[max(begin + _EDGE, 0) : run.start]
        if begin + _EDGE >= 0 and head == chunks[run.key][_EDGE : run.offset]:
            continue
        assert len(whole & {*range(run.start, run.stop)}) < 2 * MIN_RUN
    assert len(whole - _covered(runs)) < MIN_RUN * (len(runs) + 1)

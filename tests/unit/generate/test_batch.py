"""Answers that are decoded together: each gets the same tokens as alone, whatever happens to the others."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from blending import CHUNKS, messages

import kvrag.scheduling.waiting
from kvrag import BlendEngine, Delta, KvragError, Model, ModelError, Sampling, SettingError
from kvrag.errors import OutOfMemoryError
from kvrag.generate.decode import AHEAD, Row, _batch_of, decode

PROMPTS = [messages(*CHUNKS), messages(CHUNKS[1]), messages(*CHUNKS[:2]), [{"role": "user", "content": "Hello"}]]
LENGTHS = (5, 90, 40)

Start = Callable[..., Generator[Delta, None, None]]


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(5, 1000, (length,), generator=torch.Generator().manual_seed(length))


@pytest.fixture
def start(endless: Model) -> Start:
    """Begin an answer to a prompt of this length."""

    def begin(length: int, max_new_tokens: int = 20, **settings: Any) -> Any:
        ids, cache = ids_of(length), endless.new_cache(length + 3)
        logits = endless.forward(ids[None], cache)
        return decode(Row(endless, ids, cache, logits, Sampling(max_new_tokens, temperature=0, **settings)))

    return begin


@pytest.fixture
def alone(start: Start) -> dict[int, list[int]]:
    """The tokens of each answer alone, by the length of its prompt."""
    return {length: tokens(start(length)) for length in LENGTHS}


@pytest.fixture
def steps(endless: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each step."""
    sizes: list[int] = []
    forward_each = endless.forward_each

    def counted(given: Any, caches: Any) -> torch.Tensor:
        sizes.append(len(caches))
        return forward_each(given, caches)

    monkeypatch.setattr(endless, "forward_each", counted)
    return sizes


def tokens(deltas: Any, count: int | None = None) -> list[int]:
    """The tokens of the next `count` deltas."""
    taken = deltas if count is None else (next(deltas) for _ in range(count))
    return [token for delta in taken for token in delta.token_ids]


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run these at the same time; return their results or errors."""
    results: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            results[number] = works[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    return results


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


# ---------------------------------------------------------------- the same tokens


def test_rows_that_join_and_leave_midway_do_not_change_the_others(
    start: Start, alone: dict[int, list[int]], steps: list[int]
) -> None:
    first = start(5)
    got = tokens(first, 4)
    second, third = start(90), start(40)
    joined = tokens(second, 3)
    got += tokens(first, 5)
    late = tokens(third, 2)
    joined += tokens(second, 2)
    second.close()
    late += tokens(third)
    assert got + tokens(first) == alone[5]
    assert joined == alone[90][:5]
    assert late == alone[40]
    assert {1, 2, 3} <= set(steps)
    assert sum(steps) < 3 * 20 + AHEAD


def test_a_deterministic_answer_shares_no_step(engine: BlendEngine, endless: Model, steps: list[int]) -> None:
    options: Any = {"temperature": 0, "max_new_tokens": 12, "logprobs": 1, "ratio": 0.5, "deterministic": True}
    engine.warm(CHUNKS)
    expected = engine.generate(PROMPTS[0], **options)
    others = [engine.stream(prompt, temperature=0, max_new_tokens=60) for prompt in PROMPTS[1:]]
    for other in others:
        tokens(other, 2)  # the first needs no step
    steps.clear()
    answer = engine.generate(PROMPTS[0], **options)
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == expected.logprobs, "to the last bit"
    assert {1, len(others)} <= set(steps)
    assert len(others) + 1 not in steps
    for other in others:
        other.close()


def test_every_row_has_its_own_settings(engine: BlendEngine, endless: Model, steps: list[int]) -> None:
    engine.warm(CHUNKS)
    word = engine.generate(PROMPTS[0], max_new_tokens=12, temperature=0, ratio=1.0).text[12:18]
    each: list[Any] = [
        {"temperature": 0, "stop": (word,)},
        {"temperature": 1.3, "seed": 4, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.7, "seed": 5, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        {"temperature": 0, "frequency_penalty": 1.5, "logit_bias": {77: 9.0}, "max_new_tokens": 17},
    ]
    common: dict[str, Any] = {"max_new_tokens": 30, "ratio": 1.0}
    alone = [engine.generate(prompt, **{**common, **own}) for prompt, own in zip(PROMPTS, each, strict=True)]
    assert [answer.finish_reason for answer in alone] == ["stop", "length", "length", "length"]
    steps.clear()
    for got, wanted in zip(engine.generate_batch(PROMPTS, each, **common), alone, strict=True):
        assert (got.text, got.token_ids, got.finish_reason) == (wanted.text, wanted.token_ids, wanted.finish_reason)
        assert [known.token for known in got.logprobs] == [known.token for known in wanted.logprobs]
    assert len(alone[1].logprobs) == 30


def test_parallel_calls_share_their_steps(
    engine: BlendEngine, endless: Model, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [engine.generate(prompt, max_new_tokens=12, temperature=0, policy="full") for prompt in PROMPTS]
    steps.clear()
    counted = endless.forward_each

    def when_all_are_there(*args: Any) -> torch.Tensor:
        if not steps:
            until(lambda: len(_batch_of(endless)._rows) == 4)
        return counted(*args)

    monkeypatch.setattr(endless, "forward_each", when_all_are_there)
    answers = engine.generate_batch(PROMPTS, max_new_tokens=12, temperature=0, policy="full")
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in wanted]
    assert len(steps) <= 12
    assert 4 in steps

    async def asynchronously() -> list[Any]:
        settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "policy": "full"}
        return await asyncio.gather(*(engine.agenerate(prompt, **settings) for prompt in PROMPTS))

    steps.clear()
    assert [answer.token_ids for answer in asyncio.run(asynchronously())] == [answer.token_ids for answer in wanted]
    assert len(steps) <= 12


# ---------------------------------------------------------------- consumers


def test_a_slow_consumer_stops_no_other_and_its_answer_stays_close_behind(
    start: Start, alone: dict[int, list[int]], endless: Model
) -> None:
    slow = start(5, max_new_tokens=100)
    got = tokens(slow, 2)
    assert tokens(start(90)) == alone[90]
    assert tokens(start(40)) == alone[40]
    [row] = _batch_of(endless)._rows
    assert len(row.deltas) == AHEAD
    assert got + tokens(slow, 18) == alone[5]


def test_a_consumer_may_send_a_prompt_while_it_reads(engine: BlendEngine, endless: Model) -> None:
    wanted = engine.generate(PROMPTS[1], max_new_tokens=5, temperature=0).token_ids
    with BlendEngine(endless, engine.store, batch_bytes=0) as narrow:  # no two answers at a time
        for count, _ in enumerate(narrow.stream(PROMPTS[0], max_new_tokens=6), 1):
            if count in (1, 4):
                assert narrow.generate(PROMPTS[1], max_new_tokens=5, temperature=0).token_ids == wanted
        assert count == 6


def test_answers_beyond_the_bytes_wait_in_order(engine: BlendEngine, endless: Model, steps: list[int]) -> None:
    size = max(len(endless.tokenizer.render(prompt)) for prompt in PROMPTS) + 8
    with BlendEngine(endless, engine.store, batch_bytes=size * endless.bytes_per_token) as narrow:
        longest = [PROMPTS[0]] * 3
        answers = narrow.generate_batch(longest, max_new_tokens=8, temperature=0)
        assert len({answer.token_ids for answer in answers}) == 1
    assert set(steps) == {1}
    with pytest.raises(SettingError, match="batch_bytes"):
        BlendEngine(endless, engine.store, batch_bytes=-1)


def test_a_closed_answer_leaves_nothing_behind(start: Start, endless: Model) -> None:
    cache = endless.new_cache(8)
    gone = weakref.ref(cache.layers[0])
    deltas = decode(Row(endless, ids_of(5), cache, endless.forward(ids_of(5)[None], cache), Sampling()))
    del cache
    tokens(deltas, 3)
    assert gone() is not None
    deltas.close()
    assert gone() is None
    assert not _batch_of(endless)._rows


def test_an_answer_ends_while_another_thread_still_adds_its_last_token(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = start(5, 4), start(40)
    tokens(first, 2)  # it takes part in the steps from now on
    waiting = threading.Thread(target=lambda: tokens(first))
    ended: list[bool] = []

    def slowly(row: Row, delta: Delta) -> None:
        row.deltas.append(delta)
        if delta.finish_reason is not None and not ended:
            waiting.start()
            waiting.join(10)
            ended.append(not waiting.is_alive())
        row.is_done = delta.finish_reason is not None

    monkeypatch.setattr(Row, "_add", slowly)
    tokens(second)
    assert ended == [True]


def test_a_batch_that_is_closed_ends_its_answers(engine: BlendEngine, endless: Model) -> None:
    deltas = engine.stream_batch(PROMPTS, max_new_tokens=400)
    numbers = {next(deltas)[0] for _ in range(60)}
    assert numbers <= {0, 1, 2, 3}
    deltas.close()
    until(lambda: not _batch_of(endless)._rows and not engine._answering._admission._admitted)
    assert list(engine.stream_batch([])) == []
    with pytest.raises(SettingError, match="one dict per prompt"):
        engine.stream_batch(PROMPTS, [{}])


def test_an_engine_may_be_closed_during_a_batch(engine: BlendEngine, endless: Model) -> None:
    wanted = [engine.generate(prompt, max_new_tokens=10, temperature=0).token_ids for prompt in PROMPTS]
    streams = [engine.stream(prompt, max_new_tokens=10, temperature=0) for prompt in PROMPTS]
    got = [tokens(deltas, 2) for deltas in streams]
    engine.close()
    rest = in_threads(*(lambda deltas=deltas: tokens(deltas) for deltas in streams))
    assert [(*first, *last) for first, last in zip(got, rest, strict=True)] == wanted
    with pytest.raises(KvragError, match="closed"):
        engine.generate_batch(PROMPTS)


# ---------------------------------------------------------------- errors


def test_an_error_of_one_row_reaches_only_its_consumer(
    engine: BlendEngine, endless: Model, start: Start, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = start(5), start(90)
    got = tokens(good, 2)
    tokens(bad, 2)
    [row] = [row for row in _batch_of(endless)._rows if row.cache.get_seq_length() < 50]

    def fail(*_: Any) -> torch.Tensor:
        raise ModelError("a bad row")

    monkeypatch.setattr(row, "_process", fail)
    got += tokens(good)  # its steps compute the bad row too
    assert got == alone[90]
    with pytest.raises(ModelError, match="a bad row"):
        tokens(bad)
    assert not _batch_of(endless)._rows
    too_long = endless.tokenizer.encode("word " * 3000)
    with pytest.raises(KvragError, match="too many"):
        engine.generate_batch([PROMPTS[3], too_long], max_new_tokens=3)


def test_without_memory_the_steps_become_smaller(
    start: Start, alone: dict[int, list[int]], endless: Model, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = endless.forward_each

    def limited(given: Any, caches: Any) -> torch.Tensor:
        logits = counted(given, caches)  # it fails after some layers have been written
        if len(caches) > 1:
            raise OutOfMemoryError("memory ran out")
        return logits

    monkeypatch.setattr(endless, "forward_each", limited)
    streams = [start(length) for length in LENGTHS]
    got = [tokens(deltas, 3) for deltas in streams]
    assert [[*first, *tokens(rest)] for first, rest in zip(got, streams, strict=True)] == list(alone.values())
    assert 1 <= sum(size > 1 for size in steps) <= 3, "tried again when a row has ended, not at every step"


def test_a_row_without_memory_ends_with_the_error_and_no_other_does(
    start: Start, alone: dict[int, list[int]], endless: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_each = endless.forward_each

    def limited(given: Any, caches: Any) -> torch.Tensor:
        if any(cache.get_seq_length() > 92 for cache in caches):
            raise OutOfMemoryError("memory ran out")
        return forward_each(given, caches)

    monkeypatch.setattr(endless, "forward_each", limited)
    short, long = start(5), start(90)
    tokens(short, 2)
    with pytest.raises(OutOfMemoryError):
        tokens(long)
    assert tokens(short) == alone[5][2:]


def test_an_interrupted_step_is_computed_again(
    start: Start, alone: dict[int, list[int]], endless: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward_each, passes = endless.forward_each, iter(range(100))

    def interrupted(given: Any, caches: Any) -> torch.Tensor:
        logits = forward_each(given, caches)
        if next(passes) == 4:
            raise KeyboardInterrupt
        return logits

    first, second = start(5), start(90)
    got = tokens(first, 2) + tokens(second, 2)
    monkeypatch.setattr(endless, "forward_each", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(second)
    assert [*got[:2], *tokens(first)] == alone[5]
    assert got[2:] == alone[90][:2]


# ---------------------------------------------------------------- between the layers of a prefill


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.scheduling.waiting, "_SHARE", 0.0)


def test_a_decode_step_waits_for_one_layer_of_a_prefill_only(
    start: Start, alone: dict[int, list[int]], endless: Model, engine: BlendEngine, paused: None
) -> None:
    engine.warm(CHUNKS)
    wanted = engine.generate(PROMPTS[0], max_new_tokens=4, temperature=0, ratio=1.0).token_ids
    deltas, events = start(5), []
    got = tokens(deltas, 2)
    prefilling, seen = threading.Event(), set()

    def watch(layer: Any, *_: Any) -> None:
        if threading.current_thread().name == "prefill":
            events.append("layer")
            prefilling.set()
            if layer not in seen:
                seen.add(layer)
                until(lambda: endless.lock.is_wanted_first or len(got) == 20)

    hooks = [layer.register_forward_pre_hook(watch) for layer in endless.hf.model.layers]

    def prefill() -> Any:
        threading.current_thread().name = "prefill"
        return engine.generate(PROMPTS[0], max_new_tokens=4, temperature=0, ratio=1.0).token_ids

    def read() -> None:
        assert prefilling.wait(60)
        for delta in deltas:
            events.append("step")
            got.extend(delta.token_ids)

    try:
        answer, _ = in_threads(prefill, read)
    finally:
        for hook in hooks:
            hook.remove()
    assert answer == wanted
    assert got == alone[5]
    last = len(events) - events[::-1].index("layer")
    assert events[:last].count("step") >= 2


@pytest.fixture(autouse=True)
def _no_row_is_left(endless: Model) -> Iterator[None]:
    yield
    until(lambda: not _batch_of(endless)._rows)

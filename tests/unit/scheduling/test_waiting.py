"""The byte budget of answers in progress: who waits, and who must not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from blending import CHUNKS, messages

from kvrag import BlendEngine, Model
from kvrag.errors import AbandonedError
from kvrag.scheduling import waiting as module
from kvrag.scheduling.waiting import Admission, Idle, is_cancelled

PROMPT, OTHER = messages(*CHUNKS), messages(CHUNKS[1])
SHORT: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0}


def has_to_wait(admission: Admission, num_bytes: int, context: Context) -> bool:
    """Return whether an answer that is asked for in this context is not admitted at once."""

    def ask() -> bool:
        is_cancelled.set(lambda: True)  # ends the first wait
        try:
            with admission.admit(num_bytes):
                return False
        except AbandonedError:
            return True

    return context.run(ask)


def finish(*works: Callable[[], Any]) -> list[Any]:
    """Run these at the same time; return their results."""
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        results[number] = works[number]()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "deadlock"
    return [results[number] for number in range(len(works))]


@pytest.fixture
def never_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 3600.0)


# ---------------------------------------------------------------- rules


def test_answers_begin_while_they_fit_and_one_always_does() -> None:
    admission = Admission(10)
    with admission.admit(100):
        assert has_to_wait(admission, 0, Context())
    with admission.admit(6):
        assert has_to_wait(admission, 5, Context())
        assert not has_to_wait(admission, 4, Context())
    assert not admission.is_busy()


def test_only_the_consumer_of_a_paused_answer_need_not_wait_for_its_kv() -> None:
    admission = Admission(10)
    with admission.admit(10) as answer:
        assert has_to_wait(admission, 10, copy_context()), "it goes on by itself"
        answer.pause()
        assert not has_to_wait(admission, 10, copy_context())
        assert has_to_wait(admission, 10, Context())
        answer.is_working = True
        assert has_to_wait(admission, 10, copy_context())
        answer.pause()
    with admission.admit(10):
        assert has_to_wait(admission, 10, copy_context()), "its answer has ended"


def test_a_consumer_may_hold_an_answer_of_another_engine() -> None:
    one, other = Admission(10), Admission(10)
    with one.admit(10) as answer:
        answer.pause()
        with other.admit(10) as foreign:
            Context().run(foreign.pause)
            assert has_to_wait(other, 10, Context())
            assert not has_to_wait(other, 10, copy_context())


def test_consumers_that_each_hold_an_answer_get_another_one_after_the_other(never_polling: None) -> None:
    admission, have_one = Admission(2), threading.Barrier(2, timeout=60)
    together: list[int] = []

    def consume() -> None:
        with admission.admit(1) as first:
            first.pause()
            have_one.wait()
            with admission.admit(2):
                together.append(sum(answer.is_working for answer in admission._admitted))

    finish(consume, consume)
    assert together == [1, 1]


def test_an_answer_that_pauses_lets_the_consumer_of_a_paused_one_go_on(never_polling: None) -> None:
    admission, have_one, is_done = Admission(2), threading.Barrier(2, timeout=60), threading.Event()

    def hold() -> None:
        with admission.admit(1) as answer:
            have_one.wait()
            while not admission._waiting:
                pass
            answer.pause()
            assert is_done.wait(60)

    def ask() -> None:
        with admission.admit(1) as answer:
            answer.pause()
            have_one.wait()
            with admission.admit(2):
                is_done.set()

    finish(hold, ask)


# ---------------------------------------------------------------- consumers


@pytest.fixture
def narrow(engine: BlendEngine, endless: Model) -> Iterator[BlendEngine]:
    """An engine that has no two answers at a time."""
    with BlendEngine(endless, engine.store, batch_bytes=0) as narrow:
        yield narrow


ASKING: dict[str, Callable[[BlendEngine], object]] = {
    "generate": lambda engine: engine.generate(OTHER, **SHORT),
    "stream with a timeout": lambda engine: list(engine.stream(OTHER, **SHORT, timeout=600)),
    "batch": lambda engine: engine.generate_batch([OTHER] * 3, **SHORT),
}


@pytest.mark.parametrize("ask", ASKING)
@pytest.mark.parametrize("reading", ["plain", "with a timeout", "in another thread"])
def test_a_consumer_may_ask_while_it_reads(narrow: BlendEngine, reading: str, ask: str, never_polling: None) -> None:
    def consume() -> int:
        deltas = narrow.stream(PROMPT, **SHORT, timeout=600 if reading == "with a timeout" else None)
        if reading == "in another thread":
            finish(lambda: next(deltas))
        next(deltas)
        ASKING[ask](narrow)
        return len(list(deltas))

    [rest] = finish(consume)
    assert rest > 0
    assert not narrow._answering._admission.is_busy()


@pytest.mark.parametrize("way", ["await", "task", "tasks", "thread", "astream"])
def test_an_asynchronous_consumer_may_ask_while_it_reads(narrow: BlendEngine, way: str, never_polling: None) -> None:
    async def consume() -> int:
        count = 0
        async for _ in narrow.astream(PROMPT, **SHORT):
            count += 1
            if way == "await":
                await narrow.agenerate(OTHER, **SHORT)
            elif way == "task":
                await asyncio.create_task(narrow.agenerate(OTHER, **SHORT))
            elif way == "tasks":
                await asyncio.gather(*(narrow.agenerate(OTHER, **SHORT) for _ in range(3)))
            elif way == "thread":
                await asyncio.to_thread(narrow.generate, OTHER, **SHORT)
            else:
                assert [delta async for delta in narrow.astream(OTHER, **SHORT)]
        return count

    assert finish(lambda: asyncio.run(consume())) == [4]


def test_other_consumers_wait_until_the_kv_is_free(narrow: BlendEngine, never_polling: None) -> None:
    admission, got = narrow._answering._admission, list[object]()
    deltas = narrow.stream(PROMPT, **SHORT)
    next(deltas)
    other = threading.Thread(target=lambda: got.append(narrow.generate(OTHER, **SHORT)), daemon=True)
    other.start()
    while not admission._waiting:
        pass
    next(deltas)
    narrow.generate(OTHER, **SHORT)  # this consumer does not wait in line
    assert (len(admission._waiting), got) == (1, [])
    deltas.close()
    other.join(60)
    assert len(got) == 1


def test_idle_work_does_not_begin_at_the_end() -> None:
    def end() -> bool:  # while the work waits for answers
        idle.closed.set()
        return False

    idle, done = Idle(end, lambda: None), list[int]()
    idle.add(SimpleNamespace(is_forgotten=False), lambda: done.append(1))
    idle.wait()
    idle.close()
    assert done == []

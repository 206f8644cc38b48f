"""Learning from prompts: what becomes a chunk, and what must not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from blending import CHUNKS, messages

from kvrag import BlendEngine, FileStore, Model
from kvrag.errors import StoreError
from kvrag.listen import learn
from kvrag.listen.learn import Learner, new_texts
from kvrag.types import LearnStats

PAGE = " ".join(CHUNKS[:3])  # over 64 tokens


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0, learn=True) as engine:
        yield engine


def _learner(engine: BlendEngine) -> Learner:
    [learner] = [one for one in engine._answering.listeners if isinstance(one, Learner)]
    return learner


def _learned(engine: BlendEngine, namespace: str | None = None) -> LearnStats:
    return cast(LearnStats, engine.stats(namespace)["learned"])


def _ask(engine: BlendEngine, prompt: Any, **settings: Any) -> Any:
    report = engine.generate(prompt, max_new_tokens=1, **settings).report
    engine.wait_until_idle()
    return report


def test_a_text_of_two_prompts_is_reused_in_the_third(engine: BlendEngine) -> None:
    questions = [messages(PAGE, question=f"Question {number}: who?") for number in range(3)]
    assert [len(_ask(engine, question).runs) for question in questions] == [0, 0, 1]
    assert (_learned(engine).learned, _learned(engine).failed) == (1, 0)
    assert _learned(engine).tokens >= learn.LEAST_TOKENS
    assert engine.documents() == [], "they have no document"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (f"{PAGE}\n \n{PAGE[::-1]}\n\nWho?", [PAGE, PAGE[::-1]]),
        ([{"role": "tool", "content": f"{PAGE}\n\n{PAGE}"}], [f"{PAGE}\n\n{PAGE}"]),
        (
            [
                {"role": "user", "content": PAGE},
                {"role": "assistant", "content": PAGE},
                {"role": "user", "content": PAGE[::-1]},
            ],
            [PAGE[::-1]],
        ),
        ([{"role": "assistant", "content": None, "tool_calls": []}, {"role": "tool", "content": "short"}], []),
        ([1, 2, 3], []),
    ],
)
def test_the_new_texts_of_a_prompt(prompt: Any, texts: list[str]) -> None:
    assert list(new_texts(prompt)) == texts


def test_a_follow_up_turn_is_not_a_second_prompt(engine: BlendEngine) -> None:
    first = messages(PAGE, question="Who?")
    _ask(engine, first)
    _ask(engine, [*first, {"role": "assistant", "content": "Mira."}, {"role": "user", "content": "Why?"}])
    assert engine.store.stats().chunks == 0


def test_namespaces_learn_apart(engine: BlendEngine) -> None:
    for namespace in ("one", "two"):
        _ask(engine, messages(PAGE), namespace=namespace)
    assert engine.store.stats().chunks == 0
    _ask(engine, messages(PAGE), namespace="two")
    assert [share.namespace for share in engine.store.stats().namespaces] == ["two"]
    assert _ask(engine, messages(PAGE), namespace="one").runs == ()


def test_the_counters_of_a_namespace(engine: BlendEngine) -> None:
    for _ in range(2):
        _ask(engine, messages(PAGE), namespace="one")
    run = max(_ask(engine, messages(PAGE), namespace="one").runs, key=len)
    _ask(engine, messages(PAGE), namespace="two")
    one, two, none = (_learned(engine, namespace) for namespace in ("one", "two", ""))
    assert (one.learned, one.reused) == (1, len(run))
    assert two == LearnStats(seen=1, learned=0, tokens=0, failed=0, ignored=0, reused=0)
    assert none == LearnStats(seen=0, learned=0, tokens=0, failed=0, ignored=0, reused=0)
    assert _learned(engine) == replace(one, seen=one.seen + 1)


def test_texts_that_are_stored_or_short_are_not_learned(engine: BlendEngine) -> None:
    engine.warm([PAGE], document="a")
    for _ in range(2):
        _ask(engine, messages(PAGE, CHUNKS[3]))
    assert _learned(engine).learned == 0
    assert engine.forget("a") == 1
    assert engine.store.stats().chunks == 0


def test_a_learned_text_goes_with_the_document_that_contains_it(engine: BlendEngine) -> None:
    for _ in range(2):
        _ask(engine, messages(PAGE))
    engine.warm([PAGE], document="a")
    engine.forget("a")
    assert engine.store.stats().chunks == 0
    assert _ask(engine, messages(PAGE)).runs == ()


def test_a_text_that_a_prompt_brought_goes_with_its_document_too(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        engine.generate(messages(PAGE, CHUNKS[3]), documents=[PAGE, CHUNKS[3]], max_new_tokens=1)
        engine.warm([PAGE], document="a")
        engine.forget("a")
        assert engine.store.stats().chunks == 1, "the other one stays"
        engine.warm([CHUNKS[3]], document="b")
        assert engine.forget_learned() == 0
        assert engine.store.stats().chunks == 1


def test_a_learned_text_goes_with_a_document_that_has_only_a_part_of_it(engine: BlendEngine) -> None:
    for _ in range(2):
        _ask(engine, messages(PAGE, CHUNKS[3] * 4))
    engine.warm([CHUNKS[1]], document="a")
    assert engine.store.stats().chunks == 3
    engine.forget("a")
    assert engine.store.stats().chunks == 1, "the text without the part stays"
    assert len(_ask(engine, messages(PAGE, CHUNKS[3] * 4)).runs) == 1


@pytest.mark.parametrize("where", ["here", "another engine"])
@pytest.mark.parametrize("late", [False, True])
def test_a_text_that_was_forgotten_before_its_turn_is_not_learned(
    where: str, late: bool, engine: BlendEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is forgotten while it is being encoded."""
    _ask(engine, messages(PAGE))
    stream = engine.stream(messages(PAGE), max_new_tokens=4)
    next(stream)
    engine.warm([CHUNKS[1]], document="a")
    with BlendEngine(engine.model, FileStore(tmp_path, min_free_bytes=0)) as other:
        forgetting = {"here": engine, "another engine": other}[where]
        if late:
            put = engine.store.put

            def putting(records: Any) -> int:
                forgetting.forget("a")
                return put(records)

            monkeypatch.setattr(engine.store, "put", putting)
        else:
            forgetting.forget("a")
        list(stream)
        engine.wait_until_idle()
    assert engine.store.stats().chunks == 0


def test_learned_texts_can_be_forgotten(engine: BlendEngine) -> None:
    for _ in range(2):
        _ask(engine, messages(PAGE))
        _ask(engine, messages(PAGE[::-1]), namespace="other")
    _ask(engine, messages(PAGE[:-20]))
    assert engine.forget_learned() == 1
    assert [share.namespace for share in engine.store.stats().namespaces if share.chunks] == ["other"]
    assert _learned(engine).seen == 0


def test_learning_waits_until_no_answer_is_in_progress(engine: BlendEngine) -> None:
    _ask(engine, messages(PAGE))
    stream = engine.stream(messages(PAGE), max_new_tokens=4, temperature=0)
    next(stream)
    done = threading.Thread(target=engine.wait_until_idle)
    done.start()
    done.join(0.3)
    assert done.is_alive()
    assert engine.store.stats().chunks == 0
    list(stream)
    done.join(30)
    assert engine.store.stats().chunks == 1


def test_prompts_wait_for_an_idle_moment(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than `_WAITING`, the oldest are ignored."""
    monkeypatch.setattr(learn, "_WAITING", 2)
    stream = engine.stream(messages(PAGE), max_new_tokens=4, temperature=0)
    next(stream)
    for _ in range(2):
        engine.generate(messages(" ".join(CHUNKS[1:])), max_new_tokens=1)
    assert (_learned(engine).seen, _learned(engine).ignored) == (0, 1)
    list(stream)
    engine.wait_until_idle()
    assert (_learned(engine).learned, _learned(engine).ignored) == (1, 1)


def test_an_answer_in_progress_does_not_keep_the_program_from_ending(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ask(engine, messages(PAGE))
    stream = engine.stream(messages(PAGE), max_new_tokens=4, temperature=0)
    next(stream)
    done = engine._answering.idle._pool.submit(lambda: None)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)  # the interpreter waits for all threads
    done.result(30)
    assert engine.store.stats().chunks == 0


def test_closing_the_engine_ends_an_encoding_between_two_layers(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _ask(engine, messages(PAGE))
    layers, pause, idle = [], engine.model.lock.pause, engine._answering.idle

    def closing(suspended: Any) -> None:
        if threading.current_thread().name.startswith("kvrag-idle"):
            layers.append(1)
            idle.close()
        pause(suspended)

    monkeypatch.setattr(engine.model.lock, "pause", closing)
    engine.generate(messages(PAGE), max_new_tokens=1)
    idle._pool.shutdown()
    assert layers == [1]
    assert engine.store.stats().chunks == 0
    assert not caplog.text


def test_a_text_that_is_encoded_while_the_engine_is_closed_is_no_error(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _ask(engine, messages(PAGE))

    def put(records: Any) -> int:
        engine.close()
        raise StoreError("the store is closed")

    monkeypatch.setattr(engine.store, "put", put)
    engine.generate(messages(PAGE), max_new_tokens=1)
    engine._answering.idle._pool.shutdown()
    assert not caplog.text


def test_a_full_disk_costs_one_warning_and_no_answer(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=1 << 60), learn=True) as engine:
        caplog.clear()
        for number in range(6):
            report = _ask(engine, messages(f"{number // 2} {PAGE}"), ratio=0.3)
            assert report.prompt_tokens > 60
        assert (_learned(engine).learned, _learned(engine).failed) == (0, 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, warnings
    assert "disk" in warnings[0]


def test_memory_for_texts_seen_once_is_bounded(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "_SEEN", 3)
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0), conversation_bytes=0, learn=True) as engine:
        for number in range(9):
            _ask(engine, f"{number} {PAGE}")
        assert _learned(engine).seen == 3


def test_odd_unicode_is_learned_or_left(engine: BlendEngine) -> None:
    for _ in range(2):
        for prompt in ("\ud800 lone " * 50, "🜁\u200d" * 200):
            _learner(engine).prefilled(engine.prefill([1, 2, 3]), prompt)
    engine.wait_until_idle()
    assert _learned(engine).learned + _learned(engine).failed >= 1
    assert _ask(engine, messages(PAGE)).prompt_tokens > 60, "answers go on"


def test_without_learning_nothing_is_kept(model: Model, tmp_path: Path) -> None:
    with BlendEngine(model, FileStore(tmp_path, min_free_bytes=0)) as engine:
        for _ in range(3):
            engine.generate(messages(PAGE), max_new_tokens=1)
        assert ("learned" in engine.stats(), engine.store.stats().chunks) == (False, 0)


def test_forgetting_learned_texts_leaves_what_another_namespace_is_about_to_learn(engine: BlendEngine) -> None:
    for namespace in "ab":
        _ask(engine, messages(PAGE), namespace=namespace)
    engine.forget_learned(namespace="a")
    seen = {namespace: _learned(engine, namespace).seen for namespace in "ab"}
    assert seen == {"a": 0, "b": 1}
    for namespace in "ab":
        _ask(engine, messages(PAGE, question="What?"), namespace=namespace)
    assert [_learned(engine, namespace).learned for namespace in "ab"] == [0, 1]

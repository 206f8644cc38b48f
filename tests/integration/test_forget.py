"""Forgetting while answers are in progress: they end with their own KV, and none of it is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS, endings, messages, num_texts
from processes import COMMON, expect, start, tell

from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.control.plan import _in_full

PROMPT = messages(*CHUNKS)
OTHER: dict[str, Any] = {"max_new_tokens": 1, "policy": "full"}  # of a prompt after which no conversation is kept

FORGET = (
    COMMON
    + """
import kvrag
engine = kvrag.BlendEngine(here.fresh_model(), kvrag.FileStore({folder!r}, min_free_bytes=0))
print("ready", flush=True)
for line in sys.stdin:
    print(engine.forget(line.strip()), flush=True)
"""
)

Forget = Callable[[], object]


@pytest.fixture
def engine(endless: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(endless, FileStore(tmp_path, min_free_bytes=0), BlendConfig(controller="off")) as engine:
        engine.warm(CHUNKS, document="a")
        yield engine


@pytest.fixture(params=["this process", "another"])
def forget(request: pytest.FixtureRequest, engine: BlendEngine, tmp_path: Path) -> Iterator[Forget]:
    """Forget the chunks in this engine, or in another one whose removal this engine has noticed."""
    if request.param == "this process":
        yield lambda: engine.forget("a")
        return
    with BlendEngine(engine.model, FileStore(tmp_path, min_free_bytes=0)) as other:

        def forget() -> None:
            assert other.forget("a") == 4
            engine.generate("Something else.", **OTHER)

        yield forget


def check(engine: BlendEngine) -> None:
    """Check that nothing is kept or found."""
    assert (engine._pipeline.memory.keys(), engine._answering._conversations.keys()) == ([], set())
    assert not list(Path(engine.store.path).glob("chunks/*/*"))  # type: ignore[attr-defined]
    following = [*PROMPT, {"role": "assistant", "content": "Zel."}, {"role": "user", "content": "Why?"}]
    report = engine.generate(following, max_new_tokens=1).report
    assert (report.conversation_tokens, report.runs) == (0, ())
    assert num_texts(engine._lookup) == 0


@pytest.mark.parametrize("ends", ["complete", "abandoned"])
def test_a_stream_in_progress_leaves_no_conversation(ends: str, engine: BlendEngine, forget: Forget) -> None:
    stream = engine.stream(PROMPT, ratio=0.3, max_new_tokens=8, temperature=0)
    assert endings(engine._answering._conversations) == 0
    said = list(next(stream).token_ids)
    forget()
    if ends == "complete":
        said += [token for delta in stream for token in delta.token_ids]
        assert len(said) == 8
    stream.close()
    check(engine)


def test_the_next_turn_in_progress_leaves_none_either(engine: BlendEngine, forget: Forget) -> None:
    said = engine.generate(PROMPT, ratio=0.3, max_new_tokens=4, temperature=0).text
    following = [*PROMPT, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    stream = engine.stream(following, ratio=0.3, max_new_tokens=8)
    next(stream)
    forget()
    assert list(stream)[-1].report.conversation_tokens > 0  # type: ignore[union-attr]
    check(engine)


def test_a_prefill_in_progress_leaves_nothing(
    engine: BlendEngine, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are removed while it opens them."""
    opened = _forget_at_first(engine.store, "open", forget, monkeypatch)
    engine.generate(PROMPT, ratio=0.3, max_new_tokens=2)
    assert opened == [1]
    check(engine)


def test_a_prefill_that_fails_leaves_nothing(
    engine: BlendEngine, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = _forget_at_first(engine.store, "open", forget, monkeypatch)

    def touch(keys: Any) -> None:
        raise RuntimeError("after the pass")

    monkeypatch.setattr(engine.store, "touch", touch)
    with pytest.raises(RuntimeError, match="after the pass"):
        engine.generate(PROMPT, ratio=0.3, max_new_tokens=2)
    monkeypatch.undo()
    assert opened == [1]
    assert (engine._pipeline.memory.keys(), engine._answering._conversations.keys()) == ([], set())


def test_chunks_that_the_controller_has_recomputed_are_forgotten_too(
    engine: BlendEngine, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._planner, "_with_chunks", lambda plan, *_: _in_full(plan.config, ""))
    report = engine.generate(PROMPT, controller="auto", max_new_tokens=2).report
    assert (report.policy, report.runs, endings(engine._answering._conversations)) == ("full", (), 1)
    forget()
    check(engine)


def test_chunks_that_another_version_replaces_are_freed(engine: BlendEngine) -> None:
    stream = engine.stream(PROMPT, ratio=0.3, max_new_tokens=8)
    next(stream)
    engine.warm(["Nobody likes curry. " * 8], document="a")
    assert len(list(stream)) == 7
    assert (engine._pipeline.memory.keys(), engine._answering._conversations.keys()) == ([], set())


def test_a_prompt_waits_for_a_removal_in_progress(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts at the same time, neither continues a conversation that the other is about to free."""
    said = engine.generate(PROMPT, ratio=0.3, max_new_tokens=4, temperature=0).text
    following = [*PROMPT, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    noticing, goes_on = threading.Event(), threading.Event()
    free = engine._answering.forgetting.free

    def slow(keys: Any) -> None:
        if threading.current_thread() is thread:
            noticing.set()
            assert goes_on.wait(30)
        free(keys)

    monkeypatch.setattr(engine._answering.forgetting, "free", slow)
    thread = threading.Thread(target=lambda: engine.generate("Something else.", **OTHER))
    engine.store.remove([key for keys in engine.store.documents().values() for key in keys])
    thread.start()
    assert noticing.wait(30)
    try:
        assert engine.generate(following, max_new_tokens=1).report.conversation_tokens == 0
    finally:
        goes_on.set()
        thread.join()


def test_threads_that_answer_while_documents_come_and_go_leave_nothing(engine: BlendEngine) -> None:
    stops = threading.Event()
    errors: list[BaseException] = []

    def answer(number: int) -> None:
        try:
            while not stops.is_set():
                stream = engine.stream(messages(*CHUNKS[number:]), ratio=0.3, max_new_tokens=6)
                for _ in range(2 + number):
                    next(stream)
                if number:
                    list(stream)
                stream.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        engine.forget("a")
        engine.warm(CHUNKS, document="a")
    engine.forget("a")
    stops.set()
    for thread in threads:
        thread.join()
    assert not errors
    conversations = engine._answering._conversations
    assert engine._pipeline.memory.keys() == []
    assert not conversations.keys(), "the remaining ones were computed without a stored chunk"


def test_chunks_that_another_process_forgets_are_gone_at_the_next_prompt(engine: BlendEngine, tmp_path: Path) -> None:
    process = start(FORGET, tmp_path)
    try:
        expect(process, "ready")
        stream, left = (engine.stream(PROMPT, ratio=0.3, max_new_tokens=8) for _ in range(2))
        next(stream)
        next(left)
        tell(process, "a")
        expect(process, "4")
        engine.generate("Something else.", **OTHER)
        assert len(list(stream)) == 7
        left.close()
        check(engine)
    finally:
        process.kill()
        process.wait()


def _forget_at_first(store: Any, name: str, forget: Forget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forget after the first call of a method of the store, before its caller gets the result."""
    done, method = list[int](), getattr(store, name)

    def call(*args: Any) -> Any:
        result = method(*args)
        if not done:
            done.append(1)
            forget()
        return result

    monkeypatch.setattr(store, name, call)
    return done


def test_a_prompt_that_was_never_blended_is_forgotten_too(
    engine: BlendEngine, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where full prefill is faster, no chunk's KV is used, but the prompt's own is that of the chunk's text."""

    monkeypatch.setattr(engine._planner, "_with_chunks", lambda plan, *_: _in_full(plan.config, ""))
    report = engine.generate(PROMPT, controller="auto", max_new_tokens=2).report
    assert (report.policy, report.runs, endings(engine._answering._conversations)) == ("full", (), 1)
    forget()
    check(engine)


@pytest.mark.parametrize("moment", ["answered", "streaming", "prefilling"])
def test_a_prompt_that_was_computed_before_its_document_was_warmed_is_forgotten_too(
    moment: str, engine: BlendEngine, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV was computed without a chunk, but of the same text."""
    engine.forget("a")
    stream = engine.stream(PROMPT, ratio=0.3, max_new_tokens=8)
    if moment == "prefilling":
        method, prefill = type(engine._pipeline).prefill, engine._pipeline.prefill

        def slow(*args: Any, **more: Any) -> Any:
            done = prefill(*args, **more)
            monkeypatch.setattr(type(engine._pipeline), "prefill", method)
            engine.warm(CHUNKS, document="a")
            forget()
            return done

        monkeypatch.setattr(type(engine._pipeline), "prefill", lambda self, *args, **more: slow(*args, **more))
        assert next(stream).token_ids
    else:
        if moment == "answered":
            list(stream)
        else:
            next(stream)
        engine.warm(CHUNKS, document="a")
        forget()
    assert len(list(stream)) == (0 if moment == "answered" else 7)
    check(engine)


def test_a_text_that_a_request_in_progress_stores_is_forgotten(
    engine: BlendEngine, forget: Forget, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.forget("a")
    warm = engine._ingestion.warm

    def late(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(engine._ingestion, "warm", warm)
        engine.warm(CHUNKS, document="a")
        forget()
        return warm(*args, **more)

    monkeypatch.setattr(engine._ingestion, "warm", late)
    engine.generate(PROMPT, documents=CHUNKS, ratio=0.3, max_new_tokens=2)
    check(engine)

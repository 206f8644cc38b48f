"""Shared stores: vLLM and kvrag's own engine on one store, and a store that does not answer."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from places import Bucket, Faults
from vllm_engines import CHUNKS, QUESTION, Engine, checkpoint, prompt_of, reference, started, until
from vllm_kvrag.connector import open_store
from vllm_kvrag.params import ConnectorSettings

from kvrag import BlendEngine, Model, SharedStore
from kvrag.backend.transformers.loading import reader_path
from kvrag.errors import StoreError
from kvrag.store import shared

FACTS = [
    "Mira Brel was born in Florton. She lives in Grelville. She drives a red car and plays the harp every day.",
    "Tran Works was founded by Mira Brel. The company sells chairs. Its logo is blue. It employs Kan Dror.",
    "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology.",
    "Zel Vinford lives in Stinmouth. She studied music. She likes to eat curry and apples. She owns a snake.",
]


def store_of(engine: Engine) -> Any:
    """The store of the scheduler's side."""
    return engine.scheduler.connector._store


def await_documents(engine: Engine, *names: str) -> None:
    """Wait until vLLM sees these documents."""
    until(engine, lambda: list(store_of(engine).documents()) == list(names))


def test_one_store_serves_both_engines(s3: Bucket, tmp_path: Path) -> None:
    """The bundled reader, which answers from the chunks, in float32: the same tokens for chunks of either engine."""
    url = s3.url.replace("PLACE", "both")
    caches = tmp_path / "transformers", tmp_path / "vllm"
    model = Model.from_pretrained(str(reader_path()), dtype="float32")
    with (
        BlendEngine(model, SharedStore(url, caches[0])) as own,
        started(reader_path(), url, {"store_cache": str(caches[1])}, max_model_len=2048) as engine,
    ):

        def assert_same_answer(chunks: list[str], question: str, answer: str, tier: str) -> None:
            prompt = prompt_of(*chunks, question=f"Question: {question}")
            ids = model.tokenizer.render([{"role": "user", "content": prompt}])
            theirs = own.generate(ids, ratio=1.0, policy="query", max_new_tokens=12, temperature=0)
            full = engine.full(ids, len(theirs.token_ids)).tokens
            done = engine.ask(ids, len(theirs.token_ids), ratio=1.0, policy="query")
            assert theirs.text.strip() == answer
            assert done.tokens == full == list(theirs.token_ids)
            assert done.report is not None
            assert done.report["recomputed_tokens"] == theirs.report.recomputed_tokens > 50
            assert done.report["exact"]
            assert theirs.report.exact
            assert done.report["tier"] == tier

        own.warm(FACTS[:2], document="a")
        await_documents(engine, "a")
        assert_same_answer(FACTS[1::-1], "Where was Mira Brel born?", "Florton", "shared")
        assert engine.warm(FACTS[2:], document="b")["new"] == 2
        until(engine, lambda: own.documents() == ["a", "b"])
        assert own.warm(FACTS[2:], document="b").new == 0
        assert_same_answer(FACTS[:1:-1], "Where was Kan Dror born?", "Stelburg", "disk")

        assert [path.name for path in caches[1].iterdir()] == [own.store.path.name]  # type: ignore[attr-defined]
        own.forget("a")
        await_documents(engine, "b")
        gone = engine.ask(prompt_of(*FACTS[:2]), ratio=1.0).report
        assert gone is not None
        assert gone["reused_tokens"] == gone["conversation_tokens"] == 0


def test_a_shared_store_that_does_not_answer_stops_no_request(
    s3: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("shared.TIMEOUT_S", "objects.TIMEOUT_S", "remote.TIMEOUT_S", "shared._TRUST_S"):
        monkeypatch.setattr(f"kvrag.store.{limit}", 300.0)  # the test decides when the store is given up
    monkeypatch.setattr("kvrag.store.objects._RETRIES", 0)
    monkeypatch.setattr(shared, "_RETRY_S", 0.1)
    model, settings = checkpoint("llama", folder), {"ratio": 1.0, "policy": "query"}
    faults = Faults(s3)
    with reference(model, SharedStore(s3.url.replace("PLACE", "hang"), tmp_path / "one")) as own:
        own.warm(CHUNKS[:4], document="a")
    url = faults.url.replace("PLACE", "hang")
    with closing(faults), started(model, url, {"store_cache": str(tmp_path / "two")}) as engine:
        on_main_thread = calls_on_main_thread(engine, monkeypatch)
        here, there = prompt_of(CHUNKS[1], CHUNKS[0]), prompt_of(CHUNKS[3], CHUNKS[2])
        full = [engine.full(prompt, 4).tokens for prompt in (here, there, QUESTION)]
        assert engine.ask(prompt_of(*CHUNKS[:2]), **settings).report["tier"] == "shared"  # type: ignore[index]

        faults.mode = "hang"
        waiting = engine.submit(there, 4, {"kvrag": settings})
        until(engine, lambda: bool(engine.jobs()))
        others = engine.submit(here, 4, {"kvrag": settings}), engine.submit(QUESTION, 4)
        blended, plain = engine.wait(*others)
        assert waiting not in engine.answers
        assert blended.report is not None
        assert blended.report["tier"] == "ram"
        faults.hang_up()
        late = engine.wait(waiting)[0]
        assert late.report is not None
        assert late.report["reused_tokens"] == 0
        assert any("recomputed" in note for note in late.report["notes"])
        assert [blended.tokens, late.tokens, plain.tokens] == full
        failed = engine.ask(CHUNKS[5], mode="warm", document="b").report
        assert failed is not None
        assert failed["error"].startswith("cannot use s3://kvrag/hang")
        assert engine.ask("-", mode="documents").report == {"documents": ["a"]}

        faults.mode = "pass"
        until(engine, lambda: not engine.connector._store._is_failing)
        again = engine.ask(prompt_of(CHUNKS[2], CHUNKS[3]), **settings).report
        assert again is not None
        assert again["tier"] == "shared"
        assert on_main_thread == []


def calls_on_main_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record calls of the store, and waits for it, in the thread that schedules and runs the model."""
    seen: list[str] = []

    def watch(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def watched(*args: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                seen.append(name)
            return method(*args)

        monkeypatch.setattr(owner, name, watched)

    for store in (store_of(engine), engine.connector._store):
        for name in ("read", "look", "swap", "write", "delete", "open"):
            watch(store._remote, name)
    return seen


def test_pages_with_kv_of_a_possibly_shared_text_are_not_reused(
    s3: Bucket, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is cut off has no current record of holders: it serves no KV with context, and no old pages."""
    model, url = checkpoint("llama", folder), s3.url.replace("PLACE", "cut-off")
    with reference(model, SharedStore(url, tmp_path / "one")) as own:
        own.warm(CHUNKS[:2], document="a")
    prompt = prompt_of(*CHUNKS[:2])
    with started(model, url, {"store_cache": str(tmp_path / "two")}) as engine:
        before, again = engine.ask(prompt, ratio=0.15).report, engine.ask(prompt, ratio=0.15).report
        assert before is not None
        assert again is not None
        assert before["prompt_tokens"] - before["fresh_tokens"] > again["conversation_tokens"] > 100

        store = store_of(engine)
        pull = store._log.pull

        def fail() -> None:
            raise StoreError("cut off")

        monkeypatch.setattr(store._log, "pull", fail)
        until(engine, lambda: store._is_failing)
        store._confirmed -= 60
        cut_off = engine.ask(prompt, ratio=0.15).report
        assert cut_off is not None
        assert cut_off["conversation_tokens"] == 0
        assert 0 < cut_off["reused_tokens"] < before["reused_tokens"]  # the beginning of the document was encoded alone

        monkeypatch.setattr(store._log, "pull", pull)
        until(engine, lambda: not store._is_failing)
        assert engine.ask(prompt, ratio=0.15).report["reused_tokens"] == before["reused_tokens"]  # type: ignore[index]


def test_processes_agree_on_what_only_one_of_them_can_read(s3: Bucket, folder: Path, tmp_path: Path) -> None:
    """Two processes per model; the second one that reads a chunk from the store gets an error."""
    model, place = checkpoint("llama", folder), "parallel"
    with reference(model, SharedStore(s3.url.replace("PLACE", place), tmp_path / "one")) as own:
        own.warm(CHUNKS[:4], document="a")
    settings, cache = {"ratio": 1.0, "policy": "query"}, tmp_path / "two"
    with closing(Faults(s3)) as faults:
        faults.mode, url = "once", faults.url.replace("PLACE", place)
        with started(model, url, {"store_cache": str(cache)}, tensor_parallel_size=2) as engine:
            rounds: list[int] = []
            end = time.monotonic() + 200
            while not rounds or (rounds[-1] < 150 and time.monotonic() < end):  # both get copies afterwards
                prompt = prompt_of(f"Round {len(rounds)}.", *CHUNKS[3::-1])  # so that nothing is found in pages
                full, done = engine.full(prompt, 8), engine.ask(prompt, 8, **settings)
                assert done.report is not None
                assert done.tokens == full.tokens
                rounds.append(done.report["recomputed_tokens"])
            assert faults.refused
            assert rounds[0] == 0
            assert rounds[-1] > 150
            assert engine.warm([CHUNKS[4]], document="b")["new"] == 1
    assert len(list(cache.iterdir())) == 1


def test_a_wrong_url_stops_the_start(s3: Bucket, folder: Path, tmp_path: Path) -> None:
    model, cache = checkpoint("llama", folder), {"store_cache": str(tmp_path)}
    with (
        pytest.raises(StoreError, match="the bucket nothing does not exist: create it, or correct the URL") as caught,
        started(model, s3.url.replace("kvrag/PLACE", "nothing/x"), cache),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_wrong_credentials_stop_the_start(s3: Bucket) -> None:
    with closing(Faults(s3)) as faults:
        faults.mode = "403"
        settings = ConnectorSettings.of({"store": faults.url.replace("PLACE", "denied"), "store_cache": "x"})
        with pytest.raises(StoreError, match=r"access to .* was denied.*: check AWS_ACCESS_KEY_ID"):
            open_store(settings)

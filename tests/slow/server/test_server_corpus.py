"""The corpus of a server: documents in progress, failures."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
from blending import CHUNKS
from serving import make_corpus, serving, until

import kvrag.retrieval.index
from kvrag import BlendEngine, Model, StoreError, StoreFullError
from kvrag.cli.main import main
from kvrag.server.answers import chat_work
from kvrag.server.api_errors import ApiError
from kvrag.server.corpus import Corpus
from kvrag.server.schemas import ChatRequest
from kvrag.server.settings import ServerSettings
from kvrag.server.state import State

load_embedder = functools.cache(kvrag.retrieval.index.load_embedder)


@pytest.fixture(autouse=True)
def _embedder_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.retrieval.index, "load_embedder", load_embedder)


@pytest.fixture
def corpus(engine: BlendEngine, tmp_path: Path) -> Corpus:
    return make_corpus(engine, tmp_path / "corpus")


def test_sizes_of_the_engines_memory_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def open_engine(*_: Any, **options: Any) -> NoReturn:
        given.update(options)
        raise StoreError("seen")

    monkeypatch.setattr("kvrag.engine.BlendEngine", open_engine)
    assert main(["serve", "--port", "0", "--ram-gib", "0", "--conversation-gib", "0.5"]) == 1
    sizes = {"ram_bytes": 0, "device_bytes": None, "conversation_bytes": 1 << 29, "batch_bytes": 4 << 30}
    assert given.items() >= sizes.items()


def test_retrieved_chunks_that_do_not_fit_into_the_window_are_left_out(corpus: Corpus, engine: BlendEngine) -> None:
    corpus.add("long", [f"{number}. " + CHUNKS[number % len(CHUNKS)] for number in range(100)])
    found = corpus.index.search("Who plays the harp?", 100, 0)
    assert sum(len(engine.model.tokenizer.encode(hit.text)) for hit in found) > engine.model.context_window

    def hits(question: str) -> Any:
        asked = ChatRequest.model_validate({"model": "tiny-rag", "messages": [{"role": "user", "content": question}]})
        state = State(engine, ServerSettings(name="tiny", top_k=100), [corpus])
        work = chat_work(state, state.tenants[""], asked)()
        kept = next(work)
        next(work)  # it can be answered
        work.close()
        return kept

    kept = hits("Who plays the harp?")
    assert 1 < len(kept) < len(found)
    assert kept == found[: len(kept)]
    assert len(hits("Who plays the harp? " * 100)) < len(kept)


def test_a_question_is_retrieved_with_those_before(corpus: Corpus, engine: BlendEngine) -> None:
    for number, text in enumerate(CHUNKS):
        corpus.add(f"{number}", [text])

    def best(*questions: Any) -> str:
        messages = [{"role": "user", "content": question} for question in questions]
        asked = ChatRequest.model_validate({"model": "tiny-rag", "messages": messages})
        state = State(engine, ServerSettings(name="tiny", top_k=1), [corpus])
        work = chat_work(state, state.tenants[""], asked)()
        ((hit,), _) = next(work), work.close()
        return hit.text

    for text in CHUNKS:
        assert best(text, "And what else?") == text
        assert best([{"type": "text", "text": text}], "And what else?") == text
        assert best(text, CHUNKS[0]) == CHUNKS[0]


def test_a_document_that_is_deleted_while_it_is_encoded_does_not_come_back(
    corpus: Corpus, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go, warm = threading.Event(), threading.Event(), engine.warm

    def slow(*args: Any, **settings: Any) -> Any:
        report = warm(*args, **settings)
        reached.set()
        assert go.wait(300)
        return report

    monkeypatch.setattr(engine, "warm", slow)
    with ThreadPoolExecutor() as threads:
        adding = threads.submit(corpus.add, "a", CHUNKS[:2])
        assert reached.wait(300)
        corpus.remove("a")
        assert engine.store.stats().chunks == 0
        go.set()
        with pytest.raises(ApiError, match="deleted while it was encoded") as refused:
            adding.result()
    assert refused.value.status == 409
    with pytest.raises(ApiError, match="unknown document 'a'"):
        corpus.remove("a")
    assert (corpus.statuses(), len(corpus.index), engine.documents(), engine.store.stats().chunks) == ([], 0, [], 0)


def test_the_kv_of_a_deleted_document_is_gone_at_once(corpus: Corpus, engine: BlendEngine) -> None:
    corpus.add("a", [CHUNKS[0]])
    corpus.remove("a")
    assert engine.store.stats().chunks == 0


def test_a_document_that_fails_is_not_retrieved_and_can_be_added_again(
    corpus: Corpus, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = engine.store.put

    def full(records: Any) -> int:
        monkeypatch.setattr(engine.store, "put", put)
        raise StoreFullError("no room")

    monkeypatch.setattr(engine.store, "put", full)
    with pytest.raises(StoreFullError, match="no room"):
        corpus.add("a", [CHUNKS[0]])
    assert corpus.statuses() == []
    assert corpus.index.search("Who?", 1, 0) == []
    assert corpus.add("b", [CHUNKS[1]])["chunks"] == corpus.add("a", [CHUNKS[0]])["chunks"] == 1
    assert [status["id"] for status in corpus.statuses()] == ["a", "b"]
    corpus.add("a", [CHUNKS[2]])
    assert corpus.index.search("Who?", 9, 0)[0].text in (CHUNKS[1], CHUNKS[2])
    assert engine.store.stats().chunks == 2


def test_an_upload_whose_client_leaves_ends_and_is_continued_by_the_next(
    corpus: Corpus, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Model.forward_until

    def slow(self: Model, *args: Any, **settings: Any) -> Any:
        time.sleep(1)
        return encode(self, *args, **settings)

    monkeypatch.setattr(Model, "forward_until", slow)
    with serving(engine, corpus) as served:
        text = "\n\n".join(CHUNKS).encode()
        with pytest.raises(httpx.ReadTimeout):
            served.http.put("/v1/corpus/a.txt", content=text, timeout=0.3)
        queue = served.app.state.kvrag.encoding
        until(lambda: not queue.running(""))
        assert served.http.get("/v1/corpus").json()["total"] == 0
        monkeypatch.undo()
        assert served.http.put("/v1/corpus/a.txt", content=text).json()["status"] == "ready"
        assert served.http.get("/v1/corpus/a.txt").json()["chunks"] > 1


# -------------------------------------------------------------------- the command


@contextmanager
def started(*argv: object) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`kvrag serve` in a process of its own, and what it prints when it is ready."""
    command = [sys.executable, "-m", "kvrag.cli.main", "serve", "--port", "0", "--json", *map(str, argv)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "KVRAG_API_KEY": "one:a,two:b"}
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    command = ("--store", tmp_path / "kv", "--chunk-tokens", 40, "--served-model-name", "mine")
    body = {"model": "mine-rag", "messages": [{"role": "user", "content": "Who?"}], "stream": True, "max_tokens": 40}
    with started(*command) as (process, ready):
        with httpx.Client(base_url=ready["url"], headers={"Authorization": "Bearer b"}, timeout=300) as http:
            empty = http.post("/v1/chat/completions", json=body)
            assert (empty.status_code, empty.json()["error"]["code"]) == (400, "corpus_empty")
            assert http.put("/v1/corpus/a.txt", content=CHUNKS[0].encode()).status_code == 200
            with http.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                assert '"citations"' in next(line for line in lines if line.startswith("data: "))
                process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(300) == 0


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--concurrency", "0"], "--concurrency: must be at least 1"),
        (["--ratio", "2"], "ratio must be"),
        (["--chunk-overlap", "300"], "--chunk-tokens"),
        (["--store-gib", "0"], "--store-gib"),
        (["--store-gib", "inf"], "--store-gib"),
        (["--ram-gib", "-1"], "--ram-gib"),
        (["--batch-gib", "0"], "--batch-gib"),
        (["--max-body-mib", "nan"], "--max-body-mib"),
        (["--max-upload-mib", "-1"], "--max-upload-mib"),
        (["--shutdown-timeout", "nan"], "--shutdown-timeout"),
        (["--api-key", "a b"], "API key"),
        (["--api-key", "a", "--api-key", "b"], "--api-key NAME:KEY"),
        (["--api-key", "one:a", "--api-key", "two:a"], "two API keys are equal"),
        (["--namespace", "a\0b"], "namespace"),
        (["--host", "192.0.2.1", "--no-api-key"], "cannot listen"),
        (["--port", "99999"], "--port: must be from 0 to 65535"),
        (["--prompt-template", "/nowhere"], "/nowhere"),
        (["--prompt-template", sys.executable], "not UTF-8"),
    ],
)
def test_wrong_settings_are_reported_in_one_line(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(["serve", *argv])
    except SystemExit as end:  # 2 = wrong arguments
        code = end.code
    assert code in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("kvrag")
    assert reason in line


def test_a_port_in_use_is_reported_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "nobody/nothing"]) == 1
    assert f"kvrag: port {port} of 127.0.0.1 is in use: choose another with --port" in capsys.readouterr().err


def test_a_store_of_another_model_is_refused(
    engine: BlendEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.warm(CHUNKS)  # of the tiny llama
    assert main(["serve", "--port", "0", "--store", str(tmp_path / "kv")]) == 1
    assert "holds KV of tiny, not of reader" in capsys.readouterr().err

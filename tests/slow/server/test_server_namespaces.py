"""Two keys of one server: no request sees anything of the other key's namespace."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from blending import CHUNKS
from serving import NAME, Served, make_corpus, serving, until

import kvrag.retrieval.index
from kvrag import BlendEngine, SettingError
from kvrag.server.app import create_app
from kvrag.server.settings import ApiKey, ServerSettings

load_embedder = functools.cache(kvrag.retrieval.index.load_embedder)
QUESTION = "Who likes curry?"
KEYS = (ApiKey("key-a", "alice"), ApiKey("key-b", "bob"))

_ROLES = ("user", "assistant")


class Caller:
    """A client with a key."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def ask(self, text: str, *before: str, **changes: Any) -> Any:
        """Body of the answer to a chat whose messages alternate between user and assistant."""
        messages = [{"role": role, "content": said} for role, said in zip(cycle(_ROLES), (*before, text), strict=False)]
        body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 8, "controller": "off", **changes}
        return self.http.post("/v1/chat/completions", json=body).raise_for_status().json()

    def put(self, document: str, text: str) -> None:
        """Add a document."""
        self.http.put(f"/v1/corpus/{document}", content=text.encode()).raise_for_status()

    def documents(self) -> list[str]:
        """Ids of the documents listed."""
        return [document["id"] for document in self.http.get("/v1/corpus").json()["data"]]

    def cited(self, question: str = QUESTION) -> list[str]:
        """Texts retrieved for a question."""
        return [each["text"] for each in self.ask(question, model=f"{NAME}-rag")["citations"]]

    def metrics(self) -> dict[str, float]:
        """All metrics by name, labels included."""
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in pairs}


@pytest.fixture(autouse=True)
def _embedder_loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvrag.retrieval.index, "load_embedder", load_embedder)


@pytest.fixture
def served(engine: BlendEngine, tmp_path: Path) -> Iterator[Served]:
    corpora = [make_corpus(engine, tmp_path / key.namespace, key.namespace) for key in KEYS]
    with serving(engine, *corpora, api_keys=KEYS, concurrency=1, queue=2) as served:
        yield served


@pytest.fixture
def alice(served: Served) -> Iterator[Caller]:
    with client(served, "key-a") as caller:
        yield caller


@pytest.fixture
def bob(served: Served) -> Iterator[Caller]:
    with client(served, "key-b") as caller:
        yield caller


@contextmanager
def client(served: Served, key: str) -> Iterator[Caller]:
    with httpx.Client(base_url=served.url, timeout=300, headers={"Authorization": f"Bearer {key}"}) as http:
        yield Caller(http)


# -------------------------------------------------------------------- the corpus


def test_documents_are_listed_shown_and_deleted_in_their_own_namespace(alice: Caller, bob: Caller) -> None:
    alice.put("a.txt", CHUNKS[0])
    assert (alice.documents(), bob.documents()) == (["a.txt"], [])
    assert bob.http.get("/v1/corpus").json()["total"] == 0
    for method in ("GET", "DELETE"):
        other = bob.http.request(method, "/v1/corpus/a.txt")
        never = bob.http.request(method, "/v1/corpus/b.txt")
        assert other.status_code == never.status_code == 404
        assert other.text.replace("a.txt", "b.txt") == never.text, "nothing reveals that it exists elsewhere"
    assert alice.http.get("/v1/corpus/a.txt").json()["status"] == "ready"


def test_retrieval_finds_the_own_namespaces_chunks_only(alice: Caller, bob: Caller) -> None:
    alice.put("a.txt", CHUNKS[0])
    empty = bob.http.post(
        "/v1/chat/completions", json={"model": f"{NAME}-rag", "messages": [{"role": "user", "content": QUESTION}]}
    )
    assert empty.json()["error"]["code"] == "corpus_empty"
    bob.put("a.txt", CHUNKS[1])
    assert (alice.cited(), bob.cited()) == ([CHUNKS[0]], [CHUNKS[1]])
    assert bob.http.delete("/v1/corpus/a.txt").status_code == 200
    assert (alice.documents(), bob.documents()) == (["a.txt"], [])
    assert alice.cited() == [CHUNKS[0]]


def test_a_document_of_the_same_id_leaves_the_other_namespaces_chunks_stored(
    alice: Caller, bob: Caller, engine: BlendEngine
) -> None:
    alice.put("a.txt", CHUNKS[0])
    bob.put("a.txt", CHUNKS[1])
    bob.http.delete("/v1/corpus/a.txt").raise_for_status()
    assert engine.documents(namespace="alice") == ["a.txt"]
    assert engine.documents(namespace="bob") == []
    assert cached(alice.ask(f"{CHUNKS[0]}\n\n{QUESTION}")) > 0


# -------------------------------------------------------------------- reuse


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_chunks_are_not_reused_across_namespaces(alice: Caller, bob: Caller) -> None:
    prompt = f"{CHUNKS[0]}\n\n{QUESTION}"
    alice.ask(QUESTION, documents=[CHUNKS[0]])
    report = bob.ask(prompt)["kvrag"]
    assert (report["reused_tokens"], report["runs"], report["tier"]) == (0, [], "")
    given = bob.ask(QUESTION, documents=[CHUNKS[0]])
    own = given["kvrag"]["conversation_tokens"]  # of its own first prompt
    assert (cached(given), given["kvrag"]["runs"]) == (own, []), "as if it had never been sent"
    assert cached(bob.ask(prompt)) > 0


def test_conversations_are_not_continued_across_namespaces(alice: Caller, bob: Caller) -> None:
    question = " ".join(["Where does the river meet the old road?"] * 8)
    said = alice.ask(question)["choices"][0]["message"]["content"]
    stranger = bob.ask("And then?", question, said)["kvrag"]
    assert (stranger["conversation_tokens"], stranger["reused_tokens"]) == (0, 0)
    assert alice.ask("And then?", question, said)["kvrag"]["conversation_tokens"] > 0


# -------------------------------------------------------------------- metrics and the queue


def test_metrics_and_health_show_nothing_of_the_other_namespace(alice: Caller, bob: Caller, served: Served) -> None:
    before = bob.metrics()
    alice.put("a.txt", CHUNKS[0])
    alice.ask(QUESTION)
    assert alice.http.post("/v1/chat/completions", json={"model": NAME}).status_code == 400
    mine = alice.metrics()
    assert mine["kvrag_generation_tokens_total"] == 8
    assert {name: value for name, value in bob.metrics().items() if not name.endswith("_created")} == {
        name: value for name, value in before.items() if not name.endswith("_created")
    }
    assert not [name for name in mine if name.startswith("process_")], "all namespaces share the load of the process"
    assert served.http.get("/health").json() == {"status": "ok"}


def test_the_queue_shows_nothing_of_the_other_namespace(
    alice: Caller, bob: Caller, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, stream = threading.Event(), engine.stream

    def held(*args: Any, **settings: Any) -> Iterator[Any]:
        assert release.wait(300)
        yield from stream(*args, **settings)

    monkeypatch.setattr(engine, "stream", held)
    counts = {name: f"kvrag_num_requests_{name}" for name in ("running", "waiting")}
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(alice.ask, QUESTION) for _ in range(3)]
        until(lambda: [alice.metrics()[counts[name]] for name in counts] == [1, 2])
        assert [bob.metrics()[counts[name]] for name in counts] == [0, 0]
        body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}]}
        assert alice.http.post("/v1/chat/completions", json=body).status_code == 429
        asked.append(threads.submit(bob.ask, QUESTION))  # the other's full queue does not block it
        until(lambda: bob.metrics()[counts["waiting"]] == 1)
        assert alice.metrics()[counts["waiting"]] == 2
        release.set()
        assert all(answer.result()["choices"] for answer in asked)


# -------------------------------------------------------------------- keys


def test_a_key_names_its_namespace() -> None:
    assert ApiKey.parse("secret", "team") == ApiKey("secret", "team")
    assert ApiKey.parse("alice:se:cret", "team") == ApiKey("se:cret", "alice")
    assert ApiKey.parse(":secret") == ApiKey("secret", "")
    assert "secret" not in repr(ApiKey("secret", "alice"))
    rotated = ServerSettings(name=NAME, api_keys=(ApiKey("old", "alice"), ApiKey("new", "alice"), ApiKey("b", "bob")))
    assert rotated.namespaces == ("alice", "bob")
    assert ServerSettings(name=NAME, namespace="team").namespaces == ("team",)


def test_corpora_must_be_those_of_the_namespaces(engine: BlendEngine, tmp_path: Path) -> None:
    corpus = make_corpus(engine, tmp_path / "alice", "alice")
    with pytest.raises(SettingError, match="'alice', 'bob'"):
        create_app(engine, ServerSettings(name=NAME, api_keys=KEYS), [corpus])

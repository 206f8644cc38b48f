"""Real servers for tests: uvicorn in a thread, on a port of 127.0.0.1."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from kvrag import BlendEngine
from kvrag.retrieval import documents
from kvrag.retrieval.index import ChunkIndex
from kvrag.server.app import create_app
from kvrag.server.corpus import Corpus
from kvrag.server.run import bind, make_server, url
from kvrag.server.settings import ServerSettings

NAME = "reader"


@dataclass
class Served:
    """A server under test; `stop` is what SIGTERM would do to its process."""

    app: FastAPI
    url: str
    stop: Callable[[], None]
    http: httpx.Client = field(repr=False)

    @property
    def address(self) -> tuple[str, int]:
        """For a socket."""
        return self.http.base_url.host, self.http.base_url.port or 0

    def metric(self, name: str) -> float:
        """A number of `/metrics`."""
        for line in self.http.get("/metrics").raise_for_status().text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"there is no {name}")

    def running(self) -> tuple[int, int]:
        """Running and waiting requests."""
        health = self.http.get("/health").json()
        return health["running"], health["waiting"]

    def ask(self, text: str, **changes: Any) -> httpx.Response:
        """One chat request."""
        messages = [{"role": "user", "content": text}]
        body = {"model": NAME, "messages": messages, "temperature": 0, "max_tokens": 12, **changes}
        return self.http.post("/v1/chat/completions", json=body)


def until(claim: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait until the condition is true."""
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def make_corpus(engine: BlendEngine, folder: Path, namespace: str = "") -> Corpus:
    """As in `kvrag serve`, with chunks of 40 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    encode = engine.model.tokenizer.encode
    split = documents.splitter(lambda text: len(encode(text)), 40, 0)
    return Corpus(engine, ChunkIndex(folder / "index.sqlite"), split, namespace)


@contextmanager
def serving(engine: BlendEngine, *corpora: Corpus, key: str = "", **settings: Any) -> Iterator[Served]:
    """A server, until the context ends."""
    app = create_app(engine, ServerSettings(name=NAME, **settings), corpora)
    taken = bind("127.0.0.1", 0)
    server = make_server(app, 600)
    place = url(taken)
    thread = threading.Thread(target=server.run, args=([taken],))
    thread.start()

    def stop() -> None:
        server.should_exit = True

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=place, timeout=300, headers=headers) as http:
        until(lambda: server.started)
        try:
            yield Served(app, place, stop, http)
        finally:
            stop()
            thread.join()

"""Fixtures of the frameworks' packages: the small reader on a store of its own, offline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from defaults import is_sure, learning, not_by_the_clock, pytest_collection_finish  # noqa: F401
from serving import Served, serving

from kvrag import BlendConfig, BlendEngine, FileStore, Model
from kvrag.answer import Answering


@pytest.fixture(scope="session", autouse=True)
def model() -> Model:
    """Stays loaded between tests."""
    return Model.from_pretrained("reader", dtype="float32")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    # float32: blending in full must not meet a tie of two tokens
    return {"model": "reader", "store": tmp_path, "dtype": "float32", "temperature": 0, "max_tokens": 16}


@pytest.fixture
def endless(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers end at max_tokens only, so that there is something to compare."""
    monkeypatch.setitem(vars(model), "eos_ids", frozenset())


@pytest.fixture
def thinking(endless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is a thought between two marks without text, and a name."""
    inner = Answering.stream
    said = [*(("", part) for part in ("", "Who ", "eats ", "it?", "")), ("Zel ", ""), ("Vinford.", "")]

    def stream(*args: Any) -> Any:
        for (text, thought), delta in zip(said + [("", "")] * 9, inner(*args), strict=True):
            yield replace(delta, text=text, reasoning=thought, reasoning_tokens=1 if thought else 0)

    monkeypatch.setattr(Answering, "stream", stream)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per forward pass."""
    passes: list[int] = []
    forward, step = Model._forward, Model.forward_each

    def counting(self: Model, ids: Any, *args: Any, **options: Any) -> Any:
        passes.append(ids.shape[1])
        return forward(self, ids, *args, **options)

    def counting_steps(self: Model, tokens: Any, *args: Any) -> Any:
        passes.append(1)
        return step(self, tokens, *args)

    monkeypatch.setattr(Model, "_forward", counting)
    monkeypatch.setattr(Model, "forward_each", counting_steps)
    return passes


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry per ended answer of an engine, successful or not."""
    endings: list[str] = []
    inner = Answering.stream

    def watched(*args: Any) -> Any:
        try:
            yield from inner(*args)
        finally:
            endings.append("closed")

    monkeypatch.setattr(Answering, "stream", watched)
    return endings


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per loaded model."""
    models: list[Any] = []
    from_pretrained = BlendEngine.from_pretrained

    def counting(*args: Any, **kwargs: Any) -> BlendEngine:
        models.append(args)
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(BlendEngine, "from_pretrained", counting)
    return models


@pytest.fixture
async def loop_ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the event loop ran while the model was loaded, and during each forward pass."""
    loop = asyncio.get_running_loop()
    ran: list[bool] = []

    def after_the_loop_has_run(function: Any) -> Any:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            runs = threading.Event()
            loop.call_soon_threadsafe(runs.set)
            ran.append(runs.wait(60))
            return function(*args, **kwargs)

        return waiting

    monkeypatch.setattr(BlendEngine, "from_pretrained", after_the_loop_has_run(BlendEngine.from_pretrained))
    monkeypatch.setattr(Model, "forward", after_the_loop_has_run(Model.forward))
    return ran


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The engine's methods and the namespaces they were called with."""
    calls: list[tuple[str, str]] = []

    def watched(name: str) -> Any:
        inner = getattr(BlendEngine, name)

        def call(self: BlendEngine, *args: Any, **settings: Any) -> Any:
            calls.append((name, settings.get("namespace", "")))
            return inner(self, *args, **settings)

        return call

    for name in ("warm", "forget", "documents", "stream", "explain"):
        monkeypatch.setattr(BlendEngine, name, watched(name))
    return calls


def kept(engine: BlendEngine) -> list[str]:
    """The texts whose KV is stored, sorted."""
    return sorted(engine.model.tokenizer.decode(entry.ids.tolist()) for entry in engine.store.entries(0))


def merged(pieces: list[Any]) -> Any:
    """Return the sum of the pieces of a stream."""
    return sum(pieces[1:], start=pieces[0])


# ---------------------------------------------------------------- a server, and an engine to compare it with

TIMES = ("match_s", "load_s", "load_stall_s", "stitch_s", "select_s", "blend_s", "ttft_s", "tier", "bytes_loaded")
"""Fields of a report that differ between a server and a local engine."""


@pytest.fixture
def here(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(model, FileStore(tmp_path / "here", min_free_bytes=0), BlendConfig(controller="off")) as engine:
        yield engine


@pytest.fixture
def there(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """The server's engine."""
    with BlendEngine(model, FileStore(tmp_path / "there", min_free_bytes=0), BlendConfig(controller="off")) as engine:
        yield engine


@pytest.fixture
def served(there: BlendEngine) -> Iterator[Served]:
    with serving(there) as served:
        yield served

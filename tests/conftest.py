"""Everything offline and on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch
from blending import CHUNKS, LayOut, laying_out
from defaults import is_measured, not_by_the_clock  # noqa: F401
from families import build
from places import Bucket, Memory, Server, run_s3, run_valkey
from transformers import AutoTokenizer

import kvrag
from kvrag import BlendEngine, FileStore, Model

ROOT = Path(__file__).parents[1]
SLOW = {ROOT / "tests" / "slow", ROOT / "benchmarks"}

torch.set_num_threads(1)  # the models are too small for more, and threads that wait for each other cost seconds


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the tests of that folder, those that need a server, and those of the benchmarks."""
    for item in items:
        if SLOW & set(item.path.parents) or {"s3", "valkey"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """A bucket that needs no server."""
    memory = Memory()
    monkeypatch.setattr("kvrag.store.objects.S3Store", memory)
    return memory


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """An S3 server of this session's own."""
    with run_s3() as bucket:
        yield bucket


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    """A Valkey server of this session's own."""
    with run_valkey() as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The bundled reader's."""
    return AutoTokenizer.from_pretrained(Path(kvrag.__file__).parent / "reader")


@pytest.fixture(scope="session")
def hf() -> Any:
    """A tiny random llama."""
    return build("llama", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def model(hf: Any, tokenizer: Any) -> Model:
    """The tiny llama, ready to blend."""
    return Model(hf, tokenizer, "tiny")


@pytest.fixture
def endless(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The tiny llama without an end token, so that answers have the requested length."""
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())
    return model


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    """On a store of its own, nothing warmed."""
    with BlendEngine(model, FileStore(tmp_path / "kv", min_free_bytes=0)) as engine:
        yield engine


@pytest.fixture
def lay_out(engine: BlendEngine) -> Iterator[LayOut]:
    """Of CHUNKS, which are warmed."""
    engine.warm(CHUNKS)
    with laying_out(engine) as lay_out:
        yield lay_out


@pytest.fixture
def forbid(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Deny access to a file, or to all in a folder: tests may run as root, whom permissions do not stop."""
    forbidden: dict[str, bool] = {}  # with whether it is a folder

    def denying(call: Callable[..., Any], is_listing: bool) -> Callable[..., Any]:
        def checked(path: Any, *args: Any, **kwargs: Any) -> Any:
            itself = forbidden.get(str(path))
            if itself is False or (itself and is_listing) or any(str(path).startswith(f"{one}/") for one in forbidden):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *args, **kwargs)

        return checked

    for name in ("scandir", "listdir", "stat", "lstat"):
        monkeypatch.setattr(os, name, denying(getattr(os, name), name in ("scandir", "listdir")))
    return lambda path: forbidden.update({str(path): path.is_dir()})

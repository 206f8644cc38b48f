"""Fixtures of tests on a tiny random model: `from tiny import *` in a conftest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import build
from processes import GGUF
from transformers import AutoTokenizer

from kvrag import BlendEngine, FileStore, Model
from kvrag.backend.transformers.loading import reader_path


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The bundled reader's."""
    return AutoTokenizer.from_pretrained(reader_path())


@pytest.fixture(scope="session")
def hf() -> Any:
    """A tiny random llama."""
    return build("llama", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def model(hf: Any, tokenizer: Any) -> Model:
    """The tiny llama, ready to blend; or the GGUF file that the environment names, in llama.cpp."""
    path = os.environ.get(GGUF)
    return Model.from_pretrained(path) if path else Model(hf, tokenizer, "tiny")


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

"""A tiny random model, offline and on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from defaults import not_by_the_clock  # noqa: F401
from families import build
from transformers import AutoTokenizer

from kvrag import BlendEngine, FileStore, Model
from kvrag.backend.transformers.loading import reader_path

torch.set_num_threads(1)  # the models are too small for more


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(reader_path())


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Model:
    return Model(build("llama", max_position_embeddings=2048), tokenizer, "tiny")


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(model, FileStore(tmp_path / "kv", min_free_bytes=0)) as engine:
        yield engine


@pytest.fixture
def endless(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers have the requested length."""
    monkeypatch.setitem(model.__dict__, "eos_ids", frozenset())

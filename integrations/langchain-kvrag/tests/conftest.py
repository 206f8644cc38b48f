"""The fixtures of both frameworks, and one object of each class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blending import CHUNKS
from frameworks import *  # noqa: F403
from langchain_kvrag import BlendLLM, ChatBlend

from kvrag import BlendEngine, Model


@pytest.fixture
def chunks() -> list[str]:
    return list(CHUNKS)


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[BlendEngine]:
    with BlendEngine(model, tmp_path / "kv") as engine:
        yield engine


@pytest.fixture
def chat(settings: dict[str, Any]) -> ChatBlend:
    return ChatBlend(**settings)


@pytest.fixture
def llm(settings: dict[str, Any]) -> BlendLLM:
    return BlendLLM(**settings)

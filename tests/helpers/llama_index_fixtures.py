"""Fixtures of LlamaIndex's packages: those of both frameworks, and an LLM."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import *  # noqa: F403
from llama_index.llms.kvrag import BlendLLM


@pytest.fixture
def llm(settings: dict[str, Any]) -> BlendLLM:
    return BlendLLM(**settings)

"""The fixtures of both frameworks, and texts about invented people."""

from __future__ import annotations

from typing import Any

import pytest
from frameworks import *  # noqa: F403
from langchain_kvrag import BlendLLM, ChatBlend

CHUNKS = [
    "Mira Brel was born in Florton. She lives in Grelville. She drives a red car and plays the harp every day.",
    "Tran Works was founded by Mira Brel. The company sells chairs. Its logo is blue. It employs Kan Dror.",
    "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology.",
    "Zel Vinford lives in Stinmouth. She studied music. She likes to eat curry and apples. She owns a snake.",
]


@pytest.fixture
def chunks() -> list[str]:
    return list(CHUNKS)


@pytest.fixture
def chat(settings: dict[str, Any]) -> ChatBlend:
    return ChatBlend(**settings)


@pytest.fixture
def llm(settings: dict[str, Any]) -> BlendLLM:
    return BlendLLM(**settings)

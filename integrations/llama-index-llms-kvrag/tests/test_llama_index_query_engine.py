"""Typical query engines, with only the model replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from llama_index.core import MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.schema import MetadataMode, TextNode
from llama_index.llms.kvrag import BlendLLM

import kvrag

pytestmark = pytest.mark.usefixtures("endless")

QUESTION = "Who likes curry?"
TEXTS = [
    "Mira Brel was born in Florton. She lives in Grelville. She drives a red car and plays the harp every day.",
    "Tran Works was founded by Mira Brel. The company sells chairs. Its logo is blue. It employs Kan Dror.",
    "Kan Dror was born in Stelburg. He plays the banjo. He owns a goat and a cat. He studied geology.",
]


@pytest.fixture
def nodes() -> list[TextNode]:
    return [TextNode(text=text, metadata={"file_path": f"/data/{n}.txt"}, id_=str(n)) for n, text in enumerate(TEXTS)]


def query_engine(llm: BlendLLM, nodes: list[TextNode], **settings: Any) -> Any:
    index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
    return index.as_query_engine(llm=llm, similarity_top_k=3, response_mode="compact", **settings)


class LastRaw(TokenCountingHandler):
    """Keeps the `raw` of the last response."""

    raw: Any = None

    def on_event_end(self, event_type: Any, payload: Any = None, event_id: str = "", **kwargs: Any) -> None:
        super().on_event_end(event_type, payload, event_id, **kwargs)
        if "response" in (payload or {}) and hasattr(payload["response"], "raw"):
            self.raw = payload["response"].raw


async def test_all_ways_to_query_give_the_same_answer(llm: BlendLLM, nodes: list[TextNode]) -> None:
    llm.warm(node.get_content(MetadataMode.LLM) for node in nodes)
    answer = str(query_engine(llm, nodes).query(QUESTION))
    assert answer
    pieces = list(query_engine(llm, nodes, streaming=True).query(QUESTION).response_gen)
    assert len(pieces) > 3
    assert "".join(pieces) == answer
    assert str(await query_engine(llm, nodes).aquery(QUESTION)) == answer


def test_recomputing_everything_gives_full_prefills_answer(settings: dict[str, Any], nodes: list[TextNode]) -> None:
    blended, full = BlendLLM(**settings, ratio=1.0), BlendLLM(**settings, policy="full")
    blended.warm(node.get_content(MetadataMode.LLM) for node in nodes)
    answer = str(query_engine(blended, nodes).query(QUESTION))
    assert answer == str(query_engine(full, nodes).query(QUESTION)) != "Empty Response"


@pytest.mark.parametrize("streaming", [False, True])
def test_retrieved_nodes_are_found_in_the_prompt_and_counted(
    llm: BlendLLM, nodes: list[TextNode], streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = LastRaw(tokenizer=lambda text: [])
    monkeypatch.setattr(Settings, "_callback_manager", CallbackManager([seen]))
    contents = [node.get_content(MetadataMode.LLM) for node in nodes]
    llm.warm(contents)
    str(query_engine(llm, nodes, streaming=streaming).query(QUESTION))
    usage, report = seen.raw["usage"], seen.raw["kvrag"]
    num_chunk_tokens = sum(len(llm.encode(content)) for content in contents)
    assert report["reused_tokens"] >= 0.95 * num_chunk_tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == report["reused_tokens"]
    assert seen.prompt_llm_token_count == usage["prompt_tokens"] == report["prompt_tokens"]
    assert seen.completion_llm_token_count == usage["completion_tokens"] == 16


def test_as_the_default_llm_with_its_own_tokenizer(
    llm: BlendLLM, nodes: list[TextNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "_llm", None)
    monkeypatch.setattr(Settings, "_tokenizer", None)
    monkeypatch.setattr(Settings, "_prompt_helper", None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    Settings.llm, Settings.tokenizer = llm, llm.encode
    long = [TextNode(text=text + " internationalization" * 150) for text in TEXTS]
    index = VectorStoreIndex(long, embed_model=MockEmbedding(embed_dim=4))
    # more than the window: LlamaIndex splits it into calls that each fit, which takes the right window and tokenizer
    answer = str(index.as_query_engine(similarity_top_k=3).query(QUESTION))
    assert answer
    assert answer != "Empty Response"  # its result for an LLM's ValueError


def test_the_example_in_the_docs_runs(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docs = (Path(kvrag.__file__).parents[1] / "docs" / "llama_index.md").read_text()
    code = docs.split("```python\n")[1].split("```")[0]
    assert len(code.strip().splitlines()) <= 17
    here = {
        "Qwen/Qwen2.5-1.5B-Instruct": str(tiny),
        "kv/": str(tmp_path / "kv"),
        "docs/": str(tmp_path / "docs"),
        "from llama_index.embeddings.huggingface import HuggingFaceEmbedding": "",
        'HuggingFaceEmbedding("BAAI/bge-small-en-v1.5")': "MockEmbedding(embed_dim=4)",
    }
    for theirs, ours in here.items():
        assert theirs in code
        code = code.replace(theirs, ours)
    (tmp_path / "docs").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    for name in ("_llm", "_tokenizer", "_prompt_helper", "_embed_model"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    names: dict[str, Any] = {"MockEmbedding": MockEmbedding}
    exec(code, names)
    assert names["llm"]._open().store.stats().chunks == len(TEXTS)

"""The example in the docs, with only the model replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_index.core
import pytest
from blending import CHUNKS
from llama_index.core import MockEmbedding, Settings

import kvrag

pytestmark = pytest.mark.usefixtures("endless")

QUESTION = "Who likes curry?"


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
    for number, text in enumerate(CHUNKS):
        (tmp_path / "docs" / f"{number}.txt").write_text(text)
    for name in ("_llm", "_tokenizer", "_prompt_helper", "_embed_model"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)
    names: dict[str, Any] = {"MockEmbedding": MockEmbedding}
    exec(code, names)
    assert names["llm"]._open().store.stats().chunks == len(CHUNKS)

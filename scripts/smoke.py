"""Smoke tests after `pip install`. Run by release.py outside the repository, with the expected version."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from typing import Any

import langchain_kvrag
import llama_index.llms.kvrag
import llama_index.vector_stores.kvrag
import ray_kvrag
from fastapi.testclient import TestClient
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_kvrag import ChatBlend
from llama_index.core import MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.kvrag import BlendLLM
from llama_index.vector_stores.kvrag import KVWarmVectorStore

import kvrag
from kvrag import BlendConfig, BlendEngine
from kvrag.server.app import create_app
from kvrag.server.settings import ServerSettings

ARTICLES = (
    "By all accounts, Finlon chose a yellow star as its sign. As it happens, the company has bought a green boat. "
    "As it happens, the company can be found in Grimvik.",
    "As it happens, Jomouth sells dried bread on its market. By all accounts, the town gets its water from the Rosuva. "
    "The town became a town in 1957.",
)

PACKAGES = {
    "kvrag": kvrag,
    "langchain-kvrag": langchain_kvrag,
    "llama-index-llms-kvrag": llama_index.llms.kvrag,
    "llama-index-vector-stores-kvrag": llama_index.vector_stores.kvrag,
    "ray-kvrag": ray_kvrag,
}


def packages(version: str) -> None:
    """Check that the packages are installed, typed, licensed and have the same version."""
    for name, module in PACKAGES.items():
        assert module.__file__ is not None
        assert Path(module.__file__).is_relative_to(sys.prefix), module.__file__
        assert (files(module) / "py.typed").is_file(), name
        installed = distribution(name)
        assert installed.version == version, (name, installed.version)
        assert any(file.name == "LICENSE" for file in installed.files or ()), f"{name} has no licence"


def command_line() -> list[str]:
    """Warm, ask and inspect; return the retrieved chunks."""
    folder = Path("articles")
    folder.mkdir()
    for number, text in enumerate(ARTICLES):
        (folder / f"{number}.txt").write_text(text, "utf-8")
    assert command("warm", "articles", "--store", "demo")["new"] == len(ARTICLES)
    answer = command("ask", "Which company has its offices in Grimvik?", "--store", "demo", "--policy", "none")
    assert answer["report"]["reused_tokens"] > 0
    assert command("store", "check", "--store", "demo")["damaged"] == 0
    assert command("verify", "--dtype", "float32", "--chunk-tokens", "32")["passed"]
    return [hit["text"] for hit in answer["context"]]


def command(*arguments: str) -> dict[str, Any]:
    """Run the installed `kvrag` with --json."""
    program = str(Path(sys.executable).with_name("kvrag"))
    process = subprocess.run([program, *arguments, "--json"], capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"kvrag {' '.join(arguments)}: {process.stderr}"
    return json.loads(process.stdout)


def langchain(chunks: list[str]) -> None:
    """Check that a chain answers from warmed chunks, and streams the same answer."""
    llm = ChatBlend(model="reader", store="langchain", max_tokens=32, temperature=0, policy="query")
    llm.warm(chunks)
    chain = ChatPromptTemplate.from_messages([("human", "{context}\n\n{question}")]) | llm
    inputs = {"context": "\n\n".join(chunks), "question": "Question: Who?"}
    message = chain.invoke(inputs)
    assert message.response_metadata["kvrag"]["recomputed_tokens"] > 0
    assert message.usage_metadata["input_token_details"]["cache_read"] > 0
    assert "".join((chain | StrOutputParser()).stream(inputs)) == message.text
    schema = {"title": "answer", "type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    assert set(llm.with_structured_output(schema).invoke("Who?")) == {"sure"}


def llama(chunks: list[str]) -> None:
    """Check that a query engine answers from nodes that were encoded when added."""
    llm = BlendLLM(model="reader", store="llama", max_tokens=8, temperature=0, policy="query")
    context = StorageContext.from_defaults(vector_store=KVWarmVectorStore(SimpleVectorStore(), llm))
    nodes = [TextNode(text=chunk) for chunk in chunks]
    index = VectorStoreIndex(nodes, storage_context=context, embed_model=MockEmbedding(embed_dim=8))
    assert len(index.as_query_engine(llm=llm, similarity_top_k=2).query("Who?").source_nodes) == 2
    prompt = "\n\n".join([*chunks, "Question: Who?"])
    response = llm.complete(prompt)
    assert response.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert "".join(piece.delta or "" for piece in llm.stream_complete(prompt)) == response.text


def server(chunks: list[str]) -> None:
    """Check that the OpenAI-compatible server answers from chunks that the command line warmed."""
    body = {
        "model": "reader",
        "messages": [{"role": "user", "content": "\n\n".join([*chunks, "Who?"])}],
        "max_tokens": 4,
    }
    with (
        BlendEngine.from_pretrained("reader", store="demo", config=BlendConfig(controller="off")) as engine,
        TestClient(create_app(engine, ServerSettings(name="reader")), base_url="http://127.0.0.1") as client,
    ):
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


if __name__ == "__main__":
    packages(sys.argv[1])
    chunks = command_line()
    langchain(chunks)
    llama(chunks)
    server(chunks)
    print("the installed command line, LangChain, LlamaIndex, server and plugins work")

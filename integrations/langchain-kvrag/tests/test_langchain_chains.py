"""Typical chains, with only the model replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import BlendLLM, ChatBlend

pytestmark = pytest.mark.usefixtures("endless")

TEMPLATE = "Use this context.\n\n{context}\n\nQuestion: {question}"
QUESTIONS = ["Who likes curry?", "Where was Kan Dror born?"]


def format_docs(docs: list[Document]) -> str:
    return "\n\n".join(doc.page_content for doc in docs)


def chain(llm: Any, chunks: list[str], k: int = 3) -> Runnable[str, str]:
    store = InMemoryVectorStore.from_texts(chunks, DeterministicFakeEmbedding(size=16))
    retriever = store.as_retriever(search_kwargs={"k": k})
    prompt: Any = ChatPromptTemplate.from_messages([("system", "You are brief."), ("human", TEMPLATE)])
    if isinstance(llm, BlendLLM):
        prompt = PromptTemplate.from_template(TEMPLATE)
    return (
        {"context": retriever | format_docs, "question": RunnablePassthrough()}
        | prompt
        | llm
        | StrOutputParser()
    )  # fmt: skip


@pytest.fixture(params=[ChatBlend, BlendLLM])
def either(request: pytest.FixtureRequest, settings: dict[str, Any]) -> Any:
    return request.param(**settings)


async def test_all_ways_to_run_a_chain_give_the_same_answer(either: Any, chunks: list[str]) -> None:
    either.warm(chunks)
    rag = chain(either, chunks)
    answers = [rag.invoke(question) for question in QUESTIONS]
    assert len(set(answers)) == 2
    assert all(answers)
    pieces = list(rag.stream(QUESTIONS[0]))
    assert len(pieces) > 3
    assert "".join(pieces) == answers[0]
    assert rag.batch(QUESTIONS) == answers
    assert await rag.ainvoke(QUESTIONS[1]) == answers[1]
    assert await rag.abatch(QUESTIONS) == answers
    assert "".join([piece async for piece in rag.astream(QUESTIONS[0])]) == answers[0]


def test_recomputing_everything_gives_full_prefills_answer(either: Any, chunks: list[str]) -> None:
    either.warm(chunks)
    blended, full = either.bind(ratio=1.0), either.bind(policy="full")
    for question in QUESTIONS:
        assert chain(blended, chunks).invoke(question) == chain(full, chunks).invoke(question)


def test_retrieved_chunks_are_found_in_the_prompt(either: Any, chunks: list[str]) -> None:
    class Report(BaseCallbackHandler):
        def on_llm_end(self, response: LLMResult, **_: Any) -> None:
            generation = response.generations[0][0]
            message = getattr(generation, "message", None)
            self.report = (message.response_metadata if message else generation.generation_info or {})["kvrag"]

    either.warm(chunks)
    seen = Report()
    list(chain(either, chunks, k=4).stream(QUESTIONS[0], {"callbacks": [seen]}))
    num_chunk_tokens = sum(either.get_num_tokens(chunk) for chunk in chunks)
    assert seen.report["reused_tokens"] >= 0.95 * num_chunk_tokens
    assert json.loads(json.dumps(seen.report)) == seen.report


def test_chunks_that_one_object_warms_serve_the_others(chat: ChatBlend, llm: BlendLLM, chunks: list[str]) -> None:
    llm.warm(chunks[:1])
    message = chat.invoke(f"{chunks[0]}\n\nWho?")
    assert message.response_metadata["kvrag"]["reused_tokens"] > 16

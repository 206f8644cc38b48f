"""Typical applications of chat models, with only the model replaced.

With everything recomputed, each gives full prefill's answers, and its chunks are found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, SummarizationMiddleware, dynamic_prompt, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import MultiQueryRetriever
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_kvrag import ChatBlend
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel, Field

from kvrag import BlendEngine, Model

QUESTION = "Who likes curry?"
CONTEXT = ChatPromptTemplate.from_messages([("system", "Use this context.\n\n{context}"), ("human", "{input}")])
HISTORY = [HumanMessage("Who lives in Stinmouth?"), AIMessage("Zel Vinford.")]


class Heard(BaseCallbackHandler):
    """Messages and prompts of the model in one run of an application, and the reports."""

    def __init__(self) -> None:
        self.prompts: list[list[Any]] = []
        self.said: list[Any] = []
        self.reports: list[dict[str, Any]] = []

    def on_chat_model_start(self, _: Any, messages: list[list[Any]], **__: Any) -> None:
        self.prompts.append(messages[0])

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        message = response.generations[0][0].message  # type: ignore[union-attr]
        self.said.append((message.content, [(call["name"], call["args"]) for call in message.tool_calls]))
        self.reports.append(message.response_metadata["kvrag"])


@pytest.fixture(scope="module")
def documents() -> list[str]:
    """Three of about 150 tokens, so that few tokens are lost at their ends."""
    people = {"Mira Brel": "Florton", "Kan Dror": "Stelburg", "Zel Vinford": "Stinmouth"}
    return [
        f"{name} was born in {town}. {name} plays the banjo and the harp. In {town} there is a harbour, a museum and "
        f"two schools. The mayor of {town} is Tran Hol, who sells chairs. {name} studied geology and music, likes "
        f"to eat curry and apples, owns a goat and a snake, and drives a red car to {town} every day."
        for name, town in people.items()
    ]


@pytest.fixture(scope="module")
def engine(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlendEngine]:
    model = Model.from_pretrained("reader", dtype="float32")
    with BlendEngine(model, tmp_path_factory.mktemp("kv")) as engine:
        engine.warm(documents)
        yield engine


@pytest.fixture(scope="module")
def vectors(documents: list[str]) -> InMemoryVectorStore:
    return InMemoryVectorStore.from_texts(documents, DeterministicFakeEmbedding(size=16))


def joined(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def lcel(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    context = {"context": vectors.as_retriever() | joined, "input": RunnablePassthrough()}
    return context | CONTEXT | llm | StrOutputParser()


def retrieval_chain(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    chain = create_retrieval_chain(vectors.as_retriever(), create_stuff_documents_chain(llm, CONTEXT))
    return RunnableLambda(lambda question: {"input": question}) | chain


def history_aware(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    rewrite = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    retriever = create_history_aware_retriever(llm, vectors.as_retriever(), rewrite)
    chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, CONTEXT))
    return RunnableLambda(lambda question: {"input": question, "chat_history": HISTORY}) | chain


def qa(kind: str) -> Callable[[ChatBlend, InMemoryVectorStore], Any]:
    return lambda llm, vectors: RetrievalQA.from_chain_type(llm, chain_type=kind, retriever=vectors.as_retriever())


def conversational(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    chain = ConversationalRetrievalChain.from_llm(llm, vectors.as_retriever())
    return RunnableLambda(lambda question: {"question": question, "chat_history": [("Who?", "Mira Brel.")]}) | chain


def multi_query(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    retriever = MultiQueryRetriever.from_llm(vectors.as_retriever(), llm)
    return {"context": retriever | joined, "input": RunnablePassthrough()} | CONTEXT | llm


def as_messages(question: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(question)]}


def prompted_agent(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    @dynamic_prompt
    def with_context(request: ModelRequest) -> str:
        found = vectors.similarity_search(request.messages[-1].text)
        return f"Use this context.\n\n{joined(found)}"

    return RunnableLambda(as_messages) | create_agent(llm, [], middleware=[with_context])


def agent(llm: ChatBlend, vectors: InMemoryVectorStore) -> Any:
    @tool(response_format="content_and_artifact")
    def retrieve(query: Annotated[str, Field(max_length=20)]) -> Any:
        """Retrieve what helps to answer."""
        found = vectors.similarity_search(query)
        return joined(found), found

    @wrap_model_call
    def look_first(request: ModelRequest, handler: Callable[..., Any]) -> Any:
        looked = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request if looked else request.override(tool_choice="any"))

    return RunnableLambda(as_messages) | create_agent(llm, [retrieve], middleware=[look_first])


APPLICATIONS = {
    "lcel": lcel,
    "retrieval-chain": retrieval_chain,
    "history-aware": history_aware,
    "qa-stuff": qa("stuff"),
    "qa-map-reduce": qa("map_reduce"),
    "qa-refine": qa("refine"),
    "conversational": conversational,
    "multi-query": multi_query,
    "agent-dynamic-prompt": prompted_agent,
    "agent-with-tool": agent,
}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_it_answers_as_full_prefill_does_and_reuses_its_chunks(
    name: str, engine: BlendEngine, vectors: InMemoryVectorStore, documents: list[str]
) -> None:
    heard = []
    for settings in ({"ratio": 1.0}, {"policy": "full"}):
        llm = ChatBlend(engine=engine, temperature=0, max_tokens=120 if name == "agent-with-tool" else 8, **settings)
        heard.append(Heard())
        APPLICATIONS[name](llm, vectors).invoke(QUESTION, {"callbacks": [heard[-1]]})
    blended, full = heard
    assert blended.said
    assert blended.said == full.said
    assert [report["prompt_tokens"] for report in blended.reports] == [r["prompt_tokens"] for r in full.reports]
    lengths = [len(engine.model.tokenizer.encode(document)) for document in documents]
    # its first and last token may merge with their neighbours
    stored = sum(report["prompt_tokens"] - report["fresh_tokens"] for report in blended.reports)
    assert stored >= sum(lengths) - 2 * len(lengths)


async def test_an_application_runs_in_every_way(engine: BlendEngine, vectors: InMemoryVectorStore) -> None:
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=8, ratio=1.0)
    rag = lcel(llm, vectors)
    answer = rag.invoke(QUESTION)
    events = [event async for event in rag.astream_events(QUESTION, version="v2")]
    streamed = [event["data"]["chunk"].content for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(streamed) == answer
    limited = llm.model_copy(update={"rate_limiter": InMemoryRateLimiter(requests_per_second=1e4)})
    assert lcel(limited.with_retry(), vectors).batch([QUESTION] * 2) == [answer] * 2
    broken = ChatBlend(engine=engine, stop=["x"]).bind(stop=[""])
    assert lcel(broken.with_fallbacks([llm]), vectors).invoke(QUESTION) == answer


def test_an_agent_streams_its_messages(engine: BlendEngine, vectors: InMemoryVectorStore) -> None:
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=120, ratio=1.0)
    final = agent(llm, vectors).invoke(QUESTION)["messages"]
    assert [message.type for message in final] == ["human", "ai", "tool", "ai"]
    assert len(final[2].artifact) == 3
    pieces = [piece for piece, _ in create_agent(llm, []).stream(as_messages(QUESTION), stream_mode="messages")]
    assert "".join(str(piece.content) for piece in pieces) == llm.invoke(QUESTION).content


def test_a_conversation_that_gets_too_long_is_summarised(engine: BlendEngine) -> None:
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=4)
    summarise = SummarizationMiddleware(
        llm,
        trigger=("fraction", 0.9),
        keep=("messages", 1),
        summary_prompt="Summarise: {messages}",
        trim_tokens_to_summarize=None,
    )
    long = "Who likes curry? " * (engine.model.context_window // 4)  # its summary does not fit in at first, either
    history = [HumanMessage(long), AIMessage("Mira."), HumanMessage(QUESTION)]
    messages = create_agent(llm, [], middleware=[summarise]).invoke({"messages": history})["messages"]
    assert [message.type for message in messages] == ["human", "human", "ai"]
    assert messages[0].additional_kwargs["lc_source"] == "summarization"


class Count(BaseModel):
    """How many."""

    number: int = Field(ge=0, le=9)


@pytest.mark.parametrize("strategy", [Count, ProviderStrategy(Count), ToolStrategy(Count)])
def test_an_agents_structured_response_is_guaranteed(engine: BlendEngine, strategy: Any) -> None:
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=60)
    result = create_agent(llm, [], response_format=strategy).invoke(as_messages(QUESTION))
    assert isinstance(result["structured_response"], Count)


# ---------------------------------------------------------------- an agent about a long document


def test_an_agent_converses_about_a_long_document(
    engine: BlendEngine, vectors: InMemoryVectorStore, documents: list[str]
) -> None:
    """Two turns with tools and a memory: the messages, and how much of the prompts is reused."""
    llm = ChatBlend(engine=engine, temperature=0, max_tokens=120, ratio=1.0)

    @tool
    def read_document(name: Literal["Mira", "Kan", "Zel"]) -> str:
        """Read the whole document about a person."""
        return next(text for text in documents if text.startswith(name))

    @wrap_model_call
    def read_first(request: ModelRequest, handler: Callable[..., Any]) -> Any:
        reads = request.messages[-1].type == "human"  # a small model does not decide this by itself
        return handler(request.override(tool_choice="read_document") if reads else request)

    long = "\n\n".join(documents)
    agent = create_agent(
        llm,
        [read_document],
        system_prompt=f"Answer about these documents.\n\n{long}",
        middleware=[read_first],
        checkpointer=InMemorySaver(),
    )
    follows = Heard()
    config: Any = {"configurable": {"thread_id": "1"}, "callbacks": [follows]}
    for turn, question in enumerate([QUESTION, "And who plays the harp?"], 1):
        messages = agent.invoke(as_messages(question), config)["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"] * turn
        asked, result = messages[-3:-1]
        (call,) = asked.tool_calls
        assert result.tool_call_id == call["id"]
        assert result.content in documents
    assert [len(prompt) for prompt in follows.prompts] == [2, 4, 6, 8]
    assert all(prompt[0].text.endswith(long) for prompt in follows.prompts)
    whole = sum(len(engine.model.tokenizer.encode(document)) for document in documents)
    for report in follows.reports:  # of the system prompt alone; each result of the tool is reused, too
        assert report["prompt_tokens"] - report["fresh_tokens"] >= whole - 2 * len(documents)
    first, second = (report["prompt_tokens"] - report["fresh_tokens"] for report in follows.reports[:2])
    assert second > first + 100
    assert all(report["conversation_tokens"] > whole for report in follows.reports[1:])

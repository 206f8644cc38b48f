"""Reuse over the turns of a conversation with an agent: LangGraph, LlamaIndex's FunctionAgent and its ReActAgent.

In every turn, the user asks about the handbook in `examples/handbook`, the agent calls its search tool, and answers
from the sections that the tool returns. Small models do not decide to call a tool, so the first answer of a turn is
forced to be a call: by `tool_choice`, and for ReActAgent, which asks for text, by a grammar. All else is the
frameworks' own.

The same conversation is held with engines that keep no conversations ("off"), that reuse KV as far as a prompt begins
like an earlier one ("exact"), and that also reuse it behind edits ("blend").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langchain_kvrag import ChatBlend
from langgraph.checkpoint.memory import InMemorySaver
from llama_index.core.agent.workflow import AgentOutput, FunctionAgent, ReActAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool
from llama_index.llms.kvrag import BlendLLM
from pydantic import BaseModel, Field

from kvrag import BlendEngine, Grammar
from kvrag.control.prompts import search_by_words

WAYS = {"off": ("exact", 0), "exact": ("exact", 1 << 30), "blend": ("blend", 1 << 30)}
"""History and conversation_bytes, by way of answering."""
QUESTIONS = (
    "How many days of paid holiday does an employee have?",
    "How long are the breaks, and when do people start to work?",
    "Who may take parental leave, and for how long?",
    "What do I do when I am ill for more than three days?",
    "How is overtime paid?",
    "Which expenses are paid back after a journey?",
    "How long must a password be?",
    "Can I take unpaid leave for a sabbatical?",
    "What happens in the first week of a new employee?",
    "How many days of holiday can I carry into the next year?",
)
_SYSTEM = "You answer questions of employees from the handbook. Search it first, and name the section that you used."
_TOP_K = 2  # sections that a search returns
_CALL = Grammar(
    regex=r'Thought: I need to search the handbook\.\nAction: search\nAction Input: \{"query": "[A-Za-z0-9 ]{3,30}"\}'
)
_ANSWER = Grammar(regex=r"Thought: I can answer without using any more tools\.\nAnswer: [A-Za-z0-9 ,.'-]{1,400}")

Ask = Callable[[str], Coroutine[Any, Any, list[dict[str, Any]]]]
"""From a question to the reports of the answers that the agent needed."""


class Query(BaseModel):
    """Arguments of the tool."""

    query: str = Field(min_length=3, max_length=30, pattern="^[A-Za-z0-9 ]+$")


class Handbook:
    """The tool: a search in the chunks of a handbook, which counts its calls.

    It also searches for the words of `question`, because small models write poor queries.
    """

    def __init__(self, chunks: list[str]) -> None:
        self.calls, self.question = 0, ""
        self._search = search_by_words(chunks)

    def search(self, query: str) -> str:
        """Search the employees' handbook."""
        self.calls += 1
        return "\n\n".join(self._search(f"{self.question} {query}", _TOP_K))


def langgraph(engine: BlendEngine, handbook: Handbook, max_tokens: int) -> Ask:
    """LangChain's `create_agent` with a checkpointer."""
    search = tool("search", description="Search the employees' handbook.", args_schema=Query)(handbook.search)

    @wrap_model_call
    async def search_first(request: ModelRequest, handler: Callable[..., Any]) -> Any:
        return await handler(
            request.override(tool_choice="search") if request.messages[-1].type == "human" else request
        )

    llm = ChatBlend(engine=engine, temperature=0, max_tokens=max_tokens)
    agent = create_agent(llm, [search], system_prompt=_SYSTEM, middleware=[search_first], checkpointer=InMemorySaver())

    async def ask(question: str) -> list[dict[str, Any]]:
        thread: Any = {"configurable": {"thread_id": "1"}}
        asked: Any = {"messages": [("user", question)]}
        messages = (await agent.ainvoke(asked, thread))["messages"]
        last = max(number for number, message in enumerate(messages) if message.type == "human")
        return [said.response_metadata["kvrag"] for said in messages[last:] if isinstance(said, AIMessage)]

    return ask


def function_agent(engine: BlendEngine, handbook: Handbook, max_tokens: int) -> Ask:
    """LlamaIndex's FunctionAgent."""
    llm = BlendLLM(engine=engine, temperature=0, max_tokens=max_tokens)
    return _llama_index(
        FunctionAgent(llm=llm, tools=[_tool(handbook)], system_prompt=_SYSTEM, initial_tool_choice="search")
    )


def react_agent(engine: BlendEngine, handbook: Handbook, max_tokens: int) -> Ask:
    """LlamaIndex's ReActAgent."""
    llm = _Reasoning(engine=engine, temperature=0, max_tokens=max_tokens)
    return _llama_index(ReActAgent(llm=llm, tools=[_tool(handbook)], system_prompt=_SYSTEM))


class _Reasoning(BlendLLM):
    """Writes an action after a question, and the answer after an observation."""

    async def astream_chat(self, messages: Any, **kwargs: Any) -> Any:
        grammar = _ANSWER if (messages[-1].content or "").startswith("Observation:") else _CALL
        return await super().astream_chat(messages, grammar=grammar, **kwargs)


def _tool(handbook: Handbook) -> FunctionTool:
    return FunctionTool.from_defaults(handbook.search, name="search", fn_schema=Query)


def _llama_index(agent: FunctionAgent | ReActAgent) -> Ask:
    memory = ChatMemoryBuffer.from_defaults(llm=agent.llm)  # not `ctx=`: workflows 2.26 forgets the memory in it

    async def ask(question: str) -> list[dict[str, Any]]:
        run = agent.run(question, memory=memory)
        answers: list[Any] = [event.raw async for event in run.stream_events() if isinstance(event, AgentOutput)]
        await run
        return [raw["kvrag"] for raw in answers]

    return ask


FRAMEWORKS: dict[str, Callable[[BlendEngine, Handbook, int], Ask]] = {
    "langgraph": langgraph,
    "function-agent": function_agent,
    "react-agent": react_agent,
}


@dataclass(frozen=True)
class Tokens:
    """Tokens of a turn's prompts, which may be several: `chunks` came from the store, `kept` from prompts that began
    alike, `moved` from behind an edit. `computed` are the others, and those of the three that were recomputed."""

    prompt: int
    chunks: int
    kept: int
    moved: int
    computed: int

    @classmethod
    def of(cls, reports: list[dict[str, Any]]) -> Tokens:
        """Add up the reports of a turn."""

        def total(name: str) -> int:
            return sum(report[f"{name}_tokens"] for report in reports)

        kept, moved = total("conversation"), total("moved")
        computed = total("fresh") + total("recomputed")
        return cls(total("prompt"), total("prompt") - total("fresh") - kept - moved, kept, moved, computed)


def converse(
    name: str, engine: BlendEngine, handbook: Handbook, turns: int, max_tokens: int
) -> Iterator[list[dict[str, Any]]]:
    """Hold a conversation with one framework; yields the reports of each turn."""
    ask = FRAMEWORKS[name](engine, handbook, max_tokens)
    with asyncio.Runner() as runner:
        for handbook.question in islice(cycle(QUESTIONS), turns):
            yield runner.run(ask(handbook.question))

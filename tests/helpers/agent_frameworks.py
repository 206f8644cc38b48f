"""Reuse over the turns of a conversation with an agent: LangGraph, LlamaIndex's FunctionAgent and its ReActAgent.

In every turn, the user asks about the handbook in `examples/handbook`, the agent calls its search tool, and answers
from the sections that the tool returns. Small models do not decide to call a tool, so the first answer of a turn is
forced to be a call: by `tool_choice`, and for ReActAgent, which asks for text, by a grammar. All else is the
frameworks' own.

The same conversation is held with engines that keep no conversations ("off"), that reuse KV as far as a prompt begins
like an earlier one ("exact"), and that also reuse it behind edits ("blend").
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import cycle, islice
from pathlib import Path
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

from kvrag import BlendConfig, BlendEngine, Grammar, Model
from kvrag.cli.common import add_number, at_least, existing_path
from kvrag.control.prompts import search_by_words
from kvrag.errors import SettingError

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


def sections(folder: Path) -> list[str]:
    """Return the sections of all Markdown files in a folder."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md"))]
    chunks = [section.strip() for text in texts for section in text.replace("\n## ", "\n\0## ").split("\0")]
    if not chunks:
        raise SettingError(f"no Markdown files in {folder}: run this in the root of the repository")
    return chunks


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
        return cls(total("prompt"), total("reused") - kept - moved, kept, moved, computed)


@dataclass(frozen=True)
class Conversation:
    """The turns of a conversation with one framework, by way of answering, and how often each called the tool."""

    framework: str
    turns: dict[str, list[Tokens]]
    calls: dict[str, int]


def measure(
    model: Model,
    frameworks: Sequence[str],
    chunks: list[str],
    turns: int,
    max_tokens: int,
    ratio: float,
    progress: Callable[[str], None] = lambda line: None,
) -> Iterator[Conversation]:
    """Hold the conversations, each beginning without KV of earlier ones, on chunks that were warmed."""
    with tempfile.TemporaryDirectory() as folder:
        for name in frameworks:
            rows: dict[str, list[Tokens]] = {}
            calls: dict[str, int] = {}
            for way, (history, conversation_bytes) in WAYS.items():
                config = BlendConfig(ratio=ratio, controller="off", history=history)
                with BlendEngine(model, folder, config, conversation_bytes=conversation_bytes) as engine:
                    engine.warm(chunks)
                    handbook = Handbook(chunks)
                    rows[way] = []
                    for number, reports in enumerate(converse(name, engine, handbook, turns, max_tokens), 1):
                        progress(f"{name}, {way}, turn {number} of {turns}")
                        rows[way].append(Tokens.of(reports))
                    calls[way] = handbook.calls
            yield Conversation(name, rows, calls)


def converse(
    name: str, engine: BlendEngine, handbook: Handbook, turns: int, max_tokens: int
) -> Iterator[list[dict[str, Any]]]:
    """Hold a conversation with one framework; yields the reports of each turn."""
    ask = FRAMEWORKS[name](engine, handbook, max_tokens)
    with asyncio.Runner() as runner:
        for handbook.question in islice(cycle(QUESTIONS), turns):
            yield runner.run(ask(handbook.question))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", default="smollm2", help="model id, folder or smollm2 (default)")
    parser.add_argument(
        "--layers",
        type=at_least(1),
        metavar="N",
        help="use only the first N layers: faster, and the answers are worthless",
    )
    parser.add_argument(
        "--docs", type=existing_path, default="examples/handbook", metavar="FOLDER", help="Markdown files"
    )
    parser.add_argument("--frameworks", nargs="+", default=list(FRAMEWORKS), choices=FRAMEWORKS, help="default: all")
    add_number(parser, "--turns", 10, "number of turns", least=1)
    add_number(parser, "--max-tokens", 64, "maximum length of an answer, in tokens", least=64)  # calls have to fit
    add_number(parser, "--ratio", 0.15, "recompute ratio", most=1)


def run(args: argparse.Namespace) -> int:
    """Measure and print the results."""
    chunks, model = sections(args.docs), _load(args.model, args.layers)
    settings = {"model": model.name, "turns": args.turns, "max_tokens": args.max_tokens, "ratio": args.ratio}
    settings |= {
        name: version(name) for name in ("kvrag", "langchain", "langgraph", "llama-index-core", "transformers")
    }
    conversations = []
    if not args.json:
        print(", ".join(f"{name} {value}" for name, value in settings.items()))
    for conversation in measure(
        model,
        args.frameworks,
        chunks,
        args.turns,
        args.max_tokens,
        args.ratio,
        lambda line: print(line, file=sys.stderr),
    ):
        conversations.append(asdict(conversation))
        if not args.json:
            _print(conversation)
    if args.json:
        print(json.dumps({"conversations": conversations, "settings": settings}))
    return 0


def _load(name: str, layers: int | None) -> Model:
    model = Model.from_pretrained(name)
    if layers is None:
        return model
    model.hf.config.num_hidden_layers, model.hf.model.layers = layers, model.hf.model.layers[:layers]
    return Model(model.hf, model.tokenizer.hf, f"{model.name}, {layers} layers")


def _print(conversation: Conversation) -> None:
    """Print a table: every way has the columns in which it is not always 0."""
    columns = {"off": ("prompt", "chunks", "computed"), "exact": ("prompt", "chunks", "kept", "computed")}
    columns["blend"] = (*columns["exact"][:-1], "moved", "computed")
    print(f"\n{conversation.framework}, tool calls: {conversation.calls}")
    print("    " + "  |".join(f"{way:>{9 * len(names)}}" for way, names in columns.items()))
    print("turn" + "  |".join("".join(f"{name:>9}" for name in names) for names in columns.values()))
    for number, rows in enumerate(zip(*(conversation.turns[way] for way in columns), strict=True), 1):
        cells = (
            "".join(f"{getattr(row, name):>9}" for name in names)
            for row, names in zip(rows, columns.values(), strict=True)
        )
        print(f"{number:>4}" + "  |".join(cells))
    for way, turns in conversation.turns.items():
        shares = [
            sum(row.computed for row in rows) / sum(row.prompt for row in rows) for rows in (turns, turns[1:]) if rows
        ]
        print(f"{way}: computed", ", from turn 2 on ".join(f"{share:.1%}" for share in shares))

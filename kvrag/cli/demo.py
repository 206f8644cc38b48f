"""`kvrag demo`: measure the speed of a LangChain chain, and compare its answers by several policies, all offline."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrag.cli import warm
from kvrag.cli.common import human_bytes, open_engine, open_index, progress, say
from kvrag.errors import KvragError

if TYPE_CHECKING:
    from kvrag.bench.ttft import TtftResult
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex

QUESTIONS = (
    ("What does Ingla play?", "leather drum"),
    ("Which town is known for its round harbour?", "Harfield"),
    ("What does Holra play?", "paper drum"),
    ("Which town was first settled in 1957?", "Jomouth"),
    ("Which company has its offices in Danvik?", "Wilmax"),
)
"""Questions with the right answers: one direct, one inverse, and three whose fact refers to a name in an earlier chunk,
each about another article. All were chosen among the questions that full prefill answers right, so they show agreement
with full prefill, not accuracy."""


class Way(NamedTuple):
    """A variant to compare: the policy (None = default), and whether the chunks were encoded alone."""

    name: str
    policy: str | None
    alone: bool = False


FULL = Way("full prefill", "full")
WAYS = (
    FULL,
    Way("plain reuse, chunks encoded alone", "none", alone=True),
    Way("plain reuse", "none"),
    Way("blending", None),
)

_WIDTH = 80  # columns of a terminal
CHUNK_TOKENS = 40  # one or two paragraphs of the corpus
_TOP_K, _AROUND = 3, 2


@dataclass(frozen=True)
class Outcome:
    """One answer. `correct` = equal to the expected answer."""

    question: str
    expected: str
    way: str
    answer: str
    correct: bool
    reused_tokens: int
    recomputed_tokens: int
    ttft_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag demo`."""
    parser.add_argument("--store", help="folder for the encoded chunks (default: a temporary one)")
    parser.add_argument("--no-speed", action="store_true", help="skip the speed measurement")


def run(args: argparse.Namespace) -> int:
    """Print the speed-up, the answers to the questions, and the next commands to try."""
    from kvrag.engine import BlendEngine

    chain = _import_chain()
    speed = None if args.no_speed else _measure(chain)
    if speed and not args.json:
        print("\n".join(speed_lines(speed)), flush=True)
    with ExitStack() as stack:
        store = args.store or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-demo-"))
        settings = argparse.Namespace(model="reader", store=store, codec="native", dtype="auto", device=None)
        engine = stack.enter_context(open_engine(settings))
        index = stack.enter_context(open_index(engine, ""))
        corpus = corpus_folder()
        plan = _plan(engine, corpus, args.json)
        warmed = warm.warm(engine, index, plan, args.json)
        apart = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-demo-"))
        alone = stack.enter_context(BlendEngine(engine.model, apart))
        alone.warm(chunk for chunks in plan.chunks.values() for chunk in chunks)  # without a document name
        if not args.json:
            print(
                "\nThe answers: the bundled reader (4.8 M parameters) in a LangChain chain, about\n"
                f"{warmed['files']} articles of a made-up world, {warmed['chunks']} chunks ({warmed['new']} new), "
                f"{warmed['tokens']} tokens, {human_bytes(warmed['bytes'])} of KV\n"
            )
        outcomes = _ask_all(chain, engine, alone, index, args.json)
        if not args.json:
            print("\n".join(outcome_lines(outcomes)))
    if args.json:
        result = {"warm": warmed, "questions": [asdict(outcome) for outcome in outcomes]}
        print(json.dumps(result | {"speed": asdict(speed) if speed else None}))
        return 0
    print(
        "\nNext, with your own files:\n"
        "  kvrag warm PATH... --model Qwen/Qwen2.5-0.5B-Instruct\n"
        '  kvrag ask "..." --model Qwen/Qwen2.5-0.5B-Instruct\n'
        "In your LangChain or LlamaIndex application: docs/chain.md."
    )
    return 0


def corpus_folder() -> Path:
    """Return the folder of the articles: in the package if installed, under examples/ in a checkout.

    Raises:
        KvragError: Both are missing.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "corpus", here.parents[2] / "examples" / "corpus"):
        if folder.is_dir():
            return folder
    raise KvragError("the demo's articles are missing from this installation: reinstall kvrag")


def _plan(engine: BlendEngine, corpus: Path, quiet: bool) -> warm.Plan:
    wanted = argparse.Namespace(
        paths=[str(corpus)], chunk_tokens=CHUNK_TOKENS, chunk_overlap=0, text_field="text", namespace="", json=quiet
    )
    return warm.make_plan(engine, wanted)


Chain = Callable[
    ["BlendEngine", "str | None", Callable[[str], list[str]], int], Callable[[str], tuple[str, dict[str, Any]]]
]
"""Function of (engine, policy, retrieve, longest answer); returns a function: question -> (answer, report)."""


def _import_chain() -> Chain:
    """Import LangChain and return a function that builds an ordinary LCEL chain."""
    try:
        from langchain_core.callbacks import BaseCallbackHandler
        from langchain_core.documents import Document
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate
        from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
        from langchain_kvrag import ChatBlend
    except ImportError as error:
        raise KvragError(
            f"{error.name or error} is not installed, but the demo runs a LangChain chain: pip install langchain-kvrag"
        ) from None

    class Reports(BaseCallbackHandler):
        """Keeps the report of the last answer, which the chain's parser drops."""

        last: dict[str, Any]

        def on_llm_end(self, response: Any, **_: Any) -> None:
            self.last = response.generations[0][0].message.response_metadata["kvrag"]

    def build(
        engine: BlendEngine, policy: str | None, retrieve: Callable[[str], list[str]], max_tokens: int
    ) -> Callable[[str], tuple[str, dict[str, Any]]]:
        def format_docs(docs: list[Document]) -> str:
            return "\n\n".join(doc.page_content for doc in docs)

        retriever: Runnable[str, list[Document]] = RunnableLambda(
            lambda question: [Document(text) for text in retrieve(question)]
        )
        prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{question}")])
        llm = ChatBlend(engine=engine, max_tokens=max_tokens, temperature=0, policy=policy, controller="off")
        inputs = {"context": retriever | format_docs, "question": RunnablePassthrough()}
        chain = inputs | prompt | llm | StrOutputParser()

        def ask(question: str) -> tuple[str, dict[str, Any]]:
            reports = Reports()
            return chain.invoke(question, config={"callbacks": [reports]}).strip(), reports.last

        return ask

    return build


def _ask_all(chain: Chain, engine: BlendEngine, alone: BlendEngine, index: ChunkIndex, quiet: bool) -> list[Outcome]:
    def retrieve(question: str) -> list[str]:
        return [hit.text for hit in index.search(question, _TOP_K, _AROUND)]

    asks = {way: chain(alone if way.alone else engine, way.policy, retrieve, 16) for way in WAYS}
    for ask in asks.values():
        ask(QUESTIONS[0][0])  # the first answer of a process includes start-up costs
    outcomes = []
    with progress("asking", quiet) as show:
        for number, (question, expected) in enumerate(QUESTIONS, 1):
            for way, ask in asks.items():
                answer, report = ask(f"Question: {question}")
                numbers = report["reused_tokens"], report["recomputed_tokens"], report["ttft_s"]
                outcomes.append(Outcome(question, expected, way.name, answer, answer == expected, *numbers))
            show(number, len(QUESTIONS))
    return outcomes


def _measure(chain: Chain) -> TtftResult:
    from kvrag.bench.ttft import TtftSetup, measure
    from kvrag.types import BlendReport

    def ask(engine: BlendEngine, policy: str, chunks: list[str], question: str) -> BlendReport:
        return BlendReport(**chain(engine, policy, lambda _: chunks, 1)(question)[1])

    say("measuring the time to first token of a LangChain chain; takes about a minute")
    return measure(TtftSetup(repeats=2), ask, say, with_prefix=False)


def speed_lines(result: TtftResult) -> list[str]:
    """Return the speed-up in one line, then how it was measured."""
    full, blending = result.rows
    ratio = blending.speedup
    compared = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    processor, threads = result.settings["processor"], result.settings["threads"]
    return [
        f"{compared}: first token after {blending.ttft_s:.2f} s instead of {full.ttft_s:.2f} s",
        "",
        f"A LangChain chain on Qwen2.5-0.5B's shape with random weights, {result.prompt_tokens} prompt",
        "tokens, 6 chunks in an order never seen before, medians of 2 rounds;",
        f"{threads} threads, {processor}"[:_WIDTH],
        f"Bound, if computing the tokens were the only cost: {blending.bound:.1f}x",
    ]


def outcome_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return a table of the answers by question, and what it shows."""
    lines = [f"{'':38}{'answer':22}{'reused':>8}{'recomputed':>12}"]
    for outcome in outcomes:
        if outcome.way == FULL.name:
            lines += ["", f"{outcome.question} ({outcome.expected})"]
        answer = shorten(outcome.answer, 12, placeholder="...") + ("" if outcome.correct else " (wrong)")
        lines.append(f"  {outcome.way:36}{answer:22}{outcome.reused_tokens:>8}{outcome.recomputed_tokens:>12}")
    right = {way.name: sum(outcome.correct for outcome in outcomes if outcome.way == way.name) for way in WAYS}
    counts = [f"{count} of {len(QUESTIONS)} by {name}" for name, count in right.items()]
    return [
        *lines,
        "",
        f"Right: {'; '.join(counts[:2])};",
        f"       {'; '.join(counts[2:])}.",
        "Chunks encoded alone cannot resolve pronouns; kvrag encodes them with the",
        "preceding text. All questions were chosen so that full prefill answers them",
        "right: the counts show agreement with it, not accuracy. This model and its",
        "prompts are too small for blending to be faster.",
    ]

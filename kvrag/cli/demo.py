"""`kvrag demo`: answers and speed of a LangChain chain by several policies, and the speed of a larger model."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrag.cli import warm
from kvrag.cli.common import human_bytes, open_engine, open_index, progress, say
from kvrag.errors import KvragError
from kvrag.sample import ARTICLES, ENCODED_ALONE, READER, Sample

if TYPE_CHECKING:
    from kvrag.bench.ttft import TtftResult
    from kvrag.engine import BlendEngine


class Way(NamedTuple):
    """A way to answer: the policy, None = default."""

    name: str
    policy: str | None


FULL = Way("full prefill", "full")
BLENDING = Way("blending", None)
WAYS = (FULL, Way("plain reuse", "none"), BLENDING)

_WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class DemoAnswer:
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
    """Print the speed-up, the answers to two sets of questions, and the next commands to try."""
    chain = _import_chain()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-demo-"))
        warmed, outcomes = _ask_all(chain, ARTICLES, args.store or f"{folder}/articles", args.json)
        if not args.json:
            print("\n".join(outcome_lines(outcomes, warmed)), flush=True)
        _, alone = _ask_all(chain, ENCODED_ALONE, f"{folder}/alone", args.json)
    if not args.json:
        print("\n".join(["", *alone_lines(alone)]), flush=True)
    speed = None if args.no_speed else _measure(chain)
    if args.json:
        questions = {
            "questions": [asdict(outcome) for outcome in outcomes],
            "alone": [asdict(outcome) for outcome in alone],
        }
        print(json.dumps({"warm": warmed} | questions | {"speed": asdict(speed) if speed else None}))
        return 0
    if speed:
        print("\n".join(["", *speed_lines(speed)]))
    print(
        "\nNext, with your own files:\n"
        "  kvrag warm PATH... --model Qwen/Qwen2.5-0.5B-Instruct\n"
        '  kvrag ask "..." --model Qwen/Qwen2.5-0.5B-Instruct\n'
        "In your LangChain or LlamaIndex application: docs/quickstart.md."
    )
    return 0


def _plan(engine: BlendEngine, sample: Sample, quiet: bool) -> warm.WarmPlan:
    settings = argparse.Namespace(
        paths=[str(sample.path)],
        chunk_tokens=sample.chunk_tokens,
        chunk_overlap=0,
        text_field="text",
        namespace="",
        json=quiet,
    )
    return warm.make_plan(engine, settings)


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


def _ask_all(chain: Chain, sample: Sample, store: str, quiet: bool) -> tuple[dict[str, Any], list[DemoAnswer]]:
    """Warm the sample's documents and ask its questions each way; return what was warmed and the outcomes."""
    settings = argparse.Namespace(
        model=READER, store=store, store_cache=None, codec="native", dtype="auto", device=None
    )
    outcomes = []
    with (
        open_engine(settings, context_tokens=sample.context_tokens) as engine,
        open_index(engine, "") as index,
    ):
        warmed = warm.warm(engine, index, _plan(engine, sample, quiet), quiet)

        def retrieve(question: str) -> list[str]:
            return [hit.text for hit in index.search(question, sample.top_k, sample.around)]

        asks = {way: chain(engine, way.policy, retrieve, 16) for way in WAYS}
        for ask in asks.values():
            ask("What is this about?")  # the first answer of a process includes start-up costs
        with progress("asking", quiet) as show:
            for number, (question, expected) in enumerate(sample.questions.items(), 1):
                for way, ask in asks.items():
                    answer, report = ask(f"Question: {question}")
                    numbers = report["reused_tokens"], report["recomputed_tokens"], report["ttft_s"]
                    outcomes.append(DemoAnswer(question, expected, way.name, answer, answer == expected, *numbers))
                show(number, len(sample.questions))
    return warmed, outcomes


def _measure(chain: Chain) -> TtftResult:
    from kvrag.bench.ttft import TtftSetup, measure
    from kvrag.types import BlendReport

    def ask(engine: BlendEngine, policy: str, chunks: list[str], question: str) -> BlendReport:
        return BlendReport(**chain(engine, policy, lambda _: chunks, 1)(question)[1])

    say("measuring the same chain on a larger model; takes about a minute")
    return measure(TtftSetup(repeats=2), ask, say, with_prefix=False)


def _faster(full_s: float, blending_s: float) -> str:
    """Return the speed-up in words, as measured."""
    ratio = full_s / blending_s
    compared = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    return f"{compared}: first token after {blending_s * 1000:.0f} ms instead of {full_s * 1000:.0f} ms"


def outcome_lines(outcomes: Sequence[DemoAnswer], warmed: dict[str, Any]) -> list[str]:
    """Return the speed-up and the agreement in one line each, then a table of the answers."""
    by_way = _by_way(outcomes)
    full, blending = by_way[FULL.name], by_way[BLENDING.name]
    times = [statistics.median(outcome.ttft_s for outcome in part) for part in (full, blending)]
    same = sum(reference.answer == blended.answer for reference, blended in zip(full, blending, strict=True))
    return [
        _faster(*times),
        f"{same} of {len(full)} answers are full prefill's",
        "",
        "The bundled reader (4.8 M parameters) in a LangChain chain, about",
        f"{warmed['files']} articles of a made-up world: {warmed['chunks']} chunks ({warmed['new']} new), "
        f"{warmed['tokens']} tokens, {human_bytes(warmed['bytes'])} of KV.",
        "Medians over the questions.",
        "",
        *_table(outcomes),
        "",
        _counts(outcomes),
        "All questions were chosen so that full prefill answers them right: the counts",
        "show agreement with it, not accuracy.",
    ]


def alone_lines(outcomes: Sequence[DemoAnswer]) -> list[str]:
    """Return a table of the questions that plain reuse answers wrong, and how they were picked."""
    return [
        "Why blend? Plain reuse is wrong here",
        "",
        "The same articles in chunks of a few sentences, each encoded alone. Most say",
        '"he" or "the town"; the name is in another chunk. Plain reuse cannot connect',
        "the two. Blending recomputes the few tokens that need it. (Prompts of 200 tokens",
        "are too short to save time.)",
        "",
        *_table(outcomes, times=False),
        "",
        _counts(outcomes),
        "These questions were picked because plain reuse answers them wrong. Of 500 that",
        "were not picked, full prefill answers 442 right, plain reuse 279, blending 434",
        "(docs/results.md). By default kvrag encodes a chunk with the text before it in",
        "its document: then plain reuse is right more often.",
    ]


def _by_way(outcomes: Sequence[DemoAnswer]) -> dict[str, list[DemoAnswer]]:
    return {way.name: [outcome for outcome in outcomes if outcome.way == way.name] for way in WAYS}


def _table(outcomes: Sequence[DemoAnswer], times: bool = True) -> list[str]:
    lines = [f"{'':20}{'answer':22}{'recomputed':>12}" + f"{'TTFT':>12}" * times]
    for outcome in outcomes:
        if outcome.way == FULL.name:
            lines += ["", f"{outcome.question} ({outcome.expected})"]
        answer = shorten(outcome.answer, 12, placeholder="...") + ("" if outcome.correct else " (wrong)")
        computed = "all" if outcome.way == FULL.name else f"{outcome.recomputed_tokens} of {outcome.reused_tokens}"
        ttft = f"{outcome.ttft_s * 1000:>9.0f} ms" * times
        lines.append(f"  {outcome.way:18}{answer:22}{computed:>12}{ttft}")
    return lines


def _counts(outcomes: Sequence[DemoAnswer]) -> str:
    counts = [
        f"{sum(outcome.correct for outcome in part)} of {len(part)} by {name}"
        for name, part in _by_way(outcomes).items()
    ]
    return f"Right: {'; '.join(counts)}."


def speed_lines(result: TtftResult) -> list[str]:
    """Return the speed-up of a larger model, and how it was measured."""
    full, blending = result.rows
    processor, threads = result.settings["processor"], result.settings["threads"]
    return [
        f"A larger model: {_faster(full.ttft_s, blending.ttft_s)}",
        "",
        f"The same chain on Qwen2.5-0.5B's shape with random weights, {result.prompt_tokens} prompt",
        "tokens, 6 chunks in an order never seen before, medians of 2 rounds;",
        f"{threads} threads, {processor}"[:_WIDTH],
        f"Bound, if computing the tokens were the only cost: {blending.bound:.1f}x",
    ]

"""`kvrag demo`: answer questions about a sample handbook by blending and by full prefill, offline."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from textwrap import shorten
from typing import TYPE_CHECKING

from kvrag import sample
from kvrag.cli import warm
from kvrag.cli.common import at_least, human_bytes, open_engine, open_index, progress, say
from kvrag.cli.prompt import stuff

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex

MODEL = "smollm2"


@dataclass(frozen=True)
class Outcome:
    """Both answers to one question. Times to first token in seconds; reading and laying out KV are included."""

    question: str
    expected: str
    answer: str
    full_answer: str
    ttft_s: float
    full_ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag demo`."""
    parser.add_argument("--store", help="folder for the encoded chunks (default: a temporary one)")
    parser.add_argument("--max-tokens", type=at_least(1), default=16, metavar="N", help="longest answer (default: 16)")


def run(args: argparse.Namespace) -> int:
    """Print how much sooner the first token comes, the answers, and the next commands to try."""
    with ExitStack() as stack:
        store = args.store or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrag-demo-"))
        settings = argparse.Namespace(model=MODEL, store=store, codec="native", dtype="auto", device=None)
        say("loading SmolLM2-135M-Instruct, a small real model")
        engine = stack.enter_context(open_engine(settings))
        index = stack.enter_context(open_index(engine, ""))
        wanted = argparse.Namespace(
            paths=[str(sample.handbook())],
            chunk_tokens=sample.CHUNK_TOKENS,
            chunk_overlap=0,
            text_field="text",
            namespace="",
            json=args.json,
        )
        plan = warm.make_plan(engine, wanted)
        say(f"encoding a handbook of {len(plan.chunks)} documents, {plan.tokens} tokens; this happens once")
        warmed = warm.warm(engine, index, plan, args.json)
        say(f"asking {len(sample.QUESTIONS)} questions, each by blending and by full prefill")
        outcomes = _ask_all(engine, index, args.max_tokens, args.json)
    if args.json:
        asked = [asdict(outcome) for outcome in outcomes]
        print(json.dumps({"model": MODEL, "warm": warmed, "questions": asked}))
    else:
        _print(outcomes)
        print(
            f"\n{warmed['chunks']} chunks took {human_bytes(warmed['bytes'])} on disk. The questions are some that\n"
            "this small model answers correctly by full prefill.\n\n"
            "Next: kvrag chat --web          the same handbook, or your files, in a browser\n"
            "      kvrag warm PATH... --model Qwen/Qwen2.5-1.5B-Instruct\n"
            '      kvrag ask "..." --model Qwen/Qwen2.5-1.5B-Instruct'
        )
    return 0


def _ask_all(engine: BlendEngine, index: ChunkIndex, max_tokens: int, quiet: bool) -> list[Outcome]:
    engine.generate("Hello.", max_new_tokens=1)  # the first answer of a process includes start-up costs
    outcomes = []
    with progress("asking", quiet) as show:
        for number, (question, expected) in enumerate(sample.QUESTIONS.items(), 1):
            hits = index.search(question, sample.TOP_K)
            prompt = [{"role": "user", "content": stuff(engine, question, hits)}]
            blended = engine.generate(prompt, max_new_tokens=max_tokens, temperature=0)
            full = engine.generate(prompt, max_new_tokens=max_tokens, temperature=0, policy="full")
            report = blended.report
            outcomes.append(
                Outcome(
                    question,
                    expected,
                    blended.text.strip(),
                    full.text.strip(),
                    report.ttft_s,
                    full.report.ttft_s,
                    report.prompt_tokens,
                    report.reused_tokens,
                    report.recomputed_tokens,
                )
            )
            show(number, len(sample.QUESTIONS))
    return outcomes


def _print(outcomes: list[Outcome]) -> None:
    """Print the median first, then each question, in 80 columns."""
    blended, full = median(one.ttft_s for one in outcomes), median(one.full_ttft_s for one in outcomes)
    right = sum(one.expected in one.answer for one in outcomes)
    full_right = sum(one.expected in one.full_answer for one in outcomes)
    same = sum(one.answer == one.full_answer for one in outcomes)
    tokens = median(one.prompt_tokens for one in outcomes)
    print(
        f"\nFirst token {full / blended:.1f}x sooner: {blended:.2f} s instead of {full:.2f} s\n"
        f"(medians; prompts of about {tokens:,.0f} tokens).\n"
        f"Right answers: {right} of {len(outcomes)}, full prefill {full_right} of {len(outcomes)}. "
        f"The same in every word: {same}.\n"
    )
    for one in outcomes:
        print(f"{shorten(one.question, 79)}")
        print(f"  kvrag        {one.ttft_s:5.2f} s  {shorten(one.answer, 56)}")
        print(f"  full prefill {one.full_ttft_s:5.2f} s  {shorten(one.full_answer, 56)}")

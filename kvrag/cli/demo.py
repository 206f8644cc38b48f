"""`kvrag demo`: answers and speed by several policies, and the speed of a larger model."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from kvrag.backend.hub import READER
from kvrag.cli import warm
from kvrag.cli.common import human_bytes, open_engine, open_index, progress, require_extra, say
from kvrag.reader.samples import ARTICLES, ENCODED_ALONE, Sample
from kvrag.types import Answer

if TYPE_CHECKING:
    from kvrag.cli.speed import SpeedUp

_FULL, _BLENDING = "full prefill", "blending"
WAYS = {_FULL: "full", "plain reuse": "none", _BLENDING: None}
"""Ways to answer, with their policies; None = default."""

_WIDTH = 80  # columns of a terminal
_BUSY = 0.15  # share of the CPU that other processes take


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
    require_extra()
    started = cpu()
    warn_if_busy(started)

    def show(*lines: str) -> None:
        if not args.json:
            print("\n".join(lines), flush=True)

    with tempfile.TemporaryDirectory(prefix="kvrag-demo-") as folder:
        started = cpu()
        warmed, answers = _ask_all(ARTICLES, args.store or f"{folder}/articles", args.json)
        show(*answer_lines(answers, warmed, busy_note(started, cpu())))
        _, alone = _ask_all(ENCODED_ALONE, f"{folder}/alone", args.json)
        show("", *_alone_lines(alone))
    started = cpu()
    speed = None if args.no_speed else _measure(args.json)
    if speed:
        show("", "A larger model:", *speed_lines(speed, busy_note(started, cpu())))
    show(
        "",
        "Next, with your own files:",
        "  kvrag warm PATH... --model Qwen/Qwen2.5-0.5B-Instruct",
        '  kvrag ask "..." --model Qwen/Qwen2.5-0.5B-Instruct',
        "In your LangChain or LlamaIndex application: docs/quickstart.md.",
    )
    if args.json:
        questions = {"questions": list(map(asdict, answers)), "alone": list(map(asdict, alone))}
        print(json.dumps({"warm": warmed} | questions | {"speed": asdict(speed) if speed else None}))
    return 0


def _ask_all(sample: Sample, store: str, quiet: bool) -> tuple[dict[str, Any], list[DemoAnswer]]:
    """Warm the sample's documents and ask its questions each way; return what was warmed and the answers."""
    parser = argparse.ArgumentParser()
    warm.add_arguments(parser)
    chunks = ["--chunk-tokens", str(sample.chunk_tokens), "--context-tokens", str(sample.context_tokens)]
    args = parser.parse_args([str(sample.path), "--model", READER, "--store", store, *chunks])
    args.json = quiet
    warmed, answers = warm.warm_here(args), []
    with open_engine(args) as engine, open_index(engine.store, "") as index:

        def ask(way: str, question: str) -> Answer:
            texts = [hit.text for hit in index.search(question, sample.top_k, sample.around)]
            messages = [{"role": "user", "content": "\n\n".join([*texts, question])}]
            return engine.generate(messages, max_new_tokens=16, temperature=0, policy=WAYS[way], controller="off")

        for way in WAYS:
            ask(way, "What is this about?")  # the first answer of a process includes start-up costs
        with progress("asking", quiet) as show:
            for number, (question, expected) in enumerate(sample.questions.items(), 1):
                for way in WAYS:
                    said = ask(way, f"Question: {question}")
                    text, report = said.text.strip(), said.report
                    numbers = report.reused_tokens, report.recomputed_tokens, report.ttft_s
                    answers.append(DemoAnswer(question, expected, way, text, text == expected, *numbers))
                show(number, len(sample.questions))
    return warmed, answers


def _measure(quiet: bool) -> SpeedUp:
    from kvrag.cli.speed import measure

    with progress("measuring a larger model", quiet, "tokens") as show:
        return measure(progress=show)


def cpu() -> tuple[float, float, float]:
    """Return the machine's CPU time so far, in ticks: in all, idle, and of this process; zeros except on Linux."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    except OSError:
        return 0, 0, 0
    return sum(ticks), sum(ticks[3:5]), time.process_time() * os.sysconf("SC_CLK_TCK")


def _others(start: Sequence[float], stop: Sequence[float]) -> tuple[float, float]:
    """Return the shares of the CPU that other processes took between two results of `cpu`, and that nobody took."""
    total, idle, own = (after - before for before, after in zip(start, stop, strict=True))
    return (total - idle - own) / max(total, 1), idle / max(total, 1)


def warn_if_busy(start: Sequence[float]) -> None:
    """Say so if other processes have taken much of the CPU since a result of `cpu`: measuring takes longer then."""
    others, _ = _others(start, cpu())
    if others > _BUSY:
        say(f"Machine busy: other processes take {others:.0%} of the CPU. This takes longer, and times may not compare")


def busy_note(start: Sequence[float], stop: Sequence[float]) -> list[str]:
    """Return a note if other processes slowed this one down between two results of `cpu`, else nothing."""
    others, idle = _others(start, stop)
    note = f"Machine busy: other processes took {others:.0%} of the CPU, so times may not compare"
    return [note] if others > _BUSY and idle < 0.25 else []


def _faster(full_s: float, blending_s: float) -> str:
    """Return the speed-up in words, as measured."""
    ratio = full_s / blending_s
    compared = f"{ratio:.1f}x faster" if ratio >= 1 else f"{1 / ratio:.1f}x slower"
    return f"{compared}: first token after {blending_s * 1000:.0f} ms instead of {full_s * 1000:.0f} ms"


def answer_lines(answers: Sequence[DemoAnswer], warmed: dict[str, Any], notes: Sequence[str] = ()) -> list[str]:
    """Return the speed-up and the agreement in one line each, then a table of the answers."""
    full, blending = ([answer for answer in answers if answer.way == way] for way in (_FULL, _BLENDING))
    times = [statistics.median(answer.ttft_s for answer in part) for part in (full, blending)]
    same = sum(reference.answer == blended.answer for reference, blended in zip(full, blending, strict=True))
    return [
        _faster(*times),
        *notes,
        f"{same} of {len(full)} answers are full prefill's",
        "",
        "The bundled reader (4.8 M parameters), about",
        f"{warmed['files']} articles of a made-up world: {warmed['chunks']} chunks ({warmed['new']} new), "
        f"{warmed['tokens']} tokens, {human_bytes(warmed['bytes'])} of KV.",
        "Medians over the questions.",
        "",
        *_table(answers),
        "All questions were chosen so that full prefill answers them right: the counts",
        "show agreement with it, not accuracy.",
    ]


def _alone_lines(answers: Sequence[DemoAnswer]) -> list[str]:
    """Return a table of the questions that plain reuse answers wrong, and how they were picked."""
    return [
        "Why blend? Plain reuse is wrong here",
        "",
        "The same articles in chunks of a few sentences, each encoded alone. Most say",
        '"he" or "the town"; the name is in another chunk. Plain reuse cannot connect',
        "the two. Blending recomputes the few tokens that need it. (Prompts of 200 tokens",
        "are too short to save time.)",
        "",
        *_table(answers, times=False),
        "These questions were picked because plain reuse answers them wrong. Of 500 that",
        "were not picked, full prefill answers 442 right, plain reuse 279, blending 434",
        "(docs/results.md). By default kvrag encodes a chunk with the text before it in",
        "its document: then plain reuse is right more often.",
    ]


def _table(answers: Sequence[DemoAnswer], times: bool = True) -> list[str]:
    """Return a line for each answer, and the number of right ones by each way."""
    lines = [f"{'':20}{'answer':22}{'recomputed':>12}" + f"{'TTFT':>12}" * times]
    for answer in answers:
        if answer.way == _FULL:
            lines += ["", f"{answer.question} ({answer.expected})"]
        text = shorten(answer.answer, 12, placeholder="...") + ("" if answer.correct else " (wrong)")
        computed = "all" if answer.way == _FULL else f"{answer.recomputed_tokens} of {answer.reused_tokens}"
        ttft = f"{answer.ttft_s * 1000:>9.0f} ms" * times
        lines.append(f"  {answer.way:18}{text:22}{computed:>12}{ttft}")
    by_way = {way: [answer.correct for answer in answers if answer.way == way] for way in WAYS}
    right = "; ".join(f"{sum(correct)} of {len(correct)} by {way}" for way, correct in by_way.items())
    return [*lines, "", f"Right: {right}."]


def speed_lines(result: SpeedUp, notes: Sequence[str] = ()) -> list[str]:
    """Return the speed-up of a model of a real size, and how it was measured."""
    return [
        _faster(result.full_s, result.blending_s),
        *notes,
        "",
        f"{result.model}: {result.prompt_tokens} prompt tokens,",
        "6 chunks in an order never seen before, medians of 2 rounds;",
        f"{result.threads} threads, {result.processor}"[:_WIDTH],
        f"Bound, if computing the tokens were the only cost: {result.bound:.1f}x",
    ]

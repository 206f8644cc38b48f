"""`kvrag demo`: the times and right answers of the bundled reader, with full prefill and with kvrag."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

from kvrag.backend.hub import READER
from kvrag.cli import warm
from kvrag.cli.common import open_engine, open_index, progress, require_extra
from kvrag.reader import samples
from kvrag.types import Answer, BlendReport
from kvrag.words import human_bytes

WAYS: dict[str, dict[str, Any]] = {"full prefill": {"policy": "full"}, "kvrag": {}}
"""Ways to answer, with their options."""


@dataclass(frozen=True)
class DemoAnswer:
    """One answer. `correct` = equal to the expected answer."""

    question: str
    expected: str
    way: str
    answer: str
    correct: bool
    report: BlendReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option of `kvrag demo`."""
    parser.add_argument("--store", help="folder for the encoded chunks (default: a temporary one)")


def run(args: argparse.Namespace) -> int:
    """Print the answers to questions about sample articles, and their times."""
    require_extra()
    with tempfile.TemporaryDirectory(prefix="kvrag-demo-") as folder:
        warmed, answers = _ask_all(args.store or folder, args.json)
    if args.json:
        print(json.dumps({"warm": warmed, "questions": answers}, default=asdict))
    else:
        print(*_lines(answers, warmed), sep="\n")
    return 0


def _ask_all(store: str, quiet: bool) -> tuple[dict[str, Any], list[DemoAnswer]]:
    """Warm the articles and ask each question each way; return what was warmed and the answers."""
    parser = argparse.ArgumentParser()
    warm.add_arguments(parser)
    chunks = ["--chunk-tokens", str(samples.CHUNK_TOKENS)]
    args = parser.parse_args([str(samples.folder()), "--model", READER, "--store", store, *chunks])
    args.json = quiet
    warmed, answers = warm.warm_here(args), []
    with open_engine(args) as engine, open_index(engine.store, "") as index:

        def ask(way: str, question: str) -> Answer:
            texts = [hit.text for hit in index.search(question, samples.TOP_K)]
            messages = [{"role": "user", "content": "\n\n".join([*texts, question])}]
            return engine.generate(messages, max_new_tokens=16, temperature=0, **WAYS[way])

        for way in WAYS:
            ask(way, "What is this about?")  # the first answer of a process includes start-up costs
        with progress("asking", quiet) as show:
            for number, (question, expected) in enumerate(samples.QUESTIONS.items(), 1):
                for way in WAYS:
                    said = ask(way, f"Question: {question}")
                    text = said.text.strip()
                    answers.append(DemoAnswer(question, expected, way, text, text == expected, said.report))
                show(number, len(samples.QUESTIONS))
    return warmed | {"dtype": str(engine.model.dtype).removeprefix("torch.")}, answers


def _lines(answers: Sequence[DemoAnswer], warmed: dict[str, Any]) -> list[str]:
    """Return the answers, and what they are worth."""
    times = [statistics.median(answer.report.ttft_s for answer in answers if answer.way == way) for way in WAYS]
    return [
        f"Articles of a made-up world: {warmed['chunks']} chunks ({warmed['new']} new), "
        f"{warmed['tokens']} tokens, {human_bytes(warmed['bytes'])} of KV",
        "",
        *_table(answers),
        _row("first token, median", [f"{seconds:.3f} s" for seconds in times]),
        "",
        "All were chosen so that full prefill answers them right: the counts show",
        "agreement with it, not accuracy. Default settings, prompts of about",
        f"{statistics.median(answer.report.prompt_tokens for answer in answers):.0f} tokens, "
        f"4.8 M parameters, {warmed['dtype']}, {os.cpu_count()} cores.",
    ]


def _table(answers: Sequence[DemoAnswer]) -> Iterator[str]:
    """Yield a line for each question with its answers, the wrong ones marked, and one that counts the right ones."""
    yield _row("", list(WAYS))
    for start in range(0, len(answers), len(WAYS)):
        same = answers[start : start + len(WAYS)]
        marks = ["" if answer.correct else "x " for answer in same]
        cells = [mark + shorten(answer.answer, 13, placeholder="...") for mark, answer in zip(marks, same, strict=True)]
        yield _row(same[0].question, cells)
    by_way = [[answer.correct for answer in answers if answer.way == way] for way in WAYS]
    yield _row("right", [f"{sum(correct)} of {len(correct)}" for correct in by_way])


def _row(question: str, cells: Sequence[str]) -> str:
    return f"{question:44}" + "".join(f"{cell:16}" for cell in cells).rstrip()  # the longest question has 43

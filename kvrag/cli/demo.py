"""`kvrag demo`: why to blend, and the times and right answers of the bundled reader."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

from kvrag.backend.hub import READER
from kvrag.cli import warm
from kvrag.cli.common import open_engine, open_index, progress, require_extra
from kvrag.reader.samples import ARTICLES, ENCODED_ALONE, Sample
from kvrag.types import Answer, BlendReport
from kvrag.words import human_bytes

Ways = Mapping[str, Mapping[str, Any]]

_FULL = {"full prefill": {"policy": "full"}}
WAYS: Ways = {**_FULL, "kvrag": {}}
"""Ways to answer with the defaults, with their options."""
WAYS_ALONE: Ways = {**_FULL, "plain reuse": {"policy": "none"}, "blending": {"controller": "off"}}
"""Ways to answer from chunks that were encoded alone."""


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
    """Print the answers to two sets of questions, and the times and counts of the second one."""
    require_extra()
    with tempfile.TemporaryDirectory(prefix="kvrag-demo-") as folder:
        _, alone = _ask_all(ENCODED_ALONE, WAYS_ALONE, f"{folder}/alone", args.json)
        if not args.json:
            print(*_alone_lines(alone), "", sep="\n", flush=True)
        warmed, answers = _ask_all(ARTICLES, WAYS, args.store or f"{folder}/articles", args.json)
    if args.json:
        print(json.dumps({"warm": warmed, "questions": answers, "alone": alone}, default=asdict))
    else:
        print(*_article_lines(answers, warmed), sep="\n")
    return 0


def _ask_all(sample: Sample, ways: Ways, store: str, quiet: bool) -> tuple[dict[str, Any], list[DemoAnswer]]:
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
            return engine.generate(messages, max_new_tokens=16, temperature=0, **ways[way])

        for way in ways:
            ask(way, "What is this about?")  # the first answer of a process includes start-up costs
        with progress("asking", quiet) as show:
            for number, (question, expected) in enumerate(sample.questions.items(), 1):
                for way in ways:
                    said = ask(way, f"Question: {question}")
                    text = said.text.strip()
                    answers.append(DemoAnswer(question, expected, way, text, text == expected, said.report))
                show(number, len(sample.questions))
    return warmed | {"dtype": str(engine.model.dtype).removeprefix("torch.")}, answers


def _alone_lines(answers: Sequence[DemoAnswer]) -> list[str]:
    """Return a table of the questions that plain reuse answers wrong, and how they were picked."""
    blended = [answer for answer in answers if answer.way == "blending"]
    recomputed = sum(answer.report.recomputed_tokens for answer in blended)
    stored = sum(answer.report.stored_tokens for answer in blended)
    return [
        "Why blend? Plain reuse is wrong here (x)",
        "",
        "Articles of a made-up world in chunks of a few sentences, each encoded alone.",
        'Most say "he" or "the town"; the name is in another chunk. Plain reuse cannot',
        f"connect the two. Blending recomputed {recomputed} of {stored} tokens.",
        "",
        *_table(answers, WAYS_ALONE),
        "",
        "These questions were picked because plain reuse answers them wrong. Of 500 that",
        "were not picked, full prefill answers 442 right, plain reuse 279, blending 434",
        "(docs/results.md). By default kvrag encodes a chunk with the text before it in",
        "its document: then plain reuse is right more often.",
    ]


def _article_lines(answers: Sequence[DemoAnswer], warmed: dict[str, Any]) -> list[str]:
    """Return the answers with the defaults, and what they are worth."""
    times = [statistics.median(answer.report.ttft_s for answer in answers if answer.way == way) for way in WAYS]
    return [
        f"The articles whole: {warmed['chunks']} chunks ({warmed['new']} new), "
        f"{warmed['tokens']} tokens, {human_bytes(warmed['bytes'])} of KV",
        "",
        *_table(answers, WAYS),
        _row("first token, median", [f"{seconds:.3f} s" for seconds in times]),
        "",
        "All were chosen so that full prefill answers them right: the counts show",
        "agreement with it, not accuracy. Default settings, prompts of about",
        f"{statistics.median(answer.report.prompt_tokens for answer in answers):.0f} tokens, "
        f"4.8 M parameters, {warmed['dtype']}, {os.cpu_count()} cores.",
    ]


def _table(answers: Sequence[DemoAnswer], ways: Ways) -> Iterator[str]:
    """Yield a line for each question with its answers, the wrong ones marked, and one that counts the right ones."""
    yield _row("", list(ways))
    for start in range(0, len(answers), len(ways)):
        same = answers[start : start + len(ways)]
        marks = ["" if answer.correct else "x " for answer in same]
        cells = [mark + shorten(answer.answer, 13, placeholder="...") for mark, answer in zip(marks, same, strict=True)]
        yield _row(same[0].question, cells)
    by_way = [[answer.correct for answer in answers if answer.way == way] for way in ways]
    yield _row("right", [f"{sum(correct)} of {len(correct)}" for correct in by_way])


def _row(question: str, cells: Sequence[str]) -> str:
    wide = 32 if len(cells) > 2 else 44  # the longest question and two
    return f"{question:{wide}}" + "".join(f"{cell:16}" for cell in cells).rstrip()

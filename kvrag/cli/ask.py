"""`kvrag ask`: one question."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from kvrag.cli.common import (
    add_answer_arguments,
    add_engine_arguments,
    open_engine,
    open_index,
    require_chunks,
    say,
    summary,
)
from kvrag.cli.prompt import as_prompt, stuff
from kvrag.errors import PromptError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of `kvrag ask`."""
    parser.add_argument("question", metavar="QUESTION")
    add_engine_arguments(parser)
    add_answer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Retrieve, answer, report."""
    if not args.question.strip():
        raise PromptError("the question is empty")
    with open_engine(args) as engine, open_index(engine) as index:
        require_chunks(index)
        hits = index.search(args.question, args.top_k, args.around)
        prompt = as_prompt(engine, [{"role": "user", "content": stuff(engine, args.question, hits)}])
        text, report = "", None
        for delta in engine.stream(prompt, ratio=args.ratio, policy=args.policy, max_new_tokens=args.max_tokens):
            piece = delta.text if text else delta.text.lstrip()
            text += piece
            report = delta.report or report
            if not args.json:
                print(piece, end="", flush=True)
    assert report is not None
    if args.json:
        context = [asdict(hit) for hit in hits]
        print(json.dumps({"answer": text.strip(), "context": context, "report": report.to_dict()}))
    else:
        print()
        say(summary(report))
    return 0

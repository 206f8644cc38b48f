"""`kvrag ask`: answer one question."""

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
    require_extra,
    say,
    stream,
    summary,
)
from kvrag.cli.question import as_prompt, retrieve
from kvrag.errors import PromptError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag ask`."""
    parser.add_argument("question", metavar="QUESTION", help="question about the warmed documents, in quotes")
    add_engine_arguments(parser)
    add_answer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Retrieve, answer, print a report."""
    if not args.question.strip():
        raise PromptError("the question is empty: pass one in quotes")
    require_extra()
    with open_engine(args, is_warmed=True) as engine, open_index(engine, args.namespace) as index:
        require_chunks(index)
        hits, message = retrieve(engine, index, args.question, args)
        text, report = stream(engine, as_prompt(engine, [message]), args)
    if args.json:
        context = [asdict(hit) for hit in hits]
        print(json.dumps({"answer": text, "context": context, "report": report.to_dict()}))
    else:
        say(f"sources: {', '.join(dict.fromkeys(hit.source for hit in hits))}")
        say(summary(report))
    return 0

"""`kvrag ask`: answer one question."""

from __future__ import annotations

import argparse

from kvrag.cli.common import (
    add_answer_arguments,
    add_engine_arguments,
    open_engine,
    open_index,
    require_chunks,
    require_extra,
    stream,
)
from kvrag.cli.question import as_prompt, print_answer, retrieve
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
    with open_engine(args, is_warmed=True) as engine, open_index(engine.store, args.namespace) as index:
        require_chunks(index)
        hits, message = retrieve(engine, index, args.question, args)
        text, report = stream(engine, as_prompt(engine, [message]), args)
    print_answer(hits, text, report, args)
    return 0

"""`kvrag ask`: answer a question with the prompt of a LangChain stuff chain."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvrag.backend.hub import READER
from kvrag.cli.common import (
    add_answer_arguments,
    add_engine_arguments,
    nothing_warmed,
    open_engine,
    open_index,
    require_extra,
    say,
)
from kvrag.errors import PromptError
from kvrag.inspect.explanation import summary_of
from kvrag.server.settings import TEMPLATE, fill
from kvrag.types import Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import Hit

_INSTRUCTION = "Use the following context to answer the question. If it does not say, say that you do not know."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag ask`."""
    parser.add_argument("question", metavar="QUESTION", help="question about the warmed documents, in quotes")
    add_engine_arguments(parser)
    add_answer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer a question: stream the text to stdout, then its sources and report to stderr, or all of it as JSON."""
    if not args.question.strip():
        raise PromptError("the question is empty: pass one in quotes")
    require_extra()
    with open_engine(args, is_warmed=True) as engine, open_index(engine.store, args.namespace) as index:
        if not len(index):
            raise nothing_warmed(index.path.parent)
        from kvrag.retrieval.index import fitting

        found = index.search(args.question, args.top_k, args.around)
        hits = fitting(found, engine.model, _prompt(engine, [], args.question))
        if len(hits) < len(found):
            say(f"{len(hits)} of {len(found)} chunks fit into the window of {engine.context_window} tokens")
        prompt, text, report = _prompt(engine, hits, args.question), "", None
        options: Any = {"max_new_tokens": args.max_tokens, "temperature": args.temperature, "namespace": args.namespace}
        for delta in engine.stream(prompt, **options):
            new_text = delta.text if text else delta.text.lstrip()
            text += new_text
            report = delta.report or report
            if not args.json:
                print(new_text, end="", flush=True)
    assert report is not None
    if args.json:
        result = {"question": args.question, "answer": text.strip(), "context": [asdict(hit) for hit in hits]}
        print(json.dumps(result | {"report": report.to_dict()}))
    else:
        print(flush=True)
        here = os.path.join(os.getcwd(), "")
        say(f"sources: {', '.join(dict.fromkeys(hit.source.removeprefix(here) for hit in hits))}")
        say("\n".join(summary_of(report)))
    return 0


def template(engine: BlendEngine) -> str:
    """Return the template of prompts with retrieved chunks."""
    # the reader was trained on bare context and would read an instruction as part of it
    return TEMPLATE if engine.model.name == READER else f"{_INSTRUCTION}\n\n{TEMPLATE}"


def _prompt(engine: BlendEngine, hits: Sequence[Hit], question: str) -> str | Messages:
    """Return the prompt with these chunks."""
    prompt = engine.as_prompt(fill(template(engine), [hit.text for hit in hits], question))
    return f"{prompt}\nAnswer:" if isinstance(prompt, str) else prompt

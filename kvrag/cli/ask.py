"""`kvrag ask`: answer a question, or several as a conversation, with the prompt of a LangChain stuff chain."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrag.backend.hub import READER
from kvrag.cli.common import (
    add_answer_arguments,
    add_engine_arguments,
    blend_settings,
    open_engine,
    open_index,
    require_chunks,
    require_extra,
    say,
)
from kvrag.errors import ContextWindowError, PromptError
from kvrag.inspect.explanation import summary_of
from kvrag.server.settings import TEMPLATE, fill
from kvrag.types import BlendReport, Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex, Hit

_INSTRUCTION = "Use the following context to answer the question. If it does not say, say that you do not know."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag ask`."""
    question = "question about the warmed documents, in quotes; without it, ask several in a conversation"
    parser.add_argument("question", nargs="?", metavar="QUESTION", help=question)
    add_engine_arguments(parser)
    add_answer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer a question, or one in each line of stdin until /quit or its end."""
    if args.question is not None and not args.question.strip():
        raise PromptError("the question is empty: pass one in quotes")
    require_extra()
    history: Messages = []  # questions and answers, without the retrieved chunks
    asked: list[str] = []
    with open_engine(args, is_warmed=True) as engine, open_index(engine.store, args.namespace) as index:
        require_chunks(index)
        if args.question is None:
            say("/quit ends the chat")
        for question in _questions() if args.question is None else [args.question]:
            hits, message = _retrieve(engine, index, question, args, asked)
            try:
                text, report = _answer(engine, history, message, args)
            except PromptError as error:
                if args.question is not None:
                    raise
                say(f"kvrag: {error}")
                continue
            asked.append(question)
            history += [{"role": "user", "content": f"Question: {question}"}, {"role": "assistant", "content": text}]
            print_answer(question, hits, text, report, args)
    return 0


def template(engine: BlendEngine) -> str:
    """Return the template of prompts with retrieved chunks."""
    # the reader was trained on bare context and would read an instruction as part of it
    return TEMPLATE if engine.model.name == READER else f"{_INSTRUCTION}\n\n{TEMPLATE}"


def _questions() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if line.strip():
            yield line.strip()


def _retrieve(
    engine: BlendEngine, index: ChunkIndex, question: str, args: argparse.Namespace, before: Sequence[str]
) -> tuple[list[Hit], dict[str, str]]:
    """Return the chunks for a question that fit into the window, and the message with them; see `ChunkIndex.search`."""
    from kvrag.retrieval.index import fitting

    def message(hits: Sequence[Hit]) -> dict[str, str]:
        return {"role": "user", "content": fill(template(engine), [hit.text for hit in hits], question)}

    found = index.search(question, args.top_k, args.around, before)
    hits = fitting(found, engine.model, _as_prompt(engine, [message([])]))
    if len(hits) < len(found):
        say(f"{len(hits)} of {len(found)} chunks fit into the window of {engine.context_window} tokens")
    return hits, message(hits)


def _as_prompt(engine: BlendEngine, messages: Messages) -> str | Messages:
    """Return the messages unchanged, or as one string for a base model without a chat template."""
    if engine.model.tokenizer.hf.chat_template is not None:
        return messages
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"


def _answer(
    engine: BlendEngine, history: Messages, message: dict[str, str], args: argparse.Namespace
) -> tuple[str, BlendReport]:
    """Answer, and drop the oldest turns of `history` until the prompt fits."""
    while True:
        try:
            return _stream(engine, _as_prompt(engine, [*history, message]), args)
        except ContextWindowError:
            if not history:
                raise
            del history[:2]
            say("the conversation does not fit into the context window: the oldest turn was dropped")


def _stream(engine: BlendEngine, prompt: str | Messages, args: argparse.Namespace) -> tuple[str, BlendReport]:
    """Answer with the options of `add_answer_arguments`; stream the text to stdout unless --json was passed."""
    text, report = "", None
    settings = blend_settings(args) | {"temperature": args.temperature, "namespace": args.namespace}
    for delta in engine.stream(prompt, max_new_tokens=args.max_tokens, **settings):
        new_text = delta.text if text else delta.text.lstrip()
        text += new_text
        report = delta.report or report
        if not args.json:
            print(new_text, end="", flush=True)
    if not args.json:
        print()
    assert report is not None
    return text.strip(), report


def print_answer(question: str, hits: Sequence[Hit], text: str, report: BlendReport, args: argparse.Namespace) -> None:
    """Print an answer as JSON, or, after its text was streamed, its sources and report."""
    if args.json:
        result = {"question": question, "answer": text, "context": [asdict(hit) for hit in hits]}
        print(json.dumps(result | {"report": report.to_dict()}), flush=True)
    else:
        here = os.path.join(os.getcwd(), "")
        say(f"sources: {', '.join(dict.fromkeys(hit.source.removeprefix(here) for hit in hits))}")
        say("\n".join(summary_of(report)))

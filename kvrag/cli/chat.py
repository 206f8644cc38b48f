"""`kvrag chat`: answer several questions as a conversation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvrag.cli import serve
from kvrag.cli.common import (
    add_answer_arguments,
    add_engine_arguments,
    at_least,
    open_engine,
    open_index,
    require_chunks,
    require_extra,
    say,
    stream,
)
from kvrag.cli.question import as_prompt, print_answer, retrieve
from kvrag.errors import ContextWindowError, PromptError, SettingError
from kvrag.reader import samples
from kvrag.types import BlendReport, Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag chat`."""
    add_engine_arguments(parser)
    add_answer_arguments(parser)
    parser.set_defaults(top_k=None)  # another default in the browser
    web = parser.add_argument_group("in a browser")
    page = "chat on a web page, beside full prefill; an empty store gets sample documents: "
    page += "articles of the bundled model's world, or a handbook for other models"
    web.add_argument("--web", action="store_true", help=page)
    port = "port of the web page (default: any free one)"
    web.add_argument("--port", type=at_least(0, int, 65535), default=0, help=port)


def run(args: argparse.Namespace) -> int:
    """Answer until /quit or the end of the input; with --json one object per line."""
    if args.web:
        documents = samples.of(args.model)
        args.top_k, args.chunk_tokens = args.top_k or documents.top_k, documents.chunk_tokens
        return serve.chat(args)
    if args.port:
        raise SettingError("--port needs --web")
    args.top_k = args.top_k or 4
    history: Messages = []  # questions and answers, without the retrieved chunks
    asked: list[str] = []
    require_extra()
    with open_engine(args, is_warmed=True) as engine, open_index(engine.store, args.namespace) as index:
        require_chunks(index)
        say("/quit ends the chat")
        for question in _questions():
            hits, message = retrieve(engine, index, question, args, asked)
            try:
                text, report = _answer(engine, history, message, args)
            except PromptError as error:
                say(f"kvrag: {error}")
                continue
            asked.append(question)
            history += [{"role": "user", "content": f"Question: {question}"}, {"role": "assistant", "content": text}]
            print_answer(hits, text, report, args, question=question)
    return 0


def _questions() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return
        if line.strip():
            yield line.strip()


def _answer(
    engine: BlendEngine, history: Messages, message: dict[str, str], args: argparse.Namespace
) -> tuple[str, BlendReport]:
    """Answer, and drop the oldest turns of `history` until the prompt fits."""
    while True:
        try:
            return stream(engine, as_prompt(engine, [*history, message]), args)
        except ContextWindowError:
            if not history:
                raise
            del history[:2]
            say("the conversation does not fit into the context window: the oldest turn was dropped")

"""The prompt of `ask` and `chat`, as a LangChain stuff chain makes it, and retrieval for it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvrag.backend.hub import READER
from kvrag.cli.common import say
from kvrag.inspect.explanation import summary_of
from kvrag.server.settings import TEMPLATE, fill
from kvrag.types import BlendReport, Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.retrieval.index import ChunkIndex, Hit

_INSTRUCTION = "Use the following context to answer the question. If it does not say, say that you do not know."


def template(engine: BlendEngine) -> str:
    """Return the template of prompts with retrieved chunks."""
    # the reader was trained on bare context and would read an instruction as part of it
    return TEMPLATE if engine.model.name == READER else f"{_INSTRUCTION}\n\n{TEMPLATE}"


def retrieve(
    engine: BlendEngine, index: ChunkIndex, question: str, args: argparse.Namespace, before: Sequence[str] = ()
) -> tuple[list[Hit], dict[str, str]]:
    """Return the chunks for a question that fit into the window, and the message with them; see `ChunkIndex.search`."""
    from kvrag.retrieval.index import fitting

    def message(hits: Sequence[Hit]) -> dict[str, str]:
        return {"role": "user", "content": fill(template(engine), [hit.text for hit in hits], question)}

    found = index.search(question, args.top_k, args.around, before)
    hits = fitting(found, engine.model, as_prompt(engine, [message([])]))
    if len(hits) < len(found):
        say(f"{len(hits)} of {len(found)} chunks fit into the window of {engine.context_window} tokens")
    return hits, message(hits)


def as_prompt(engine: BlendEngine, messages: Messages) -> str | Messages:
    """Return the messages unchanged, or as one string for a base model without a chat template."""
    if engine.model.tokenizer.hf.chat_template is not None:
        return messages
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"


def print_answer(hits: Sequence[Hit], text: str, report: BlendReport, args: argparse.Namespace, **about: str) -> None:
    """Print an answer as JSON with what it is `about`, or, after its text was streamed, its sources and report."""
    if args.json:
        context = [asdict(hit) for hit in hits]
        print(json.dumps({**about, "answer": text, "context": context, "report": report.to_dict()}), flush=True)
    else:
        here = os.path.join(os.getcwd(), "")
        say(f"sources: {', '.join(dict.fromkeys(hit.source.removeprefix(here) for hit in hits))}")
        say("\n".join(summary_of(report)))

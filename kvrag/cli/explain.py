"""`kvrag explain`: explain what was reused of a prompt, and why not more."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from kvrag.cli.common import add_blend_arguments, add_engine_arguments, open_engine, read_text, say
from kvrag.errors import PromptError

_FILES = (".txt", ".md", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag explain`."""
    prompt = "the final prompt as the chain sends it: a text, a file, or '-' for stdin; JSON = messages or the body of "
    parser.add_argument("prompt", metavar="PROMPT", help=f"{prompt}a request to OpenAI's API")
    parser.add_argument("--html", metavar="FILE", help="write an HTML page with the highlighted prompt")
    add_engine_arguments(parser)
    add_blend_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prefill the prompt as for an answer, and print what was reused."""
    request = _request(args.prompt)
    with open_engine(args) as engine:
        explanation = engine.explain(
            engine.as_prompt(request["text"]) if "text" in request else request.get("messages", request.get("prompt")),
            namespace=args.namespace,
            tools=request.get("tools"),
            template=request.get("chat_template_kwargs"),
        )
    if args.html:
        Path(args.html).write_text(explanation.html(), "utf-8")
        say(f"wrote {args.html}")
    print(json.dumps(explanation.to_dict()) if args.json else explanation)
    return 0


def _request(prompt: str) -> dict[str, Any]:
    """Return the body of a request to OpenAI's API, or `text` as the framework classes take it."""
    if Path(prompt).suffix in _FILES and len(prompt.split()) == 1 and not os.path.isfile(prompt):
        raise PromptError(f"{prompt} does not exist: check the path")
    text = sys.stdin.read() if prompt == "-" else read_text(Path(prompt)) if os.path.isfile(prompt) else prompt
    if not text.strip():
        raise PromptError("the prompt is empty: pass a text")
    try:
        parsed = json.loads(text)
    except ValueError:
        return {"text": text}
    if isinstance(parsed, list):
        return {"messages": parsed}
    if not isinstance(parsed, dict) or not {"messages", "prompt"} & set(parsed):
        return {"text": text}
    if parsed.get("documents"):
        raise PromptError("`documents` are inserted by the server: put them into the last user message instead")
    if not isinstance(parsed.get("messages", []), list) or not isinstance(parsed.get("prompt", ""), str):
        raise PromptError("`messages` must be a list, `prompt` one string")
    return parsed

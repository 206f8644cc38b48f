"""`kvrag explain`: explain what was reused of a prompt, and why not more."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvrag.cli.common import add_blend_arguments, add_engine_arguments, open_engine, read_text, say
from kvrag.errors import KvragError, PromptError
from kvrag.types import Messages

if TYPE_CHECKING:
    from kvrag.engine import BlendEngine
    from kvrag.inspect.explanation import Explanation

_STYLES = {"fresh": "dim", "reused": "black on green", "conversation": "black on bright_blue"}
_RECOMPUTED = "black on yellow"
_FILES = (".txt", ".md", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvrag explain`."""
    parser.add_argument(
        "prompt",
        metavar="PROMPT",
        help="the final prompt as the chain sends it: a text, a file, or '-' for stdin; JSON = messages or "
        "the body of a request to OpenAI's API",
    )
    parser.add_argument(
        "--retrieved",
        nargs="+",
        default=[],
        metavar="FILE",
        help="retrieved chunks: files with one chunk each, or .json files with a list of chunks",
    )
    parser.add_argument("--html", metavar="FILE", help="write an HTML page with the highlighted prompt")
    add_engine_arguments(parser)
    add_blend_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prefill the prompt as for an answer, and print what was reused."""
    request = _request(args.prompt)
    retrieved = [text for path in args.retrieved for text in _chunks(Path(path))] if args.retrieved else None
    with open_engine(args) as engine:
        explanation = engine.explain(
            _prompt(engine, request),
            retrieved=retrieved,
            namespace=args.namespace,
            tools=request.get("tools"),
            template=request.get("chat_template_kwargs"),
            ratio=args.ratio,
            policy=args.policy,
            controller=args.controller,
        )
    if args.html:
        Path(args.html).write_text(explanation.html(), "utf-8")
        say(f"wrote {args.html}")
    if args.json:
        print(json.dumps(explanation.to_dict()))
    else:
        _show(explanation)
    return 0


def _request(prompt: str) -> dict[str, Any]:
    """Return the body of a request to OpenAI's API, or `text` as the framework classes take it."""
    if Path(prompt).suffix in _FILES and len(prompt.split()) == 1 and not _is_file(prompt):
        raise PromptError(f"{prompt} does not exist: check the path")
    text = sys.stdin.read() if prompt == "-" else read_text(Path(prompt)) if _is_file(prompt) else prompt
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


def _prompt(engine: BlendEngine, request: dict[str, Any]) -> str | Messages:
    if "text" in request:
        return engine.model.tokenizer.as_prompt(request["text"])
    messages: str | Messages = request["messages"] if "messages" in request else request["prompt"]
    return messages


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or contains a null byte
        return False


def _chunks(path: Path) -> list[str]:
    text = read_text(path)
    if path.suffix.lower() != ".json":
        return [text]
    try:
        chunks = json.loads(text)
    except ValueError as error:
        raise KvragError(f"{path} is not JSON: {error}") from None
    if not isinstance(chunks, list) or not all(isinstance(chunk, str) for chunk in chunks):
        raise KvragError(f"{path} must contain a JSON list of strings")
    return chunks


def _show(explanation: Explanation) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise KvragError("rich is not installed: pip install 'kvrag[cli]'") from None
    from kvrag.inspect.explanation import title

    console = Console()
    if not console.is_terminal:
        print(explanation)
        return
    legend = Text("\n")
    for name, style in {**_STYLES, "reused and recomputed": _RECOMPUTED}.items():
        legend.append(f" {name} ", style).append(" ")
    prompt = Text()
    source = ""
    for stretch in explanation.stretches:
        if stretch.documents and stretch.documents[0] != source:
            source = stretch.documents[0]
            prompt.append(f"[{source}] ", "bold")
        for text, is_recomputed in stretch.pieces:
            prompt.append(text, _RECOMPUTED if is_recomputed else _STYLES[stretch.kind])
    table = Table("", "reused", "chunk", "why", box=None, header_style="dim")
    for chunk in explanation.chunks:
        colour = "green" if chunk.reason == "reused" else "red"
        reason = Text(chunk.reason, colour)
        table.add_row(reason, f"{chunk.reused} of {chunk.tokens}", Text(title(chunk)), Text(chunk.detail))
    console.print(prompt, legend, soft_wrap=True)
    console.print(table)
    for line in explanation.summary:
        console.print(Text(line))
